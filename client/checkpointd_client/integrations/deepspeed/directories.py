"""What lies in a directory that DeepSpeed saves to, as a look at it tells; nothing in it is read but `latest`."""

from __future__ import annotations

import os
from contextlib import suppress

from checkpointd.layout.keys import LATEST
from checkpointd_client.integrations.deepspeed.zero_files import is_zero_checkpoint

_NAMED_MAX = 8


def missing_fault(load_dir: str, tag: str | None) -> str | None:
    """Why DeepSpeed would find no files of `tag`, or of what `latest` names; None if it would, and if there is neither."""
    named = pointed(load_dir) if tag is None else str(tag)
    if named is None or is_zero_checkpoint(os.path.join(load_dir, named)):
        return None
    directory = os.path.join(load_dir, named)
    what = f"{directory} has no file *_model_states.pt" if os.path.isdir(directory) else f"there is no directory {directory}"
    asked = f", which {os.path.join(load_dir, LATEST)} names" if tag is None else ""
    found = tags_in(load_dir)
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    there = f"checkpoints there are {', '.join(found[:_NAMED_MAX])}{more}" if found else "there is no checkpoint of DeepSpeed"
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
    with suppress(OSError, UnicodeDecodeError), open(os.path.join(load_dir, LATEST), encoding="utf-8") as file:
        return file.read().strip() or None
    return None


def stock_files(directory: str) -> list[str]:
    """The files that DeepSpeed writes for a tag in its `directory`."""
    with suppress(OSError):
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith("_states.pt")]
    return []
