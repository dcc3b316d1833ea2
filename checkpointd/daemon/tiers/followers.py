"""What the mirrors and the exports of a daemon have in common: each root is followed in a task of its own.

Invariant
  FOLLOWER-1  A follower that fails, hangs or ends disturbs nothing else in the daemon. Its stores are its own, so no save waits
      for its storage, and the daemon waits for it at most CLOSE_S when it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import ClassVar, Generic, Protocol, TypeVar

from checkpointd.daemon.process.logs import Subject, about
from checkpointd.errors import CheckpointdError
from checkpointd.export.progress import ExportProgress
from checkpointd.layout.manifest import ErrorReport
from checkpointd.mirror.news import MirrorProgress
from checkpointd.pipeline.workers import stopped
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore

log = logging.getLogger("checkpointd")

CLOSE_S = 10.0

Setting = TypeVar("Setting")
Progress = TypeVar("Progress", MirrorProgress, ExportProgress)


class RunningFollower(Protocol[Progress]):
    """What follows one root. `run` ends only with an error that `progress` and the log have, or if it is cancelled."""

    progress: Progress

    async def run(self) -> None: ...


class Followers(ABC, Generic[Setting, Progress]):
    """All followers of one kind in a daemon. `noun`, `doing` and `done`: the kind in the log, such as "an export"."""

    noun: ClassVar[str]
    doing: ClassVar[str]
    done: ClassVar[str]

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings
        self._progress: list[Progress] = [self._beginning(one) for one in settings]

    @property
    def progress(self) -> tuple[Progress, ...]:
        """How far each has come, in the order of the configuration."""
        return tuple(self._progress)

    @abstractmethod
    def _beginning(self, setting: Setting) -> Progress:
        """The progress before anything was done."""

    @abstractmethod
    def _places(self, setting: Setting) -> tuple[str, str]:
        """The root, and the place to which it is mirrored or exported."""

    @abstractmethod
    def _follower(self, setting: Setting, stores: AsyncExitStack) -> RunningFollower[Progress]:
        """The follower. `stores` closes its stores. Raises CheckpointdError."""

    async def run(self) -> None:
        """Follow all roots until cancelled."""
        tasks = [asyncio.create_task(self._follow(number)) for number in range(len(self._settings))]
        try:
            await asyncio.wait(tasks)  # unlike gather(), it ends at once when it is cancelled
        finally:
            if not await stopped(tasks, CLOSE_S):
                log.warning("%s has not ended within %g s; the daemon does not wait for it any longer", self.noun, CLOSE_S)

    async def _follow(self, number: int) -> None:
        setting = self._settings[number]
        root, _ = self._places(setting)
        about(Subject(root))
        async with AsyncExitStack() as stores:
            try:
                follower = self._follower(setting, stores)
            except CheckpointdError as error:
                self._ended(number, error)
                return
            self._progress[number] = follower.progress
            try:
                await follower.run()
            except CheckpointdError:
                return  # `progress` and the log have it; the others go on
            except Exception as error:
                log.exception("%s %s failed in an unforeseen way; please report it", self.doing, root)
                self._ended(number, CheckpointdError(f"{self.doing} failed: {error!r}"))

    def _ended(self, number: int, error: CheckpointdError) -> None:
        shown, (root, to) = self._progress[number], self._places(self._settings[number])
        shown.state, shown.problem = "over", ErrorReport.of(error)
        log.error("%s cannot be %s to %s: %s", root, self.done, to, error)


def opened(place: str, stores: AsyncExitStack, *, read_only: bool = False) -> Store:
    """The store at `place`, which `stores` closes. No symbolic link in its path is followed, as at the roots that the daemon
    serves.
    """
    store = open_store(place, read_only=read_only) if "://" in place else PosixStore(place, read_only=read_only, anchor="/")
    stores.push_async_callback(store.close)
    return store
