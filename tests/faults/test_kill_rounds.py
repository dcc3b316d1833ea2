"""SIGKILL of one rank, and of all with their launcher, at random moments of a training under torchrun that saves all the time.

No round may lose a checkpoint that was committed before the kill, as a handle or the store said, nor load a wrong bit.
`--kill-rounds` says how many there are.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from checkpointd.pipeline.root import root_view
from checkpointd.store import open_store
from tests.builders import load_arrays
from tests.faults.jobs import Torchrun, kill, wait_until
from tests.faults.predictable_training import expected
from tests.faults.training_journals import Event, JournalReader, committed_steps
from tests.logged_roots import attempts

NBYTES = 4 << 20
TARGETS = ("rank 0", "rank 1", "all")
JITTER_S = 0.06
"""Longer than a save takes: the kill comes anywhere in one, or between two."""
START_JITTER_S = 0.3
CHECKED = 12
"""Checkpoints of which every bit is read again at the end; each start has done so with the newest one."""


@dataclass
class Rounds:
    """Rounds at one root: a job that trains, a moment, a kill. `promised` is the newest step that was committed before it."""

    folder: Path
    seed: int
    promised: int = -1
    struck: set[int] = field(default_factory=set)
    """Processes that had begun before the last kill."""
    kills: Counter[str] = field(default_factory=Counter)
    patience_s: ClassVar[float] = 60.0
    """How long a start may take, and how long a few saves."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.root: str | Path = self.folder / "root"
        self.ranks = [JournalReader(self.folder / f"rank-{rank}.jsonl") for rank in range(2)]
        self.job: Torchrun | None = None

    def run(self, target: str) -> None:
        """One round."""
        if self.job is None:
            self.job = self.launch()
        if self.chance.random() < 0.2:
            self.wait_for_a_start(self.job)
            moment = "while starting"
        else:
            self.check_the_start(self.job)
            self.wait_for_saves(self.job)
            moment = "while saving"
        self.promised = max(self.promised, *committed_steps(self.ranks), *self.at_store())
        self.struck = self.pids()
        self.kills[f"{target} {moment}"] += 1
        self.kill(self.job, target)

    def at_store(self) -> set[int]:
        """The steps whose attempts have a commit at the store."""
        return {one.step for one in attempts(Path(self.root), "checkpoint")} | {-1}

    def pids(self) -> set[int]:
        return {event["pid"] for rank in self.ranks for event in rank.look()}

    def launch(self) -> Torchrun:
        compression = self.chance.choice(["auto", "none", "planes"])
        options = {"root": self.root, "seed": self.seed, "nbytes": NBYTES, "save-every": 1, "compression": compression}
        return Torchrun(self.folder, [str(word) for name, value in options.items() for word in (f"--{name}", value)])

    def wait_for_a_start(self, job: Torchrun) -> None:
        """Until rank 0 begins again: its start, recovery and load come next."""

        def begun() -> bool:
            job.check_running()
            newest = self.ranks[0].last("up")
            return newest is not None and newest["pid"] not in self.struck

        wait_until(begun, "a rank starts")
        threading.Event().wait(self.chance.uniform(0, START_JITTER_S))

    def check_the_start(self, job: Torchrun) -> None:
        """Until both ranks have loaded: every bit is right, and nothing that was promised is lost."""
        wait_until(lambda: self.loaded(job), "both ranks load")
        first, second = self.loaded(job)
        assert first["step"] == second["step"] >= self.promised, (self.seed, self.promised, first, second)
        assert first["wrong"] == second["wrong"] == [], (self.seed, first, second)
        assert first["fell_back_from"] == second["fell_back_from"] == [], (self.seed, first, second)

    def loaded(self, job: Torchrun) -> list[Event]:
        """What each rank has loaded since the last kill; nothing as long as one has not."""
        job.check_running()
        newest = [event for rank in self.ranks if (event := rank.last("loaded")) and event["pid"] not in self.struck]
        return newest if len(newest) == 2 and newest[0]["start"] == newest[1]["start"] else []

    def wait_for_saves(self, job: Torchrun) -> None:
        """Until a few more saves have committed, and a moment longer."""
        goal = len(committed_steps(self.ranks)) + self.chance.randrange(4)

        def reached() -> bool:
            job.check_running()
            return len(committed_steps(self.ranks)) >= goal

        wait_until(reached, "saves commit", limit_s=self.patience_s)
        threading.Event().wait(self.chance.uniform(0, JITTER_S))

    def kill(self, job: Torchrun, target: str) -> None:
        if target == "all":
            job.kill_all()
            self.job = None
            return
        newest = self.ranks[int(target[-1])].last("up")
        if newest is not None:
            kill(newest["pid"])

    def finish(self) -> None:
        """One more start, which must find everything."""
        self.job = self.job or self.launch()
        self.check_the_start(self.job)
        self.close()

    def close(self) -> None:
        if self.job is not None:
            self.job.close()


@pytest.mark.e2e
@pytest.mark.timeout(3600)
async def test_no_kill_loses_a_committed_checkpoint(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rounds = Rounds(tmp_path, seed)
    try:
        for number in range(pytestconfig.getoption("--kill-rounds")):
            rounds.run(TARGETS[number % len(TARGETS)])
        rounds.finish()
    finally:
        rounds.close()
    print(dict(rounds.kills), f"{rounds.promised} is the newest step promised before the last kill")
    await check_all(rounds.root, seed, at_least=committed_steps(rounds.ranks))


async def check_all(root: str | Path, seed: int, *, at_least: set[int], nbytes: int = NBYTES) -> None:
    """All that was ever committed is there, and a random choice of it right in every bit."""
    async with open_store(root) as store:
        steps = {c.commit.step for c in await root_view.checkpoints(store)}
        assert at_least <= steps
        for step in random.Random(seed).sample(sorted(steps), min(CHECKED, len(steps))):
            for rank in range(2):
                assert await load_arrays(store, f"global_step{step}", rank) == expected(seed, rank, step, nbytes), step
