"""SaveHandle: save() returns it, and only it keeps the result of a save."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Literal, get_args

import msgspec

from checkpointd import arguments
from checkpointd.commit.machine import FINAL, IN_SPOOL, ORDER, Phase, reached, shown
from checkpointd.errors import CheckpointdError, ClosedError, UsageError, WaitTimeoutError
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.pace import Pace
from checkpointd.pipeline.shard import ShardProgress
from checkpointd.waits import Waiting

Until = Literal["staged", "persisting", "spooled", "uploading", "prepared", "committed"]


class Timings(msgspec.Struct):
    """Seconds from the call of save() until each event; None if it has not happened.

    `call_s`: save() returned. `waited_s` is a duration: how long save() waited because two earlier saves were not written yet.
    `safe_s`: the tensors were free to change again. `staged_s`: the snapshot was whole. `spooled_s`:
    it was durable in the spool of this node. `durable_s`: this rank's shard was durable at the root and it had voted.
    `committed_s`: the decision was durable. `fence_s` is a duration: how long optimizer steps waited for the snapshot.
    `rested_s`: how long the workers rested so that training kept its speed, added up. `copy_rested_s`: how long the background
    copy rested for that. `overhead`: how much longer the steps took while it was in flight, as a part of a step; None if too
    few steps say it.
    """

    call_s: float | None = None
    waited_s: float = 0.0
    fence_s: float = 0.0
    safe_s: float | None = None
    staged_s: float | None = None
    spooled_s: float | None = None
    durable_s: float | None = None
    committed_s: float | None = None
    rested_s: float = 0.0
    copy_rested_s: float = 0.0
    overhead: float | None = None

    @property
    def held_s(self) -> float:
        """How long the save has held training: its call, and the optimizer steps that waited for it."""
        return max(0.0, (self.call_s or 0.0) + self.fence_s)


class SaveHandle:
    """One save on this rank. Every rank's handle ends the same way: committed on all, or on none.

    `await handle` waits for the commit in any event loop. All methods may be called from any thread.
    """

    def __init__(self, tag: str, attempt: str, step: int, progress: ShardProgress) -> None:
        self.tag = tag
        self.attempt = attempt
        self.step = step
        self.timings = Timings()
        self._bytes = progress
        self._began = time.perf_counter()
        self._phase = Phase.STAGING
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._future: Future[SaveHandle] = Future()
        self._future.set_running_or_notify_cancel()
        self._process = os.getpid()
        self.observed = False
        self.was_spooled = False
        """Whether the snapshot was durable in the spool: from then on nobody needs the slot."""
        self.trouble = ""
        """Why the sidecar that persists it does not reach the root now; empty if it does."""
        self._is_left = False
        self.missing: Callable[[], str] = lambda: f"{self.tag} is {self.phase}"
        """Says in words why the save has not ended."""

    def _trouble_words(self) -> str:
        """The end of a message about it, if the sidecar does not reach the root."""
        return f"; the sidecar does not reach the root: {self.trouble}" if self.trouble else ""

    def __repr__(self) -> str:
        return f"SaveHandle({self.tag!r}, attempt={self.attempt!r}, phase={self.phase!r})"

    @property
    def phase(self) -> str:
        """staging, staged, persisting, prepared, committed; or aborted, fenced (a newer job has begun), failed, skipped.

        With a spool also spooled and uploading, before prepared, and superseded: it was dropped for a newer save.
        """
        return shown(self._phase, self._error.code if isinstance(self._error, CheckpointdError) else "")

    @property
    def progress(self) -> float:
        """The part of this rank's bytes that is on the disk, 0 to 1. It is 1 only once they are in the spool, or this rank has
        voted.
        """
        return 1.0 if reached(self._phase, Phase.SPOOLED) else self._bytes.fraction

    @property
    def bytes_uploaded(self) -> int:
        """Bytes that have gone from the spool to the root."""
        return self._bytes.uploaded

    @property
    def bytes_to_upload(self) -> int:
        """Bytes that go from the spool to the root, after encoding; 0 before they are in the spool, and without one."""
        return self._bytes.upload_total

    @property
    def bytes_total(self) -> int:
        """Bytes of this rank's shard before encoding; 0 until persisting has begun."""
        return self._bytes.raw_total

    @property
    def bytes_done(self) -> int:
        """Bytes of the shard that are on the disk: written past the system's cache, or unchanged since the last checkpoint."""
        return self._bytes.raw_done

    @property
    def bytes_stored(self) -> int:
        """Bytes after encoding, of what has been written so far."""
        return self._bytes.stored

    @property
    def no_progress(self) -> bool:
        """Whether it was committed although no trained tensor had changed on any rank since the checkpoint before."""
        return self._bytes.no_progress

    @property
    def seconds(self) -> PhaseSeconds:
        """The seconds that each phase took on this rank. A sidecar reports them with the vote."""
        return self._bytes.seconds

    @property
    def speed_bps(self) -> float | None:
        """Bytes of the shard written per second, before encoding; None until the first are on the disk."""
        return self._bytes.speed_bps

    @property
    def eta_s(self) -> float | None:
        """Seconds until this rank's shard is written, at the speed so far; None while that is unknown."""
        return self._bytes.eta_s if self._phase is Phase.PERSISTING else None

    def done(self) -> bool:
        """Whether the save has ended, well or not, or was left in the spool when this process closed."""
        return self._phase in FINAL or self._is_left

    def exception(self) -> BaseException | None:
        """The error that ended the save; None while it runs and after it has committed. Does not wait."""
        if self.done():
            self.observed = True
        return self._error

    def wait(self, until: Until | float | None = "committed", timeout: float | None = None) -> SaveHandle:
        """Wait until the save has reached `until`, at most `timeout` seconds (None: no limit). Returns the handle itself.

        Examples: `wait("staged")`, `wait("spooled")` (durable on this node's own disk; without a spool, at the root),
        `wait("staged", timeout=5.0)`. A number alone is the time-out: `wait(5.0)` means
        `wait("committed", timeout=5.0)`. If the save fails first, raises its error: on every rank, one of the class that the
        failed rank had, such as StoreFullError. Raises WaitTimeoutError after `timeout` seconds.
        """
        if not isinstance(until, str):
            if until is not None and timeout is not None:
                raise UsageError(f"wait({until!r}, {timeout!r}) has two time-outs: name the phase, as in wait('staged', 5.0)")
            return self.wait("committed", timeout if until is None else until)
        arguments.choice("until", until, get_args(Until))
        if timeout is not None:
            arguments.seconds("timeout", timeout, most=arguments.TIMEOUT_S_MAX, zero=True)
        if os.getpid() != self._process and not self.done():
            raise ClosedError(
                f"wait() in a forked process, which lacks the threads that persist {self.tag}: call it in the process that "
                "saved"
            )
        goal = Phase(until)
        if goal is Phase.STAGED:
            self._bytes.pace.hurry_copy()
        else:
            self._bytes.pace.lift("awaited")
        if not self._wait(lambda: reached(self._phase, goal) or self.done(), timeout):
            words = f"{self.tag} is still {self.phase} after {timeout:g} s; it goes on in the background"
            raise WaitTimeoutError(f"{words}{self._trouble_words()}")
        if not reached(self._phase, goal):
            self.observed = True
            assert self._error is not None
            raise self._error
        return self

    def __await__(self) -> Generator[Any, None, SaveHandle]:
        return self._awaited().__await__()

    async def _awaited(self) -> SaveHandle:
        self._bytes.pace.lift("awaited")
        try:
            # Shielded: cancelling this wait, as a time-out does, must not cancel the save for all who wait.
            return await asyncio.shield(asyncio.wrap_future(self._future))
        except CheckpointdError:
            self.observed = True
            raise

    def _wait(self, there: Callable[[], bool], timeout: float | None) -> bool:
        def wait(seconds: float) -> bool:
            with self._change:
                return self._change.wait_for(there, seconds)

        return Waiting(self.missing).until(wait, timeout)


