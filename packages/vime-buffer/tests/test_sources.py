"""Prompts from JSONL files: order, mapping, errors."""

import builders as b
import grpc
import pytest
from client import prompts_of

from vime_buffer import BufferSettings
from vime_buffer._rules import permutation
from vime_buffer._sources import JsonlFile, RowError
from vime_buffer.settings import PromptFile
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError


def _rows(count):
    return [{"prompt": f"q{i}", "answer": i} for i in range(count)]


async def _all(client, step=3):
    """Leases everything that the source gives, one batch a step."""
    seen = []
    number = 0
    while True:
        response = await client.lease(most=step)
        if response.outcome != pb.LEASE_OUTCOME_GRANTED:
            return seen
        for lease in response.leases:
            seen.append(lease.prompt)
            await client.commit(lease)
        batch = await client.batch()
        number = (await client.ack(batch)).trained
        await client.publish(number)


async def test_rows_come_in_the_order_of_the_file_without_a_seed(start, jsonl):
    path = jsonl("add.jsonl", _rows(7))
    async with start(prompts=[PromptFile(path=path, answer_field="answer")]) as client:
        answer = await client.open(batch_groups=3, group_size=1, epochs=2)
        assert answer.source_rows == 7
        seen = await _all(client)
    assert [one.prompt_id for one in seen] == [f"add-{epoch}-{row}" for epoch in range(2) for row in range(7)]
    assert [one.text for one in seen[:7]] == [f"q{i}" for i in range(7)]
    assert (seen[3].answer, seen[3].dataset, seen[3].row, seen[3].epoch) == ("3", "add", 3, 0)
    assert seen[3].record_json == '{"prompt": "q3", "answer": 3}'


async def test_a_seed_shuffles_each_epoch_its_own_way_and_always_the_same(start, jsonl, tmp_path):
    path = jsonl("add.jsonl", _rows(20))
    orders = []
    for attempt in range(2):
        async with start(prompts=[PromptFile(path=path)], database=str(tmp_path / f"{attempt}.db")) as client:
            await client.open(batch_groups=5, group_size=1, epochs=2, seed=3)
            orders.append([one.row for one in await _all(client, 5)])
    assert orders[0] == orders[1]
    first, second = orders[0][:20], orders[0][20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != sorted(first)


def test_the_permutation_depends_on_nothing_but_its_arguments():
    assert permutation(10, 0, 0).tolist() == [7, 4, 8, 1, 2, 6, 5, 0, 9, 3]
    assert permutation(6, 2**64 - 1, 3).tolist() == [2, 4, 5, 3, 0, 1]
    assert permutation(1000, 5, 1).tolist() == permutation(1000, 5, 1).tolist()
    assert permutation(1000, 5, 1).tolist() != permutation(1000, 5, 2).tolist()
    assert permutation(1000, 5, 1).tolist() != permutation(1000, 6, 1).tolist()
    assert permutation(0, 1, 1).tolist() == []


async def test_an_infinite_source_goes_on_over_epochs(start, jsonl):
    path = jsonl("add.jsonl", _rows(2))
    async with start(prompts=[PromptFile(path=path)]) as client:
        await client.open(batch_groups=5, group_size=1)
        assert prompts_of(await client.lease()) == ["add-0-0", "add-0-1", "add-1-0", "add-1-1", "add-2-0"]


async def test_data_ends_with_the_last_epoch(start, jsonl):
    path = jsonl("add.jsonl", _rows(3))
    async with start(prompts=[PromptFile(path=path)]) as client:
        await client.open(batch_groups=2, group_size=1, epochs=1)
        assert len((await client.step(1)).groups) == 2
        assert len((await client.step(2)).groups) == 1
        assert (await client.batch()).outcome == pb.LEASE_OUTCOME_END_OF_DATA


@pytest.mark.parametrize(
    "start_row, stop_row, rows",
    [(-100, None, list(range(150, 250))), (None, -240, list(range(10))), (5, 8, [5, 6, 7]), (-3, -1, [247, 248])],
)
def test_slices_may_be_negative(jsonl, start_row, stop_row, rows):
    file = JsonlFile(jsonl("x.jsonl", [{"n": i} for i in range(250)]), start=start_row, stop=stop_row)
    assert [file.read(i)[0]["n"] for i in range(len(file))] == rows
    file.close()


def test_mixed_rows_keep_their_order(jsonl):
    rows = [{"n": i, **({"image": "x"} if i % 2 else {})} for i in range(9)]
    file = JsonlFile(jsonl("x.jsonl", rows))
    assert [file.read(i)[0] for i in range(len(file))] == rows
    file.close()


@pytest.mark.parametrize(
    "rows, texts",
    [
        (['{"prompt": "a"}', "", '{"prompt": '], ["x.jsonl:3", "not JSON"]),
        (['{"prompt": "a"}', "[1]"], ["x.jsonl:2", "must be a JSON object, got list"]),
        ([], ["no rows"]),
    ],
)
def test_bad_files_are_named_by_file_and_line(jsonl, rows, texts):
    with pytest.raises(ContractError) as caught:
        JsonlFile(jsonl("x.jsonl", rows))
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "mapping, texts",
    [
        ({"text_field": "promt"}, ["x.jsonl:1", "did you mean 'prompt'", "answer"]),
        ({"text_field": "answer"}, ["x.jsonl:1", "'answer' must be text"]),
        ({"messages_field": "prompt"}, ["x.jsonl:1", "list of chat messages"]),
        ({"text_field": "prompt", "messages_field": "prompt"}, ["prompts[0].messages_field", "exclude"]),
        ({"answer_field": "solution"}, ["unknown field 'solution'"]),
        ({"path": "/nowhere.jsonl"}, ["prompts[0].path", "/nowhere.jsonl"]),
    ],
)
def test_wrong_mappings_fail_at_the_start(jsonl, mapping, texts):
    settings = BufferSettings(prompts=[PromptFile(**{"path": jsonl("x.jsonl", _rows(2)), **mapping})])
    with pytest.raises(ContractError) as caught:
        settings.open_source()
    for text in texts:
        assert text in str(caught.value)


