"""Measures how long each phase of a save takes, on the loop that drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.layout.save_timings import PhaseSeconds


@dataclass(slots=True)
class Meter:
    """The time in which at least one piece of work was under way, and the bytes of all pieces."""

    nbytes: int = 0
    seconds: float = 0.0
    _busy: int = 0
    _since: float = 0.0

    @contextmanager
    def busy(self, nbytes: int = 0) -> Iterator[None]:
        """Count a piece of `nbytes` that is under way while the block runs."""
        if self._busy == 0:
            self._since = _now()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self.nbytes += nbytes
            if self._busy == 0:
                self.seconds += _now() - self._since


@dataclass(slots=True)
class SaveMeter:
    """The times of one save, by the loop's clock. `hash`, `codec` and `disk` are parts of persisting that may overlap."""

    hash: Meter = field(default_factory=Meter)
    codec: Meter = field(default_factory=Meter)
    disk: Meter = field(default_factory=Meter)
    staging_s: float | None = None
    persisting_s: float | None = None
    waiting_s: float | None = None
    uploading_s: float | None = None
    _spooled: float | None = None
    _began: float | None = None
    _staged: float | None = None
    _voted: float | None = None

    def begin(self) -> None:
        """Note that the save has begun. If its snapshot is whole already, staging counts as 0 seconds."""
        self._began = _now()

    def entered(self, phase: Phase) -> None:
        """Note that the save has entered `phase`."""
        if phase is Phase.STAGED and self._began is not None:
            self._staged = _now()
            self.staging_s = self._staged - self._began if self.staging_s is None else self.staging_s
        elif phase is Phase.SPOOLED:
            self._spooled = _now()
        elif phase is Phase.PREPARED and self._spooled is not None:
            self._voted = _now()
            self.uploading_s = self._voted - self._spooled
        elif phase is Phase.PREPARED:
            self.voted()
        elif phase in FINAL and self._voted is not None:
            self.waiting_s = _now() - self._voted

    def voted(self) -> None:
        """Note that the vote is being put, or was put."""
        self._voted = _now()
        if self._staged is not None:
            self.persisting_s = self._voted - self._staged

    def seconds(self) -> PhaseSeconds:
        """All times, rounded to milliseconds."""
        worked = self._staged is not None
        return PhaseSeconds(
            staging=_rounded(self.staging_s),
            persisting=_rounded(self.persisting_s),
            hash=_rounded(self.hash.seconds) if worked else None,
            codec=_rounded(self.codec.seconds) if worked else None,
            disk=_rounded(self.disk.seconds) if worked else None,
            waiting=_rounded(self.waiting_s),
            uploading=_rounded(self.uploading_s),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 3)
