"""One rank's attempt under DCP: it runs on the session's thread, and each call of DCP waits for its own stage."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.errors import AbortedError
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Shard
from checkpointd.waits import Waiting
from checkpointd_client.integrations.dcp.session import DcpSession


class DcpAttempt:
    """An attempt from its vote to its decision. `staged` gives the snapshot, or the error that prevented it."""

    def __init__(self, session: DcpSession, state: WriterState, info: AttemptInfo, staged: Future[Shard]) -> None:
        self._session, self._info = session, info
        self._may_commit = threading.Event()
        self._voted = threading.Event()
        self._decided = threading.Event()
        """Set at the decision, before the rest of the run: other ranks would wait for that in a collective call."""
        self._attempt: Attempt | None = None
        self._ended: Future[None] = session.writer.submit(self._run(state, staged))
        session.follow(
            self._ended, lambda: self.give_up("the process that led it ended before DCP had finished it"), state.tidier
        )

    async def _run(self, state: WriterState, staged: Future[Shard]) -> None:
        self._attempt = Attempt(
            state,
            self._info,
            deadline=asyncio.get_running_loop().time() + state.commit.timeout_s,
            on_phase=self._entered,
            may_commit=self._may_commit.is_set,
        )
        try:
            await self._attempt.run(asyncio.wrap_future(staged))
        finally:
            self._voted.set()
            self._decided.set()

    def _entered(self, phase: Phase) -> None:
        if phase is Phase.PREPARED or phase in FINAL:
            self._voted.set()
        if phase in FINAL:
            self._decided.set()

    def wait_voted(self) -> None:
        """Return when this rank has voted yes; otherwise raise the attempt's error. It ends at its deadline at the
        latest.
        """
        self._waiting().until(self._voted.wait)
        if self._attempt is None or self._attempt.phase is not Phase.PREPARED:
            self._check()

    def commit(self) -> None:
        """Let the coordinator commit, and return when the commit is durable; otherwise raise the attempt's error."""
        self._may_commit.set()
        self._waiting().until(self._decided.wait)
        if self._attempt is None or self._attempt.phase not in FINAL:
            self._ended.result()  # raises an unforeseen error
        self._check()

    def _waiting(self) -> Waiting:
        """A wait that ends at the attempt's deadline at the latest."""
        return Waiting(lambda: f"{self._info.prefix} is {self._attempt.phase if self._attempt else 'not begun'}")

    def give_up(self, why: str) -> None:
        """Abort an attempt that this rank coordinates and that DCP never finished."""
        if self._info.rank == COORDINATOR and not self._may_commit.is_set():
            self._session.writer.call_soon(self._give_up, why)

    def _give_up(self, why: str) -> None:
        if self._attempt is not None and self._attempt.phase not in FINAL:
            self._attempt.give_up(why)

    def _check(self) -> None:
        attempt = self._attempt
        if attempt is None:
            self._ended.result()
            raise AbortedError(f"{self._info.tag} was not begun", ranks=(self._info.rank,))
        if attempt.phase is not Phase.COMMITTED and attempt.error is not None:
            raise attempt.error
