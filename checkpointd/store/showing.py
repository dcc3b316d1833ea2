"""Shows objects as plain files beside the store: a capability of stores on a file system.

Other stores need not implement it: `plain_files_of` returns None for them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from checkpointd.store.base import Store
from checkpointd.store.posix.plain import PlainFiles


@runtime_checkable
class SupportsPlainFiles(Protocol):
    """A store that can have directories of plain files beside it."""

    @property
    def plain_files(self) -> PlainFiles | None:
        """The directories beside this root; None if the root has another name than `.checkpointd` (see `plain.py`)."""
        ...


def plain_files_of(store: Store) -> PlainFiles | None:
    """The directories beside any store; None if it cannot show files."""
    return store.plain_files if isinstance(store, SupportsPlainFiles) else None
