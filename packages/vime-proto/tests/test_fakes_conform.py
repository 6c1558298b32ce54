"""Each fake passes the conformance suite of the service whose place it takes, as a process behind an address."""

import contextlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest


@contextlib.contextmanager
def served(*arguments: str):
    """A fake in a process of its own; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vime_proto.fakes", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        with process.stdout as output:
            yield output.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        assert process.wait(60) == 0


def run_suite(name: str, target: str, report) -> tuple[int, set[str]]:
    """(tests passed, names of those skipped) of a suite; fails with its output when a test failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "vime_proto.conformance.plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--pyargs", f"vime_proto.conformance.{name}", "--target", target, f"--junitxml={report}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=report.parent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    skipped = {case.get("name") for case in suite.iter("testcase") if case.find("skipped") is not None}
    return int(suite.get("tests")) - len(skipped), skipped


@pytest.mark.parametrize(
    ("fake", "suite", "least"),
    [("buffer", "buffer", 140), ("engine", "rollout", 55), ("engine", "engine_control", 80), ("router", "router", 30)],
)
def test_a_fake_passes_its_suite(fake, suite, least, tmp_path):
    with served(fake) as target:
        passed, skipped = run_suite(suite, target, tmp_path / "report.xml")
    assert passed >= least
    assert skipped <= {"test_without_the_capability_routes_are_refused"}


def test_a_router_in_front_of_engines_is_indistinguishable_from_one(tmp_path):
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served("engine", "--engine-id", f"engine-{i}")) for i in range(2)]
        given = [word for i, address in enumerate(addresses) for word in ("--engine", f"engine-{i}={address}")]
        target = stack.enter_context(served("router", *given))
        passed, skipped = run_suite("rollout", target, tmp_path / "report.xml")
    assert passed >= 55
    assert skipped <= {"test_without_the_capability_routes_are_refused", "test_a_cancelled_call_leaves_nothing_running"}


def test_a_suite_without_target_says_so(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vime_proto.conformance.plugin", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--pyargs", "vime_proto.conformance.buffer"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode != 0
    assert "conformance suites need --target host:port" in result.stdout + result.stderr