def test_a_file_that_changed_after_it_was_indexed_is_named(jsonl, tmp_path):
    file = JsonlFile(jsonl("x.jsonl", _rows(3)))
    (tmp_path / "x.jsonl").write_text("garbage\n" * 20)
    with pytest.raises(RowError, match=r"x\.jsonl:2"):
        file.read(1)
    file.close()


async def test_a_bad_row_is_dropped_by_name_and_the_rest_goes_on(start, jsonl, caplog):
    rows = [*_rows(2), {"promt": "typo"}, *_rows(2)]
    async with start(prompts=[PromptFile(path=jsonl("x.jsonl", rows))]) as client:
        await client.open(batch_groups=4, group_size=1, epochs=1, max_attempts=1)
        assert prompts_of(await client.lease()) == ["x-0-0", "x-0-1", "x-0-3"]
        assert prompts_of(await client.lease()) == ["x-0-4"]
        stats = await client.stats()
    assert (stats.prompts_dropped_total, stats.prompts_read_total) == (1, 5)
    assert "x.jsonl:3" in caplog.text and "did you mean 'promt'" in caplog.text


async def test_several_files_are_one_stream(start, jsonl):
    files = [
        PromptFile(path=jsonl("a.jsonl", _rows(2)), reward="exact"),
        PromptFile(
            path=jsonl("b.jsonl", [{"m": [{"role": "user", "content": "hi"}]}] * 2), messages_field="m", name="chat"
        ),
    ]
    async with start(prompts=files) as client:
        await client.open(batch_groups=4, group_size=1, epochs=1)
        leases = (await client.lease()).leases
    assert [one.prompt.prompt_id for one in leases] == ["a-0-0", "a-0-1", "chat-0-0", "chat-0-1"]
    assert (
        leases[0].prompt.reward == "exact" and leases[2].prompt.messages_json == '[{"role": "user", "content": "hi"}]'
    )


def test_data_sets_of_the_same_name_are_refused(jsonl):
    one = PromptFile(path=jsonl("a.jsonl", _rows(2)))
    with pytest.raises(ContractError, match="'a' is named twice"):
        BufferSettings(prompts=[one, one]).open_source()


async def test_put_prompts_come_before_rows_not_read_yet(start, jsonl):
    async with start(prompts=[PromptFile(path=jsonl("a.jsonl", _rows(3)))]) as client:
        await client.open(batch_groups=2, group_size=1)
        await client.put("mine")
        assert prompts_of(await client.lease()) == ["mine"]
        assert prompts_of(await client.lease()) == ["a-0-0"]


async def test_a_run_does_not_go_on_with_other_files(start, jsonl, refused):
    path = jsonl("a.jsonl", _rows(3))
    async with start(prompts=[PromptFile(path=path)]) as client:
        await client.open()
    jsonl("a.jsonl", _rows(4))
    async with start(prompts=[PromptFile(path=path)]) as client:
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "prompt files changed", repr(b.RUN)):
            await client.open(publish=False)


async def test_put_prompts_may_not_take_the_id_of_a_row(start, jsonl):
    """It would stand in the way of that row, and of everything behind it."""
    path = jsonl("x.jsonl", _rows(2))
    async with start(prompts=[PromptFile(path=path)]) as client:
        await client.open(batch_groups=8, group_size=1, epochs=1)
        answer = await client.put("x-0-1", "x-y-1", "y-0-1")
        assert [one.code for one in answer.statuses] == [grpc.StatusCode.INVALID_ARGUMENT.value[0], 0, 0]
        assert "'x-0-1' is the id of a row" in answer.statuses[0].message
        assert prompts_of(await client.lease()) == ["x-y-1", "y-0-1"]
        assert prompts_of(await client.lease()) == ["x-0-0", "x-0-1"]
