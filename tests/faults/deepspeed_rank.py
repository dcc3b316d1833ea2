"""One rank with a DeepSpeed engine that obeys commands, including commands that make its storage fail.

The methods of `Rank` are its commands, as in commanded_rank.py. rank_forker_process.py forks it, so no import here may start a
thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any

import torch._inductor.compile_fx  # noqa: F401  # DeepSpeed's first engine would

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.pipeline.write import persist
from checkpointd_client.integrations.deepspeed import attach
from tests.e2e import deepspeed_engines as engines
from tests.faults.commanded_rank import Records


class Rank:
    """Its public methods are the commands."""

    def __init__(self, records: Records) -> None:
        del records
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        self._engine: Any = None
        self._held = threading.Event()
        self._written = persist.write_shard

    def open(self, stage: int, seed: int, **options: Any) -> None:
        """A new engine, attached."""
        self.close()
        self._engine = engines.make(engines.Kind(stage), seed)
        self._plug = attach(self._engine, **options)

    def train(self, first: int, last: int) -> list[float]:
        return engines.train(self._engine, first, last)

    def save(self, root: str, tag: str | None = None) -> bool:
        return bool(self._engine.save_checkpoint(root, tag=tag, client_state={"tag": tag}))

    def validate_tags(self) -> None:
        """From here on, other tags on other ranks are an error, as DeepSpeed's `tag_validation` can have it."""
        self._engine._config.checkpoint_config["tag_validation"] = "FAIL"

    def end(self) -> list[str]:
        """How the last save ended, and why."""
        handle = self._engine.checkpoint_handle()
        try:
            handle.wait(timeout=60.0)
        except CheckpointdError as error:
            return [handle.phase, f"{error}"]
        return [handle.phase, ""]

    def load(self, root: str) -> list[Any]:
        """The tag that was loaded, as its client state has it, and the steps that were taken."""
        path, client = self._engine.load_checkpoint(root)
        return [path and client["tag"], self._engine.global_steps]

    # --- storage that fails ----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From here on a save writes its files, and then stands before its vote."""

        async def held(*arguments: Any) -> Any:
            written = await self._written(*arguments)
            self._held.set()
            await asyncio.Event().wait()
            return written

        self._write_by(held)

    def is_held(self) -> bool:
        return self._held.is_set()

    def fail(self) -> None:
        """From here on a save fails in the storage of this rank alone."""

        async def failing(*arguments: Any) -> Any:
            await self._written(*arguments)
            raise StoreError("the disk of one rank gave up")

        self._write_by(failing)

    def work_again(self) -> None:
        self._write_by(self._written)

    @staticmethod
    def _write_by(function: Any) -> None:
        setattr(persist, "write_shard", function)  # noqa: B010  # a mutation, which mypy need not understand

    # --- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            with suppress(CheckpointdError):  # of a save that was to fail
                self._plug.close()
            self._plug.detach()
            engine.destroy()
