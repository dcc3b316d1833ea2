"""Removes old `checkpoint-N` and `checkpoint_N` after a newer commit, by the limits of the Trainer and of Accelerate.

Invariants
  ROTATE-1  Nothing is removed before the save that asked for it, or a later one, has committed. A directory without the files
      of an engine, if one takes part, or of the library is not a checkpoint: it is neither counted nor removed.
  ROTATE-2  The newest commit and the best checkpoint stay. The checkpoints of this process have the order of its saves, whose
      files are written in the background, and may be written in another order. They are newer than all others, whose age is
      that of their files, not of their directories. A directory whose save is in flight is neither counted nor removed: it may
      appear before the end of its save is noted.
  ROTATE-3  A directory is first moved to a hidden place and then removed: half removed, other programs could take it for a
      checkpoint. So could the rotation of another rank, since on CPUs each rank counts itself as the first of its node.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointd.commit.machine import Phase
from checkpointd.store.posix.unfinished import GOING
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Limit:
    """How many checkpoints with which names a directory keeps; others are moved to `out_of_sight` and removed.

    `names`: a regular expression. `needed`: a file that the library writes into each checkpoint. `engines`: a pattern for the
    files of an engine that takes part; the newest of them says how old a checkpoint is, in place of the file `needed`.
    """

    keep: int
    names: str
    needed: str
    out_of_sight: str
    best: str | None = None
    engines: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What this process knows of its saves (ROTATE-2).

    `committed`: the directories that it has saved, each with the number of its last save. `in_flight`: those that it is saving.
    """

    committed: Mapping[str, int]
    in_flight: Collection[str]


class Saves:
    """The directories that were saved to, each with its last save, and the limits of the directories above them."""

    def __init__(self) -> None:
        self._handles: dict[str, OwnHandle] = {}
        self._limits: dict[str, Limit] = {}
        self._committed: dict[str, int] = {}
        """The committed directories, each with the number of its last save. Those that a rotation has removed are not in it."""
        self._due: set[str] = set()
        self._bests: dict[str, str] = {}
        self._in_flight: dict[OwnHandle, tuple[int, str]] = {}
        """The saves whose end was not noted yet, each with its number and directory. Ends may be noted in another order."""
        self._beginning: list[str] = []
        """The directories whose saves are being begun."""
        self._count = itertools.count()
        self._alone = threading.Lock()
        """Never held for long: the writer's thread waits for it."""
        self._removing = threading.Lock()

    def begin(self) -> None:
        """A training begins: forget the limits of the one before."""
        self.settle()
        with self._alone:
            self._limits.clear()
            self._due.clear()
            self._bests.clear()

    @contextmanager
    def beginning(self, directory: str) -> Iterator[None]:
        """A save to `directory` begins within the block, which calls `add`. It may commit before that call."""
        directory = os.path.abspath(directory)
        with self._alone:
            self._beginning.append(directory)
        try:
            yield
        finally:
            with self._alone:
                self._beginning.remove(directory)

    def add(self, directory: str, handle: OwnHandle) -> None:
        """A save to `directory` has begun."""
        directory = os.path.abspath(directory)
        with self._alone:
            for known, older in list(self._handles.items()):
                if older.done() and older.phase == Phase.COMMITTED:
                    self._handles.pop(known, None)
            self._handles[directory] = handle
            self._in_flight[handle] = next(self._count), directory
        handle.when_done(lambda: self._ended(directory, handle))

    def limit(self, folder: str, limit: Limit | None) -> None:
        """Set the limit of `folder`, which holds from the next commit there."""
        folder = os.path.abspath(folder)
        with self._alone:
            self._due.discard(folder)
            self._limits.pop(folder, None)
            if limit is not None and limit.keep > 0:
                self._limits[folder] = limit

    def note_best(self, folder: str, best: str) -> None:
        """Note the best of the checkpoints that exist when a save begins."""
        with self._alone:
            self._bests[os.path.abspath(folder)] = os.path.abspath(best)

    def best(self, folder: str) -> str | None:
        """The best checkpoint that was noted last, if it still exists."""
        found = self._bests.get(os.path.abspath(folder))
        return found if found is not None and os.path.isdir(found) else None

    def has_failed(self, directory: str) -> bool:
        """Whether the last save there has ended without a commit."""
        handle = self._handles.get(os.path.abspath(directory))
        return handle is not None and handle.done() and handle.phase != Phase.COMMITTED

    def settle(self, below: str | None = None) -> None:
        """Wait until no save is in flight, without raising their errors, and until old checkpoints are removed.

        `below`: wait only for saves to directories below this one. Of all others, wait until their tensors may change: such a
        save may take until its time-out, for example because its directory was removed.
        """
        for directory, handle in list(self._handles.items()):
            if below is None or directory.startswith(os.path.join(below, "")):
                handle.ended_within(None)
                self._note(directory, handle)
            else:
                handle.staged_within(None)
        for handle, (_, directory) in list(self._in_flight.items()):
            if handle.done():  # an earlier save to the same directory
                self._note(directory, handle)
        self._rotate()

    def _ended(self, directory: str, handle: OwnHandle) -> None:
        self._note(directory, handle)
        if self._due:
            with suppress(RuntimeError):  # the interpreter ends: the next job's rotation does it
                threading.Thread(target=self._rotate, name="checkpointd-rotation").start()  # removal may take long

    def _note(self, directory: str, handle: OwnHandle) -> None:
        folder = os.path.dirname(directory)
        with self._alone:
            noted = self._in_flight.pop(handle, None)
            if noted is not None and handle.phase == Phase.COMMITTED:
                self._committed[directory] = max(noted[0], self._committed.get(directory, -1))
                self._due |= {folder} & self._limits.keys()

    def _rotate(self) -> None:
        with self._removing:
            for folder, limit, best in self._decided():
                removed = rotate(folder, limit, best, self._known)
                with self._alone:
                    for path in removed:
                        self._committed.pop(path, None)

    def _known(self) -> Known:
        with self._alone:
            return Known(dict(self._committed), {*self._beginning, *(path for _, path in self._in_flight.values())})

    def _decided(self) -> list[tuple[str, Limit, str | None]]:
        """The rotations that are due and possible now, each with the arguments of `rotate`."""
        found: list[tuple[str, Limit, str | None]] = []
        with self._alone:
            for folder in sorted(self._due):
                limit = self._limits[folder]
                best = limit.best and os.path.abspath(limit.best)
                if best and self._handles.get(best) in self._in_flight:
                    continue  # only its end shows which checkpoint is the best
                if best and not os.path.isdir(best):
                    best = self._bests.get(folder)
                self._due.discard(folder)
                found.append((folder, limit, best))
        return found


