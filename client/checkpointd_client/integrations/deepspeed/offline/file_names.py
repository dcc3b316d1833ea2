"""How DeepSpeed names its files, and which of them lie in a directory. Needs no torch, and reads no file but `latest`."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress

from checkpointd.layout.keys import LATEST
from checkpointd.phrases import listed
from checkpointd.regular_files import open_regular

MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt\Z")
MODEL_END, OPTIM_END, STATES_END = "_model_states.pt", "_optim_states.pt", "_states.pt"
_LATEST_BYTES_MAX = 4096


def read_latest(directory: str) -> bytes:
    """The bytes of `latest` in `directory`. OSError if it cannot be read, is not a regular file, or is longer than a path."""
    pointer = os.path.join(directory, LATEST)
    with open_regular(pointer) as file:
        found = file.read(_LATEST_BYTES_MAX + 1)
    if len(found) > _LATEST_BYTES_MAX:
        raise OSError(errno.EINVAL, "not a file with the name of a checkpoint", pointer)
    return found


def is_zero_checkpoint(directory: str) -> bool:
    """Whether files of DeepSpeed lie there."""
    with suppress(FileNotFoundError):  # another process may remove it meanwhile
        return os.path.isdir(directory) and any(name.endswith(MODEL_END) for name in os.listdir(directory))
    return False


def directory_of(root: str, tag: str | None) -> str | None:
    """The directory with DeepSpeed's files of checkpoint `tag` (default: the latest) at `root`; None if there are none."""
    try:
        named = pointed(root) if tag is None or tag == LATEST else tag
        place = None if named is None else os.path.join(root, named)
        return place if place is not None and is_zero_checkpoint(place) else None
    except OSError:
        return None


def missing_fault(load_dir: str, tag: str | None) -> str | None:
    """Why DeepSpeed would find no files of `tag`, or of the tag in `latest`; None if it would, or if there is no tag."""
    named = pointed(load_dir) if tag is None else str(tag)
    if named is None or is_zero_checkpoint(os.path.join(load_dir, named)):
        return None
    directory = os.path.join(load_dir, named)
    what = f"{directory} has no file *_model_states.pt" if os.path.isdir(directory) else f"there is no directory {directory}"
    asked = f", which {os.path.join(load_dir, LATEST)} names" if tag is None else ""
    found = tags_in(load_dir)
    there = f"checkpoints there are {listed(found)}" if found else "there is no checkpoint of DeepSpeed"
    return f"{what}{asked}; {there}"


def tags_in(load_dir: str) -> list[str]:
    """The tags under which DeepSpeed's files lie, newest first."""
    with suppress(OSError):
        with os.scandir(load_dir) as entries:
            found = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if is_zero_checkpoint(entry.path)]
        return [name for _, name in sorted(found, reverse=True)]
    return []


def pointed(load_dir: str) -> str | None:
    """The tag in `latest`, without white space around it; None if `latest` is missing or unreadable."""
    with suppress(OSError, UnicodeDecodeError):
        return read_latest(load_dir).decode().strip() or None
    return None


def stock_files(directory: str) -> list[str]:
    """The files that DeepSpeed writes for a tag in its `directory`."""
    with suppress(OSError):
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(STATES_END)]
    return []
