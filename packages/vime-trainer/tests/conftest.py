"""Tiny random models, shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests_support import make_folder

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")

torch.set_num_threads(2)


@pytest.fixture(scope="session", params=["qwen3", "qwen3_tied", "qwen3_moe", "glm4_moe", "glm4_moe_tied"])
def hf_folder(request, tmp_path_factory) -> Path:
    """A Hugging Face folder of each supported kind; Qwen3-MoE has a dense layer between two MoE layers, GLM-4.5 before."""
    return make_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory) -> Path:
    """The MoE alone."""
    return make_folder("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def glm_folder(tmp_path_factory) -> Path:
    """GLM-4.5 alone."""
    return make_folder("glm4_moe", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory) -> Path:
    """The untied dense model alone."""
    return make_folder("qwen3", tmp_path_factory.mktemp("dense"))
