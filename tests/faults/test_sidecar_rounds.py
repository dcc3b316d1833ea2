"""Trainers and their sidecar, killed and stopped at random moments of a training under torchrun that saves all the time.

In each round one thing is struck: a rank, all ranks with their launcher, the daemon, all of these, or the daemon stops for a
while. No round may lose a checkpoint that was committed before it, as a handle, the daemon or the store said, nor load a wrong
bit from memory or from the store, nor leave a checkpoint that does not verify; and the job goes on. `--sidecar-rounds` says how
many there are.
"""

from __future__ import annotations

import random
import re
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from checkpointd.config import LoadConfig
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store import open_store
from tests.faults.daemons import Daemon
from tests.faults.jobs import Torchrun, wait_until
from tests.faults.test_kill_rounds import NBYTES, Rounds, check_all
from tests.faults.training_journals import committed_steps

TARGETS = ("daemon", "rank 0", "stop", "rank 1", "all and daemon", "all")
ANSWER_S = 1.0
"""What counts as a daemon that hangs: short, so that some stops are longer."""
PAUSE_S_MAX = 1.5
JITTER_S = 0.5
MIB_PER_S = (8, 32, 256)
"""What the daemon may write: a save takes it from half a second to next to nothing."""
COMMITTED = re.compile(r"global_step(\d+)/\d+-\d+: committed \(rank")


@dataclass
class SidecarRounds(Rounds):
    """`struck` holds what began before the trainers were last struck: a daemon that is struck alone starts nothing anew."""

    verified: set[str] = field(default_factory=set)
    checked: int = 0
    """The newest start that was checked."""
    loss: str = "inline"
    sources: Counter[str] = field(default_factory=Counter)
    nbytes: ClassVar[int] = NBYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        self.daemon = self.serve()

    def serve(self) -> Daemon:
        return Daemon(self.folder, *self.options())

    def options(self) -> tuple[str, ...]:
        return ("--bandwidth-mib", str(self.chance.choice(MIB_PER_S)))

    def launch(self) -> Torchrun:
        self.loss = self.chance.choice(["inline", "inline", "raise"])
        options = {
            "root": self.root,
            "seed": self.seed,
            "nbytes": self.nbytes,
            "save-every": 1,
            "compression": self.chance.choice(["auto", "none"]),
            "sidecar": self.daemon.socket,
            "on-sidecar-loss": self.loss,
            "sidecar-answer": ANSWER_S,
        }
        return Torchrun(self.folder, [str(word) for name, value in options.items() for word in (f"--{name}", value)])

    def run(self, target: str) -> None:
        """One round."""
        if self.job is None:
            self.job = self.launch()
        moment = self.come_to_a_moment(self.job)
        self.promised = max(self.promised, *committed_steps(self.ranks), *self.at_store(), *self.said_committed())
        print(f"{target} ({self.loss}) {moment}; {self.promised} is promised", flush=True)
        self.kills[f"{target} {moment}"] += 1
        self.strike(self.job, target)

    def come_to_a_moment(self, job: Torchrun) -> str:
        """Wait for it: a moment of a start, or of saving."""
        if self.chance.random() < 0.2 and self.struck != self.pids():
            self.wait_for_a_start(job)
            return "while starting"
        self.check_the_start(job)
        self.wait_for_saves(job)
        threading.Event().wait(self.chance.uniform(0, JITTER_S))
        return "while saving"

    def check_the_start(self, job: Torchrun) -> None:
        """Once for each start: what was committed since is not what it loaded."""
        wait_until(lambda: self.loaded(job), "both ranks load", limit_s=self.patience_s)
        start = self.loaded(job)[0]["start"]
        if start != self.checked:
            super().check_the_start(job)
            self.checked = start
            self.sources[self.loaded(job)[0]["source"]] += 1

    def strike(self, job: Torchrun, target: str) -> None:
        if target == "stop":
            self.daemon.send(signal.SIGSTOP)
            threading.Event().wait(self.chance.uniform(0, 2 * PAUSE_S_MAX))
            self.daemon.send(signal.SIGCONT)
            return
        with_daemon = target.endswith("daemon")
        if with_daemon:
            self.daemon.kill()
        if target != "daemon":
            self.struck = self.pids()
            self.kill(job, target.removesuffix(" and daemon"))
        if with_daemon:
            threading.Event().wait(self.chance.choice([0.0, self.chance.uniform(0, PAUSE_S_MAX)]))
            self.daemon.start_again(self.options())

    def said_committed(self) -> set[int]:
        """The steps that the daemon has called committed."""
        return {int(step) for step in COMMITTED.findall(self.daemon.said())}

    async def verify_new(self) -> None:
        """Every checkpoint that was not verified before is whole."""
        if not self.was_used():
            return
        async with open_store(self.root) as store:
            for checkpoint in await root_view.checkpoints(store):
                if checkpoint.prefix not in self.verified:
                    verdict = await verify(store, checkpoint, LoadConfig())
                    assert verdict.whole, (self.seed, verdict)
                    self.verified.add(checkpoint.prefix)

    def was_used(self) -> bool:
        return Path(self.root).exists()

    def close(self) -> None:
        super().close()
        self.daemon.close()


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(7200)
async def test_no_strike_at_trainers_or_sidecar_loses_a_committed_checkpoint(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("--sidecar-seed") or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rounds = SidecarRounds(tmp_path, seed)
    try:
        for number in range(pytestconfig.getoption("--sidecar-rounds")):
            rounds.run(TARGETS[number % len(TARGETS)])
            await rounds.verify_new()
        rounds.job = rounds.job or rounds.launch()
        rounds.check_the_start(rounds.job)
        wait_until(lambda: committed_steps(rounds.ranks) - {rounds.promised}, "the job goes on")
    finally:
        rounds.close()
    print(dict(rounds.kills), dict(rounds.sources), f"{rounds.promised} is the newest step promised before the last strike")
    await rounds.verify_new()
    await check_all(rounds.root, seed, at_least=committed_steps(rounds.ranks) | rounds.said_committed())
