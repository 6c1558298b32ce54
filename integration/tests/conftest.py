from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from launch_support import Recipes

from vime_launch.process_tree import tree

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")


@pytest.fixture
def recipes(tmp_path):
    made = Recipes(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            for seen in tree(process.pid):
                os.kill(seen.pid, 9)
            process.wait()
