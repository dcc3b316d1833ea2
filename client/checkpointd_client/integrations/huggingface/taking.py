"""Takes the files with tensors that the libraries write into a directory, and makes them files of the save.

Within `Taking.active`, torch.save, safetensors and DCP's file writer write no such files in that directory. The save copies
the tensors in the background, like those of any state. The libraries write all other files themselves.

Invariants
  TAKING-1  A file is taken as it is at the moment of the call, except for the bytes of its tensors. If one of these changes
      before the save begins, the save is refused.
  TAKING-2  What cannot be taken is written by the library itself, so no file is ever missing.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from checkpointd.errors import FormatError, StateError
from checkpointd.layout.files import check_names
from checkpointd_client.capture.torch_files import CapturedFile, capture_file
from checkpointd_client.integrations.huggingface.dcp_files import capture_items
from checkpointd_client.integrations.huggingface.filling import current
from checkpointd_client.integrations.huggingface.replacing import instead
from checkpointd_client.integrations.huggingface.safetensors_files import capture_safetensors

Function = Callable[..., Any]


class Taking:
    """The files that are taken of those written in `folder`. `stepped`: the addresses of storages that only optimizer steps
    change.
    """

    def __init__(self, folder: str, stepped: set[int]) -> None:
        self._folder, self._stepped = folder, stepped
        self._captured: dict[str, CapturedFile] = {}
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def files(self) -> dict[str, CapturedFile]:
        """The files by name, relative to the folder. StateError if a tensor has changed since (TAKING-1)."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise StateError(
                    f"{name} cannot be saved: a tensor changed in place after the call that writes it and before the save "
                    "began. A callback that swaps weights for an average does this. Write a clone, or swap back after the save"
                )
        return self._captured

    @contextmanager
    def active(self) -> Iterator[None]:
        """Take files within the block."""
        with ExitStack() as stack:
            stack.enter_context(instead(torch, save=_taking_torch(torch.save, self)))
            stack.enter_context(instead(filesystem._FileSystemWriter, _write_data=_taking_dcp(self)))
            with suppress(ImportError):
                module = importlib.import_module("safetensors.torch")
                if hasattr(module, "_flatten_as_ptr"):
                    stack.enter_context(instead(module, **_taking_safetensors(module, self)))
            yield

    def name_of(self, path: object) -> str | None:
        """The name of the file `path`, if it lies in the folder and can be stored, and if this thread fills it."""
        filling = current()
        if filling is None or filling.filled.path != self._folder or not isinstance(path, str | os.PathLike):
            return None
        name = os.path.relpath(os.path.abspath(os.fspath(path)), self._folder)
        with suppress(FormatError):
            check_names([name, *(self._captured.keys() - {name})])
            if filling.is_taking:
                return name
            self._forget(name)
        return None

    def _forget(self, name: str) -> None:
        self._captured.pop(name, None)
        self._versions = [known for known in self._versions if known[0] != name]

    def take(self, name: str, capture: Callable[[set[int]], CapturedFile]) -> None:
        """Take the file `name` in place of one that was written under this name before."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, name))
        file = capture(self._stepped)
        self._forget(name)
        self._captured[name] = file
        self._versions += [(name, leaf.tensor, leaf.tensor._version) for leaf in file.leaves if not leaf.tensor.is_inference()]


def _taking_torch(original: Function, taking: Taking) -> Function:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = None if args or kwargs else taking.name_of(f)
        if name is None:
            original(obj, f, *args, **kwargs)
        else:
            taking.take(name, lambda stepped: capture_file(name, obj, stepped))

    return save


class _Unwritten(dict[str, torch.Tensor]):
    """Tensors that safetensors has checked."""


def _taking_safetensors(module: Any, taking: Taking) -> dict[str, Function]:
    """The two functions by which safetensors describes tensors by their addresses, and writes them to a file."""
    flatten, serialize = module._flatten_as_ptr, module.serialize_file

    def flattened(tensors: Mapping[str, torch.Tensor], keep_alive: list[Any]) -> Any:
        if current() is None:
            return flatten(tensors, keep_alive)
        module._evaluate_tensors_for_save(tensors)
        fault = next((key for key, tensor in tensors.items() if not tensor.is_contiguous()), None)
        return flatten(tensors, keep_alive) if fault is not None else _Unwritten(tensors)  # raises the library's own error

    def serialized(tensors: Any, filename: Any, metadata: Any = None) -> None:
        name = taking.name_of(filename) if isinstance(tensors, _Unwritten) else None
        if name is not None:
            taking.take(name, lambda stepped: capture_safetensors(name, tensors, metadata, stepped))
            return
        keep_alive: list[Any] = []
        serialize(flatten(tensors, keep_alive) if isinstance(tensors, _Unwritten) else tensors, filename, metadata=metadata)

    return {"_flatten_as_ptr": flattened, "serialize_file": serialized}


def _taking_dcp(taking: Taking) -> Function:
    original = filesystem._FileSystemWriter._write_data

    @functools.wraps(original)
    def write_data(self: Any, planner: Any, file_queue: Any) -> Any:
        plain = not self.transforms.extensions and self.serialization_format is filesystem.SerializationFormat.TORCH_SAVE
        files = list(file_queue.queue)
        names = [taking.name_of(path) for path, _, _ in files]
        if not plain or not files or not all(items for _, _, items in files) or None in names:
            return original(self, planner, file_queue)
        results: list[Any] = []
        for name, (_, key, items) in zip(names, files, strict=True):
            taking.take(str(name), functools.partial(capture_items, str(name), key, items, planner, results))
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result(results)
        return done

    return write_data
