import pytest
import torch
from tiny import build, start


@pytest.fixture(scope="session", autouse=True)
def one_process(tmp_path_factory):
    """Megatron's process groups with one rank on the CPU."""
    yield from start(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture
def make_model():
    """Builds a tiny mixture-of-experts GPTModel; keyword arguments go to TransformerConfig."""
    return build


@pytest.fixture
def batch():
    """tokens ``[1, 12]``, positions and labels."""
    torch.manual_seed(7)
    tokens = torch.randint(0, 32, (1, 12))
    return tokens, torch.arange(12)[None], torch.randint(0, 32, (1, 12))
