"""A store with patient reads: it tries an unreadable object again, and reports a missing object only if it stays missing.

Readers follow names, from an outcome to its votes, indexes and chunks, so every object that they ask for existed once. A file
server that is failing over, a process out of descriptors, or a client with a stale directory entry must not look like damage.

Invariants
  PATIENT-1  An UnreadableError never becomes another error. It is raised when reads have failed for `retry_s`, and at once if
      waiting cannot help, as with a missing permission.
  PATIENT-2  NotFoundError is raised only after LOOKS_MIN looks in a row, the first and the last at least `absence_s` apart,
      that found neither the object nor its name in a listing taken afterwards. A look that finds the name, or that fails,
      starts the count again.
  PATIENT-3  Pauses grow, but never beyond PAUSE_S_MAX, and `on_answer` is called after each look. So a caller that waits for a
      sign of life does not wait long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

from checkpointd.errors import CheckpointdError, NotFoundError, UnreadableError
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, Store
from checkpointd.store.passing import PassingStore
from checkpointd.system_errors import lasts

T = TypeVar("T")

LOOKS_MIN: Final = 4
PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 2.0
_LEAST_S: Final = 0.001
"""Timers are not finer. Shorter pauses could round to zero and repeat for ever."""


class Patience:
    """How long the reads of one task, such as a load, may wait in all. For one loop; times in seconds.

    `retry_s`: how long reads may fail in all; time without a failing read does not count. `absence_s`: see PATIENT-2; None if
    the objects certainly exist, so that a missing one counts as unreadable. `on_failure` is called at the first failure.
    """

    def __init__(self, retry_s: float, absence_s: float | None, on_failure: Callable[[], None] = lambda: None) -> None:
        self.retry_s, self.absence_s = retry_s, absence_s
        self._on_failure = on_failure
        self._failing = 0
        self._since = self._spent_s = 0.0
        self._told = False
        self.last_failure: UnreadableError | None = None
        """Why the last read failed, as long as reads fail."""

    def looks(self) -> RepeatedLooks:
        """The looks at one object."""
        return RepeatedLooks(self)

    def left_s(self) -> float:
        """The rest of `retry_s`."""
        return self.retry_s - self._spent_s - (_now() - self._since if self._failing else 0.0)

    def began_to_fail(self) -> None:
        if not self._failing:
            self._since = _now()
        self._failing += 1
        if not self._told:
            self._told = True
            self._on_failure()

    def ended_failing(self) -> None:
        self._failing -= 1
        if not self._failing:
            self._spent_s += _now() - self._since
            self.last_failure = None


class RepeatedLooks:
    """The looks at one object that was unreadable or missing. A context manager: leaving it ends the looks."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._pause_s = PAUSE_S_MIN
        self._failed = 0
        self._agreed, self._absent_since = 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._failed:
            self._patience.ended_failing()

    async def unreadable(self, error: UnreadableError) -> None:
        """Wait until the next look is due. If no time is left, raise `error` and say how long it was tried. If waiting cannot
        help, raise it at once (PATIENT-1).
        """
        if lasts(error):
            raise error
        self._agreed = 0
        self._patience.last_failure = error
        self._note()
        left_s = self._patience.left_s()
        if left_s < _LEAST_S:
            if self._failed == 1:
                raise error
            raise UnreadableError(f"{error} (tried {self._failed} times in {self._patience.retry_s:g} s)") from error
        await self._pause(left_s)

    async def is_lost(self, what: str) -> bool:
        """Whether the absence is proved (PATIENT-2); if not yet, wait until the next look is due. `what`: for errors."""
        if self._patience.absence_s is None:
            await self.unreadable(UnreadableError(f"{what}, although it was seen by another look"))
            return False
        self._note()
        if not self._agreed:
            self._absent_since = _now()
        self._agreed += 1
        left_s = self._absent_since + self._patience.absence_s - _now()
        if self._agreed >= LOOKS_MIN and left_s <= 0:
            return True
        await self._pause(max(left_s, _LEAST_S))
        return False

    def _note(self) -> None:
        if not self._failed:
            self._patience.began_to_fail()
        self._failed += 1

    async def _pause(self, at_most_s: float) -> None:
        await asyncio.sleep(min(self._pause_s, at_most_s))
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)


class PatientStore(PassingStore):
    """`store`, read with `patience`; writes are passed on. Closing it closes `store`.

    `on_answer` is called after each answer, good or bad. `on_absence` is called after each look that found nothing; if it
    raises, that error ends the looks.
    """

    def __init__(
        self,
        store: Store,
        patience: Patience,
        on_answer: Callable[[], None] = lambda: None,
        on_absence: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(store)
        self._patience, self._on_answer, self._on_absence = patience, on_answer, on_absence

    @property
    def uncached(self) -> Store:
        return PatientStore(self._store.uncached, self._patience, self._on_answer, self._on_absence)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        return await self._read(key, lambda: self._store.get(key, size_max=size_max))

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        return await Store.get_each(self, keys, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        await self._read(key, lambda: self._store.get_range(key, offset, out))

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        def kept() -> Callable[[], T]:
            try:
                result = then()
            except Exception as error:
                return partial(_raised, error)  # its errors are its own, so no further look follows
            return lambda: result

        return (await self._read(key, lambda: self._store.get_parts(key, offset, parts, kept)))()

    async def settle(self, key: str) -> None:
        await self._read(key, lambda: self._store.settle(key))

    async def stat(self, key: str) -> int | None:
        async def size() -> int:
            found = await self._store.stat(key)
            if found is None:
                raise NotFoundError(f"there is no object {key!r} in {self.url}")
            return found

        try:
            return await self._read(key, size)
        except NotFoundError:
            return None

    async def list(self, prefix: str) -> list[Entry]:
        return await self._read(None, lambda: self._store.list(prefix))

    async def _read(self, key: str | None, read: Callable[[], Awaitable[T]]) -> T:
        with self._patience.looks() as looks:
            while True:
                try:
                    return await self._look(key, read)
                except UnreadableError as error:
                    await looks.unreadable(error)
                except NotFoundError as error:
                    if self._on_absence is not None:
                        await self._on_absence()
                    if await looks.is_lost(str(error)):
                        raise
                finally:
                    self._on_answer()

    async def _look(self, key: str | None, read: Callable[[], Awaitable[T]]) -> T:
        try:
            return await read()
        except NotFoundError as error:
            if key is not None and await self._is_listed(key):
                why = "is listed and cannot be opened: does the file server lag behind?"
                raise UnreadableError(f"{key!r} in {self.url} {why}") from error
            raise

    async def _is_listed(self, key: str) -> bool:
        prefix, _, name = key.rpartition("/")
        return any(entry.name == name and not entry.is_prefix for entry in await self._store.list(prefix))


def _raised(error: Exception) -> NoReturn:
    raise error


def _now() -> float:
    return asyncio.get_running_loop().time()
