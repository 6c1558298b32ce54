"""vLLM's schedulers with joined routes against its own, step by step: chunked prompts, shared prefixes, preemption, aborts."""

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
        params = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
        params.routed_experts_prompt_start = int(rng.integers(0, len(prompt))) if number % 3 == 0 else 0
        yield schedulers.request(f"r{number}", prompt, params)


def run(one, ahead, unpack):
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
            queue.append((scheduled, schedulers.work(one, scheduled, ids)))
        preempted += len(scheduled.preempted_req_ids or ())
        if len(queue) > ahead or (queue and not scheduled.total_num_scheduled_tokens):
            for outputs in one.update_from_output(*queue.pop(0)).values():
                unpack(outputs.outputs)
                said += [(o.request_id, o.new_token_ids, o.finish_reason, o.routed_experts) for o in outputs.outputs]
        if not (waiting or queue or one.requests):
            break
    assert not one.requests
    return said, preempted


@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
def test_each_request_gets_the_rows_that_vllm_alone_would_give_it(tmp_path, ahead):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vime_rollout.engine.backend import _scheduler

    cfg = models.config(moe=True, layers=LAYERS)
    folder = models.save(tmp_path, cfg, models.weights(cfg, 1))
    own, joined = (
        (AsyncScheduler, _scheduler.JoinedAsyncScheduler) if ahead else (Scheduler, _scheduler.JoinedScheduler)
    )
    expected, preempted = run(schedulers.make(own, folder, 24), ahead, lambda outputs: None)
    arrays = []

    def unpack(outputs):
        arrays.append(sum(one.routed_experts is not None for one in outputs))
        _scheduler._unpack(outputs)

    found, _ = run(schedulers.make(joined, folder, 24), ahead, unpack)
    assert preempted and max(arrays) == 1 and len(expected) == len(found) > 100
    for (*before, rows), (*after, got) in zip(expected, found, strict=True):
        assert before == after and (rows is None) == (got is None)
        assert rows is None or (rows.dtype == got.dtype and np.array_equal(rows, got))
