from __future__ import annotations

import os

import pytest
from launch_support import Recipes

from vime_launch.process_tree import tree


@pytest.fixture
def recipes(tmp_path):
    made = Recipes(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            for seen in tree(process.pid):
                os.kill(seen.pid, 9)
            process.wait()
