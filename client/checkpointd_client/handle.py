"""SaveHandle: what save() returns, and the only place where a save's result is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from checkpointd.commit.machine import FINAL, ORDER, Phase, reached
from checkpointd.errors import CheckpointdError, UsageError, WaitTimeoutError
from checkpointd.pipeline.shard import Progress

Until = Literal["staged", "persisting", "prepared", "committed"]


class Timings(msgspec.Struct):
    """Seconds since save() was called, until each point was reached; None where it was not.

    `call_s`: save() returned. `fence_s`: how long optimizer steps were held beyond that. `safe_s`: the tensors might change
    again. `staged_s`: the snapshot was whole. `durable_s`: this rank's shard and vote were durable. `committed_s`: the
    outcome was.
    """

    call_s: float | None = None
    fence_s: float = 0.0
    safe_s: float | None = None
    staged_s: float | None = None
    durable_s: float | None = None
    committed_s: float | None = None


class SaveHandle:
    """One save on this rank. Every rank's handle ends the same way: committed on all, or on none.

    `await handle` waits for the commit in any event loop. All methods may be called from any thread.
    """

    def __init__(self, tag: str, attempt: str, step: int, progress: Progress) -> None:
        self.tag = tag
        self.attempt = attempt
        self.step = step
        self.timings = Timings()
        self._bytes = progress
        self._began = time.perf_counter()
        self._phase = Phase.STAGING
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._persisting_s: float | None = None
        self._future: Future[SaveHandle] = Future()
        self._future.set_running_or_notify_cancel()
        self.observed = False

    def __repr__(self) -> str:
        return f"SaveHandle({self.tag!r}, attempt={self.attempt!r}, phase={self.phase!r})"

    @property
    def phase(self) -> str:
        """staging, staged, persisting, prepared, committed; or aborted, failed, skipped."""
        return _SHOWN.get(self._phase, str(self._phase))

    @property
    def progress(self) -> float:
        """The part of this rank's bytes that is encoded and handed to the disk, 0 to 1."""
        if reached(self._phase, Phase.PREPARED):
            return 1.0
        return min(self._bytes.raw_done / self._bytes.raw_total, 1.0) if self._bytes.raw_total else 0.0

    @property
    def bytes_total(self) -> int:
        """Bytes of this rank's shard before encoding; 0 until persisting has begun."""
        return self._bytes.raw_total

    @property
    def bytes_done(self) -> int:
        return self._bytes.raw_done

    @property
    def bytes_stored(self) -> int:
        """Bytes after encoding, as far as persisting has come."""
        return self._bytes.stored

    @property
    def stale(self) -> bool:
        """Whether it was committed although, on all ranks, nothing that is trained had changed since the checkpoint before."""
        return self._bytes.stale

    @property
    def speed_bps(self) -> float | None:
        """Bytes of the shard persisted per second, from the first on; None before."""
        if self._persisting_s is None or not self.bytes_done:
            return None
        until = self.timings.durable_s if self.timings.durable_s is not None else self.seconds()
        return self.bytes_done / max(until - self._persisting_s, 1e-6)

    @property
    def eta_s(self) -> float | None:
        """Seconds until this rank's shard is persisted, at the speed so far; None where nothing can be said."""
        speed = self.speed_bps
        return (self.bytes_total - self.bytes_done) / speed if speed and self._phase is Phase.PERSISTING else None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._phase in FINAL

    def exception(self) -> BaseException | None:
        """The error that ended the save; None while it runs and where it committed. Does not wait."""
        if self.done():
            self.observed = True
        return self._error

    def wait(self, timeout: float | None = None, until: Until = "committed") -> SaveHandle:
        """Wait until the save has reached `until`; returns itself.

        Raises the error that ended the save before that (AbortedError and its kin), WaitTimeoutError after `timeout` seconds.
        """
        if until not in _UNTIL:
            raise UsageError(f"until is {until!r}; choose one of {', '.join(_UNTIL)}")
        goal = Phase(until)
        with self._change:
            ended = self._change.wait_for(lambda: reached(self._phase, goal) or self.done(), timeout)
        if not ended:
            raise WaitTimeoutError(f"{self.tag} is still {self.phase} after {timeout:g} s; it goes on in the background")
        if not reached(self._phase, goal):
            self.observed = True
            assert self._error is not None
            raise self._error
        return self

    def __await__(self) -> Generator[Any, None, SaveHandle]:
        return self._awaited().__await__()

    async def _awaited(self) -> SaveHandle:
        try:
            # Shielded: whoever stops waiting, by a time-out say, must not end the save for all others.
            return await asyncio.shield(asyncio.wrap_future(self._future))
        except CheckpointdError:
            self.observed = True
            raise

    def ended_within(self, timeout: float | None) -> bool:
        """Wait until the save has ended, without counting as having looked."""
        with self._change:
            return self._change.wait_for(self.done, timeout)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it when the save has ended, on the thread that ends it; at once where it has."""
        self._future.add_done_callback(lambda _: callback())

    def peek(self) -> BaseException | None:
        """The same as `exception`, without counting as having looked."""
        return self._error

    # --- for the checkpointer ----------------------------------------------------------------------------------

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def advance(self, phase: Phase, error: CheckpointdError | None = None) -> None:
        """Enter `phase`. Nothing follows a final one, and none leads back: whoever takes a save over begins anew, unseen."""
        now = self.seconds()
        with self._change:
            if self.done() or _is_behind(phase, self._phase):
                return
            if phase is Phase.PERSISTING and self._persisting_s is None:
                self._persisting_s = now
            self._phase = phase
            self._error = error or self._error
            if phase is Phase.PREPARED:
                self.timings.durable_s = now
            if phase is Phase.COMMITTED:
                self.timings.committed_s = now
            self._change.notify_all()
        if phase in FINAL:
            self._resolve()

    def snapshot_taken(self) -> None:
        """The snapshot is whole: from here on the tensors may change."""
        self.timings.safe_s = self.timings.staged_s = self.seconds()

    def _resolve(self) -> None:
        if self._future.done():
            return
        if self._error is None:
            self._future.set_result(self)
        else:
            self._future.set_exception(self._error)


def _is_behind(phase: Phase, now: Phase) -> bool:
    return phase in ORDER and now in ORDER and ORDER.index(phase) < ORDER.index(now)


_SHOWN = {Phase.FAILING: "failed", Phase.SKIPPING: "skipped"}
_UNTIL = ("staged", "persisting", "prepared", "committed")
