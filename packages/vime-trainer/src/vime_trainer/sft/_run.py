"""`vime-trainer sft`: from settings to a final Hugging Face folder."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from vime_trainer.checkpoint import POLICY, CheckpointError, RunState, Saver, Trained, load_checkpoint, start_point
from vime_trainer.files import write_text
from vime_trainer.megatron import Parallel
from vime_trainer.metrics import Writer, finite, open_writers
from vime_trainer.optim import Optimizer
from vime_trainer.policy import Policy
from vime_trainer.profiler import Profiler
from vime_trainer.settings.sft import SftSettings
from vime_trainer.sft._examples import read_examples
from vime_trainer.sft._order import Cursor, Order
from vime_trainer.sft._train import SftStep, train_step

__all__ = ["run_sft"]

log = logging.getLogger(__name__)


def run_sft(settings: SftSettings, traced: threading.Event | None = None) -> Path:
    """Trains and exports; goes on from the newest checkpoint of the output folder if there is one.

    With RANK and WORLD_SIZE in the environment, as torchrun sets them, all ranks call it.

    Args:
        settings: the configuration.
        traced: the next step is traced once it is set.

    Returns:
        The Hugging Face folder of the trained model, `output/final`.

    Raises:
        CheckpointError: a checkpoint that does not fit, or a run that is done already.
        DataError, FileNotFoundError, ValueError: bad data, model or settings; each names what is wrong.
    """
    checkpoints = settings.output / "checkpoints"
    policy = Policy.from_hf(
        settings.model,
        settings.dtype,
        settings.layout,
        settings.recompute,
        parallel=settings.parallel,
        transformer_engine=settings.transformer_engine,
    )
    here = policy.parallel
    tokenizer = _tokenizer(settings.tokenizer or settings.model)
    limit = min(settings.data.max_tokens or policy.arch.max_positions, policy.arch.max_positions)
    examples, dropped = read_examples(settings.data, tokenizer, limit)
    order = Order(
        [len(example.tokens) for example in examples],
        settings.seed,
        settings.data.shuffle,
        settings.batch_size,
        settings.batch_tokens,
    )
    steps = settings.steps or order.count(settings.epochs or 1)
    start = _start(settings, steps, here)
    optimizer = Optimizer(policy, settings.optimizer, steps)
    state = RunState(step=0, cursor=Cursor().to_json(), run={"rows": len(examples), "seed": settings.seed})
    if start is not None:
        restored = load_checkpoint(start, policy, optimizer)
        if restored.run != state.run:
            raise CheckpointError(f"{start}: its run had {restored.run}, this one has {state.run}")
        state = restored
    writers: list[Writer] = []
    if here.is_leader:
        settings.output.mkdir(parents=True, exist_ok=True)
        write_text(settings.output / "config.json", settings.model_dump_json(indent=2) + "\n")
        config = settings.model_dump(mode="json")
        writers = open_writers(settings.metrics, settings.output, settings.run_id, config, {})
    log.info("%s; %d rows (%d dropped); step %d of %d", policy.describe(), len(examples), dropped, state.step, steps)

    saver = Saver(checkpoints, settings.checkpoint.keep, settings.checkpoint.asynchronous)
    models = {POLICY: Trained(policy, optimizer)}
    profiler = Profiler(settings.profiler, settings.output, here.rank, traced)
    try:
        while state.step < steps:
            begin = time.perf_counter()
            saver.check()
            rows, cursor = order.batch(Cursor(**state.cursor), settings.epochs)
            with profiler.trace(state.step + 1, _asked(profiler, state.step + 1, here)):
                done = train_step(policy, optimizer, [examples[row] for row in rows], settings.micro_batch_tokens)
            state = RunState(state.step + 1, state.version, cursor.to_json(), state.run)
            values = _figures(done, optimizer, len(rows), cursor, len(examples), time.perf_counter() - begin)
            if here.is_leader:
                _report(writers, state.step, steps, values, settings.log_interval)
            if settings.checkpoint.interval and state.step % settings.checkpoint.interval == 0 and state.step < steps:
                saver.save(models, state)
    finally:
        for writer in writers:
            writer.close()
    saver.save(models, state)
    source = settings.tokenizer or settings.model
    final = policy.save_hf(settings.output / "final", side_files=source)
    saver.wait()
    log.info("model written to %s", final)
    return final


def _start(settings: SftSettings, steps: int, here: Parallel) -> Path | None:
    """As `start_point`, decided by the first rank alone: others may see the file system as it was a while ago."""
    found: dict[str, str | None] = {}
    if here.is_leader:
        try:
            path = start_point(settings.output / "checkpoints", settings.checkpoint, steps)
            found = {"path": None if path is None else str(path)}
        except CheckpointError as error:
            found = {"error": str(error)}
    found = json.loads(here.broadcast(json.dumps(found).encode() if here.is_leader else None))
    if "error" in found:
        raise CheckpointError(found["error"])
    return None if found["path"] is None else Path(found["path"])


def _asked(profiler: Profiler, step: int, here: Parallel) -> bool:
    """Whether the first rank wants a trace; then all write one."""
    wanted = bytes([profiler.wants(step)])
    return bool(here.broadcast(wanted if here.is_leader else None)[0])


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise FileNotFoundError(f"tokenizer: no folder {folder}")
    return AutoTokenizer.from_pretrained(str(folder))


def _figures(
    done: SftStep, optimizer: Optimizer, rows: int, cursor: Cursor, total: int, seconds: float
) -> dict[str, float]:
    return {
        "loss": done.loss,
        "grad_norm": done.result.grad_norm,
        "learning_rate": done.result.learning_rate,
        "grad_clipped": float(done.result.clipped),
        "skipped_steps": float(optimizer.skipped),
        "rows": float(rows),
        "tokens": float(done.tokens),
        "learnt_tokens": float(done.learnt),
        "epoch": cursor.epoch + cursor.place / total,
        "seconds": seconds,
        "tokens_per_second": done.tokens / seconds,
    }


def _report(writers: list[Writer], step: int, steps: int, values: dict[str, float], interval: int) -> None:
    now = time.time()
    for writer in writers:
        writer.write(step, now, finite(values))
    if step % interval == 0 or step == steps:
        log.info(
            "step %d/%d loss %.4f lr %.3g norm %.3f %.0f tokens/s",
            step,
            steps,
            values["loss"],
            values["learning_rate"],
            values["grad_norm"],
            values["tokens_per_second"],
        )
