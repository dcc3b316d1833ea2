"""The files beside the weights of an export, copied from a directory that the user names: configuration and tokenizer."""

from __future__ import annotations

import os
import re

import msgspec

from checkpointd import arguments
from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.export.record import CONFIG, NAME
from checkpointd.regular_files import open_regular
from checkpointd.system_errors import in_words

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|distcp)(\.index\.json)?\Z", re.IGNORECASE)
BYTES_MAX = 256 << 20
"""The most bytes of all files together. They are in memory while the export runs."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def check_beside(directory: str | None) -> None:
    """NotFoundError if `directory` is not there; None is no directory, from which nothing is copied."""
    if directory is not None and not os.path.isdir(directory):
        raise _missing(os.path.abspath(directory))


def read_beside(directory: str | os.PathLike[str] | None, dtype: str = "keep") -> dict[str, bytes]:
    """The files directly in `directory`, by name, without weights and hidden files; none if it is None.

    If the weights are converted to `dtype`, `config.json` says so. NotFoundError if there is no such directory, UsageError if
    the files are too large, StoreError if one cannot be read.
    """
    if directory is None:
        return {}
    arguments.path("files", directory)
    place, found, total = os.path.abspath(os.fspath(directory)), dict[str, bytes](), 0
    try:
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name == NAME or _WEIGHTS.match(entry.name) or not entry.is_file():
                continue
            total += entry.stat().st_size
            if total > BYTES_MAX:
                raise UsageError(
                    f"the files in {place} have more than {BYTES_MAX} bytes, up to {entry.name}: give a directory that holds "
                    "only configuration and tokenizer"
                )
            with open_regular(entry.path) as file:
                found[entry.name] = file.read()
    except FileNotFoundError as error:
        raise _missing(place) from error
    except OSError as error:
        raise StoreError(f"the files in {place} cannot be read: {in_words(error, 'file')}") from error
    if CONFIG in found and dtype in _DTYPES:
        found[CONFIG] = _with_dtype(found[CONFIG], _DTYPES[dtype], os.path.join(place, CONFIG))
    return found


def _missing(place: str) -> NotFoundError:
    return NotFoundError(f"there is no directory {place} to copy configuration and tokenizer from: make it first")


def _with_dtype(data: bytes, dtype: str, path: str) -> bytes:
    """A `config.json` whose dtype, where it names one, is `dtype`."""
    try:
        config = msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON object: {error}") from error
    changed = {name: dtype for name in _DTYPE_KEYS if name in config}
    return msgspec.json.format(msgspec.json.encode({**config, **changed}), indent=2) + b"\n" if changed else data
