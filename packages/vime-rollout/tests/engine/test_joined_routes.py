"""vLLM's schedulers with joined routes and log-probs against its own, step by step.

Prompts in chunks, shared prefixes, preemption, aborts.
"""

import models
import numpy as np
import pytest
import schedulers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

LAYERS, TOP_K = 2, 2


def requests(count):
    from vllm.sampling_params import SamplingParams

    rng = np.random.default_rng(1)
    shared = rng.integers(3, 60, 20).tolist()
    for number in range(count):
        prompt = shared[: int(rng.integers(0, 20))] + rng.integers(3, 60, int(rng.integers(1, 40))).tolist()
        # Some ask for no log-probs.
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 30)), ignore_eos=True, logprobs=None if number % 5 == 4 else number % 2
        )
        params.routed_experts_prompt_start = int(rng.integers(0, len(prompt))) if number % 3 == 0 else 0
        yield schedulers.request(f"r{number}", prompt, params)


def logprobs(rng, rows):
    from vllm.v1.outputs import LogprobsLists

    values = rng.standard_normal((rows, 2)).astype(np.float32)
    return LogprobsLists(
        rng.integers(0, 60, (rows, 2)).astype(np.int32), values, rng.integers(0, 9, rows).astype(np.int32)
    )


def run(one, ahead, unpack, capture):
    """Everything that the scheduler says, step by step, and how often it preempted."""
    from vllm.v1.request import RequestStatus

    waiting, queue, said, preempted = list(requests(14)), [], [], 0
    for step in range(600):
        if step % 5 == 0 and waiting:
            one.add_request(waiting.pop(0))
        if step in (33, 61):
            one.finish_requests([next(iter(one.requests))], RequestStatus.FINISHED_ABORTED)
        scheduled = one.schedule()
        if scheduled.total_num_scheduled_tokens:
            rng = np.random.default_rng(step)  # other routes at every step, also of a token that is read again
            ids = lambda n, rng=rng: rng.integers(0, 8, (n, LAYERS, TOP_K)).astype(np.int32)  # noqa: E731
            answer = schedulers.work(one, scheduled, ids if capture else None, lambda n, rng=rng: logprobs(rng, n))
            queue.append((scheduled, answer))
        preempted += len(scheduled.preempted_req_ids or ())
        if len(queue) > ahead or (queue and not scheduled.total_num_scheduled_tokens):
            for outputs in one.update_from_output(*queue.pop(0)).values():
                unpack(outputs.outputs)
                said += [
                    (o.request_id, o.new_token_ids, o.finish_reason, o.routed_experts, o.new_logprobs)
                    for o in outputs.outputs
                ]
        if not (waiting or queue or one.requests):
            break
    assert not one.requests
    return said, preempted


@pytest.mark.parametrize("capture", [True, False], ids=["capture", "plain"])
@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
def test_each_request_gets_what_vllm_alone_would_give_it(tmp_path, monkeypatch, ahead, capture):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vime_rollout.engine.backend import _packing, _scheduler

    cfg = models.config(moe=True, layers=LAYERS)
    folder = models.save(tmp_path, cfg, models.weights(cfg, 1))
    own, joined = (
        (AsyncScheduler, _scheduler.JoinedAsyncScheduler) if ahead else (Scheduler, _scheduler.JoinedScheduler)
    )
    theirs = schedulers.make(own, folder, 24, capture=capture)
    expected, preempted = run(theirs, ahead, lambda outputs: None, capture)
    arrays = []

    def unpack(outputs):
        for name in ("routed_experts", "new_logprobs"):
            arrays.append(sum(getattr(one, name) is not None for one in outputs))
        _packing.unpack(outputs)

    one, prompts = schedulers.make(joined, folder, 24, capture=capture), []
    take = _packing._frames.take
    monkeypatch.setattr(_packing._frames, "take", lambda *given: prompts.append(len(given[-1])) or take(*given))
    found, _ = run(one, ahead, unpack, capture)
    # Steps with and without first tokens, and no request that is still waited for.
    assert (min(prompts) == 0 < max(prompts)) if capture else not prompts
    assert not one._fresh
    assert not capture or one._re_block_ids.keys() <= theirs._re_block_ids.keys()
    assert preempted and max(arrays) == 1 and len(expected) == len(found) > 100
    assert any(one[-1] is not None for one in expected) and any(one[-1] is None for one in expected)
    for (*before, rows, values), (*after, got, read) in zip(expected, found, strict=True):
        assert before == after and (rows is None) == (got is None) and (capture or rows is None)
        assert rows is None or (rows.dtype == got.dtype and np.array_equal(rows, got))
        assert (values is None) == (read is None)
        if values is not None:
            assert read.cu_num_generated_tokens is None
            for one, other in zip(values[:3], read[:3], strict=True):
                assert one.dtype == other.dtype and np.array_equal(one, other)
