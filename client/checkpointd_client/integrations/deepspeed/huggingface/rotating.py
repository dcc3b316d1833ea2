"""Removes old `checkpoint-N` and `checkpoint_N` after a newer commit, by the limits of the Trainer and of Accelerate.

Invariants
  ROTATE-1  Nothing is removed before the save that asked for it, or a later one, has committed. What no engine has saved to, or
      has lost the engine's files or the library's, is no checkpoint: it is not counted, and not removed.
  ROTATE-2  The newest commit and the best checkpoint stay. One is as old as its engine's files, whoever touches its directory.
  ROTATE-3  What goes is first moved out of sight: half removed, it could be taken for a checkpoint, by whoever looks and by the
      rotation of another rank, as on a CPU each takes itself for the first one of its node.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointd.commit.machine import Phase
from checkpointd.store.posix.unfinished import GOING
from checkpointd_client.saves.handle import SaveHandle

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Limit:
    """How many checkpoints of which names are kept in a directory; what goes is moved to `out_of_sight`.

    `names`: a regular expression. `needed`: a file that the library writes into each.
    """

    keep: int
    names: str
    needed: str
    out_of_sight: str
    best: str | None = None


class Saves:
    """The directories that were saved to, each with its last save; the limits of those in which they lie."""

    def __init__(self) -> None:
        self._handles: dict[str, SaveHandle] = {}
        self._limits: dict[str, Limit] = {}
        self._newest: dict[str, str] = {}
        """By the directory above: what was committed there last."""
        self._due: set[str] = set()
        self._bests: dict[str, str] = {}
        self._in_flight: set[SaveHandle] = set()
        self._alone = threading.Lock()
        """Never held for long: the thread on which saves are written waits for it."""
        self._removing = threading.Lock()

    def begin(self) -> None:
        """A training begins: what was wanted of the one before does not count."""
        self.settle()
        with self._alone:
            self._limits.clear()
            self._due.clear()
            self._bests.clear()

    def add(self, directory: str, handle: SaveHandle) -> None:
        """A save to `directory` has begun."""
        directory = os.path.abspath(directory)
        with self._alone:
            for known, older in list(self._handles.items()):
                if older.done() and older.phase == Phase.COMMITTED:
                    self._handles.pop(known, None)
            self._handles[directory] = handle
            self._in_flight.add(handle)
        handle.when_done(lambda: self._ended(directory, handle))

    def limit(self, folder: str, limit: Limit | None) -> None:
        """From the next commit in `folder` on."""
        folder = os.path.abspath(folder)
        with self._alone:
            self._due.discard(folder)
            self._limits.pop(folder, None)
            if limit is not None and limit.keep > 0:
                self._limits[folder] = limit

    def note_best(self, folder: str, best: str) -> None:
        """The best checkpoint, of those that are there when a save begins."""
        with self._alone:
            self._bests[os.path.abspath(folder)] = os.path.abspath(best)

    def best(self, folder: str) -> str | None:
        """The last one noted, if it is still there."""
        found = self._bests.get(os.path.abspath(folder))
        return found if found is not None and os.path.isdir(found) else None

    def has_failed(self, directory: str) -> bool:
        """Whether the last save there has ended without a commit."""
        handle = self._handles.get(os.path.abspath(directory))
        return handle is not None and handle.done() and handle.phase != Phase.COMMITTED

    def settle(self) -> None:
        """Wait until no save is in flight, whatever becomes of it: its handle and the log say what. Old ones have gone then."""
        for directory, handle in list(self._handles.items()):
            handle.ended_within(None)
            self._note(directory, handle)
        self._rotate()

    def _ended(self, directory: str, handle: SaveHandle) -> None:
        self._note(directory, handle)
        if self._due:
            with suppress(RuntimeError):  # the interpreter ends: the next job's rotation finds the same
                threading.Thread(target=self._rotate, name="checkpointd-rotation").start()  # much may have to go

    def _note(self, directory: str, handle: SaveHandle) -> None:
        folder = os.path.dirname(directory)
        with self._alone:
            if handle in self._in_flight and handle.phase == Phase.COMMITTED:
                self._newest[folder] = directory
                self._due |= {folder} & self._limits.keys()
            self._in_flight.discard(handle)

    def _rotate(self) -> None:
        with self._removing:
            for folder, limit, staying in self._decided():
                rotate(folder, limit, staying)

    def _decided(self) -> list[tuple[str, Limit, set[str | None]]]:
        """What is due and can be done now."""
        found: list[tuple[str, Limit, set[str | None]]] = []
        with self._alone:
            for folder in sorted(self._due):
                limit = self._limits[folder]
                best = limit.best and os.path.abspath(limit.best)
                if best and self._handles.get(best) in self._in_flight:
                    continue  # when it has ended, it is known which one is the best
                if best and not os.path.isdir(best):
                    best = self._bests.get(folder)
                self._due.discard(folder)
                found.append((folder, limit, {best, self._newest.get(folder)}))
        return found


def rotate(folder: str, limit: Limit, staying: set[str | None]) -> None:
    """Remove the oldest checkpoints in `folder`, but for those `staying`, until as many are left as the limit says."""
    ages = {str(path): age for path in Path(folder).glob("*") if (age := _age(path, limit)) is not None}
    oldest_first = sorted(ages, key=lambda path: (ages[path], path))
    staying = {*staying, *oldest_first[-1:]} & ages.keys()
    spare = len(ages) - max(limit.keep, len(staying))
    for path in [path for path in oldest_first if path not in staying][: max(0, spare)]:
        _remove(path, limit.out_of_sight)


def _age(path: Path, limit: Limit) -> int | None:
    """When the engine's files were written, in ns since the epoch; None for what is no checkpoint (ROTATE-1)."""
    if re.fullmatch(limit.names, path.name) is None or not (path / limit.needed).is_file():
        return None
    with suppress(FileNotFoundError):  # another rank removes it
        return max((file.stat().st_mtime_ns for file in path.glob("*/*_states.pt")), default=None)
    return None


def _remove(path: str, out_of_sight: str) -> None:
    """A start removes what a crash leaves in `out_of_sight`."""
    gone = os.path.join(out_of_sight, f"{GOING}{uuid.uuid4().hex}")
    try:
        os.makedirs(gone)
        os.rename(path, os.path.join(gone, os.path.basename(path)))
    except FileNotFoundError:  # another rank has removed it
        pass
    except OSError as error:
        log.error("%s is no longer needed and cannot be removed: %s", path, error)
    shutil.rmtree(gone, ignore_errors=True)
