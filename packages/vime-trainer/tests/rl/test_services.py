"""TrainerService while a run goes on, export and import of batches, metrics on disk."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
from make import answer, group, prompt, rollout, sample
from stages import Stages, settings_for
from test_loop import lines, run, steps
from toy import ToyBackend

from vime_proto.channel import open_sync_channel
from vime_proto.errors import ContractError
from vime_proto.trainer.v1 import trainer_pb2 as pb
from vime_proto.trainer.v1 import trainer_pb2_grpc
from vime_trainer import metrics, rl, service
from vime_trainer.checkpoint import list_steps
from vime_trainer.metrics import JsonlWriter, MetricsSettings, PrometheusWriter, finite, open_writers, spread
from vime_trainer.rl import RlSettings, read_groups, train, write_batch
from vime_trainer.rl._figures import batch_figures
from vime_trainer.service import RunStatus


def test_public_names():
    assert sorted(service.__all__) == [
        "CheckpointRequest",
        "RunStatus",
        "TrainerServicer",
        "WeightServicer",
        "reachable_address",
        "serve_trainer",
    ]
    assert sorted(rl.__all__) == [
        "AlarmSettings",
        "Backend",
        "EvaluationSettings",
        "FolderSource",
        "Interrupted",
        "RlSettings",
        "StepOutcome",
        "main",
        "read_groups",
        "train",
        "write_batch",
    ]
    assert sorted(metrics.__all__) == [
        "JsonlWriter",
        "MetricsSettings",
        "PrometheusWriter",
        "TensorBoardWriter",
        "WandbSettings",
        "WandbWriter",
        "Writer",
        "finite",
        "mean",
        "mean_and_std",
        "open_writers",
        "peak_rss_bytes",
        "spread",
    ]


class Slow(ToyBackend):
    """A step takes long enough to be asked about."""

    def step(self):
        time.sleep(0.3)
        return super().step()


class Running:
    """A run in a thread, and a stub of its TrainerService."""

    def __init__(self, settings, backend=Slow):
        self.settings = settings
        self.result = None
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(backend,))

    def _run(self, backend):
        try:
            self.result = train(self.settings, backend)
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        path = self.settings.address_file
        end = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < end and self._thread.is_alive()
            time.sleep(0.01)
        self._channel = open_sync_channel(path.read_text())
        return self, trainer_pb2_grpc.TrainerServiceStub(self._channel)

    def __exit__(self, *exc):
        self._thread.join(30)
        self._channel.close()
        assert self.error is None, self.error


def running(stages, tmp_path, **changes):
    return Running(settings_for(stages, tmp_path, address_file=tmp_path / "address", **changes))


def test_status_metrics_checkpoint_and_stop(tmp_path):
    with Stages(rows=200) as stages:
        with running(stages, tmp_path, max_steps=40, checkpoint={"interval": 0}) as (run_, stub):
            stream = stub.StreamMetrics(pb.StreamMetricsRequest(from_step=1))
            first = next(stream).metrics
            assert first.step == 1 and "loss" in first.values
            status = stub.GetStatus(pb.GetStatusRequest())
            assert status.max_steps == 40 and status.step >= 1 and status.version.number >= 0
            assert not status.HasField("checkpoint")
            saved = stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id="save"), timeout=20)
            assert list_steps(tmp_path / "checkpoints") == [saved.batch] and saved.path.endswith(f"{saved.batch:08d}")
            assert stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id="save")) == saved
            answer_ = stub.Stop(pb.StopRequest(request_id="stop", reason="enough"))
            assert stub.Stop(pb.StopRequest(request_id="stop", reason="enough")) == answer_
            with pytest.raises(grpc.RpcError) as error:
                stub.Stop(pb.StopRequest(request_id="stop", reason="another"))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            rest = [one.metrics.step for one in stream]
            assert rest == list(range(2, answer_.after_step + 1))
        assert run_.result == "stopped"
        assert list_steps(tmp_path / "checkpoints")[-1] == answer_.after_step
        assert stages.buffer.store.runs["run"].closed
        assert [row["step"] for row in steps(tmp_path)] == list(range(1, answer_.after_step + 1))


def test_stop_while_waiting_for_a_batch_ends_at_once(tmp_path):
    with Stages(workers=False) as stages:
        with running(stages, tmp_path) as (run_, stub):
            while stub.GetStatus(pb.GetStatusRequest()).state != pb.TRAINER_STATE_WAITING:
                time.sleep(0.01)
            assert stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id="c"), timeout=10).batch == 0
            assert stub.Stop(pb.StopRequest(request_id="s")).after_step == 0
        assert run_.result == "stopped"


def test_status_listeners_and_history():
    status = RunStatus(5)
    status.set(step=2)
    assert status.request_stop("a") == 2
    assert not status.begin_step(3)  # the batch leased meanwhile goes back
    assert status.stop_reason == "a"
    busy = RunStatus()
    assert busy.begin_step(3)
    busy.set(step=3)
    assert busy.request_stop("b") == 3
    busy.end_step()
    assert busy.request_stop("c") == 3 and busy.stop_reason == "b"
    status.record(1, 0.0, {"x": 1.0})
    status.record(2, 0.0, {"x": 2.0})
    metrics_, position = status.metrics_since(1)
    assert [one.step for one in metrics_] == [2] and position == 2
    assert status.metrics_since(2) == ([], 2)


# Export and import -------------------------------------------------------------------------------------------------


def import_settings(folder, output, **changes):
    return RlSettings(
        **{
            "model": "unused",
            "output": output,
            "import_batches": folder,
            "batch": {"groups": 4, "group_size": 2, "token_budget": 20},
            "metrics": {"tensorboard": False},
            **changes,
        }
    )


def test_exported_batches_train_the_same_without_a_buffer(tmp_path):
    with Stages() as stages:
        _, live = run(settings_for(stages, tmp_path / "live", export_batches=tmp_path / "batches"))
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["000000", "000001", "000002"]
    reason, again = run(import_settings(tmp_path / "batches", tmp_path / "again"))
    assert reason == "finished" and again.trained == live.trained
    for (name, a), (_, b) in zip(live.hf_tensors(), again.hf_tensors(), strict=True):
        assert (a == b).all(), name
    assert not any("publish/bytes" in row or "seconds/publish" in row for row in lines(tmp_path / "again"))
    # A part, and then the rest.
    run(import_settings(tmp_path / "batches", tmp_path / "part", max_steps=1))
    _, rest = run(import_settings(tmp_path / "batches", tmp_path / "part", max_steps=3))
    for (name, a), (_, b) in zip(live.hf_tensors(), rest.hf_tensors(), strict=True):
        assert (a == b).all(), name


def test_a_reader_who_comes_after_the_last_step_gets_every_figure(tmp_path):
    with Stages() as stages:
        run(settings_for(stages, tmp_path / "live", export_batches=tmp_path / "batches"))
    settings = import_settings(
        tmp_path / "batches", tmp_path / "late", address_file=tmp_path / "address", metrics_wait_seconds=60
    )
    with Running(settings, ToyBackend) as (run_, stub):
        while stub.GetStatus(pb.GetStatusRequest()).state != pb.TRAINER_STATE_FINISHED:
            time.sleep(0.01)
        stream = stub.StreamMetrics(pb.StreamMetricsRequest(from_step=0))
        assert [one.metrics.step for one in stream] == [1, 2, 3]
    assert run_.result == "finished"


def test_who_waits_for_a_reader_still_ends_when_asked():
    status, interrupt = RunStatus(), threading.Event()
    assert status.wait_read(60, interrupt)
    status.record(1, 0.0, {"loss": 1.0})
    begin = time.monotonic()
    asked = threading.Timer(0.05, interrupt.set)
    asked.start()
    assert not status.wait_read(60, interrupt) and time.monotonic() - begin < 50
    asked.join()


def test_imports_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="import_batches"):
        run(import_settings(tmp_path / "nothing", tmp_path / "o"))
    target = tmp_path / "batches" / "000000"
    target.mkdir(parents=True)
    for content in (b"x", b"\xff" * 20, b"\x03" + b"\x00" * 7 + b"\xff\xff\xff"):
        (target / "groups.binpb").write_bytes(content)
        with pytest.raises(ContractError, match=r"000000/groups\.binpb"):
            list(read_groups(target / "groups.binpb"))
    one = group("g", rollout("r", 1.0, sample("s", prompt(), answer([3]))))
    from make import index_of, samples_of

    write_batch(tmp_path / "single", index_of([one]), samples_of([one]))
    with pytest.raises(ValueError, match="group_size: 1 rollout"):
        run(import_settings(tmp_path / "single", tmp_path / "o2"))


# Figures ------------------------------------------------------------------------------------------------------------


def test_a_crash_keeps_the_figures_of_every_step(tmp_path):
    class Crashing(ToyBackend):
        def hf_tensors(self):
            if len(self.trained) == 3:
                raise RuntimeError("crash")
            return super().hf_tensors()

    with Stages() as stages:
        with pytest.raises(RuntimeError, match="crash"):
            train(settings_for(stages, tmp_path, max_steps=5), Crashing)
        assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3]


def test_a_half_line_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for tail in (b"", b'{"step": 2, "lo', b"x" * 10_000):
        path.write_bytes(b'{"step": 1}\n' + tail)
        writer = JsonlWriter(path)
        writer.write(2, 0.0, {"loss": 0.5})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]  # before close
        writer.close()
    path.write_bytes(b"no line at all")
    JsonlWriter(path).close()
    assert path.read_bytes() == b""


def test_figures_that_were_not_measured_are_absent():
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf"), "zero": 0.0}) == {"a": 1.0, "zero": 0.0}
    import numpy as np

    assert spread("x", np.zeros(0)) == {}
    assert spread("x", np.array([0.0, 1.0]))["x/share_above_ln2"] == 0.5


def test_rewards_of_failed_rollouts_do_not_enter_the_mean():
    from make import index_of

    from vime_proto.sample.v1 import sample_pb2

    index = index_of(
        [
            group(
                "g",
                rollout("a", 1.0, sample("sa", prompt(), answer([3]))),
                rollout(
                    "b", 0.0, sample("sb", prompt(), answer([3, 4, 5])), status=sample_pb2.ROLLOUT_STATUS_TRUNCATED
                ),
                rollout("c", None, status=sample_pb2.ROLLOUT_STATUS_FAILED),
                rollout("d", 9.0, sample("sd", prompt(), answer([3] * 12)), reliable=False),
            ),
            group("h", rollout("e", 0.1, sample("se", prompt(), answer([]))), rollout("f", 0.1)),
        ]
    )
    figures = batch_figures(index, 0)
    assert figures["reward/mean"] == pytest.approx(1.2 / 4)
    assert figures["rollouts/failed"] == figures["rollouts/unreliable"] == 1
    assert figures["response_tokens/max"] == 3
    assert figures["truncated_share"] == 0.25
    assert figures["groups/zero_variance_share"] == 0.5
    assert figures["rollouts/empty"] == 2
    nothing = batch_figures(index_of([group("g", rollout("c", None, status=sample_pb2.ROLLOUT_STATUS_FAILED))]), 0)
    assert "reward/mean" not in nothing and "staleness/mean" not in nothing and "truncated_share" not in nothing


def test_tensorboard_and_prometheus_take_the_same_figures(tmp_path):
    from urllib.request import urlopen

    writers = open_writers(MetricsSettings(), tmp_path, "run", {}, {"lineage": 0})
    writers.append(PrometheusWriter(0))
    for writer in writers:
        writer.write(1, 0.0, {"reward/mean": 0.25, "reward/a-b": 1.0, "reward/a_b": 2.0})
    port = writers[-1]._server.server_port
    text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert "vime_trainer_reward_mean 0.25" in text and "vime_trainer_step 1.0" in text
    assert list((tmp_path / "tensorboard").iterdir())
    with pytest.raises(OSError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
        PrometheusWriter(port)
    for writer in writers:
        writer.close()


def test_wandb_without_its_extra_says_how_to_get_it(tmp_path):
    settings = MetricsSettings(wandb={"project": "p"}, tensorboard=False, jsonl=False)
    with pytest.raises(ImportError, match=r"pip install 'vime-trainer\[wandb\]'"):
        open_writers(settings, tmp_path, "run", {}, {})


def test_wandb_takes_the_figures_of_an_earlier_step(tmp_path, monkeypatch):
    class Run(SimpleNamespace):
        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, values, **options):
            assert not options
            self.rows.append(values)

    made = Run(rows=[])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: made))
    (writer,) = open_writers(
        MetricsSettings(wandb={"project": "p"}, tensorboard=False, jsonl=False), tmp_path, "run", {}, {}
    )
    writer.write(4, 0.0, {"loss": 1.0})
    writer.write(2, 0.0, {"eval/set/reward_mean": 0.5})
    assert made.rows == [{"step": 4, "loss": 1.0}, {"step": 2, "eval/set/reward_mean": 0.5}]
