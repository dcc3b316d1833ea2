"""Mutations of the POSIX store: disks that leave out, or turn round, one of its steps. Each must break a scenario."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import pytest

from checkpointd.store.posix.directories import Directories
from checkpointd.testing.crashpoints import Scenario, every_crash_point
from checkpointd.testing.simdisk import ProcessDisk
from checkpointd.testing.simfs import SimFile
from checkpointd.testing.storecrashes import (
    ROOT,
    View,
    delete,
    large_object,
    lost_put_if_absent,
    nothing_overwritten,
    one_winner,
    put,
    put_if_absent,
    put_if_match,
    replacement,
    settle,
    several_at_once,
    undurable,
)
from tests.simulation.named_seeds import NamedSeeds

SEEDS_MAX = 300
"""Seeds that are searched where none is named."""


class Forgetful(ProcessDisk):
    """A disk that says yes and does nothing where `forgets` says so: the store without that step."""

    @staticmethod
    def forgets(kind: str, path: str) -> bool:
        raise NotImplementedError

    async def sync_node(self, file: SimFile, path: str) -> None:
        if not self.forgets("fsync", path):
            await super().sync_node(file, path)

    async def sync_directory(self, path: str) -> None:
        if not self.forgets("sync-dir", path):
            await super().sync_directory(path)


def without(kind: str, path: Callable[[str], bool]) -> View:
    class Without(Forgetful):
        @staticmethod
        def forgets(of: str, where: str) -> bool:
            return of == kind and path(where)

    return Without


class LinksBeforeSync(ProcessDisk):
    """Gives the object its name first, and syncs its content afterwards."""

    async def sync_node(self, file: SimFile, path: str) -> None:
        if "/tmp/" not in path:
            await super().sync_node(file, path)

    async def link(self, source: str, target: str) -> None:
        await super().link(source, target)
        await super().sync_node(self.disk.fs.file(target), target)

    async def rename(self, source: str, target: str) -> None:
        await super().rename(source, target)
        await super().sync_node(self.disk.fs.file(target), target)


class LooksThenRenames(ProcessDisk):
    """Creates by looking whether the name is free and then renaming: not atomic."""

    async def link(self, source: str, target: str) -> None:
        try:
            await self.size(target)
        except FileNotFoundError:
            await self.rename(source, target)
        else:
            raise FileExistsError(target)


class NoLock:
    async def release(self) -> None:
        """There is nothing to release."""


class LocksNothing(ProcessDisk):
    async def locked(self, path: str) -> NoLock:  # type: ignore[override]  # the mutation
        return NoLock()


class ReplacesByUnlink(ProcessDisk):
    """Removes what has the name before it gives the name."""

    async def rename(self, source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            await self.unlink(target)
        await super().rename(source, target)


Attempt: TypeAlias = Callable[[View, int], object]
"""What is tried on a disk under a seed."""


def _crashes(make: Callable[[View], Scenario]) -> Attempt:
    return lambda view, seed: every_crash_point(make(view), [seed])


def _races(race: Callable[[int, View], None]) -> Attempt:
    return lambda view, seed: race(seed, view)


MUTATIONS: dict[str, tuple[View, Attempt]] = {
    "no fsync of the temporary file, created": (without("fsync", lambda p: "/tmp/" in p), _crashes(put_if_absent)),
    "no fsync of the temporary file, replaced": (without("fsync", lambda p: "/tmp/" in p), _crashes(put)),
    "no fsync of the temporary file, compared": (without("fsync", lambda p: "/tmp/" in p), _crashes(put_if_match)),
    "no fsync of a large object": (without("fsync", lambda p: p.endswith(".chunks")), _crashes(large_object)),
    "no fsync of a large replacement": (without("fsync", lambda p: "/tmp/" in p), _crashes(replacement)),
    "no sync of a replacement's directory": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(replacement)),
    "no sync of the object's directory, created": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(put_if_absent)),
    "no sync of the object's directory, replaced": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(put)),
    "no sync of the object's directory, compared": (without("sync-dir", lambda p: p == ROOT), _crashes(put_if_match)),
    "no sync of the object's directory, large": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(large_object)),
    "no sync of the object's directory, lost race": (
        without("sync-dir", lambda p: p.endswith("-0")),
        _crashes(lost_put_if_absent),
    ),
    "no sync of the object's directory, settled": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(settle)),
    "no sync of the object's directory, deleted": (without("sync-dir", lambda p: p.endswith("-0")), _crashes(delete)),
    "no fsync of the content, settled": (without("fsync", lambda p: p.endswith("large")), _crashes(settle)),
    "no fsync of the content, settled later": (without("fsync", lambda p: p.endswith("vote")), _crashes(undurable)),
    "no sync of the attempt's name": (without("sync-dir", lambda p: p.endswith("/tag")), _crashes(put_if_absent)),
    "no sync of the tag's name": (without("sync-dir", lambda p: p == ROOT), _crashes(put_if_absent)),
    "no sync of the root's name": (without("sync-dir", lambda p: p == "/root"), _crashes(put_if_absent)),
    "link before fsync": (LinksBeforeSync, _crashes(put_if_absent)),
    "rename before fsync": (LinksBeforeSync, _crashes(put)),
    "unlink and rename": (ReplacesByUnlink, _crashes(put)),
    "look, then rename": (LooksThenRenames, _races(one_winner)),
    "no lock": (LocksNothing, _races(nothing_overwritten)),
}


def caught(name: str, named_seeds: NamedSeeds, view: View, attempt: Attempt) -> None:
    def breaks(seed: int) -> str | None:
        try:
            attempt(view, seed)
        except AssertionError as error:
            return str(error) or "an assertion"
        return None

    named_seeds.caught(f"posix: {name}", breaks, range(SEEDS_MAX))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str, named_seeds: NamedSeeds) -> None:
    caught(name, named_seeds, *MUTATIONS[name])


def test_a_sync_that_began_before_a_change_does_not_count(monkeypatch: pytest.MonkeyPatch, named_seeds: NamedSeeds) -> None:
    """POSIX-4: calls that wait for a sync that runs already are not durable when they return."""
    sync = Directories.sync

    async def joins(self: Directories, directory: str) -> None:
        if directory in self._running:
            await asyncio.wait([self._running[directory]])
        else:
            await sync(self, directory)

    monkeypatch.setattr(Directories, "sync", joins)
    caught("joins a sync that runs", named_seeds, ProcessDisk, _crashes(several_at_once))
