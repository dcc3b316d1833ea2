"""The systems under measurement, each behind the same four calls: save, make durable, load, close.

Every system saves the same tensors: the peers get them as nested dictionaries of state, checkpointd gets the
modules and the optimizer that own them. An adapter uses the public interface of its system in the way its own
documentation shows, and says in `ours_to_sync` what the system leaves for us to fsync.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks import disk
from benchmarks.report import OURS, PEERS
from benchmarks.state import State

Tree = dict[str, Any]


@dataclass(frozen=True)
class Saving:
    """One save under way: two waits, which return at once where nothing is left to wait for."""

    wait_safe: Callable[[], object]
    wait_done: Callable[[], object]
    reported: Callable[[], dict[str, float]] = dict


def nothing() -> None:
    """A wait for what is over."""
    return


class System(ABC):
    """One way to save and load `state`, under `root`, on this rank of `ranks`."""

    ours_to_sync: ClassVar[str]
    """What our fsync adds before a save is durable: `files`, `directories` or `nothing`."""
    reshards: ClassVar[bool] = True
    """Whether FSDP2 state can be loaded on another number of ranks."""

    def __init__(self, root: Path, state: State, rank: int, ranks: int, *, fresh: bool = True) -> None:
        self.root, self.state, self.tree, self.rank, self.ranks = root, state, state.tree, rank, ranks
        self.fresh = fresh
        self.open()
        self.fresh = False

    def open(self) -> None:
        """Make what saves or loads need. Called again between the last save and the first load."""
        return

    @abstractmethod
    def save(self, step: int) -> Saving:
        """Start a save; how long this blocks is the call."""

    @abstractmethod
    def load(self, step: int) -> None:
        """Load a save of this job into the tensors of the tree, in place."""

    def path(self, step: int) -> Path:
        """The folder of one save."""
        return self.root / f"global_step{step}"

    def make_durable(self, step: int) -> None:
        """Our fsync of what the system leaves out."""
        if self.ours_to_sync == "files":
            disk.fsync_tree(self.path(step))
        elif self.ours_to_sync == "directories":
            disk.fsync_directories(self.path(step))

    def close(self) -> None:
        """Let go of threads, processes and memory."""
        return

    def finish(self) -> None:
        """After the last close: let go of what `open` does not make again."""
        return


class TorchSave(System):
    """torch.save of one file per rank, blocking; loaded through mmap and copied into the tensors."""

    ours_to_sync = "files"

    def _file(self, step: int) -> Path:
        return self.path(step) / f"rank{self.rank}.pt"

    def save(self, step: int) -> Saving:
        """Write the file; returns when torch.save has."""
        self.path(step).mkdir(exist_ok=True)
        torch.save(self.tree, self._file(step))
        return Saving(nothing, nothing)

    def load(self, step: int) -> None:
        """Map the file and copy it into the tree."""
        _copy_into(self.tree, torch.load(self._file(step), mmap=True, weights_only=True))


def _copy_into(tree: Tree, loaded: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            value.copy_(loaded[key])
        else:
            _copy_into(value, loaded[key])


class Dcp(System):
    """torch.distributed.checkpoint: async_save and load. fsyncs its files, not the directory."""

    ours_to_sync = "directories"
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    staging: ClassVar[StagingOptions | None] = None
    """None: the stager that async_save makes anew at each call. Otherwise one stager, reused."""

    def open(self) -> None:
        """Its own process group, as its documentation asks, and the stager where one is reused."""
        self._group = dist.new_group(backend="gloo")
        # It takes tensors of one name on several ranks for replicas, and would save one rank's alone.
        self._tree = self.tree if self.ranks == 1 else {f"rank{self.rank}": self.tree}
        self._stager = None if self.staging is None else DefaultStager(self.staging)

    def save(self, step: int) -> Saving:
        """Call async_save."""
        response = async_save(
            self._tree,
            checkpoint_id=self.path(step),
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            return Saving(response.staging_completion.result, response.upload_completion.result)
        return Saving(nothing, response.result)

    def load(self, step: int) -> None:
        """Call dcp.load, which copies into the tensors that it is given."""
        dcp_load(self._tree, checkpoint_id=self.path(step), process_group=self._group)

    def close(self) -> None:
        """Close the reused stager; the writer process has no public way to end before its trainer."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _host(*, shared: bool, in_background: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared,
        use_async_staging=in_background,
        use_non_blocking_copy=False,
    )


class DcpThread(Dcp):
    """async_save's default: a writer thread, and a fresh copy of the state at each save."""


class DcpThreadReused(Dcp):
    """A writer thread, and one stager whose buffers are reused."""

    staging = _host(shared=False, in_background=False)


class DcpThreadBackground(Dcp):
    """A writer thread, and one reused stager that copies in a thread of its own."""

    staging = _host(shared=False, in_background=True)


class DcpProcess(Dcp):
    """A writer process, and async_save's default stager."""

    kind = AsyncCheckpointerType.PROCESS


class DcpProcessReused(Dcp):
    """A writer process, and one stager whose buffers are reused and shared with it."""

    kind = AsyncCheckpointerType.PROCESS
    staging = _host(shared=True, in_background=False)