def rotate(folder: str, limit: Limit, best: str | None, ask: Callable[[], Known]) -> list[str]:
    """Remove the oldest checkpoints in `folder`, except the `best`, until the limit holds. Returns what was to be removed."""
    found = {str(path): age for path in Path(folder).glob("*") if (age := _age(path, limit)) is not None}
    known = ask()  # after the look at the folder: what appears later was not seen
    ages = {path: age for path, age in found.items() if path not in known.in_flight}
    oldest_first = sorted(ages, key=lambda path: (known.committed.get(path, -1), ages[path], _numbers_of(path)))
    staying = {best, *oldest_first[-1:]} & ages.keys()
    spare = len(ages) - max(limit.keep, len(staying))
    going = [path for path in oldest_first if path not in staying][: max(0, spare)]
    for path in going:
        _remove(path, limit.out_of_sight)
    return going


def _numbers_of(path: str) -> list[int]:
    """The numbers in its name, which tell between files that were written at one time."""
    return [int(number) for number in re.findall(r"\d+", os.path.basename(path))]


def _age(path: Path, limit: Limit) -> int | None:
    """When the files of a checkpoint were written, in ns since 1970; None if `path` is not a checkpoint (ROTATE-1)."""
    if re.fullmatch(limit.names, path.name) is None or not (path / limit.needed).is_file():
        return None
    with suppress(FileNotFoundError):  # another rank removes it
        files = [path / limit.needed] if limit.engines is None else path.glob(limit.engines)
        return max((file.stat().st_mtime_ns for file in files), default=None)
    return None


def _remove(path: str, out_of_sight: str) -> None:
    """Move `path` out of sight and remove it. If this crashes, the next start removes the rest."""
    gone = os.path.join(out_of_sight, f"{GOING}{uuid.uuid4().hex}")
    try:
        os.makedirs(gone)
        os.rename(path, os.path.join(gone, os.path.basename(path)))
    except FileNotFoundError:  # another rank has removed it
        pass
    except OSError as error:
        log.error("%s is no longer needed and cannot be removed: %s", path, error)
    shutil.rmtree(gone, ignore_errors=True)
