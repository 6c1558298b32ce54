"""Random histories: workers, trainers, kills, lapses, restores, in any order.

Whatever happens: no prompt is lost, none is trained twice in the lineage that is kept, the gate is never exceeded, and no group
is handed out too old or from dead weights.
"""

import asyncio
import tempfile
from pathlib import Path

import builders as b
from client import Client, ids
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vime_buffer import BufferServer, BufferSettings
from vime_buffer._store import prompts, runs
from vime_buffer._store.schema import PromptState
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.version import LineageTree

NAMES = [f"p{i:02}" for i in range(14)]


class History(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1e6
        self.server = None
        self.leases, self.batches = [], []
        self.worker, self.trainer, self.lineage = 0, 0, 0
        self.trained = []
        self.tree = LineageTree([b.lineage(0)])
        self.versions = {}

    def do(self, coroutine):
        return self.runner.run(coroutine)

    async def _start(self):
        database = str(Path(self.folder.name) / "x.db")
        self.server = await BufferServer.start(BufferSettings(database=database), lambda: self.now)
        self.client = await Client.connect(self.server.address)

    async def _stop(self):
        await self.client.close()
        await self.server.stop(0)

    async def _open(self, lineage):
        await self.client.open(
            self.groups, 1, self.staleness, lineage=lineage, publish=False, max_attempts=1000, epochs=1
        )

    @initialize(groups=st.integers(1, 3), staleness=st.integers(0, 2))
    def open(self, groups, staleness):
        self.groups, self.staleness = groups, staleness

        async def go():
            await self._start()
            await self._open(b.lineage(0))
            await self.client.put(*NAMES)

        self.do(go())

    @rule(most=st.integers(1, 5))
    def lease(self, most):
        response = self.do(self.client.lease(most, incarnation=str(self.worker)))
        self.leases += response.leases

    @rule(data=st.data())
    def commit(self, data):
        if not self.leases:
            return
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        failed = data.draw(st.integers(0, 5)) == 0
        request = self.client.commit_request(lease, failed=int(failed))

        async def go():
            for _ in range(data.draw(st.integers(1, 2))):
                await self.client.stub.CommitGroup(request)

        self._tolerate(go())

    @rule(failed=st.booleans())
    def release(self, failed):
        if self.leases:
            self._tolerate(self.client.release(self.leases.pop(0), failed=failed))

    @rule()
    def renew(self):
        if self.leases:
            directives = self.do(self.client.renew(*self.leases))
            go_on = [d == pb.LEASE_DIRECTIVE_CONTINUE for d in directives]
            self.leases = [lease for lease, kept in zip(self.leases, go_on, strict=True) if kept]

    def _tolerate(self, coroutine):
        """ABORTED is what a lease that ended gets; anything else is a fault."""
        import grpc

        try:
            return self.do(coroutine)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.ABORTED, error
            return None

    @rule()
    def lease_batch(self):
        response = self.do(self.client.batch(incarnation=str(self.trainer)))
        if response.outcome == pb.LEASE_OUTCOME_GRANTED:
            numbers = [
                one.version.number
                for group in response.groups
                for rollout in group.rollouts
                for sample in rollout.samples
                for one in sample.versions
            ]
            assert all(response.ordinal - number <= self.staleness for number in numbers), (response.ordinal, numbers)
            assert len(response.groups) <= self.groups
            self.batches.append(response)

    @rule(publish=st.booleans())
    def ack(self, publish):
        if self.batches:
            batch = self.batches.pop(0)
            answer = self._tolerate(self.client.ack(batch))
            if answer is not None:
                self.trained.append(ids(batch))
                self.versions[tuple(ids(batch))] = [
                    one.version
                    for group in batch.groups
                    for rollout in group.rollouts
                    for sample in rollout.samples
                    for one in sample.versions
                ]
                assert answer.trained == len(self.trained)
            if publish:
                self.publish()

    @rule()
    def nack(self):
        if self.batches:
            self._tolerate(self.client.nack(self.batches.pop(0)))

    @rule()
    def refuse_a_sample(self):
        if self.batches:
            batch = self.batches.pop(0)
            sample = batch.groups[-1].rollouts[0].samples[0].sample_id
            self._tolerate(self.client.nack(batch, **{sample: "NaN"}))

    @rule()
    def publish(self):
        self.do(self.client.publish(len(self.trained), self.lineage))

    @rule()
    def time_passes(self):
        self.now += 61

    @rule()
    def restart_buffer(self):
        async def go():
            await self._stop()
            await self._start()

        self.do(go())

    @rule()
    def restart_worker(self):
        self.worker += 1
        self.leases.clear()

    @rule()
    def restart_trainer_in_place(self):
        self.trainer += 1
        self.batches.clear()

    @rule(data=st.data())
    def restore(self, data):
        batch = data.draw(st.integers(0, len(self.trained)))
        later = self.trained[batch:]
        self.tree.add(b.lineage(self.lineage + 1, self.lineage, batch))
        whole = [one for one in later if all(self.tree.is_alive(v) for v in self.versions[tuple(one)])]
        parent, self.lineage = self.lineage, self.lineage + 1
        self.trainer += 1

        async def go():
            await self._open(b.lineage(self.lineage, parent, batch))
            answer = await self.client.rewind(batch, self.lineage, parent)
            assert (await self.client.stats()).prompts_leased == 0
            return answer

        self.do(go())
        self.batches.clear()
        self.trained = self.trained[:batch]
        again = self.do(self.client.batch(incarnation=str(self.trainer)))
        if whole:
            assert ids(again) == whole[0]
        if again.outcome == pb.LEASE_OUTCOME_GRANTED:
            self.batches.append(again)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        if self.server is None:
            return

        def look(tx):
            states = {
                row.prompt_id: row.state
                for row in tx.execute(prompts.prompts.select().where(prompts.prompts.c.run_id == b.RUN))
            }
            return runs.get(tx, b.RUN), states, prompts.occupancy(tx, b.RUN)

        run, states, under_way = self.server.core.database.run_sync(look)
        assert sorted(states) == NAMES or not states
        trained = sum(self.trained, [])
        assert len(trained) == len(set(trained))
        assert {name for name, state in states.items() if state == PromptState.TRAINED} == set(trained)
        assert run.trained == len(self.trained)
        gate = (self.staleness + 1) * self.groups
        if run.version is not None:
            # A restore may bring more back than the gate lets through; then nothing is granted until it is used up.
            assert under_way.leased <= gate
        assert PromptState.DROPPED not in states.values()

    def teardown(self):
        if self.server is None:
            self.runner.close()
            self.folder.cleanup()
            return
        self.finish()
        self.do(self._stop())
        self.runner.close()
        self.folder.cleanup()

    def finish(self):
        """From any state a healthy worker and trainer train what is left, exactly once."""

        async def go():
            for _ in range(200):
                await self.client.publish(len(self.trained), self.lineage)
                for lease in (await self.client.lease(incarnation="final")).leases:
                    await self.client.commit(lease)
                batch = await self.client.batch(incarnation="final")
                if batch.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
                    return
                if batch.outcome == pb.LEASE_OUTCOME_GRANTED:
                    await self.client.ack(batch)
                    self.trained.append(ids(batch))
            raise AssertionError("the loop does not end")

        self.do(go())
        assert sorted(sum(self.trained, [])) == NAMES


History.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestHistory = History.TestCase
