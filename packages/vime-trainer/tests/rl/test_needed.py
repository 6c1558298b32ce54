"""What a rank asks a buffer for: rows of the tokens that it routes, in whatever passes are to come."""

import numpy as np
import pytest
from make import answer, group, index_of, prompt, rollout, sample
from served_folder import served_folder
from test_services import import_settings
from test_train import run_settings

from vime_proto.version import policy_version
from vime_r3.trace import decode, encode
from vime_trainer.policy._layouts import Cut, routed_tokens, stream_length
from vime_trainer.rl import write_batch
from vime_trainer.rl._buffer import _selection
from vime_trainer.rl._needed import ReplayedPass, needed_routes
from vime_trainer.rl._plan import plan_batch
from vime_trainer.rl._team import Team
from vime_trainer.rl._train import BatchTrainer

LENGTHS = np.array([9, 4, 1, 13, 6, 7])


class Rank:
    """A backend as far as it says what a rank routes."""

    moe_layers, vocab_size, critic, cost = (1, 3, 4, 6), 32, None, None

    def __init__(self, cut, routed_layers=(1, 3)):
        self.cut, self.routed_layers = cut, routed_layers

    def routed_tokens(self, micro_batches):
        found = [routed_tokens(one, False, self.cut, stream_length(one, False, self.cut)) for one in micro_batches]
        return [places[places >= 0] for places in found]


def ranks(size, token_size=1):
    return [Rank(Cut(one, size, part, token_size)) for one in range(size) for part in range(token_size)]


def rows_of(needed):
    """As pairs of a sample and a row."""
    return {(s, row) for s, ranges in enumerate(needed.rows) for start, stop in ranges for row in range(start, stop)}


def every_row(samples):
    return {(s, row) for s in samples for row in range(LENGTHS[s] - 1)}


