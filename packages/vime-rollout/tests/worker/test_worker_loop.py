from __future__ import annotations

import asyncio

import worker_models as models
from worker_models import STOP, answering, delta, ids_of

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy
from vime_proto.validate import validate_group


def adder(tokenizer, number=0):
    """Solves every prompt ``<bos>a+1=``."""

    async def script(request, seen):
        (text,) = tokenizer.decode([to_numpy(request.prompt_token_ids)])
        answer = str(int(text.split("+")[0]) + 1)
        yield delta(tokenizer.encode(answer), number)
        yield delta([2], number, STOP, stop_token_id=2, stop_included=True)

    return script


async def test_groups_are_generated_scored_and_committed_until_the_data_ends(stage, prompts, tokenizer):
    one = await stage(adder(tokenizer), prompts)
    await one.open_run(group_size=3)
    worker = one.worker()
    for number in range(2):
        batch = await one.batch()
        for group in await one.groups(batch):
            validate_group(group, group_size=3)
            for rollout in group.rollouts:
                assert rollout.status == pb.ROLLOUT_STATUS_COMPLETED
                assert rollout.reward == 1.0 and rollout.rewards["exact"] == 1.0
                (sample,) = rollout.samples
                prompt, model = sample.segments
                assert ids_of(prompt.token_ids) == tokenizer.encode(group.prompt.text).tolist()
                assert ids_of(model.token_ids) == [*tokenizer.encode(group.prompt.answer).tolist(), 2]
                assert model.trainable_all and model.generation.version.number == number
                assert model.generation.stop_included and model.generation.finish_reason == STOP
        await one.ack(batch)
        one.engine.script = adder(tokenizer, number + 1)
        await one.publish(number + 1)
    async with asyncio.timeout(10):
        counters = await worker
    assert counters["groups_ready"] == 4 and counters["rollouts_failed"] == 0
    assert (await one.stats()).groups_committed_total == 4


async def test_requests_of_a_group_differ_only_in_ids_and_seed(stage, prompts):
    one = await stage(answering([5, 2]), prompts[:1])
    await one.open_run(group_size=4, batch_groups=1)
    one.worker()
    await one.batch()
    requests = one.engine.requests
    assert len({r.request_id for r in requests}) == 4 and len({r.sampling.seed for r in requests}) == 4
    for request in requests:
        request.request_id, request.session_id, request.sampling.seed = "", "", 0
    assert all(request == requests[0] for request in requests)
    assert all(m["vime-request-id"] and m["vime-estimated-tokens"].isdigit() for m in one.engine.metadata)


async def test_no_more_groups_are_in_flight_than_allowed(stage, prompts):
    async def slow(request, seen):
        await asyncio.sleep(0.05)
        yield delta([5, 2], 0, STOP)

    one = await stage(slow, prompts, max_groups_in_flight=2)
    await one.open_run(group_size=3, batch_groups=4)
    one.worker()
    await one.batch()
    assert 3 < one.engine.most_running <= 6


async def test_a_wrong_answer_gets_zero_and_zero_is_a_reward(stage, prompts):
    one = await stage(answering([models.STOP, 2]), prompts[:1])
    await one.open_run(group_size=2, batch_groups=1)
    one.worker()
    (group,) = await one.groups(await one.batch())
    for rollout in group.rollouts:
        assert rollout.status == pb.ROLLOUT_STATUS_COMPLETED and rollout.HasField("reward") and rollout.reward == 0.0
