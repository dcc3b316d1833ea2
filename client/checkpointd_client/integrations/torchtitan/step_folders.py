"""The directories `step-N` in a folder of torchtitan: ours, and those that its own manager has saved."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from checkpointd import other_formats
from checkpointd.bucket_urls import is_bucket_url

_STEP = re.compile(r"step-(\d{1,18})\Z", re.ASCII)
_FILES = {"dcp": ".metadata", "hugging face": "model.safetensors.index.json"}


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A checkpoint that torchtitan itself has saved, in DCP's format or in Hugging Face's."""

    step: int
    path: str
    kind: Literal["dcp", "hugging face"]


def joined(folder: str, name: str) -> str:
    """The path of `name` in `folder`. The options of a URL stay at its end."""
    path, options = _parted(folder)
    return f"{path}/{name}{options}"


def split(checkpoint_id: str) -> tuple[str, str]:
    """The folder and the name of a checkpoint: its root and its tag, if it is ours."""
    path, options = _parted(checkpoint_id)
    folder, _, name = path.rpartition("/")
    return f"{folder}{options}", name


def _parted(path: str) -> tuple[str, str]:
    """The path without slashes at its end, and the options of a URL."""
    place, mark, options = path.partition("?") if is_bucket_url(path) else (path, "", "")
    return place.rstrip("/"), f"{mark}{options}"


def step_in(name: str) -> int:
    """The step in the name of a checkpoint; 0 if it has another name."""
    found = _STEP.match(name)
    return int(found[1]) if found else 0


def is_root(folder: str) -> bool:
    """Whether checkpoints of ours may lie in `folder`. Every bucket may be a root."""
    return is_bucket_url(folder) or other_formats.is_root(folder)


def other_steps(folder: str, ours: Collection[str]) -> list[OtherStep]:
    """The checkpoints of torchtitan itself in `folder`, the oldest step first, without the names in `ours`. None are looked for
    in a bucket.
    """
    if is_bucket_url(folder) or not os.path.isdir(folder):
        return []
    return sorted(_others(folder, set(os.listdir(folder)) - set(ours)), key=lambda other: other.step)


def _others(folder: str, names: Collection[str]) -> Iterator[OtherStep]:
    for name in names:
        path = os.path.join(folder, name)
        kinds = [kind for kind, file in _FILES.items() if os.path.isfile(os.path.join(path, file))]
        if _STEP.match(name) and kinds:
            yield OtherStep(step_in(name), path, "dcp" if "dcp" in kinds else "hugging face")


def stale(others: Sequence[OtherStep], ours: int, keep: int) -> list[OtherStep]:
    """Those of `others`, the oldest first, that go if the newest `keep` checkpoints stay and `ours` newer ones are there."""
    return list(others[: max(0, len(others) - max(0, keep - ours))])
