"""What is public, and what importing it brings along."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import vime_proto
from vime_proto import fakes, metadata, validate

PUBLIC_MODULES = {
    "buffer",
    "channel",
    "checksum",
    "common",
    "conformance",
    "engine_state",
    "errors",
    "fakes",
    "idempotency",
    "metadata",
    "process",
    "rollout",
    "router",
    "routing",
    "sample",
    "sample_views",
    "server",
    "settings",
    "tensor",
    "trainer",
    "update_state",
    "validate",
    "version",
    "weights",
}
GENERATED = [
    f"vime_proto.{area}.v1.{area}_pb2{suffix}"
    for area in ("buffer", "common", "rollout", "router", "routing", "sample", "trainer", "weights")
    for suffix in ("", "_grpc")
]


def test_public_names_are_pinned():
    assert vime_proto.__all__ == ["CONTRACT_MAXIMUM", "CONTRACT_MINIMUM", "__version__"]
    assert fakes.__all__ == [
        "FakeBuffer",
        "FakeEngine",
        "FakeRouter",
        "build",
        "certificate",
        "serve",
        "toy_weights",
        "write_chunks",
    ]
    assert validate.__all__ == [
        "check_streams",
        "dtype_name",
        "model_digest",
        "truncates",
        "validate_batch_end",
        "validate_commit_group",
        "validate_engine_change",
        "validate_fetch_samples",
        "validate_generate_request",
        "validate_generate_response",
        "validate_group",
        "validate_in_flight",
        "validate_lease_batch",
        "validate_lease_prompts",
        "validate_lineage",
        "validate_manifest",
        "validate_minimum_version",
        "validate_open_run",
        "validate_prompt",
        "validate_publish_version",
        "validate_put_prompts",
        "validate_ragged",
        "validate_register_engine",
        "validate_release_lease",
        "validate_renew_leases",
        "validate_report_checkpoint",
        "validate_rewind",
        "validate_rollout",
        "validate_sample",
        "validate_sampling",
        "validate_score_request",
        "validate_score_response",
        "validate_start_evaluation",
        "validate_top_logprobs",
        "validate_trace",
        "validate_trace_header",
        "validate_transport",
    ]
    for module in (vime_proto, fakes, validate, metadata):
        assert all(hasattr(module, name) for name in module.__all__)


def test_public_modules_are_pinned():
    found = {one.name for one in pkgutil.iter_modules(vime_proto.__path__) if not one.name.startswith("_")}
    assert found == PUBLIC_MODULES


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_imports(name):
    assert importlib.import_module(name)


def test_the_base_install_stays_light():
    code = """
import importlib, pkgutil, sys
import vime_proto
optional = ("vime_proto.settings", "vime_proto.conformance", "vime_proto.fakes.__main__")
for one in pkgutil.walk_packages(vime_proto.__path__, "vime_proto."):
    if not one.name.startswith(optional):
        importlib.import_module(one.name)
heavy = {"torch", "vllm", "megatron", "ray", "transformers", "pydantic", "pytest", "sqlalchemy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_pickled():
    for one in pkgutil.walk_packages(vime_proto.__path__, "vime_proto."):
        spec = importlib.util.find_spec(one.name)
        with open(spec.origin) as file:
            assert "pickle" not in file.read(), one.name
