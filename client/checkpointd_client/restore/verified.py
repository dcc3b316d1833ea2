"""Stored files for torch.load: each byte is read once, into its final memory, and verified there.

Invariants
  VERIFIEDFILE-1  The bytes around the storages, which hold the pickle, are verified before any of them is given out.
  VERIFIEDFILE-2  Damaged bytes are noted and still given out, since torch's reader must not see an exception. The caller must
      throw away the loaded objects if `finish` returns damage.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpointd.errors import CheckpointdError, DamagedError
from checkpointd.pipeline.read.stored_files import FileChunk, FileChunkRun, StoredFile

ReadRuns = Callable[[StoredFile, Sequence[FileChunkRun]], list[DamagedError]]

DIRECT_BYTES = 256 << 10
"""Parts of at least this size are read straight into the reader's memory; smaller ones are read together, ahead."""
AHEAD_BYTES = 4 << 20
BLOCK_BYTES = 8 << 20
"""Neighbouring parts that are read into our own memory are read together up to this size."""
RUN_BYTES = 64 << 20
"""The same limit for parts that are read into the reader's memory: the kernel reads far ahead only in long reads."""


@dataclass(slots=True)
class _Kept:
    """A part in our own memory, until all of it was given out; `left` counts the bytes that were not given out yet."""

    data: memoryview
    left: int


@dataclass(slots=True)
class _Wanted:
    """The parts of one request: those read into the reader's memory (`runs`), and those read into our own (`kept`)."""

    runs: list[FileChunkRun] = field(default_factory=list)
    kept: list[FileChunk] = field(default_factory=list)


class VerifiedFile(io.RawIOBase):
    """`file`, whose parts `read` reads and verifies."""

    def __init__(self, file: StoredFile, read: ReadRuns) -> None:
        super().__init__()
        self.file, self._read_runs = file, read
        self.damage: list[DamagedError] = []
        self.error: CheckpointdError | None = None
        self._at = 0
        self._kept: dict[int, _Kept] = {}
        self._unread = {part.start for part in file.parts}
        self._take(_Wanted(kept=[part for part in file.parts if part.fqn == file.around]))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.file.size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        """Fill `out` from the current position and return the number of bytes; 0 if the storage fails (`error`)."""
        view = memoryview(out).cast("B")
        view = view[: max(0, min(len(view), self.file.size - self._at))]
        if not len(view):
            return 0
        try:
            self._fill(view)
        except CheckpointdError as error:
            self.error = error
            return 0
        self._at += len(view)
        return len(view)

    def finish(self) -> list[DamagedError]:
        """Verify also the parts that were not asked for; returns all damage. Raises the error if reading failed."""
        if self.error is not None:
            raise self.error
        self._kept.clear()
        for part in [part for part in self.file.parts if part.start in self._unread]:
            self._take(_Wanted(kept=[part]))
            self._kept.clear()
        return self.damage

    def _fill(self, view: memoryview) -> None:
        start, stop = self._at, self._at + len(view)
        asked = self._asked(start, stop)
        self._take(self._sorted(asked, start, view))
        for part in asked:
            kept = self._kept.get(part.start)
            if kept is not None:
                low, high = max(start, part.start), min(stop, part.stop)
                view[low - start : high - start] = kept.data[low - part.start : high - part.start]
                kept.left -= high - low
                if kept.left <= 0 and part.fqn != self.file.around:
                    del self._kept[part.start]

    def _asked(self, start: int, stop: int) -> list[FileChunk]:
        parts, number = self.file.parts, self.file.first_at(start)
        found = []
        while number < len(parts) and parts[number].start < stop:
            found.append(parts[number])
            number += 1
        return found

    def _sorted(self, asked: list[FileChunk], start: int, view: memoryview) -> _Wanted:
        """Decide which of `asked` are read straight into `view`, and which into our own memory."""
        wanted, chosen = _Wanted(), set[int]()
        direct: list[FileChunk] = []

        def end_run() -> None:
            if direct:
                wanted.runs.append(FileChunkRun(tuple(direct), view[direct[0].start - start : direct[-1].stop - start]))
                direct.clear()

        for part in asked:
            is_whole = start <= part.start and part.stop <= start + len(view)
            if part.start in self._kept or part.start in chosen:
                end_run()
            elif is_whole and part.nbytes >= DIRECT_BYTES:
                if direct and part.stop - direct[0].start > RUN_BYTES:
                    end_run()
                direct.append(part)
            else:
                end_run()
                ahead = self._ahead(part) if part.nbytes < DIRECT_BYTES else [part]
                wanted.kept += [one for one in ahead if one.start not in chosen]
                chosen |= {one.start for one in ahead}
        end_run()
        return wanted

    def _ahead(self, first: FileChunk) -> list[FileChunk]:
        """`first`, and the unread small parts behind it."""
        parts, number, found = self.file.parts, self.file.first_at(first.start) + 1, [first]
        while number < len(parts) and parts[number].stop - first.start <= AHEAD_BYTES:
            part = parts[number]
            if part.nbytes < DIRECT_BYTES and part.start in self._unread and part.start not in self._kept:
                found.append(part)
            number += 1
        return found

    def _take(self, wanted: _Wanted) -> None:
        runs = list(wanted.runs)
        for parts in _neighbours(sorted(wanted.kept, key=lambda part: part.start)):
            data = memoryview(bytearray(parts[-1].stop - parts[0].start))
            runs.append(FileChunkRun(parts, data))
            for part in parts:
                at = part.start - parts[0].start
                self._kept[part.start] = _Kept(data[at : at + part.nbytes], part.nbytes)
        if runs:
            self.damage += self._read_runs(self.file, runs)
            self._unread -= {part.start for run in runs for part in run.parts}


def _neighbours(parts: Sequence[FileChunk]) -> list[list[FileChunk]]:
    """`parts` in groups of those that lie one behind the other."""
    found: list[list[FileChunk]] = []
    for part in parts:
        if found and found[-1][-1].stop == part.start and part.stop - found[-1][0].start <= BLOCK_BYTES:
            found[-1].append(part)
        else:
            found.append([part])
    return found
