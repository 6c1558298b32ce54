"""The loop's trainer on Megatron: replayed routes, what they change, and a step that lowers the loss."""

import numpy as np
import pytest
import torch
from make import answer, group, index_of, prompt, rollout, sample, samples_of

from vime_proto.version import policy_version
from vime_r3.trace import encode
from vime_trainer.batch import RefusedSamplesError, read_columns
from vime_trainer.packed import pack
from vime_trainer.policy import Policy
from vime_trainer.rl import RlSettings
from vime_trainer.rl._megatron import MegatronBackend
from vime_trainer.rl._train import BatchTrainer

LAYERS, EXPERTS = (0, 2), 8


@pytest.fixture(scope="module")
def engine(moe_folder):
    """Stands for the inference engine: the same weights, and its own routes."""
    policy = Policy.from_hf(moe_folder)
    policy.attach_replay()
    return policy


def settings_for(folder, **changes):
    batch = {"groups": 2, "group_size": 3, "token_budget": 30, **changes.pop("batch", {})}
    optimizer = {"learning_rate": 1e-3, "clip_grad_norm": 1.0}
    return RlSettings(model=folder, output="o", buffer="h:1", router="h:2", batch=batch, optimizer=optimizer, **changes)


def scored(engine, start, tokens, routes=None, valid=None, temperature=1.0):
    """A sample as the engine returns it: log-probs and routes of one forward pass."""
    batch = pack([[*start, *tokens]], temperature)
    with torch.no_grad(), engine.replay.record() as taken:
        logprobs = engine(batch).logprobs[len(start) :].numpy()
    ids = torch.stack(list(taken), dim=1).numpy()[:-1] if routes is None else routes
    name = f"s{start}{tokens}{temperature}"
    made = sample(name, prompt(start), answer(tokens, logprobs, temperature=temperature))
    trace = encode(
        ids,
        layer_ids=engine.replay.layer_ids,
        experts=engine.arch.experts,
        version=policy_version("run", 0, 0),
        valid=valid,
    )
    made.routing.CopyFrom(trace)
    return made


def groups_of(engine, **options):
    random = np.random.default_rng(5)
    made = []
    for g in range(2):
        start = random.integers(0, engine.arch.vocab, 3).tolist()
        rollouts = []
        for i in range(3):
            tokens = random.integers(0, engine.arch.vocab, 4 + i).tolist()
            one = scored(engine, start, tokens, **options)
            rollouts.append(rollout(f"{g}.{i}", float(i == 0), one))
        made.append(group(f"g{g}", *rollouts))
    return made


def train(folder, groups, backend=None, measure=True, **changes):
    settings = settings_for(folder, **changes)
    backend = backend or MegatronBackend(settings)
    index = index_of(groups)
    columns = read_columns(index, samples_of(groups), backend.vocab_size)
    return BatchTrainer(backend, settings).train(index, columns, 3, measure).figures, backend


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_engine_agree_under_replay(moe_folder, engine, layout, parts, temperature):
    groups = groups_of(engine, temperature=temperature)
    figures, _ = train(moe_folder, groups, r3="replay", batch={"layout": layout, "optimizer_steps": parts})
    assert figures["train_rollout_logprob_abs_diff/max"] < 1e-5
    rows = sum(7 - 1 + i for i in range(3)) * 2
    assert figures["r3/rows"] == figures["r3/rows_replayed"] == rows
    assert figures["r3/holes"] == figures["r3/inexact"] == figures["r3/rows_flipped"] == 0
    assert figures["optimizer_steps"] == parts
    assert figures["logprob_abs_diff_with_replay"] < 1e-5
    assert figures["logprob_abs_diff_without_replay"] < 1e-5  # the routers agree: the weights are the same
    assert figures["logprob_abs_diff_shifted_routes"] > 1e-2


def foreign(groups):
    """Routes that this model's routers would not choose: every expert's number one higher."""
    for made in samples_of(groups).values():
        ids = np.frombuffer(made.routing.inline, np.uint8).reshape(-1, 2, 2)
        moved = encode((ids + 1) % EXPERTS, layer_ids=LAYERS, experts=EXPERTS, version=policy_version("run", 0, 0))
        made.routing.CopyFrom(moved)
    return groups


def test_replay_is_seen_to_act(moe_folder, engine):
    groups = foreign(groups_of(engine))
    figures, _ = train(moe_folder, groups, r3="replay")
    assert figures["train_rollout_logprob_abs_diff/mean"] > 1e-2
    assert figures["logprob_abs_diff_without_replay"] < 1e-5
    assert figures["r3/rows_flipped"] > 0 and 0 < figures["r3/flip_share"] <= 1
    off, _ = train(moe_folder, groups, r3="off")
    assert off["train_rollout_logprob_abs_diff/mean"] < 1e-5
    assert not any(key.startswith("r3/") or "replay" in key for key in off)


