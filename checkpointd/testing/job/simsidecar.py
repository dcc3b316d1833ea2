"""The sidecar of one rank of a simulated job: runs the rank's attempts in a process of its own, which outlives the rank.

A sidecar is *lost* when its rank gives it up, because it died, was stopped, or lost its connection. The rank then votes no. A
lost sidecar that is still alive, or wakes up, continues its attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.daemon.roots.in_doubt import InDoubtAttempts
from checkpointd.errors import CheckpointdError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.testing.job.simledger import InvariantError, Ledger
from checkpointd.testing.simloop import Process

END_S, END_S_MAX = 15.0, 45.0
"""An attempt ends so long after its deadline at most: without a fault of the storage, and with one."""


@dataclass(slots=True)
class SimRunner:
    """Runs attempts in the process `name`, and tells the ledger of their ends."""

    name: str
    state: WriterState
    ledger: Ledger

    async def run(
        self,
        info: AttemptInfo,
        staged: Awaitable[Shard] | None,
        on_free: Callable[[], None] = lambda: None,
        *,
        outlives: bool = False,
        lost: ErrorReport | None = None,
    ) -> Attempt:
        """The finished attempt. InvariantError if it raised an error or did not end."""
        timeout_s, loop = self.state.commit.timeout_s, asyncio.get_running_loop()
        began = loop.time()
        attempt = Attempt(
            self.state,
            info,
            deadline=began + timeout_s,
            on_phase=lambda phase: self._entered(attempt, phase),
            on_free=on_free,
            outlives=outlives,
            lost=lost,
        )
        try:
            await attempt.run(staged)
        except Exception as error:
            raise InvariantError("always-ends", f"{self.name}: {info.prefix} raised {error!r}") from error
        if attempt.phase not in FINAL:
            raise InvariantError("always-ends", f"{self.name}: {info.prefix} ended in phase {attempt.phase}")
        late_s = loop.time() - began - timeout_s
        if not self.ledger.hindered and late_s > (END_S_MAX if self.ledger.excuses(self.name) else END_S):
            raise InvariantError("always-ends", f"{self.name}: {info.prefix} ended {late_s:.1f} s after its deadline")
        return attempt

    def _entered(self, attempt: Attempt, phase: Phase) -> None:
        if phase in FINAL:
            try:
                self.ledger.ended(attempt.info.prefix, self.name, phase, attempt.outcome)
            except InvariantError as error:
                self.ledger.report(error)


@dataclass(slots=True)
class SimSidecar:
    """One sidecar from its start to its end. `lost` is done once its rank gives it up."""

    process: Process
    runner: SimRunner
    lost: asyncio.Future[None]
    sight: Sight
    decided: int = 0
    """Attempts that its root monitor decided."""
    _jobs: dict[str, AttemptInfo] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.process.name

    def lose(self) -> None:
        """The rank gives this sidecar up."""
        if not self.lost.done():
            self.lost.set_result(None)

    def in_flight(self) -> tuple[str, ...]:
        """The attempts that this sidecar works at; they survive a new start."""
        return tuple(self._jobs)

    def begin(self, info: AttemptInfo, snapshot: asyncio.Future[Shard]) -> asyncio.Task[Attempt | None]:
        """Run an attempt in this sidecar; None if it broke an invariant, which the ledger records."""
        self._jobs[info.prefix] = info
        return self.process.spawn(self._run(info, snapshot), name=info.prefix)

    async def _run(self, info: AttemptInfo, snapshot: asyncio.Future[Shard]) -> Attempt | None:
        try:
            return await self.runner.run(info, snapshot, outlives=True)
        except InvariantError as error:
            self.runner.ledger.report(error)
            return None
        finally:
            del self._jobs[info.prefix]


LOOKS = 12
LOOK_S_MAX = 4.0


async def look_after(sidecar: SimSidecar, rng: random.Random) -> None:
    """What a sidecar that was begun anew does beside its jobs: now and then decide what nobody decides, for a while.

    No job of a simulation is ever seen to be dead, so what lacks a vote is only watched.
    """
    store, doubts = sidecar.runner.state.store, InDoubtAttempts(grace_s=0.0, patience_s=rng.random())
    for _ in range(LOOKS):
        await asyncio.sleep(rng.random() * LOOK_S_MAX)
        try:
            attempts = (await root_view.state_of(store)).attempts.values()
            undecided = [one for one in attempts if one.status == "undecided"]
            decided = await doubts.settle(store, undecided, sidecar.in_flight(), asyncio.get_running_loop().time())
            for one in decided:
                sidecar.decided += 1
                sidecar.runner.ledger.learned(one.prefix, one, f"root monitor of {sidecar.name}")
        except CheckpointdError:
            continue  # the next look may have more luck
        except InvariantError as error:
            sidecar.runner.ledger.report(error)


def snapshot_of(process: Process, taking: asyncio.Task[Shard], error: Exception) -> asyncio.Future[Shard]:
    """The result of `taking`, a task of `process`; raises `error` if the process dies first."""
    snapshot: asyncio.Future[Shard] = asyncio.get_running_loop().create_future()

    def spoil() -> None:
        if not snapshot.done():
            snapshot.set_exception(error)

    def take(done: asyncio.Task[Shard]) -> None:
        failed = done.exception()
        if snapshot.done():
            return
        if failed is None:
            snapshot.set_result(done.result())
        else:
            snapshot.set_exception(failed)

    taking.add_done_callback(take)
    process.on_death(spoil)
    # In no process: an attempt that ended early never awaits it, and the process that would may be dead.
    snapshot.add_done_callback(lambda done: done.exception(), context=Context())
    return snapshot
