"""Reads that fail for a while: calls for names that match a pattern raise an errno, after some successes and up to a number."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from checkpointd.config import LoadConfig
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd_client.settings import Options

READS: Final = ("read", "read_at", "read_parts", "children", "size", "sync_file")
FOR_EVER: Final = 1 << 30
_LOAD: Final = Options.load


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


def read_impatiently(put: Callable[[object, str, object], None], seconds: float | None) -> None:
    """Have loads try for so long to read what cannot be read, by `put`, such as setattr; None: as long as ranks wait for each
    other, as ever. Either way, what can be read may take its time.
    """

    def load(options: Options) -> LoadConfig:
        return replace(_LOAD.__get__(options), retry_s=options.commit_timeout_s if seconds is None else seconds)

    put(Options, "load", property(load))
