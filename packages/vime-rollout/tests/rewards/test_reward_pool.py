from __future__ import annotations

import asyncio
import time

import pytest

from vime_proto.errors import ContractError
from vime_rollout.rewards import (
    RewardError,
    RewardInput,
    RewardPool,
    RewardSpec,
    RewardTimeout,
    find_spec,
    read_specs,
)

HERE = "reward_functions"
SPECS = read_specs(
    {
        "length": {"function": f"{HERE}:length", "scale": 0.5},
        "slow": {"function": f"{HERE}:slow", "seconds": 0.02},
        "hangs": {"function": f"{HERE}:hangs"},
        "patient": {"function": f"{HERE}:slow", "seconds": 1.0, "timeout_seconds": 30.0},
        **{name: {"function": f"{HERE}:{name}"} for name in ("raises", "dies", "nothing", "not_finite", "hoards")},
        **{name: {"function": f"{HERE}:{name}"} for name in ("prints", "closes", "reads_record", "process_id")},
    }
)


@pytest.fixture
async def pool():
    pools = []

    async def start(**options):
        one = RewardPool(**{"workers": 1, "timeout_seconds": 20.0, **options})
        pools.append(one)
        await one.start()
        return one

    yield start
    for one in pools:
        await one.stop()


async def test_user_functions_and_builtin_ones_score_in_processes(pool):
    one = await pool()
    score = await one.score(SPECS["length"], RewardInput("four"))
    assert score.value == 2.0 and score.parts == {"characters": 4.0}
    assert (await one.score(SPECS["math"], RewardInput(r"\boxed{\frac{2}{4}}", answer="1/2"))).value == 1.0
    assert (await one.score(find_spec(SPECS, f"{HERE}:prints"), RewardInput("x"))).value == 0.25
    item = RewardInput("b", turns=("a", "b"), truncated=True, record_json='{"level": 3}')
    assert (await one.score(SPECS["reads_record"], item)).value == 1.0


async def test_a_reward_that_hangs_is_ended_and_the_others_go_on(pool):
    one = await pool(workers=2, timeout_seconds=4.0)
    started = time.monotonic()
    hanging = asyncio.create_task(one.score(SPECS["hangs"], RewardInput("go")))
    others = await asyncio.gather(*(one.score(SPECS["slow"], RewardInput("x")) for _ in range(10)))
    assert [other.value for other in others] == [1.0] * 10
    assert not hanging.done()
    with pytest.raises(RewardTimeout, match="'hangs' ran longer than 4 s"):
        await hanging
    assert time.monotonic() - started < 30
    assert (await one.score(SPECS["hangs"], RewardInput("2"))).value == 1.0
    assert one.counters.timed_out == 1


async def test_many_slow_rewards_on_few_processes_do_not_time_out(pool):
    # 256 x 20 ms on 2 processes take 2.5 s, more than the limit of any one of them.
    one = await pool(workers=2, timeout_seconds=2.4)
    started = time.monotonic()
    scores = await asyncio.gather(*(one.score(SPECS["slow"], RewardInput(str(n))) for n in range(256)))
    assert [score.value for score in scores] == [1.0] * 256
    assert time.monotonic() - started > 2.4
    assert one.counters.timed_out == 0 and one.counters.started == 2


async def test_a_reward_may_have_a_limit_of_its_own(pool):
    one = await pool(timeout_seconds=0.2)
    assert (await one.score(SPECS["patient"], RewardInput("x"))).value == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "ValueError: cannot score 'x'"),
        ("dies", "'dies' ended with status 3"),
        ("nothing", "answered None for 'nothing', which is no number"),
        ("not_finite", "answered nan for 'not_finite', which is not finite"),
        ("hoards", "MemoryError"),
    ],
)
async def test_a_reward_that_fails_says_why_and_the_pool_goes_on(pool, name, message):
    one = await pool(memory_mib=2048)
    with pytest.raises(RewardError, match=message):
        await one.score(SPECS[name], RewardInput("x"))
    assert (await one.score(SPECS["length"], RewardInput("four"))).value == 2.0


async def test_many_first_scores_start_one_pool():
    one = RewardPool(workers=2, timeout_seconds=20.0)
    scores = await asyncio.gather(*(one.score(SPECS["length"], RewardInput("four")) for _ in range(8)))
    assert [score.value for score in scores] == [2.0] * 8
    assert one.counters.started == 2
    await one.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_request_that_cannot_be_sent_fails_alone(pool):
    one = await pool()
    unsendable = RewardSpec("length", f"{HERE}:length", {"scale": object()})
    with pytest.raises(RewardError, match="not JSON serializable"):
        async with asyncio.timeout(10):
            await one.score(unsendable, RewardInput("x"))
    assert (await one.score(SPECS["length"], RewardInput("four"))).value == 2.0


async def test_a_reward_that_closes_its_pipes_and_lives_on_is_ended(pool):
    one = await pool()
    with pytest.raises(RewardError, match="'closes' ended"):
        async with asyncio.timeout(10):
            await one.score(SPECS["closes"], RewardInput("x"))
    assert (await one.score(SPECS["length"], RewardInput("four"))).value == 2.0


async def test_a_caller_that_left_does_not_disturb_the_process(pool):
    one = await pool()
    process = (await one.score(SPECS["process_id"], RewardInput("x"))).value
    left = asyncio.create_task(one.score(SPECS["patient"], RewardInput("x")))
    await asyncio.sleep(0.05)
    left.cancel()
    assert (await one.score(SPECS["process_id"], RewardInput("x"))).value == process


async def test_a_pool_that_stops_answers_who_waits():
    one = RewardPool(workers=1)
    await one.start()
    waiting = [asyncio.create_task(one.score(SPECS["patient"], RewardInput("x"))) for _ in range(3)]
    await asyncio.sleep(0.05)
    await one.stop()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, RewardError) for result in results)


async def test_a_wrong_import_path_is_found_when_the_pool_starts():
    for path, message in (
        ("no_such_module:f", "cannot import 'no_such_module'"),
        (f"{HERE}:lenght", "did you mean 'length'"),
    ):
        one = RewardPool(workers=1, preload=[find_spec({}, path)])
        with pytest.raises(ContractError, match=message):
            await one.start()
        await one.stop()


def test_names_and_options_are_checked_with_the_nearest_valid_one():
    with pytest.raises(ContractError, match=r"rewards\.numric\.function.*did you mean 'numeric'"):
        read_specs({"numric": {}})
    with pytest.raises(ContractError, match=r"rewards\.numeric\.relative_tolerence.*did you mean 'relative_tolerance'"):
        read_specs({"numeric": {"relative_tolerence": 0.1}})
    with pytest.raises(ContractError, match="did you mean 'exact'"):
        find_spec(SPECS, "exat")
    with pytest.raises(ContractError, match=r"rewards\.exact\.timeout_seconds"):
        read_specs({"exact": {"timeout_seconds": 0}})
