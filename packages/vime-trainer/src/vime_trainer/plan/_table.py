"""A plan as text."""

from __future__ import annotations

from vime_trainer.plan._plan import Plan, StageMemory

__all__ = ["render"]

_GIB = 1 << 30
_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "working")


def render(plan: Plan, gpu_gib: float | None = None) -> str:
    """Several lines: the model, the layout, memory by stage, arithmetic.

    Args:
        plan: what to show.
        gpu_gib: memory of a GPU; says whether the worst stage fits.
    """
    layout, work = plan.layout, plan.workload
    sizes = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data", "expert_data")
    shown = ", ".join(f"{name} {getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1) or "one process"
    extras = [
        name
        for name, on in (
            ("sequence parallel", layout.sequence),
            ("recompute", work.recompute),
            ("distributed optimizer", work.distributed),
            ("optimizer in host memory", work.cpu_offload),
        )
        if on
    ]
    lines = [
        f"{plan.family}: {plan.parameters:,} parameters, {plan.active:,} of them active for a token",
        f"{layout.gpus} GPUs: {', '.join([shown, *extras])}; {work.dtype}",
        f"step: {work.step_tokens:,} tokens, {plan.micro_batches} micro-batches of {work.micro_batch_tokens:,} on each "
        f"data-parallel rank, sequences of {work.sequence_length:,}",
        "",
        "GiB on each GPU",
        *_memory(plan),
        "",
        _verdict(plan, gpu_gib),
        _arithmetic(plan),
    ]
    return "\n".join(lines)


def _memory(plan: Plan) -> list[str]:
    """A row for each stage, and with several models for each of them and their peak."""
    if not plan.others:
        return [
            _row("stage", "layers", "parameters", *_KINDS, "total"),
            *(_stage(str(stage.stage), stage) for stage in _distinct(plan)),
        ]
    rows = [_row("stage", "layers", "parameters", *_KINDS, "total", model="model")]
    models = {"policy": plan.stages, **plan.others}
    for number in (stage.stage for stage in _distinct(plan)):
        rows += [_stage(str(number), stages[number], model=name) for name, stages in models.items()]
        empty = [""] * len(_KINDS)
        rows.append(_row(str(number), "", "", *empty, f"{plan.total(number) / _GIB:.2f}", model="together"))
    return rows


def _distinct(plan: Plan) -> list[StageMemory]:
    """All stages, or of many the ends and the worst."""
    if len(plan.stages) <= 8:
        return list(plan.stages)
    chosen = {0, 1, len(plan.stages) - 2, len(plan.stages) - 1, plan.worst.stage}
    return [plan.stages[number] for number in sorted(chosen)]


def _stage(number: str, stage: StageMemory, model: str = "") -> str:
    kinds = [f"{getattr(stage, kind) / _GIB:.2f}" for kind in _KINDS]
    total = f"{stage.total / _GIB:.2f}"
    return _row(number, str(stage.layers), f"{stage.parameters:,}", *kinds, total, model=model)


def _row(stage: str, layers: str, parameters: str, *rest: str, model: str = "") -> str:
    name = f"{model:<9} " if model else ""
    return f"{name}{stage:>5} {layers:>6} {parameters:>15} " + " ".join(f"{text:>11}" for text in rest)


def _verdict(plan: Plan, gpu_gib: float | None) -> str:
    worst = plan.worst
    total, host = plan.total(worst.stage), plan.host(worst.stage)
    counts = "the larger of logits and working counts"
    if plan.others:
        counts += "; models work one after the other"
    text = f"worst: stage {worst.stage} with {total / _GIB:.1f} GiB ({counts})"
    if host:
        text += f", and {host / _GIB:.1f} GiB of host memory for each GPU"
    if gpu_gib is not None:
        text += f"; {'fits' if total <= gpu_gib * _GIB else 'DOES NOT FIT'} in {gpu_gib:g} GiB"
    return text


def _arithmetic(plan: Plan) -> str:
    flops, step = plan.flops, plan.step_flops
    attention, head = (100 * 3 * part / flops.training for part in (flops.attention, flops.head))
    executed = flops.executed(plan.workload.recompute) * (plan.workload.step_tokens or 0)
    return (
        f"arithmetic of a step: {step / 1e12:,.0f} TFLOP forward and backward, {step / plan.layout.gpus / 1e12:,.1f} a GPU; "
        f"attention {attention:.0f} %, head {head:.0f} %; computed, with repeats: {executed / 1e12:,.0f} TFLOP"
        + "".join(f"; {name}: {value / 1e12:,.0f}" for name, value in plan.other_flops().items())
    )
