"""What waits for a commit: the removal of old checkpoints, and links to new ones.

Lightning removes the older checkpoint as soon as the call that saves the newer one has returned.

Invariants
  PENDING-1  Nothing is removed before a save has committed that began before the removal was asked for, and after which none
      that began earlier is in flight. If that save fails, the next one that commits counts. Where no save has begun since the
      last removal could be done, it is done at once.
  PENDING-2  A path that is saved again before its removal was done is not removed.
  PENDING-3  A link is set when its target has committed, before anything is removed, in one step. If the target's save fails,
      the older link stays.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from checkpointd.commit.machine import Phase
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save that was begun. The saves of one job are numbered."""

    number: int
    path: str
    handle: OwnHandle


@dataclass(frozen=True, slots=True)
class _Link:
    link: str
    target: str


class Pending:
    """The removals and links of one job. `remove` removes the checkpoint at a path, and returns False if that may not be yet.

    Its methods may be called from any thread.
    """

    def __init__(self, remove: Callable[[str], bool]) -> None:
        self._remove = remove
        self.handle: OwnHandle | None = None
        """That of the last save."""
        self._begun: dict[int, _Begun] = {}
        """The saves in flight, by number."""
        self._number = self._committed = 0
        self._newest: dict[str, OwnHandle] = {}
        """The newest save of each path, unless it has committed long ago."""
        self._removals: dict[str, int] = {}
        """The paths to remove, each with the number of the save that must have committed."""
        self._links: dict[str, _Link] = {}
        self._alone = threading.Lock()
        """Never held for long: the writer's thread waits for it."""
        self._working = threading.Lock()
        self._threads: list[threading.Thread] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as in a process that Lightning spawns, waits for nothing."""
        return Pending, (self._remove,)

    def begin(self, path: str, handle: OwnHandle) -> None:
        """A save to `path` has begun."""
        self.handle = handle
        with self._alone:
            self._number += 1
            for known, older in list(self._newest.items()):
                if older.phase == Phase.COMMITTED:
                    del self._newest[known]
            begun = _Begun(self._number, path, handle)
            self._begun[begun.number] = begun
            self._newest[path] = handle
            self._removals.pop(path, None)
            self._links.pop(path, None)  # a save takes the place of a link
        handle.when_done(lambda: self._ended(begun))

    def remove(self, path: str) -> None:
        """Remove the checkpoint at `path` when that is safe (PENDING-1)."""
        with self._alone:
            self._links.pop(path, None)
            self._removals[path] = self._number
            is_due = self._is_due(path)
        if is_due:
            self._work()

    def link(self, link: str, target: str) -> None:
        """Let the symbolic link `link` lead to the checkpoint at `target`, once that has committed."""
        with self._alone:
            self._removals.pop(link, None)
            self._links[link] = _Link(link, target)
        self._work()

    def will_exist(self, path: str) -> bool | None:
        """Whether `path` will be there when all that waits is done; None if nothing waits for this path."""
        with self._alone:
            if path in self._links or any(begun.path == path for begun in self._begun.values()):
                return True
            return False if path in self._removals else None

    def settle(self) -> None:
        """Wait until no save is in flight and everything due is done. Raises no error of a save."""
        for begun in list(self._begun.values()):
            begun.handle.ended_within(None)
            self._note(begun)
        self._work()
        with self._alone:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _ended(self, begun: _Begun) -> None:
        if self._note(begun) and (self._removals or self._links):
            thread = threading.Thread(target=self._work, name="checkpointd-pending")  # removing may take long
            with suppress(RuntimeError):  # the interpreter ends: `settle` does it
                thread.start()
                with self._alone:
                    self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _note(self, begun: _Begun) -> bool:
        """Note the end of a save; returns whether it has committed."""
        has_committed = begun.handle.phase == Phase.COMMITTED
        with self._alone:
            self._begun.pop(begun.number, None)
            if has_committed:
                self._committed = max(self._committed, begun.number)
        return has_committed

    def _is_due(self, path: str) -> bool:
        needed = self._removals[path]
        return self._committed >= needed and all(number > needed for number in self._begun)

    def _work(self) -> None:
        with self._working:
            for one in self._links_due():
                _set_link(one)
            with self._alone:
                due = [path for path in self._removals if self._is_due(path)]
            for path in due:
                if self._remove(path):
                    with self._alone:
                        self._removals.pop(path, None)

    def _links_due(self) -> list[_Link]:
        """The links to set now; those to failed saves are dropped."""
        with self._alone:
            found = []
            for one in list(self._links.values()):
                handle = self._newest.get(one.target)
                if handle is not None and not handle.done():
                    continue
                del self._links[one.link]
                if handle is None or handle.phase == Phase.COMMITTED:
                    found.append(one)
                else:
                    log.error("%s still leads to the older checkpoint: %s was not saved", one.link, one.target)
            return found


def _set_link(one: _Link) -> None:
    """Replace whatever has the name of the link (PENDING-3)."""
    temporary = os.path.join(os.path.dirname(one.link), f".{secrets.token_hex(8)}.link")
    try:
        os.symlink(os.path.relpath(one.target, os.path.dirname(one.link)), temporary)
        try:
            if os.path.isdir(one.link) and not os.path.islink(one.link):
                shutil.rmtree(one.link)
            os.replace(temporary, one.link)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        log.error("%s cannot be linked to %s: %s", one.link, one.target, error)
