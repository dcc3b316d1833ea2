"""The roots that one engine uses, each with its Checkpointer.

Invariants
  J1  A root that was only loaded from is this job's until its first save at another one: other jobs begin there then.
  J2  A root that is used again after it was left counts as loaded from only where nobody has begun there meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from checkpointd.errors import CheckpointdError
from checkpointd_client.checkpointer import Checkpointer
from checkpointd_client.integrations.deepspeed.sharing import borrow, give_back

log = logging.getLogger("checkpointd")


class Roots:
    """`store_of`: where the Checkpointer of a root stores. `options` are those of Checkpointer."""

    def __init__(self, store_of: Callable[[str], str], options: dict[str, Any]) -> None:
        self._store_of, self._options = store_of, options
        self.checkpointers: dict[str, Checkpointer] = {}
        self.went_on_from: str | None = None
        """A root that was loaded from by other means."""
        self._saved: set[str] = set()
        self._left: dict[str, int] = {}
        """The roots that were taken up and left, with the epoch that ended there."""

    def __contains__(self, root: str) -> bool:
        return root in self.checkpointers

    def checkpointer(self, root: str) -> Checkpointer:
        """That of a root, begun there if there is none."""
        found = self.checkpointers.get(root)
        if found is None:
            found = self.checkpointers[root] = borrow(self._store_of(root), self._options)
            if self._left.pop(root, None) == found.status().epoch - 1:
                found.take_up()
        if root == self.went_on_from:
            found.take_up()
        return found

    def to_save(self, root: str) -> Checkpointer:
        """That of a root that is saved at now; leaves those that were only loaded from (J1)."""
        found = self.checkpointer(root)
        self._saved.add(root)
        for other in self.checkpointers.keys() - self._saved:
            self._leave(other)
        return found

    def _leave(self, root: str) -> None:
        checkpointer = self.checkpointers.pop(root)
        if checkpointer.has_taken_up:
            self._left[root] = checkpointer.status().epoch
        try:
            give_back(self._store_of(root))
        except CheckpointdError as error:  # of another engine's save, whose handle has it
            log.error("giving the root %s back failed: %s", root, error)

    def wait(self, timeout: float | None) -> None:
        """Wait until no save is in flight; raises what became of them."""
        for checkpointer in self.checkpointers.values():
            checkpointer.wait(timeout)

    def settle(self) -> None:
        """Wait until no save is in flight, whatever becomes of it."""
        for checkpointer in self.checkpointers.values():
            checkpointer.settle()

    def close(self) -> None:
        """Give all of them back."""
        self.settle()  # another engine may go on with the same Checkpointer
        roots, self.checkpointers = list(self.checkpointers), {}
        self._saved.clear()
        self._left.clear()
        with ExitStack() as stack:  # each of them, whatever another raises
            for root in roots:
                stack.callback(give_back, self._store_of(root))