@pytest.mark.parametrize(("size", "token_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)])
def test_of_one_pass_every_row_is_needed_by_one_rank(size, token_size):
    found = [needed_routes(LENGTHS, one, [ReplayedPass([[0, 3], [1], [2, 5], []])]) for one in ranks(size, token_size)]
    parts = [rows_of(one) for one in found]
    assert set().union(*parts) == every_row([0, 1, 2, 3, 5]) and sum(map(len, parts)) == 8 + 3 + 12 + 6
    assert all(one.layers == (1, 3) and one.layer_ranges == [(1, 4)] for one in found)
    assert (np.sum([one.tokens for one in found], axis=0) == np.repeat(np.arange(6) != 4, LENGTHS)).all()


def test_passes_that_cut_the_batch_otherwise_need_their_union():
    for one in ranks(2):
        first, second = ReplayedPass([[0, 3], [1, 5]]), ReplayedPass([[0, 1], [3, 5]])
        alone = [rows_of(needed_routes(LENGTHS, one, [way])) for way in (first, second)]
        assert rows_of(needed_routes(LENGTHS, one, [first, second])) == alone[0] | alone[1]
        assert alone[0] != alone[1]


def test_shifted_routes_need_the_row_before_within_a_sample():
    for one in ranks(2):
        own = rows_of(needed_routes(LENGTHS, one, [ReplayedPass([[3, 0, 1]])]))
        needed = needed_routes(LENGTHS, one, [ReplayedPass([[3, 0, 1]], shift=1)])
        starts = np.cumsum(LENGTHS) - LENGTHS
        tokens = {(s, at - starts[s]) for s in (0, 1, 3) for at in range(starts[s], starts[s] + LENGTHS[s])}
        routed = needed_routes(LENGTHS, one, [ReplayedPass([[3, 0, 1]])]).tokens
        before = {(s, i - 1) for s, i in tokens if i and routed[starts[s] + i]}
        assert rows_of(needed) == own | before > own


@pytest.mark.parametrize(
    ("steps", "measure", "algorithm", "passes"),
    [
        (1, False, {}, ["step"]),
        (2, False, {}, ["step", "step", "whole"]),
        (2, False, {"old_policy": "engine"}, ["step", "step"]),
        (1, True, {}, ["step", "first", "late"]),
    ],
)
def test_passes_are_those_that_will_be_made(steps, measure, algorithm, passes):
    groups = [
        group(
            f"g{g}",
            *(rollout(f"{g}.{i}", float(i), sample(f"{g}.{i}", prompt(), answer([3] * (g + 2 * i)))) for i in (1, 2)),
        )
        for g in range(3)
    ]
    index = index_of(groups)
    settings = run_settings(r3="replay", algorithm=algorithm, batch={"optimizer_steps": steps, "token_budget": 15})
    plan = plan_batch(index, settings.batch)
    known = {"step": iter([ReplayedPass(one[0]) for one in plan.steps]), "whole": iter([ReplayedPass(plan.whole[0])])}
    known |= {"first": iter([ReplayedPass(plan.whole[0][:1])]), "late": iter([ReplayedPass(plan.whole[0][:1], 1)])}
    want = [next(known[name]) for name in passes]
    for one in ranks(2):
        found = BatchTrainer(one, settings, team=Team()).needed_routes(index, plan, measure)
        assert np.array_equal(found.tokens, needed_routes(index.lengths, one, want).tokens)
    assert BatchTrainer(one, run_settings(r3="off")).needed_routes(index, plan, measure) is None


def test_requests_name_the_rows():
    samples = [sample(f"s{i}", prompt([1]), answer([2] * (n - 1))) for i, n in enumerate(LENGTHS) if n > 1]
    index = index_of([group("g", *(rollout(one.sample_id, 1.0, one) for one in samples))])
    needed = needed_routes(index.lengths, Rank(Cut(0, 2)), [ReplayedPass([[0, 1]])])

    def asked(sample, routes=needed):
        return [(one.start, one.stop) for one in _selection(index, sample, routes).routing_rows]

    # Of 13 tokens in parts of 4 this rank has the first and the last: that is the last token, which has no row.
    assert asked(0) == [(0, 4)]
    assert asked(1) == asked(2) == [(0, 0)], "no row, but the header"
    assert asked(0, None) == [], "everything"
    whole = needed_routes(index.lengths, Rank(Cut()), [ReplayedPass([[0, 1]])])
    assert asked(0, whole) == asked(1, whole) == [], "everything"


@pytest.mark.parametrize("layers", [(1, 6), (3, 4), ()])
def test_what_arrives_is_what_was_asked_for(layers, tmp_path):
    """Of a buffer, by a rank of two with virtual stages, one in the middle and one of dense layers."""
    random, samples = np.random.default_rng(1), []
    for number, length in enumerate(LENGTHS):
        one = sample(f"s{number}", prompt([1]), answer([2] * (length - 1)))
        ids = np.argsort(random.random((length - 1, 4, 8)))[..., :2]
        valid = np.arange(length - 1) % 5 != 1
        one.routing.CopyFrom(
            encode(
                ids,
                layer_ids=Rank.moe_layers,
                experts=8,
                version=policy_version("run", 0, 0),
                valid=valid,
                chunk_rows=4,
            )
        )
        samples.append(one)
    groups = [group("g", *(rollout(one.sample_id, 1.0, one) for one in samples))]
    write_batch(tmp_path, index_of(groups), {one.sample_id: one for one in samples})
    with served_folder(import_settings(tmp_path, tmp_path / "out", r3="replay")) as (source, received):
        folder = source(tmp_path)
        leased = folder.lease()
        for cut in (Cut(0, 2), Cut(1, 2)):
            needed = needed_routes(leased.index.lengths, Rank(cut, layers), [ReplayedPass([[0, 3], [1, 2, 5]])])
            found = folder.fetch(leased, [0, 1, 2, 3, 4, 5], needed)
            for number, given in enumerate(samples):
                came = found[given.sample_id]
                assert came.segments == given.segments
                if not layers:
                    assert not came.HasField("routing")
                    continue
                routes, whole = decode(came.routing, rows=int(LENGTHS[number]) - 1), decode(given.routing)
                rows = [row for s, row in sorted(rows_of(needed)) if s == number and whole.valid[row]]
                assert np.flatnonzero(routes.valid).tolist() == rows and routes.layer_ids == layers
                columns = [Rank.moe_layers.index(layer) for layer in layers]
                np.testing.assert_array_equal(routes.ids[rows], whole.ids[rows][:, columns])
                # Holes that were asked for may come as well.
                asked = sum(s == number for s, _ in rows_of(needed))
                assert len(rows) <= received[-1][given.sample_id] / (len(layers) * 2) <= asked
