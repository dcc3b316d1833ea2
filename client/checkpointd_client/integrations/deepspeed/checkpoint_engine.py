"""A checkpoint engine for DeepSpeed: it takes the files that the DeepSpeed engine would have written.

Invariants
  ENGINE-1  Between `collect` and `collected` nothing is written: `save` keeps its arguments, and the adapter snapshots them
      before save_checkpoint returns.
  ENGINE-2  At other times (save_16bit_model, which one rank calls alone) a file is written at once, whole or not at all.
  ENGINE-3  Only committed files are loaded: a load waits for the saves in flight. Contents that were already read and verified
      are not read again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from checkpointd.system_errors import in_words
from checkpointd_client.restore.verified import VerifiedFile


class CheckpointdEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's checkpoint engine, for checkpointd. It calls `settle` before it reads."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self.name = "checkpointd"
        self._settle = settle
        self._directory: str | None = None
        self._files: dict[str, Any] = {}
        self._fault: str | None = None
        self._held: dict[str, Any] = {}

    # --- collecting --------------------------------------------------------------------------------------------

    def collect(self, directory: str) -> None:
        """From here on, keep the files that are saved in `directory`."""
        self._directory, self._files, self._fault = os.path.abspath(directory), {}, None

    def collected(self) -> tuple[dict[str, Any], str | None]:
        """The contents of the files that were saved since, by their names, and an error on the way."""
        files, self._directory, self._files = self._files, None, {}
        return files, self._fault

    def _name_in(self, path: str) -> str | None:
        folder, name = os.path.split(os.path.abspath(path))
        return name if self._directory is not None and folder == self._directory else None

    @contextmanager
    def holding(self, contents: dict[str, Any]) -> Iterator[None]:
        """Within the block, `load` returns `contents`, by path, with tensors on the CPU."""
        self._held = contents
        try:
            yield
        finally:
            self._held = {}

    # --- what DeepSpeed calls ----------------------------------------------------------------------------------

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: the adapter begins the save."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a durable directory. That of a tag is not made: it appears with all of its files.

        In a save it raises nothing: only rank 0 calls it, and the other ranks wait for rank 0 in a barrier.
        """
        if os.path.abspath(path) == self._directory:
            return
        try:
            os.makedirs(path, exist_ok=exist_ok)
            sync_directory(os.path.dirname(os.path.abspath(path)))
        except OSError as error:
            if self._directory is None:
                raise
            self._fault = f"the directory {path} cannot be made: {in_words(error, 'file', os.path.dirname(path))}"

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the content, or write it at once (ENGINE-2)."""
        name = self._name_in(path)
        if name is None:
            write_whole(state_dict, path)
        else:
            self._files[name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of DeepSpeed's with torch.load; it may hold any object."""
        self._settle()
        held = self._held.get(os.path.abspath(path))
        if held is not None and _is_host(map_location):
            return held
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Does nothing: the adapter commits."""
        return True

    def is_decoupled(self) -> bool:
        """True, so that DeepSpeed does not write `latest`."""
        return True

    def get_commit_info(self) -> None:
        """None, so that DeepSpeed's step() does not wait."""

    def cleanup(self) -> None:
        """Called when the engine is destroyed: wait for the saves in flight."""
        with suppress(Exception):  # the handle and the log report it
            self._settle()


def unpickled(file: VerifiedFile) -> Any:
    """The content of a file of DeepSpeed's, with its tensors on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=False)  # type: ignore[arg-type]  # a file, as io has them


def _is_host(map_location: Any) -> bool:
    """Whether tensors are wanted on the CPU. All functions that DeepSpeed passes as `map_location` keep storages on the CPU."""
    return callable(map_location) or (isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cpu")


def write_whole(content: Any, path: str) -> None:
    """torch.save, durable; replaces an existing file in one step."""
    directory = os.path.dirname(os.path.abspath(path))
    temporary = os.path.join(directory, f".{secrets.token_hex(8)}.writing")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(directory)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
