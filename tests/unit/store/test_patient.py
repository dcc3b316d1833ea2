"""The patient store in virtual time: invariants PATIENT-1 to PATIENT-3 of `store/patient.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from checkpointd.errors import NotFoundError, UnreadableError
from checkpointd.store.base import SMALL_BYTES_MAX, Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import LOOKS_MIN, PAUSE_S_MAX, Patience, PatientStore
from checkpointd.testing import simloop

T = TypeVar("T")
KEY = "t/a/outcome"


class Moody(MemoryStore):
    """Does what its script says at each read: raises, hides the object, or reads it. The last word of the script stands.

    Words: "EIO", "hidden" (neither read nor listed), "listed" (listed, and not to be opened), "good".
    """

    def __init__(self, *script: str) -> None:
        super().__init__()
        self._script = list(script)
        self._now = ""
        self.looks: list[float] = []

    def _next(self) -> None:
        self.looks.append(asyncio.get_running_loop().time())
        self._now = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if self._now == "EIO":
            raise UnreadableError("EIO")

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        self._next()
        if self._now in ("hidden", "listed"):
            raise NotFoundError(f"there is no object {key!r}")
        return await super().get(key, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        await self.get(key)
        await super().get_range(key, offset, out)

    async def stat(self, key: str) -> int | None:
        self._next()
        return None if self._now in ("hidden", "listed") else await super().stat(key)

    async def settle(self, key: str) -> None:
        await self.get(key)

    async def list(self, prefix: str) -> list[Entry]:
        if not prefix:
            self._next()
        return [] if self._now == "hidden" else await super().list(prefix)


Read = Callable[[PatientStore], Awaitable[object]]


async def _get_range(store: PatientStore) -> bytes:
    out = bytearray(5)
    await store.get_range(KEY, 0, memoryview(out))
    return bytes(out)


READS: dict[str, Read] = {
    "get": lambda store: store.get(KEY),
    "get_range": _get_range,
    "stat": lambda store: store.stat(KEY),
    "settle": lambda store: store.settle(KEY),
    "list": lambda store: store.list(""),
}


def simulated(main: Coroutine[Any, Any, T]) -> T:
    return simloop.run(1, main)


async def read(inner: Moody, patience: Patience, act: Read = READS["get"]) -> object:
    await inner.put(KEY, b"bytes")
    return await act(PatientStore(inner, patience))


@pytest.mark.parametrize("act", READS.values(), ids=READS.keys())
def test_every_kind_of_read_is_tried_again(act: Read) -> None:
    inner = Moody("EIO", "EIO", "EIO", "good")
    simulated(read(inner, Patience(60.0, 5.0), act))
    assert len(inner.looks) == 4


@pytest.mark.parametrize("act", READS.values(), ids=READS.keys())
def test_what_lasts_is_raised_at_the_deadline(act: Read) -> None:
    """PATIENT-1, PATIENT-3: the last look is at the deadline, and there is never a long silence before it."""
    inner = Moody("EIO")
    with pytest.raises(UnreadableError, match=r"EIO \(tried \d+ times in 60 s\)"):
        simulated(read(inner, Patience(60.0, 5.0), act))
    pauses = [after - before for before, after in zip(inner.looks, inner.looks[1:], strict=False)]
    assert sum(pauses) == pytest.approx(60.0, abs=0.1)
    assert max(pauses) <= PAUSE_S_MAX + 0.1
    assert pauses[:5] == sorted(pauses[:5])


@pytest.mark.parametrize("act", [READS[name] for name in ("get", "get_range", "settle")])
def test_absence_is_believed_when_looks_over_the_whole_window_agree(act: Read) -> None:
    inner = Moody("hidden")
    with pytest.raises(NotFoundError):
        simulated(read(inner, Patience(60.0, 5.0), act))
    assert len(inner.looks) >= LOOKS_MIN
    assert inner.looks[-1] - inner.looks[0] >= 5.0


def test_the_size_of_what_is_lost_is_none() -> None:
    inner = Moody("hidden")
    assert simulated(read(inner, Patience(60.0, 5.0), READS["stat"])) is None
    assert inner.looks[-1] - inner.looks[0] >= 5.0


def test_a_window_of_nothing_still_takes_several_looks() -> None:
    inner = Moody("hidden")
    with pytest.raises(NotFoundError):
        simulated(read(inner, Patience(60.0, 0.0)))
    assert len(inner.looks) == LOOKS_MIN


@pytest.mark.parametrize("between", ["listed", "EIO"])
def test_a_look_that_does_not_agree_starts_the_window_again(between: str) -> None:
    """PATIENT-2: as many absences, but never a window full of them in a row."""
    inner = Moody(*["hidden"] * 12, between, *["hidden"] * 12, between, "good")
    assert simulated(read(inner, Patience(600.0, 30.0))) == b"bytes"
    assert inner.looks[-1] - inner.looks[0] > 40.0


def test_what_is_listed_and_cannot_be_opened_is_never_lost() -> None:
    inner = Moody("listed")
    with pytest.raises(UnreadableError, match="is listed and cannot be opened"):
        simulated(read(inner, Patience(20.0, 5.0)))
    assert inner.looks[-1] - inner.looks[0] >= 20.0


def test_what_somebody_else_has_seen_is_never_lost() -> None:
    inner = Moody("hidden")
    with pytest.raises(UnreadableError, match="although it was seen"):
        simulated(read(inner, Patience(20.0, None)))
    assert inner.looks[-1] - inner.looks[0] >= 20.0


def test_time_in_which_all_goes_well_does_not_count() -> None:
    async def work() -> None:
        patience = Patience(10.0, 1.0)
        for _ in range(2):
            # About 5 s of failures each, and an hour of peace after it.
            await read(Moody(*["EIO"] * 7, "good"), patience)
            await asyncio.sleep(3600)
        assert 0 < patience.left_s() < 10.0
        with pytest.raises(UnreadableError):
            await read(Moody("EIO"), patience)
        assert patience.left_s() < 0.01

    simulated(work())


def test_the_first_failure_is_told_once_and_every_answer_is() -> None:
    told, answers = [], []

    async def work() -> None:
        patience = Patience(60.0, 1.0, lambda: told.append("failed"))
        for script in (["good"], ["EIO", "good"], ["EIO", "EIO", "good"]):
            inner = Moody(*script)
            await inner.put(KEY, b"bytes")
            await PatientStore(inner, patience, lambda: answers.append("answer")).get(KEY)

    simulated(work())
    assert (len(told), len(answers)) == (1, 6)
