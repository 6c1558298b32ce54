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
        _row("stage", "layers", "parameters", *_KINDS, "total"),
        *(_stage(stage) for stage in _distinct(plan)),
        "",
        _verdict(plan, gpu_gib),
        _arithmetic(plan),
    ]
    return "\n".join(lines)


def _distinct(plan: Plan) -> list[StageMemory]:
    """All stages, or of many the ends and the worst."""
    if len(plan.stages) <= 8:
        return list(plan.stages)
    chosen = {0, 1, len(plan.stages) - 2, len(plan.stages) - 1, plan.worst.stage}
    return [plan.stages[number] for number in sorted(chosen)]


def _stage(stage: StageMemory) -> str:
    kinds = [f"{getattr(stage, kind) / _GIB:.2f}" for kind in _KINDS]
    return _row(str(stage.stage), str(stage.layers), f"{stage.parameters:,}", *kinds, f"{stage.total / _GIB:.2f}")


def _row(stage: str, layers: str, parameters: str, *rest: str) -> str:
    return f"{stage:>5} {layers:>6} {parameters:>15} " + " ".join(f"{text:>11}" for text in rest)


def _verdict(plan: Plan, gpu_gib: float | None) -> str:
    worst = plan.worst
    text = f"worst: stage {worst.stage} with {worst.total / _GIB:.1f} GiB (the larger of logits and working counts)"
    if worst.host:
        text += f", and {worst.host / _GIB:.1f} GiB of host memory for each GPU"
    if gpu_gib is not None:
        text += f"; {'fits' if worst.total <= gpu_gib * _GIB else 'DOES NOT FIT'} in {gpu_gib:g} GiB"
    return text


def _arithmetic(plan: Plan) -> str:
    flops, step = plan.flops, plan.step_flops
    attention, head = (100 * 3 * part / flops.training for part in (flops.attention, flops.head))
    executed = flops.executed(plan.workload.recompute) * (plan.workload.step_tokens or 0)
    return (
        f"arithmetic of a step: {step / 1e12:,.0f} TFLOP forward and backward, {step / plan.layout.gpus / 1e12:,.1f} a GPU; "
        f"attention {attention:.0f} %, head {head:.0f} %; computed, with repeats: {executed / 1e12:,.0f} TFLOP"
    )
