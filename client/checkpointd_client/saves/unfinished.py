"""A directory that other programs fill beside a save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished directory at `path`, which is filled beside a save. The save names it by `name`."""

    name: str
    path: str
