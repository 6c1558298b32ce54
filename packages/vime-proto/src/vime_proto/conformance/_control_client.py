"""A client of EngineControlService that sends weight updates."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import new_id
from vime_proto.conformance._rollout_client import RolloutClient
from vime_proto.conformance._weights import Tensors, Update
from vime_proto.fakes._weight_files import write_chunks
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.version import policy_version
from vime_proto.weights.v1 import weights_pb2

_PART = 1 << 20


class ControlClient(RolloutClient):
    """Generation and control of the engine under test."""

    def __init__(self, target, config: pytest.Config, weights: Tensors | None):
        super().__init__(target)
        self.control = rollout_pb2_grpc.EngineControlServiceStub(target.channel)
        self._config = config
        self._weights = weights
        self.newest: common.PolicyVersion = self.info.version
        self._roots: dict[str, Path] = {}

    @property
    def weights(self) -> Tensors:
        """Weights that fit; skips when there are none."""
        if self._weights is None:
            pytest.skip("weights for the target are needed: --manifest-dir")
        return self._weights

    def call(self, method: str, request, timeout: float | None = None, **fields):
        """Calls with a fresh request id unless one is given."""
        message = request(**fields)
        if "request_id" in message.DESCRIPTOR.fields_by_name and not message.request_id:
            message.request_id = new_id()
        return getattr(self.control, method)(message, timeout=timeout or self.timeout)

    def status(self) -> pb.EngineStatus:
        return self.control.GetStatus(pb.GetStatusRequest(), timeout=self.timeout).status

    def pause(self, **fields) -> pb.PauseResponse:
        return self.call("Pause", pb.PauseRequest, **fields)

    def resume(self, **fields) -> pb.ResumeResponse:
        return self.call("Resume", pb.ResumeRequest, **fields)

    # Transports -----------------------------------------------------------------------------------------------

    def transport(self, kind: str) -> str:
        """A transport that is set up; skips when the target has none of this kind."""
        if kind not in self.status().transports:
            pytest.skip(f"the target has no transport {kind!r}: {', '.join(self.status().transports)}")
        config = weights_pb2.TransportConfig(transport_id=new_id(kind))
        if kind == "stream":
            config.stream.SetInParent()
        else:
            root = self._config.getoption(f"--{kind}-root") or tempfile.mkdtemp(prefix="vime-conformance-")
            self._roots[config.transport_id] = Path(root)
            if kind == "file":
                config.file.root_uri = Path(root).as_uri()
            else:
                config.shm.root = root
        call = lambda: self.call("InitTransport", pb.InitTransportRequest, config=config)  # noqa: E731
        self.or_skip(f"transport {kind} (--{kind}-root)", call)
        return config.transport_id

    # Updates --------------------------------------------------------------------------------------------------

    def next_version(self) -> common.PolicyVersion:
        """One number above everything used so far."""
        self.newest = policy_version(self.newest.run_id, self.newest.lineage, self.newest.number + 1)
        return self.newest

    def update(self, **options) -> Update:
        """A full update to the next version."""
        return Update(new_id("update"), self.next_version(), self.weights, **options)

    def begin(self, update: Update, transport: str, **fields) -> pb.BeginUpdateResponse:
        return self.call(
            "BeginUpdate", pb.BeginUpdateRequest, manifest=update.manifest, transport_id=transport, **fields
        )

    def send(self, update: Update, transport: str, source: str, chunks: Sequence[int] | None = None) -> int:
        """Sends chunks of a source (all, unless told) the transport's way; answers the bytes loaded."""
        wanted = range(len(update.streams[source])) if chunks is None else chunks
        if not wanted:
            return 0
        if transport not in self._roots:
            answer = self.control.SendChunks(self._parts(update, source, wanted), timeout=self.timeout)
            return answer.bytes
        write_chunks(self._roots[transport], update.update_id, {source: update.streams[source]})
        answer = self.call(
            "LoadChunks", pb.LoadChunksRequest, update_id=update.update_id, source_id=source, chunks=wanted
        )
        return answer.bytes

    def _parts(self, update: Update, source: str, chunks: Sequence[int]):
        for index in chunks:
            data = update.streams[source][index]
            half = max(1, min(_PART, -(-len(data) // 2)))
            for offset in range(0, max(len(data), 1), half):
                yield pb.SendChunksRequest(
                    update_id=update.update_id,
                    source_id=source,
                    chunk=index,
                    offset=offset,
                    data=data[offset : offset + half],
                )

    def commit(self, update: Update, **fields) -> pb.CommitUpdateResponse:
        return self.call(
            "CommitUpdate", pb.CommitUpdateRequest, **{"update_id": update.update_id, "totals": update.totals, **fields}
        )

    def abort(self, update: Update) -> pb.EngineStatus:
        return self.call("AbortUpdate", pb.AbortUpdateRequest, update_id=update.update_id, reason="test").status

    def push(self, transport: str, update: Update | None = None, **fields) -> pb.CommitUpdateResponse:
        """A whole update."""
        update = update or self.update()
        self.begin(update, transport, **fields)
        for source in update.streams:
            self.send(update, transport, source)
        return self.commit(update)

    def greedy(self) -> tuple[list[int], bytes]:
        """Tokens and log-probs (their bits) of a fixed greedy request."""
        answer = self.generate(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        return answer.tokens, answer.logprobs.tobytes()

    def restore(self) -> None:
        """Back to SERVING, whatever a test left behind."""
        status = self.status()
        if status.state == pb.ENGINE_STATE_RECEIVING:
            status = self.call("AbortUpdate", pb.AbortUpdateRequest, update_id=status.update_id).status
        if status.state in (pb.ENGINE_STATE_ASLEEP, pb.ENGINE_STATE_AWAKE_WEIGHTS):
            status = self.call("Wake", pb.WakeRequest, weights=True).status
        if status.state == pb.ENGINE_STATE_STALE or not status.HasField("version"):
            kind = next(kind for kind in ("stream", "file", "shm") if kind in status.transports)
            self.push(self.transport(kind))
            status = self.status()
        if status.state == pb.ENGINE_STATE_AWAKE_WEIGHTS:
            status = self.call("Wake", pb.WakeRequest, kv_cache=True).status
        if status.state == pb.ENGINE_STATE_PAUSED:
            self.resume()

    def clean(self) -> None:
        """Removes folders that were made for transports."""
        for root in self._roots.values():
            if root.name.startswith("vime-conformance-"):
                shutil.rmtree(root, ignore_errors=True)
