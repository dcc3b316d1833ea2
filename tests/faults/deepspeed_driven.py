"""One rank with a DeepSpeed engine that does what it is told, and whose storage fails when it is told to. See driven.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.manifest import Index
from checkpointd.layout.tree import Files
from checkpointd.pipeline import save
from checkpointd.pipeline.chunks import Persist
from checkpointd.store.plain import PlainFiles
from tests.faults.driven import Records, serve


class Rank:
    """Its public methods are the commands."""

    def __init__(self, records: Records) -> None:
        del records
        self._engine: Any = None
        # Not above: DeepSpeed prints while it is imported, and that must not stand between the answers.
        from tests.e2e import deepspeed_engines

        self._engines = deepspeed_engines
        self._held = threading.Event()
        self._write = save.write_files

    def open(self, stage: int, seed: int, **options: Any) -> None:
        """A new engine, attached."""
        self.close()
        from checkpointd_client.integrations.deepspeed import attach

        self._engine = self._engines.make(self._engines.Kind(stage), seed)
        self._plug = attach(self._engine, **options)

    def train(self, first: int, last: int) -> list[float]:
        return self._engines.train(self._engine, first, last)

    def save(self, root: str, tag: str) -> bool:
        return bool(self._engine.save_checkpoint(root, tag=tag, client_state={"tag": tag}))

    def end(self) -> list[str]:
        """How the last save ended, and why."""
        handle = self._engine.checkpoint_handle()
        try:
            handle.wait(60.0)
        except CheckpointdError as error:
            return [handle.phase, f"{error} {error.__cause__ or ''}"]
        return [handle.phase, ""]

    def load(self, root: str) -> list[Any]:
        """The directory that was loaded, and the steps that were taken."""
        path, _ = self._engine.load_checkpoint(root)
        return [os.path.dirname(path), self._engine.global_steps]

    # --- storage that fails ----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From here on a save writes its files, and then stands before its vote."""

        async def held(job: Persist, files: Files) -> Index:
            index = await self._write(job, files)
            self._held.set()
            await asyncio.Event().wait()
            return index

        save.write_files = held

    def is_held(self) -> bool:
        return self._held.is_set()

    def fail(self) -> None:
        """From here on a save fails in the storage of this rank alone."""

        async def failing(job: Persist, files: Files) -> Index:
            await self._write(job, files)
            raise StoreError("the disk of one rank gave up")

        save.write_files = failing

    def work_again(self) -> None:
        save.write_files = self._write

    def die_when(self, call: str) -> None:
        """SIGKILL in the middle of the commit: where files are to be shown ("show"), or `latest` to be moved ("point")."""

        async def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(PlainFiles, call, die)

    # --- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            with suppress(CheckpointdError):  # of a save that was to fail
                self._plug.close()
            self._plug.detach()
            engine.destroy()

    def leave(self) -> None:
        """End the process as a script ends, with nothing closed."""
        sys.exit(0)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    serve(Rank)
