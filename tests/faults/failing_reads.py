"""Reads that fail for a while: calls for names that match a pattern raise an errno, after some successes and up to a number."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from checkpointd.store.posix.osdisk import OsDisk

READS: Final = ("read", "read_at", "read_parts", "children", "size", "sync_file")
FOR_EVER: Final = 1 << 30


@dataclass
class Fault:
    """`like` is searched in the path. The first `works` calls work, the next `fails` raise `number`, then they work again."""

    like: str
    number: int
    works: int = 0
    fails: int = 1
    calls: tuple[str, ...] = READS
    seen: int = 0

    @property
    def failed(self) -> int:
        """How many calls have failed."""
        return max(0, min(self.seen - self.works, self.fails))

    def check(self, call: str, path: str) -> None:
        """Raise where it is this call's turn."""
        if call not in self.calls or not re.search(self.like, path):
            return
        self.seen += 1
        if self.works < self.seen <= self.works + self.fails:
            raise OSError(self.number, os.strerror(self.number), path)


class FailingReads:
    """The faults of this process's file system, as its stores see it."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._is_installed = False

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def install(self, replace: Callable[[object, str, object], None]) -> None:
        """Stand between every store of this process and the disk, by `replace`, such as setattr."""
        if self._is_installed:
            return
        self._is_installed = True
        for name in READS:
            replace(OsDisk, name, self._failing(name, getattr(OsDisk, name)))

    def _failing(self, name: str, act: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(disk: OsDisk, path: str, *arguments: object, **options: object) -> Any:
            for fault in self.faults:
                fault.check(name, path)
            return await act(disk, path, *arguments, **options)

        return call
