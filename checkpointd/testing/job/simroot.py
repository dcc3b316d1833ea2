"""The root of a simulated job, on a disk or in a bucket: the stores of its processes, and what the ledger sees of it.

A ledger speaks of keys, as the store does. It belongs to the test, so it sees the storage itself, without a call of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from checkpointd.layout.keys import holds_bytes
from checkpointd.store.base import Store
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.simbucket import FarClient, SimBucket, SimClient
from checkpointd.testing.simdisk import FarDisk, ProcessDisk, SimDisk
from checkpointd.testing.simfs import Node, SimDirectory, SimFile
from checkpointd.testing.simloop import Process
from checkpointd.testing.simstorage import Effect, SimStorage

ROOT = "/root/run"

What: TypeAlias = Literal["made", "replaced", "removed", "begun", "written", "synced", "given up"]


class ObjectChange(NamedTuple):
    """What an effect did to the object `key`.

    "made": it appeared, whole. "replaced": its content was, or it appeared. "begun": it appeared, and is still to be written.
    "written": it was written in place. "synced": the names in the directory `key` are durable. "given up": its upload was
    aborted, and not by the process that had begun it.
    """

    process: str
    what: What
    key: str


class SimRoot(Protocol):
    """The root of one simulated job."""

    @property
    def storage(self) -> SimStorage: ...

    @property
    def is_durable_at_once(self) -> bool:
        """Whether no effect is ever undone, so that nothing is synced."""
        ...

    def store(self, name: str, *, far: bool = False, read_only: bool = False) -> tuple[Process, Store]:
        """A new process, and its store. With `far`, so much happens between two of its calls."""
        ...

    def change(self, effect: Effect) -> ObjectChange | None:
        """What `effect`, which has succeeded, did to an object; None if nothing that a ledger checks."""
        ...

    def visible(self, key: str) -> bytes | None:
        """The content of an object as a reader sees it now."""
        ...

    def settled(self, key: str) -> bytes | None:
        """The durable content of an object that is visible, whether its name is durable or not."""
        ...

    def durable(self, key: str) -> bytes | None:
        """The content of an object of which name and content are durable."""
        ...

    def names(self, prefix: str) -> Collection[str]:
        """The names of the children of `prefix` that are visible."""
        ...

    def durable_names(self, prefix: str) -> Collection[str]:
        """Those that are durable."""
        ...

    def unfinished(self) -> Collection[str]:
        """The keys of the unfinished uploads."""
        ...


_ON_DISK: Final[dict[str, What]] = {
    "link": "made",
    "rename": "replaced",
    "unlink": "removed",
    "create": "begun",
    "write": "written",
    "truncate": "written",
    "sync-dir": "synced",
}


class DiskRoot:
    """The root of a store on a simulated disk. `is_alive` tells its writers who is at work; `view` is their disk."""

    is_durable_at_once = False

    def __init__(self, disk: SimDisk, is_alive: Callable[[str], bool], view: type[ProcessDisk] = ProcessDisk) -> None:
        self.storage = disk
        self._is_alive, self._view = is_alive, view

    def store(self, name: str, *, far: bool = False, read_only: bool = False) -> tuple[Process, Store]:
        view = self.storage.process(name, FarDisk if far else self._view)
        return view.process, PosixStore(ROOT, view, read_only=read_only, writer=name, is_alive=self._is_alive)

    def change(self, effect: Effect) -> ObjectChange | None:
        what = _ON_DISK.get(effect.kind)
        path = effect.path.rpartition(" -> ")[2]
        inside = path == ROOT or path.startswith(f"{ROOT}/")
        return ObjectChange(effect.process, what, path[len(ROOT) + 1 :]) if what is not None and inside else None

    def visible(self, key: str) -> bytes | None:
        file = self._file(key)
        return None if file is None else bytes(file.data)

    def settled(self, key: str) -> bytes | None:
        file = self._file(key)
        return None if file is None else file.durable

    def durable(self, key: str) -> bytes | None:
        node = self.storage.fs.durable_node(_path(key))
        return node.durable if isinstance(node, SimFile) else None

    def names(self, prefix: str) -> Collection[str]:
        node = self._node(prefix)
        return node.live.keys() if isinstance(node, SimDirectory) else ()

    def durable_names(self, prefix: str) -> Collection[str]:
        node = self.storage.fs.durable_node(_path(prefix))
        return node.durable.keys() if isinstance(node, SimDirectory) else ()

    def unfinished(self) -> Collection[str]:
        return ()

    def _file(self, key: str) -> SimFile | None:
        node = self._node(key)
        return node if isinstance(node, SimFile) else None

    def _node(self, key: str) -> Node | None:
        try:
            return self.storage.fs.node(_path(key))
        except OSError:
            return None


def _path(key: str) -> str:
    return f"{ROOT}/{key}" if key else ROOT


class BucketRoot:
    """The root of a store in a simulated bucket. `client` is the class of its processes' clients."""

    is_durable_at_once = True

    def __init__(self, bucket: SimBucket, client: type[SimClient] = SimClient) -> None:
        self.storage = bucket
        self._client = client
        self._known: dict[str, bytes] = {}
        """The objects that were there after the last effect."""
        self._writers: dict[str, str] = {}
        """The process that began the upload of each large object."""

    def store(self, name: str, *, far: bool = False, read_only: bool = False) -> tuple[Process, Store]:
        client = self.storage.process(name, FarClient if far else self._client)
        return client.process, ObjectStore(client, read_only=read_only)

    def change(self, effect: Effect) -> ObjectChange | None:
        key, before, now = effect.path, self._known.get(effect.path), self.visible(effect.path)
        if effect.kind == "begin":
            self._writers[key] = effect.process
        if effect.kind == "abort" and effect.process != self._writers[key]:
            return ObjectChange(effect.process, "given up", key)
        if effect.kind in ("begin", "part", "abort"):
            return None
        if now is None:
            self._known.pop(key, None)
            return None if before is None else ObjectChange(effect.process, "removed", key)
        self._known[key] = now
        if now == before:
            return None  # as by the second try of a put
        # A small object that is put without a condition may be there or not, as on a disk; a large one is new.
        may_be_there = before is not None or (effect.kind == "put" and not holds_bytes(key.rpartition("/")[2]))
        return ObjectChange(effect.process, "replaced" if may_be_there else "made", key)

    def visible(self, key: str) -> bytes | None:
        found = self.storage.state.objects.get(key)
        return None if found is None else found.data

    settled = durable = visible

    def names(self, prefix: str) -> Collection[str]:
        entries, _ = self.storage.state.page(prefix, "", len(self.storage.state.objects) + 1)
        return [entry.name for entry in entries]

    durable_names = names

    def unfinished(self) -> Collection[str]:
        return [upload.key for upload in self.storage.state.uploads.values()]
