"""How DeepSpeed names its files, and where it points to the newest ones. Needs no torch, and reads no file but `latest`."""

from __future__ import annotations

import errno
import os
import re
import stat

from checkpointd.layout.keys import LATEST

MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt\Z")
MODEL_END, OPTIM_END = "_model_states.pt", "_optim_states.pt"
STATES_END = "_states.pt"
"""How the names of all of them end. DeepSpeed's tools count these files, so none may be left over from another save."""
_LATEST_BYTES_MAX = 4096


def read_latest(directory: str) -> bytes:
    """What `latest` in `directory` says. OSError where it cannot be read, which a pipe or what is longer than a path cannot."""
    pointer = os.path.join(directory, LATEST)
    with open(pointer, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        found = file.read(_LATEST_BYTES_MAX + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    if found is None or len(found) > _LATEST_BYTES_MAX:
        raise OSError(errno.EINVAL, "no file with the name of a checkpoint", pointer)
    return found


def is_zero_checkpoint(directory: str) -> bool:
    """Whether files of DeepSpeed lie there."""
    return os.path.isdir(directory) and any(name.endswith(MODEL_END) for name in os.listdir(directory))


def directory_of(root: str, tag: str | None) -> str | None:
    """The directory with DeepSpeed's files of checkpoint `tag` (default: the latest) at `root`; None where there are none."""
    try:
        named = read_latest(root).decode().strip() if tag is None or tag == LATEST else tag
        place = os.path.join(root, named)
        return place if is_zero_checkpoint(place) else None
    except (OSError, UnicodeDecodeError):
        return None
