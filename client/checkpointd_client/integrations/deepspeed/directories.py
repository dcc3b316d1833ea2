"""Looks at a directory to which DeepSpeed saves; it reads no file but `latest`."""

from __future__ import annotations

import os
from contextlib import suppress

from checkpointd.layout.keys import LATEST
from checkpointd.phrases import listed
from checkpointd_client.integrations.deepspeed.offline.file_names import STATES_END, is_zero_checkpoint, read_latest


def missing_fault(load_dir: str, tag: str | None) -> str | None:
    """Why DeepSpeed would find no files of `tag`, or of what `latest` names; None if it would, and if there is neither."""
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
    """What `latest` names, without what is around it; None where there is none that can be read."""
    with suppress(OSError, UnicodeDecodeError):
        return read_latest(load_dir).decode().strip() or None
    return None


def stock_files(directory: str) -> list[str]:
    """The files that DeepSpeed writes for a tag in its `directory`."""
    with suppress(OSError):
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(STATES_END)]
    return []
