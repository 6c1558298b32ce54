"""An engine's answers replayed in the trainer, which lives in another environment; data goes by files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np

from vime_r3.trace import decode

TRAINER = os.environ.get("VIME_PYTHON_TRAINER")


@dataclasses.dataclass
class Answers:
    """What an engine generated for some prompts.

    Attributes:
        sequences: prompt and answer of each.
        prompts: tokens of each prompt.
        scores: the engine's log-prob of every answer token, one after the other.
        routes: [T, layers, top_k]; the row of a sequence's last token is zeros.
        layer_ids: global numbers of the layers.
    """

    sequences: list[list[int]]
    prompts: list[int]
    scores: np.ndarray
    routes: np.ndarray
    layer_ids: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(one) for one in self.sequences]

    @property
    def has_row(self) -> np.ndarray:
        """bool [T], false for last tokens."""
        mask = np.ones(sum(self.lengths), bool)
        mask[np.cumsum(self.lengths) - 1] = False
        return mask

    def of_answers(self, values: np.ndarray) -> np.ndarray:
        """Values [T] of the generated tokens."""
        parts = np.split(values, np.cumsum(self.lengths)[:-1])
        return np.concatenate([part[prompt:] for part, prompt in zip(parts, self.prompts, strict=True)])


def generate(engine, prompts, new_tokens: int) -> Answers:
    """Answers with their routes, at temperature 1."""
    answers = [
        engine.generate(prompt, new_tokens, temperature=1.0, ignore_eos=True, seed=6, return_routing=True)
        for prompt in prompts
    ]
    sequences = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    traces = [decode(answer.last.routing, rows=len(one) - 1) for one, answer in zip(sequences, answers, strict=True)]
    rows = [np.concatenate([trace.ids, np.zeros_like(trace.ids[:1])]) for trace in traces]
    return Answers(
        sequences,
        [len(prompt) for prompt in prompts],
        np.concatenate([answer.logprobs for answer in answers]),
        np.concatenate(rows),
        traces[0].layer_ids,
    )


class Trainer:
    """The trainer's interpreter, started once: its imports take longer than what it is asked for."""

    def __init__(self):
        script = Path(__file__).parent / "replay_in_trainer.py"
        self._process = subprocess.Popen(
            [TRAINER, "-W", "ignore", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words: object) -> None:
        """See ``replay_in_trainer.py``."""
        self._process.stdin.write(json.dumps(list(map(str, words))) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the trainer's process ended with {self._process.wait()}"
        fault = json.loads(line)
        assert fault is None, fault

    def replay(self, folder: Path, answers: Answers, work: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
        """What came of an engine's routes."""
        source, target = work / "engine.npz", work / "trainer.npz"
        np.savez(
            source,
            lengths=answers.lengths,
            tokens=np.concatenate(answers.sequences).astype(np.int64),
            routes=answers.routes,
            layer_ids=answers.layer_ids,
        )
        self.ask("replay", folder, source, target, dtype)
        with np.load(target) as got:
            return dict(got)

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0
