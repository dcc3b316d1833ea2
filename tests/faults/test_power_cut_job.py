"""The power goes at random moments while a job saves: what a handle has called committed is found by the next start, every bit.

Two ranks save every step on an ext4, which is shut down without flushing anything; both are killed while it is off, and it is
mounted again. `--power-cuts` says how often.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from checkpointd.pipeline.root import root_view
from checkpointd.store import open_store
from tests.builders import load_arrays
from tests.faults import mounts
from tests.faults.jobs import Job, RankError, wait_until
from tests.faults.predictable_training import expected
from tests.faults.training_journals import JournalReader, committed_steps

pytestmark = [
    pytest.mark.root,
    pytest.mark.power_cut,
    pytest.mark.e2e,
    pytest.mark.xdist_group("mounts"),
]

MIB = 1 << 20
NBYTES = MIB
JITTER_S = 0.05


@pytest.fixture
def disk() -> Iterator[mounts.Ext4]:
    with mounts.ext4_image(1024 * MIB, Path(tempfile.gettempdir())) as mounted:
        yield mounted


@dataclass
class Cuts:
    """Cuts one after the other, at one root; `wrong` is what the starts after them found missing or damaged."""

    disk: mounts.Ext4
    folder: Path
    seed: int
    syncs_files: bool = True
    wrong: list[str] = field(default_factory=list)
    began: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.root = self.disk.path / "root"
        self.journals = [JournalReader(self.folder / f"rank-{rank}.jsonl") for rank in range(2)]

    def next_job(self) -> Job:
        """Starts at once; importing takes its time, so it is begun before it is needed."""
        self.began += 1
        folder = self.folder / f"job-{self.began}"
        folder.mkdir()
        return Job(folder=folder, seed=self.seed, nbytes=NBYTES)

    def run(self, job: Job) -> None:
        """Start, look, train and save, and lose the power; now and then while starting."""
        if self.chance.random() < 0.2:
            assert all(rank.pid for rank in job.ranks)
            job.tell_open(self.root)
        else:
            self.save(job, after=self.start(job))
        threading.Event().wait(self.chance.uniform(0, JITTER_S))
        mounts.power_cut(self.disk, while_off=job.close)

    def save(self, job: Job, *, after: int) -> None:
        """Let the ranks train and save every step, until some saves have committed."""
        for rank, journal in zip(job.ranks, self.journals, strict=True):
            rank.tell("save_endlessly", journal=str(journal.path), after=after)
        committed = len(committed_steps(self.journals)) + self.chance.randrange(8)
        wait_until(lambda: len(committed_steps(self.journals)) >= committed, "saves commit")

    def start(self, job: Job) -> int:
        """What a start finds, noting what is wrong about it; the step that it loaded, -1 where there is none."""
        promised = max(committed_steps(self.journals), default=-1)
        try:
            if not self.syncs_files:
                job.all("forget_to_sync_files")
            job.open(self.root)
            found = job.load()
        except RankError as error:
            self.wrong.append(f"after step {promised}: {error}")
            raise
        steps = {loaded.step if loaded else -1 for loaded in found}
        damage = [loaded.wrong or loaded.fell_back_from for loaded in found if loaded]
        if any(damage):
            self.wrong.append(f"after step {promised}: {damage}")
        if len(steps) != 1 or min(steps) < promised:
            self.wrong.append(f"steps {steps} were loaded, and {promised} was committed")
        return min(steps)


@pytest.mark.timeout(600)
async def test_what_a_handle_called_committed_survives(disk: mounts.Ext4, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    cuts = Cuts(disk, tmp_path, seed)
    job = cuts.next_job()
    for _ in range(pytestconfig.getoption("--power-cuts")):
        spare = cuts.next_job()
        try:
            cuts.run(job)
        finally:
            job.close()
        job = spare
    with job:
        newest = cuts.start(job)
        job.must_commit(newest + 1)
    assert cuts.wrong == []
    await all_are_whole(cuts.root, seed, at_least=committed_steps(cuts.journals))


async def all_are_whole(root: Path, seed: int, *, at_least: set[int]) -> None:
    """Every checkpoint at the root, bit for bit; among them those of the steps `at_least`."""
    async with open_store(root) as store:
        steps = {c.commit.step for c in await root_view.checkpoints(store)}
        assert at_least <= steps
        for step in steps:
            for rank in range(2):
                assert await load_arrays(store, f"global_step{step}", rank) == expected(seed, rank, step, NBYTES)


@pytest.mark.timeout(300)
def test_without_the_fsync_of_files_the_same_test_fails(disk: mounts.Ext4, tmp_path: Path) -> None:
    cuts = Cuts(disk, tmp_path, seed=1, syncs_files=False)
    for _ in range(5):
        with cuts.next_job() as job:
            try:
                cuts.run(job)
            except RankError:
                break
        if cuts.wrong:
            break
    assert cuts.wrong, "a cut that loses nothing shows nothing"
