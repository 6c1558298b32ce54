"""The README's example of an algorithm runs as it stands."""

import re
from pathlib import Path

import torch
from batches import one_token_batch, streams

from vime_trainer.algorithms import ALGORITHMS, AlgorithmSettings, advantage_streams, objective

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_of_an_algorithm():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "REINFORCE" in block]
    names = {}
    exec(code, names)
    algorithm, settings = names["REINFORCE"], AlgorithmSettings(correction="none")
    advantages = advantage_streams(algorithm, one_token_batch([1.0, 0.0]), settings)["advantages"]
    assert advantages.tolist() == [0.5, -0.5]
    given = streams([1, 1], advantages=advantages, weights=[0.5] * 2, engine_logprobs=[-1.0] * 2)
    assert objective(algorithm, settings, torch.tensor([-1.0, -3.0]), torch.zeros(2), given).loss.item() == -0.5


def test_every_algorithm_is_in_the_table():
    assert not [name for name in ALGORITHMS if f"`{name}`" not in README]