def test_holes_route_themselves_and_are_counted(moe_folder, engine):
    groups = foreign(groups_of(engine))
    for made in samples_of(groups).values():
        ids = np.frombuffer(made.routing.inline, np.uint8).reshape(-1, 2, 2)
        nothing = encode(
            ids,
            layer_ids=LAYERS,
            experts=EXPERTS,
            version=policy_version("run", 0, 0),
            valid=np.zeros(len(ids), bool),
        )
        made.routing.CopyFrom(nothing)
    figures, _ = train(moe_folder, groups, r3="replay")
    assert figures["train_rollout_logprob_abs_diff/max"] < 1e-5
    assert figures["r3/rows_replayed"] == 0 and figures["r3/holes"] == figures["r3/rows"]
    assert "r3/flip_share" not in figures


def test_samples_without_routes_are_refused_by_name(moe_folder, engine):
    groups = groups_of(engine)
    made = next(iter(samples_of(groups).values()))
    made.ClearField("routing")
    with pytest.raises(RefusedSamplesError, match="no routing trace") as error:
        train(moe_folder, groups, r3="replay")
    assert list(error.value.refused) == [made.sample_id]


def test_a_damaged_trace_is_refused_by_name(moe_folder, engine):
    groups = groups_of(engine)
    made = next(iter(samples_of(groups).values()))
    made.routing.inline = made.routing.inline[:-1] + bytes([made.routing.inline[-1] ^ 1])
    with pytest.raises(RefusedSamplesError, match="checksum"):
        train(moe_folder, groups, r3="replay")


def test_steps_raise_the_good_answers_and_the_reference_stays(moe_folder, engine):
    groups = groups_of(engine)
    algorithm = {"correction": "none", "kl": {"coefficient": 0.01}, "clip_high": 10.0, "clip_low": 1.0}
    backend, means = None, []
    for _ in range(4):
        figures, backend = train(moe_folder, groups, backend, measure=False, r3="replay", algorithm=algorithm)
        with torch.no_grad():
            good = [g.rollouts[0].samples[0] for g in groups]
            rows = [
                np.concatenate([np.frombuffer(s.token_ids.data, "<i4") for s in one.segments]).tolist() for one in good
            ]
            means.append(float(backend.policy(pack(rows)).logprobs.sum()))
    assert means[-1] > means[0]
    # Measured by the weights before the last step, against the model that the run started from.
    assert figures["policy/kl"] > 0


def test_routes_of_the_old_policy_are_replayed_in_all_steps_of_the_batch(moe_folder, engine):
    """R2: no trace of an engine is needed; later steps route as the weights before the first one did."""
    groups = groups_of(engine)
    for made in samples_of(groups).values():
        made.ClearField("routing")
    figures, backend = train(moe_folder, groups, r3="record", batch={"optimizer_steps": 2})
    tokens = sum(7 + i for i in range(3)) * 2
    assert figures["optimizer_steps"] == 2 and figures["r3/holes"] == 0
    assert figures["train_rollout_logprob_abs_diff/max"] < 1e-5
    # Both steps replay their own half; the scoring pass recorded and replayed nothing.
    assert figures["r3/rows_replayed"] == figures["r3/rows"] == tokens
    once, _ = train(moe_folder, groups, r3="record")
    assert once["r3/rows_replayed"] == 0 and "r3/agreement" not in once


def test_old_routes_stay_when_the_routers_drift(moe_folder, engine, monkeypatch):
    """Between the scoring pass and the first step the routers are changed: what runs is what was recorded."""
    groups = groups_of(engine)
    backend = MegatronBackend(settings_for(moe_folder, r3="record", batch={"optimizer_steps": 2}))
    seen = {"recorded": [], "replayed": []}

    def watch(phase):
        def hook(_module, _inputs, output):
            seen[phase].append(output[1].clone())

        return [router.register_forward_hook(hook) for router in backend.policy.router_modules().values()]

    run = backend.policy.run

    def drifting(batches, wanted, loss=None):
        handles = watch("recorded" if loss is None else "replayed")
        try:
            return run(batches, wanted, loss)
        finally:
            for handle in handles:
                handle.remove()
            if loss is None:
                for router in backend.policy.router_modules().values():
                    router.weight.data.neg_()

    monkeypatch.setattr(backend.policy, "run", drifting)
    train(moe_folder, groups, backend, r3="record", batch={"optimizer_steps": 2})

    def rows(chosen):
        """Rows of both layers, in no order: the passes cut the batch differently."""
        layers = [torch.cat(chosen[place::2]) for place in range(2)]
        return [sorted(map(tuple, layer.int().tolist())) for layer in layers]

    assert len(seen["replayed"]) > len(LAYERS) and rows(seen["recorded"]) == rows(seen["replayed"])


def test_agreement_of_every_layer_and_the_share_of_large_ratios(moe_folder, engine):
    own, _ = train(moe_folder, groups_of(engine), r3="replay")
    assert own["r3/agreement"] == own["r3/agreement/layer_0"] == own["r3/agreement/layer_2"] == 1.0
    assert own["train_rollout_logprob_abs_diff/share_above_ln2"] == 0.0
    other, _ = train(moe_folder, foreign(groups_of(engine)), r3="replay")
    layers = [other[f"r3/agreement/layer_{layer}"] for layer in LAYERS]
    assert all(0 <= share < 1 for share in layers) and other["r3/agreement"] == pytest.approx(np.mean(layers))
