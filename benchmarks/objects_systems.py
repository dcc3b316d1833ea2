"""The systems of `objects.py`: ways to save a state into a bucket and to load it, behind the calls of `systems.py`.

The environment has the server's address and the keys. Every system runs with its defaults, but for what its class says.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.state import State
from benchmarks.systems import Saving, System, nothing

PART_BYTES, AT_ONCE = 8 << 20, 8
"""Those of checkpointd: `part_bytes_for` of a small object, and PARTS_AT_ONCE."""


class ObjectSystem(System):
    """A system that saves `state` below `url`, as one rank. `folder` is for what it needs on this machine."""

    ours_to_sync = "nothing"

    def __init__(self, url: str, folder: Path, state: State, *, fresh: bool) -> None:
        self.url = url
        super().__init__(folder, state, 0, 1, fresh=fresh)

    def place(self, step: int) -> str:
        """Where one save lies."""
        return f"{self.url}/global_step{step}"

    def digests(self) -> dict[str, str]:
        """What a load must give back."""
        return self.state.digests()

    def requests(self) -> dict[str, int]:
        """The requests that the system has counted itself so far; empty if it counts none."""
        return {}


class Obstore(ObjectSystem):
    """The client alone, the limit: one buffer with as many bytes as the state, in the parts and as many at once as checkpointd.

    A load keeps the answers, and copies them nowhere.
    """

    def open(self) -> None:
        """Make the client as checkpointd does, and the buffer of the state's bytes."""
        from obstore.store import S3Store

        bucket = self.url.removeprefix("s3://").partition("/")[0]
        self._client = S3Store(
            bucket,
            config={"endpoint": os.environ["AWS_ENDPOINT_URL"], "unsigned_payload": True},
            client_options={"allow_http": True, "pool_max_idle_per_host": "64"},
        )
        self._bytes = self._joined() if self.fresh else None
        self._answers: list[Any] = []
        self._size = sum(tensor.nbytes for _, tensor in self.state.tensors())

    def _joined(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        import torch

        return np.concatenate([np.asarray(one.reshape(-1).view(torch.uint8)) for _, one in self.state.tensors()])

    def save(self, step: int) -> Saving:
        """One multipart upload."""
        asyncio.run(self._put(f"global_step{step}"))
        return Saving(nothing, nothing)

    async def _put(self, key: str) -> None:
        import obstore

        await obstore.put_async(
            self._client, key, self._parts(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=AT_ONCE
        )

    async def _parts(self) -> AsyncIterator[Any]:
        assert self._bytes is not None
        for at in range(0, self._bytes.size, PART_BYTES):
            yield self._bytes[at : at + PART_BYTES].data

    def load(self, step: int) -> None:
        """Ranges of the object, several at once."""
        asyncio.run(self._get(f"global_step{step}"))

    async def _get(self, key: str) -> None:
        """Returns nothing: asyncio.run makes a text of what its task returns, which takes seconds for that many bytes."""
        import obstore

        free = asyncio.Semaphore(AT_ONCE)

        async def one(at: int) -> Any:
            async with free:
                nbytes = min(PART_BYTES, self._size - at)
                return await obstore.get_range_async(self._client, key, start=at, length=nbytes)

        self._answers = await asyncio.gather(*(one(at) for at in range(0, self._size, PART_BYTES)))

    def digests(self) -> dict[str, str]:
        """One digest of all the bytes."""
        import hashlib

        digest = hashlib.sha256()
        for one in [self._bytes] if self._bytes is not None else self._answers:
            digest.update(memoryview(one))
        return {"all": digest.hexdigest()}


class Checkpointd(ObjectSystem):
    """checkpointd in process, storing every byte as it is, and reading nothing back while the clock runs."""

    options: Mapping[str, Any] = MappingProxyType({"compression": "none", "read_back": False})

    def open(self) -> None:
        """Make the Checkpointer; a job begins by asking it for the newest checkpoint, of which there is none."""
        client = importlib.import_module("checkpointd_client")
        self._checkpointer: Any = client.Checkpointer(self.url, **self.options)
        if self.fresh and self._checkpointer.load(self._objects()) is not None:
            raise RuntimeError(f"{self.url} is new, and yet checkpointd found a checkpoint there")

    def _objects(self) -> dict[str, Any]:
        return {"model": self.state.model, "master": self.state.master, "optimizer": self.state.optimizer}

    def save(self, step: int) -> Saving:
        """Call save; done is committed."""
        handle = self._checkpointer.save(step, self._objects())
        return Saving(lambda: handle.wait(until="staged"), lambda: handle.wait(until="committed"))

    def load(self, step: int) -> None:
        """Load into the modules and the optimizer, in place."""
        if self._checkpointer.load(self._objects(), tag=f"global_step{step}") is None:
            raise RuntimeError(f"checkpointd found no global_step{step} at {self.url}")

    def requests(self) -> dict[str, int]:
        """Those of the status."""
        found = self._checkpointer.status().requests
        return {} if found is None else dict(found.by_kind())

    def close(self) -> None:
        """Close the Checkpointer."""
        self._checkpointer.close()


class CheckpointdDefaults(Checkpointd):
    """checkpointd with its defaults: it chooses compression by itself, and reads checkpoints back after the save."""

    options = MappingProxyType({})


class CheckpointdSidecar(Checkpointd):
    """The same as `Checkpointd` with a sidecar, which holds no snapshot in memory, so that loads read the bucket."""

    def open(self) -> None:
        """Start the sidecar, and connect to it."""
        socket = self.root / "sidecar" / "socket"
        command = [sys.executable, "-m", "checkpointd", "serve", "--socket", str(socket), "--root", self.url]
        command += ["--held-mib", "0", "--uid", str(os.geteuid())]  # root has to be named
        self._sidecar = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._sidecar.stdout is not None
        if not self._sidecar.stdout.readline().startswith("ready at"):
            raise RuntimeError("the sidecar did not start")
        self.options = {**type(self).options, "sidecar": str(socket), "on_sidecar_loss": "raise"}
        super().open()

    def finish(self) -> None:
        """End the sidecar."""
        self._sidecar.terminate()
        self._sidecar.communicate()


class S3TorchConnector(ObjectSystem):
    """s3torchconnector's writer and reader for DCP, and `dcp.save`, which blocks. Loads read into the tensors, in place."""

    def open(self) -> None:
        """The settings that a server other than Amazon's needs."""
        package = importlib.import_module("s3torchconnector")
        self._dcp = importlib.import_module("s3torchconnector.dcp")
        self._region = os.environ["AWS_REGION"]
        self._config = package.S3ClientConfig(force_path_style=True)

    def _writer(self, step: int) -> Any:
        return self._dcp.S3StorageWriter(self._region, self.place(step), s3client_config=self._config)

    def _reader(self, step: int) -> Any:
        return self._dcp.S3StorageReader(self._region, self.place(step), s3client_config=self._config)

    def save(self, step: int) -> Saving:
        """Call dcp.save."""
        dcp_save(self.tree, storage_writer=self._writer(step))
        return Saving(nothing, nothing)

    def load(self, step: int) -> None:
        """Call dcp.load, which copies into the tensors that it is given."""
        dcp_load(self.tree, storage_reader=self._reader(step))


class S3TorchConnectorAsync(S3TorchConnector):
    """The same with `dcp.async_save`, which copies the state in the call and writes on a thread."""

    def save(self, step: int) -> Saving:
        """Call dcp.async_save."""
        response = async_save(self.tree, storage_writer=self._writer(step), process_group=dist.group.WORLD)
        if isinstance(response, AsyncSaveResponse):
            return Saving(response.staging_completion.result, response.upload_completion.result)
        return Saving(nothing, response.result)


class S3fs(S3TorchConnector):
    """DCP's FsspecWriter and FsspecReader over s3fs. It is told not to sync files, which would sync the whole machine."""

    def open(self) -> None:
        """Nothing to set."""
        self._fsspec = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")

    def _writer(self, step: int) -> Any:
        return self._fsspec.FsspecWriter(self.place(step), sync_files=False)

    def _reader(self, step: int) -> Any:
        return self._fsspec.FsspecReader(self.place(step))


SYSTEMS: Mapping[str, type[ObjectSystem]] = {
    "obstore": Obstore,
    "checkpointd": Checkpointd,
    "checkpointd-sidecar": CheckpointdSidecar,
    "checkpointd-defaults": CheckpointdDefaults,
    "s3torchconnector": S3TorchConnector,
    "s3torchconnector-async": S3TorchConnectorAsync,
    "s3fs": S3fs,
}
