import importlib.util

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from vime_proto.version import policy_version

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")

# The replay is an optional module: without its needs its tests are not collected.
if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron.core") is None:
    collect_ignore = ["megatron"]


@pytest.fixture
def make_ids():
    """Random distinct ids ``[rows, layers, top_k]``."""

    def make(rows, layers=4, top_k=2, experts=8, seed=0, dtype=None):
        rng = np.random.default_rng(seed)
        ids = rng.random((rows, layers, experts)).argsort(axis=-1)[..., :top_k]
        return ids.astype(dtype or (np.uint8 if experts <= 256 else np.uint16))

    return make


@pytest.fixture
def version():
    """Makes versions of one run: ``version(number, lineage=0)``."""
    return lambda number, lineage=0: policy_version("run", lineage, number)
