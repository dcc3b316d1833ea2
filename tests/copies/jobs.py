"""A small job whose weights tell the step of a state, and copies of parts of its root."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpointd.layout.keys import LATEST, LOG, SERVICE
from checkpointd_client import Checkpointer, Loaded, Retention

PARTS = (LOG, "tags", LATEST, SERVICE)


def state(value: float) -> dict[str, torch.Tensor]:
    """The frozen part is written once, so that checkpoints refer to objects of older ones."""
    return {"w": torch.full((64,), float(value)), "frozen": torch.ones(30_000)}


@dataclass
class Run:
    """One start at `root`: what it loaded, and the value of the weights, which must be that of a save of this step."""

    root: Path
    retention: Retention | int | None = None
    loaded: Loaded | None = None
    value: float = -1.0
    values: dict[int, set[float]] = field(default_factory=dict)
    """The values that were saved, by step."""

    def start(self, *saves: tuple[int, float], tag: str | None = None, again: str | None = None) -> Run:
        """Load `tag`, and save these steps with these values, each also as `again` if that is given."""
        with Checkpointer(self.root, retention=self.retention, absence_s=0.1) as ckpt:
            target = state(-1)
            self.loaded = ckpt.load(target, tag)
            self.value = float(target["w"][0])
            if self.loaded is not None:
                assert self.value in self.values[self.loaded.step], "these are not the weights of this step"
                assert target["w"].unique().numel() == 1, "a mixture of two steps"
                assert torch.equal(target["frozen"], torch.ones(30_000))
            for step, value in saves:
                self.save(ckpt, step, value, again=again)
        return self

    def save(self, ckpt: Checkpointer, step: int, value: float | None = None, *, again: str | None = None) -> None:
        value = float(step) if value is None else value
        self.values.setdefault(step, set()).add(value)
        ckpt.save(step, state(value)).wait(60)
        if again is not None:
            ckpt.save(step, state(value), tag=again).wait(60)

    def at(self, root: Path) -> Run:
        """The same job at a copy of its root."""
        return Run(root, self.retention, values=self.values)


def copy_part(origin: Path, copy: Path, part: str) -> None:
    """Copy one of PARTS, over what is there."""
    copy.mkdir(exist_ok=True)
    for path in origin.iterdir():
        if path.name == part or (part == "tags" and path.name not in (LOG, LATEST, SERVICE)):
            if path.is_dir():
                _copy_tree(path, copy / path.name)
            else:
                with suppress(FileNotFoundError):  # the job has removed it meanwhile
                    shutil.copy2(path, copy / path.name)
    shutil.rmtree(copy / SERVICE / "leases", ignore_errors=True)  # the job's own, which would refuse another one


def _copy_tree(origin: Path, copy: Path) -> None:
    """Copy a directory. What the job removes meanwhile is left out, as by rsync."""
    try:
        shutil.copytree(origin, copy, dirs_exist_ok=True)
    except FileNotFoundError:
        return
    except shutil.Error as error:
        if any("No such file or directory" not in why for _, _, why in error.args[0]):
            raise
