from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from launch_support import Recipes, start_cluster

from vime_launch.process_tree import tree

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster at whose address most runs of a file are: to start one takes longer than a run of test stages."""
    process, address = start_cluster()
    yield address
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) == 0


@pytest.fixture
def recipes(tmp_path, request):
    made = Recipes(tmp_path, lambda: request.getfixturevalue("cluster"))
    yield made
    for process in made.started:
        if process.poll() is None:
            for seen in tree(process.pid):
                os.kill(seen.pid, 9)
            process.wait()
