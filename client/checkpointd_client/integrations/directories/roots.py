"""The roots of one user, such as an engine, each with its Checkpointer. Users of one process share them: there can be only one
per root.

For example, a script may save with one engine and load with the next, without closing the first.

Invariants
  OPENROOT-1  If a root was only loaded from, the job leaves it at its first save at another root: other jobs can then begin.
  OPENROOT-2  A root that is used again after it was left counts as loaded from only if no other job has begun there
      meanwhile.
  OPENROOT-3  A root is closed when its last user leaves it. A user that was dropped without a word, such as an engine that
      nobody destroyed, has left all its roots by the time that another one opens any.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.layout.manifest import Branches
from checkpointd_client.core import Core
from checkpointd_client.settings import Options


@dataclass(slots=True)
class _Shared:
    checkpointer: Core
    options: dict[str, Any]
    users: weakref.WeakSet[OpenRoots]


_lock = threading.Lock()
_open: dict[tuple[int, str], _Shared] = {}
log = logging.getLogger("checkpointd")


def _borrow(root: str, user: OpenRoots, options: dict[str, Any]) -> Core:
    """The Checkpointer of `root`, made if there is none. UsageError if another user has it with other options."""
    key = _key(root)
    with _lock:
        for dropped in [one for one, shared in _open.items() if not shared.users]:
            _close_logged(dropped[1], _open.pop(dropped).checkpointer)
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(Core(root, Options.of(options)), dict(options), weakref.WeakSet())
        elif shared.options != options:
            raise UsageError(
                f"another user in this process uses {root} with {shared.options}, and this one asks for {options}: "
                "give both the same options, or detach the other first"
            )
        shared.users.add(user)
        return shared.checkpointer


def _give_back(root: str, user: OpenRoots) -> None:
    """Close the Checkpointer of `root` once nobody uses it; raises the errors of close()."""
    key = _key(root)
    with _lock:
        shared = _open[key]
        shared.users.discard(user)
        if not shared.users:
            del _open[key]
            shared.checkpointer.close()  # under the lock: the next user makes a new one


def _close_logged(root: str, checkpointer: Core) -> None:
    try:
        checkpointer.close()
    except CheckpointdError as error:
        log.error("closing the root %s failed: %s", root, error)


def _key(root: str) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(root)


class OpenRoots:
    """The roots of one user. `store_of`: the store of a root. `options`: those of Checkpointer. UsageError for a bad one."""

    def __init__(self, store_of: Callable[[str], str], options: dict[str, Any]) -> None:
        Options.of(options)  # raises here, and not at the first save, which may be hours away
        self._store_of, self._options = store_of, options
        self.checkpointers: dict[str, Core] = {}
        self.went_on_from: str | None = None
        """A root that was loaded from without its Checkpointer."""
        self._saved: set[str] = set()
        self._left: dict[str, tuple[int, Mapping[str, Branches]]] = {}
        """The roots that were loaded from and left, each with the start that ended there, and the branches that it has left."""

    def __contains__(self, root: str) -> bool:
        return root in self.checkpointers

    def checkpointer(self, root: str) -> Core:
        """The Checkpointer of a root, made if there is none."""
        found = self.checkpointers.get(root)
        if found is None:
            found = self.checkpointers[root] = _borrow(self._store_of(root), self, self._options)
            start, left = self._left.pop(root, (0, {}))
            if start == found.status().start - 1 > 0:
                found.take_up(left)
        if root == self.went_on_from:
            found.take_up()
        return found

    def to_save(self, root: str) -> Core:
        """The Checkpointer of a root to save at; leaves the roots that were only loaded from (OPENROOT-1)."""
        found = self.checkpointer(root)
        self._saved.add(root)
        for other in self.checkpointers.keys() - self._saved:
            self._leave(other)
        return found

    def leave(self) -> None:
        """Give back all Checkpointers until a root is used again. Logs the errors of close()."""
        self._saved.clear()
        for root in list(self.checkpointers):
            self._leave(root)

    def _leave(self, root: str) -> None:
        checkpointer = self.checkpointers.pop(root)
        if checkpointer.has_taken_up:
            self._left[root] = checkpointer.status().start, checkpointer.left
        try:
            _give_back(self._store_of(root), self)
        except CheckpointdError as error:  # a save failed, whose handle reports it
            log.error("closing the root %s failed: %s", root, error)

    def fence(self) -> None:
        """Wait until the snapshots in flight are copied."""
        for checkpointer in self.checkpointers.values():
            checkpointer.fence()

    def step_begins(self, optimizer: object) -> None:
        """A step begins that torch does not report."""
        for checkpointer in self.checkpointers.values():
            checkpointer.step_begins(optimizer)

    def wait(self, timeout: float | None) -> None:
        """Wait until no save is in flight; raises their errors."""
        for checkpointer in self.checkpointers.values():
            checkpointer.wait(timeout)

    def settle(self) -> None:
        """Wait until no save is in flight; raises nothing."""
        for checkpointer in self.checkpointers.values():
            checkpointer.settle()

    def close(self) -> None:
        """Give back all Checkpointers."""
        self.settle()  # another user may keep the same Checkpointer
        roots, self.checkpointers = list(self.checkpointers), {}
        self._saved.clear()
        self._left.clear()
        with ExitStack() as stack:  # all of them, even if one raises
            for root in roots:
                stack.callback(_give_back, self._store_of(root), self)
