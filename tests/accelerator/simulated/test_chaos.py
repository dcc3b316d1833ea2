"""Real training on devices whose streams run in random orders: each checkpoint equals the training on the CPU, bit for bit.

A seed decides everything that this test decides; `--chaos-first=SEED --chaos-seeds=1` runs one alone. The stager's thread runs
when it likes, so a seed that failed once may need a few runs to fail again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpointd_client import Checkpointer, devices
from checkpointd_client.staging import device_plan, device_snapshot
from tests.accelerator.simulated.small_training import Training, differences

MEMORY = Path("/dev/shm")
PLACES = [(0, 0), (1, 1), (0, 1), (1, 0)]
RACES_EVERY = 5
"""The race check takes a multiple of the time, so only each so manieth seed has it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = (metafunc.config.getoption(name) for name in ("chaos_first", "chaos_seeds"))
    metafunc.parametrize("seed", range(first, first + count))


@pytest.fixture
def root() -> Iterator[Path]:
    """A root in memory: a disk would take most of the time."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=MEMORY if MEMORY.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


class Job:
    """A training with its checkpoints; `dice` chooses what it does next."""

    def __init__(self, ckpt: Checkpointer, training: Training, dice: Random) -> None:
        self.ckpt, self.training, self.dice = ckpt, training, dice
        self.saved: dict[str, tuple[int, Any]] = {}
        """The moment of each tag, and the handle of its save."""

    def run(self) -> None:
        for _ in range(30):  # after that, no load goes back
            self._act()
            if self.training.is_over:
                break
            self.training.go_on(self.ckpt.fence)
        while not self.training.is_over:
            self.training.go_on(self.ckpt.fence)

    def _act(self) -> None:
        kind = self.dice.choice(["train"] * 6 + ["save"] * 3 + ["two saves", "fence", "load"])
        if kind == "fence":
            self.ckpt.fence()
        elif kind == "load":
            self._load()
        elif kind != "train":
            for _ in range(2 if kind == "two saves" else 1):
                self._save()

    def _save(self) -> None:
        tag = f"save{len(self.saved)}"
        handle = self.ckpt.save(self.training.moment, self.training.state, tag=tag)
        self.saved[tag] = self.training.moment, handle

    def _load(self) -> None:
        """Go back to a checkpoint of a whole step, while younger saves may be in flight."""
        whole = [tag for tag, (moment, _) in self.saved.items() if moment % 2 == 0]
        if not whole:
            return
        tag = self.dice.choice(whole)
        moment, handle = self.saved[tag]
        handle.wait()
        self.ckpt.load(self.training.state, tag=tag)
        self.training.moment = moment


def chosen(dice: Random, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a Checkpointer. The sizes make each way of copying take some of the small tensors."""
    patch.setattr(device_plan, "GATHERED_BYTES", dice.choice([0, 256, 2048, 256 << 10]))
    patch.setattr(device_plan, "SCRATCH_BYTES", dice.choice([1024, 4096, 128 << 20]))
    patch.setattr(device_plan, "ALONE_BYTES", dice.choice([0, 1024, 16 << 20]))
    patch.setattr(device_snapshot, "CLONED_BYTES_MAX", dice.choice([512, 512 << 20]))
    return {
        "staging": dice.choice(["lazy", "lazy", "eager"]),
        "device_checksums": dice.choice([True, False]),
        "pinned_bytes": dice.choice([8192, 256 << 20]),
        "compression": dice.choice(["auto", "none"]),
        "on_no_progress": "ignore",
        "dedup": False,
        "read_back": False,
    }


def test_checkpoints_equal_the_training_on_the_cpu(
    sim: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = Random(seed)
    options, places = chosen(dice, monkeypatch), [torch.device("sim", i) for i in dice.choice(PLACES)]
    with ExitStack() as block:
        ckpt = block.enter_context(Checkpointer(root, **options))
        races = block.enter_context(sim.races() if seed % RACES_EVERY == 0 else nullcontext([]))
        training = Training(*places)
        if dice.random() < 0.5:
            for place in set(places):
                stream = torch.Stream(place)
                stream.wait_stream(torch.accelerator.current_stream(place))
                block.enter_context(devices.on_stream(stream))
        block.enter_context(sim.chaos(seed, patience_ms=dice.choice([0, 5, 50])))
        job = Job(ckpt, training, dice)
        job.run()
        wrong = {"the training": differences(training.tensors(), training.moment)}
        for tag, (moment, handle) in job.saved.items():
            handle.wait()
            found = Training()
            ckpt.load(found.state, tag=tag)
            wrong[f"{tag} of moment {moment}"] = differences(found.tensors(), moment)
    assert {name: names for name, names in wrong.items() if names} == {}, f"seed {seed}: {options}, {places}"
    assert races == [], f"seed {seed}: {options}, {places}"