class OwnHandle(SaveHandle):
    """The handle as the Checkpointer has it, which leads the save through its phases."""

    def held(self, *, call_s: float | None = None, fence_s: float | None = None) -> None:
        """Record how long training waited: for the call of save(), or in optimizer steps."""
        self.timings.call_s = self.timings.call_s if call_s is None else call_s
        self.timings.fence_s = self.timings.fence_s if fence_s is None else fence_s
        self._bytes.held_s = self.timings.held_s

    @property
    def trouble_words(self) -> str:
        """The end of a message about it, if the sidecar does not reach the root."""
        return self._trouble_words()

    @property
    def pace(self) -> Pace:
        """How fast this rank's shard may be written."""
        return self._bytes.pace

    @property
    def is_left(self) -> bool:
        """Whether this process has closed while the shard was in the spool."""
        return self._is_left

    @property
    def in_spool(self) -> bool:
        """Whether the shard is in the spool, and not yet at the root."""
        return self._phase in IN_SPOOL

    def ended_within(self, timeout: float | None) -> bool:
        """Wait until the save has ended. close() still raises its error."""
        self.pace.lift("awaited")
        return self._wait(self.done, timeout)

    def staged_within(self, timeout: float | None) -> bool:
        """Wait until the snapshot is whole or the save has ended. close() still raises its error."""
        self.pace.hurry_copy()
        return self._wait(lambda: reached(self._phase, Phase.STAGED) or self.done(), timeout)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the save ends, on the thread that ends it; at once if it has ended."""
        self._future.add_done_callback(lambda _: callback())

    def peek(self) -> BaseException | None:
        """The same as `exception`, but close() still raises the error."""
        return self._error

    def elapsed(self) -> float:
        """Seconds since save() was called."""
        return time.perf_counter() - self._began

    def advance(self, phase: Phase, error: CheckpointdError | None = None, at_end: Callable[[], object] = lambda: None) -> None:
        """Enter `phase`, unless the save has ended or has reached it: the next sidecar tells all phases of a spooled save.

        If this ends the save, `at_end` is called before anybody who waits for the end goes on.
        """
        now = self.elapsed()
        with self._change:
            if self.done() or (phase in ORDER and reached(self._phase, phase)):
                return
            self._phase = phase
            self._error = error or self._error
            if phase in IN_SPOOL and not self.was_spooled:
                self.was_spooled, self.timings.spooled_s = True, now
                self._bytes.end()
            if phase is Phase.PREPARED:
                self.timings.durable_s, self.timings.rested_s = now, self.pace.rested_s
                self._bytes.end()
            if phase is Phase.COMMITTED:
                self.timings.committed_s = now
            if phase in FINAL:
                at_end()
            self._change.notify_all()
        if phase in FINAL and self._error is None:
            self._future.set_result(self)
        elif phase in FINAL:
            self._future.set_exception(self._error)

    def leave(self, error: CheckpointdError) -> None:
        """This process closes while the shard is in the spool: nobody here hears of the decision. Who waits gets `error`."""
        with self._change:
            if self.done():
                return
            self._is_left, self._error = True, error
            self._change.notify_all()
        self._future.set_exception(error)

    def snapshot_taken(self) -> None:
        """The snapshot is whole: from here on the tensors may change."""
        self.timings.safe_s = self.timings.staged_s = self.elapsed()
        self.timings.copy_rested_s = self.pace.copy_rested_s