class TorchCheckpointing(System):
    """torch_checkpointing.CheckpointManager: a writer process, no fsync at all.

    Its defaults but one: it opens files with O_DIRECT and then writes without aligning, which ext4 refuses with
    EINVAL at the first save, so direct I/O is switched off in the way that its documentation gives.
    """

    ours_to_sync = "files"
    prewarmed: ClassVar[bool] = False

    def open(self) -> None:
        """Make the manager, which starts its writer process in the background."""
        package = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config.with_async_save()
        config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = package.CheckpointManager(config)
        if self.prewarmed:
            self._manager.prewarm_staging(self.tree)

    def save(self, step: int) -> Saving:
        """Call the manager; its lock is what an optimizer step must take, so taking it is being safe."""
        future = self._manager.save(str(self.path(step)), self.tree)
        return Saving(self._pass_lock, future.result)

    def _pass_lock(self) -> None:
        with self._manager.lock():
            pass

    def make_durable(self, step: int) -> None:
        """Our fsync, once rank 0 has moved the folder to its final name."""
        while not self.path(step).exists():
            time.sleep(0.001)  # the others learn of the barrier, not of the rename that follows it
        super().make_durable(step)

    def load(self, step: int) -> None:
        """Load into the tree, in place."""
        self._manager.load(str(self.path(step)), into=self.tree, strict=True)

    def close(self) -> None:
        """End the writer process, and let go of the staging buffers."""
        self._manager.close()
        self._manager = None


class TorchCheckpointingPrewarmed(TorchCheckpointing):
    """The same after `prewarm_staging`, which takes the allocation out of the first save."""

    prewarmed = True


class Checkpointd(System):
    """checkpointd, durable and committed across all ranks by itself."""

    ours_to_sync = "nothing"
    compression: ClassVar[str] = "auto"
    options: Mapping[str, str] = MappingProxyType({})

    def open(self) -> None:
        """Make the Checkpointer; a job begins by asking it for the newest checkpoint, of which there is none."""
        client = importlib.import_module("checkpointd_client")
        self._checkpointer: Any = client.Checkpointer(str(self.root), compression=self.compression, **self.options)
        if self.fresh and self._checkpointer.load(self._objects()) is not None:
            raise RuntimeError(f"{self.root} is new, and yet checkpointd found a checkpoint there")

    def _objects(self) -> dict[str, Any]:
        state = self.state
        return {"model": state.model, "master": state.master, "optimizer": state.optimizer}

    def save(self, step: int) -> Saving:
        """Call save; done is committed."""
        handle = self._checkpointer.save(step, self._objects())
        return Saving(
            lambda: handle.wait(until="staged"),
            lambda: handle.wait(until="committed"),
            lambda: {name: float(value) for name, value in _timings(handle).items() if value is not None},
        )

    def load(self, step: int) -> None:
        """Load into the modules and the optimizer, in place."""
        if self._checkpointer.load(self._objects(), tag=f"global_step{step}") is None:
            raise RuntimeError(f"checkpointd found no global_step{step} under {self.root}")

    def close(self) -> None:
        """Close the Checkpointer."""
        self._checkpointer.close()
        self._checkpointer = None


def _timings(handle: Any) -> dict[str, Any]:
    names = ("call_s", "safe_s", "staged_s", "durable_s", "committed_s")
    return {name: getattr(handle.timings, name, None) for name in names}


class CheckpointdRaw(Checkpointd):
    """checkpointd that stores every chunk as it is."""

    compression = "none"


class CheckpointdEager(Checkpointd):
    """checkpointd that copies everything in the call."""

    options = MappingProxyType({"staging": "eager"})


class CheckpointdPrepared(CheckpointdEager):
    """The same after `prepare`, which takes the allocation out of the first save."""

    def open(self) -> None:
        """Make the Checkpointer, and the arena before the first save."""
        super().open()
        self._checkpointer.prepare(self._objects())


class CheckpointdSidecar(Checkpointd):
    """checkpointd with a sidecar: rank 0 starts one daemon for all ranks, as a service manager would have before them."""

    _daemon: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start the daemon at the first time, and connect to it."""
        socket = self.root.with_name(f"{self.root.name}-sidecar") / "socket"
        if self.rank == 0 and self._daemon is None:
            command = [sys.executable, "-m", "checkpointd", "serve", "--socket", str(socket), "--root", str(self.root)]
            command += ["--uid", str(os.geteuid())]  # root has to be named
            self._daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._daemon.stdout is not None
            self._daemon.stdout.readline()  # "ready at ..."
        dist.barrier()
        self.options = {"sidecar": str(socket), "on_sidecar_loss": "raise"}
        super().open()

    def finish(self) -> None:
        """End the daemon."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.communicate()


_ADAPTERS: tuple[type[System], ...] = (
    TorchSave,
    DcpThread,
    DcpThreadReused,
    DcpThreadBackground,
    DcpProcess,
    DcpProcessReused,
    TorchCheckpointing,
    TorchCheckpointingPrewarmed,
    Checkpointd,
    CheckpointdRaw,
    CheckpointdSidecar,
)
SYSTEMS: dict[str, type[System]] = {
    **dict(zip((*PEERS, *OURS), _ADAPTERS, strict=True)),
    "checkpointd-eager": CheckpointdEager,
    "checkpointd-prepared": CheckpointdPrepared,
}


def installed() -> bool:
    """Whether checkpointd can be measured here."""
    return importlib.util.find_spec("checkpointd_client") is not None


def is_available(system: str) -> bool:
    """Whether this release of checkpointd has what `system` uses."""
    prepares = issubclass(SYSTEMS[system], CheckpointdPrepared)
    return not prepares or hasattr(importlib.import_module("checkpointd_client").Checkpointer, "prepare")
