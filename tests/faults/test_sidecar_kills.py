"""A sidecar is killed at random moments of saves. This costs the saves in its hands and no slot, and no step waits longer than
for one save. `--sidecar-kills` says how often; `--sidecar-seed` repeats a run.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.daemons import Daemon
from tests.faults.jobs import MIB, Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NBYTES = 2 * MIB
MIB_PER_S = ("4", "16", "256")
"""What the sidecar may write: a save takes it from half a second to next to nothing."""
MOMENTS = ("staged", "persisting", "prepared", "later")
LATER_S = 0.3


class Kills:
    """In each round the ranks save, their sidecar is killed at some moment of that, and they train and save on without it."""

    def __init__(self, job: Job, daemon: Daemon, chance: random.Random) -> None:
        self.job, self.daemon, self.chance = job, daemon, chance
        self.steps = 0
        self.ends: Counter[str] = Counter()

    def round(self) -> None:
        in_hands = [self.save() for _ in range(self.chance.choice((1, 2)))]
        self.come_to_a_moment(in_hands[-1])
        self.daemon.kill()
        before = self.job.all("saves_that_waited")
        following = [self.save(), self.save()]  # they return, although nobody waits for a save before them
        for step in in_hands:
            self.check_end(step)
        for step in following:
            assert {end.phase for end in self.job.ends(step)} == {"committed"}
        for earlier, waits in zip(before, self.job.all("saves_that_waited"), strict=True):
            assert waits - earlier <= len(in_hands), "each step waits at most for one of the saves before it"
        wait_until(lambda: not any(self.job.all("slots_held")), "every slot is free again")
        self.daemon.start_again(self.options())

    def save(self) -> int:
        """Train a step and save it on every rank, without waiting for its end; returns the step."""
        self.steps += 1
        self.job.all("save", step=self.steps)
        return self.steps

    def come_to_a_moment(self, step: int) -> None:
        moment = self.chance.choice(MOMENTS)
        if moment == "later":
            threading.Event().wait(self.chance.uniform(0, LATER_S))
        else:
            self.job.ranks[self.chance.randrange(self.job.world_size)].do("end", step=step, until=moment)

    def check_end(self, step: int) -> None:
        """It was in the sidecar's hands: all ranks hear the same, and an error names the sidecar."""
        ends = self.job.ends(step)
        self.ends[ends[0].phase] += 1
        if ends[0].phase == "committed":
            assert {end.phase for end in ends} == {"committed"}
            return
        for end in ends:
            assert (end.phase in ("failed", "aborted"), end.code) == (True, "SidecarError"), end
            assert f"the sidecar at {self.daemon.socket} was lost while this save was" in end.message

    def options(self) -> tuple[str, ...]:
        return ("--bandwidth-mib", self.chance.choice(MIB_PER_S))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_sidecar_killed_at_any_moment_costs_the_saves_in_its_hands_alone(
    tmp_path: Path, pytestconfig: pytest.Config, world_size: int
) -> None:
    seed = pytestconfig.getoption("--sidecar-seed") or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    with Daemon(tmp_path, "--bandwidth-mib", "4") as daemon, Job(folder=tmp_path, world_size=world_size, nbytes=NBYTES) as job:
        job.open(tmp_path / "root", sidecar=str(daemon.socket), retention=2)
        job.load()
        kills = Kills(job, daemon, random.Random(seed))
        for _ in range(pytestconfig.getoption("--sidecar-kills")):
            kills.round()
        job.must_commit(kills.steps + 1)
        wait_until(lambda: f"global_step{kills.steps + 1}/00000001-0: committed" in daemon.said(), "the last sidecar has it")
        job.must_load(kills.steps + 1)
    print(dict(kills.ends))
