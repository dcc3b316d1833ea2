"""Trainers, their sidecar and the S3 server, killed and cut off at random moments of a training that saves all the time.

Beside what is struck in the rounds with a sidecar, the server is killed and started again, or is away for a while, and all the
time requests and replies get lost, are repeated, refused and put off. With and without a spool. The same must hold, and no
round may hang. `--bucket-rounds` says how many there are.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from checkpointd.pipeline.root import root_view
from checkpointd.store import open_store
from tests.faults.daemons import Daemon
from tests.faults.jobs import Torchrun, wait_until
from tests.faults.test_kill_rounds import check_all
from tests.faults.test_sidecar_rounds import SidecarRounds
from tests.faults.training_journals import committed_steps
from tests.servers.faults import SLOW_DOWN, CutBefore, Delay, Fault, LoseReply, RepeatLater, Twice
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place, root_at
from tests.servers.seaweed import SeaweedFS

TARGETS = ("server", "rank 0", "away", "daemon", "all and daemon", "server and daemon", "rank 1", "stop", "all")
AWAY_S_MAX = 4.0
NOISE: tuple[Fault, ...] = (LoseReply(), CutBefore(), Twice(), RepeatLater(requests=5), SLOW_DOWN, Delay(0.05, 0.05))
NOISY = 0.01
"""How many of the requests meet each of these faults."""


@dataclass
class BucketRounds(SidecarRounds):
    """The root is in a bucket behind `proxy`. `direct`: the same root, past the proxy."""

    server: SeaweedFS = field(kw_only=True)
    proxy: FaultyProxy = field(kw_only=True)
    url: str = field(kw_only=True)
    direct: str = field(kw_only=True)
    spools: bool = field(kw_only=True)
    SPOOL: ClassVar[str] = "spool"
    nbytes: ClassVar[int] = 1 << 20
    patience_s: ClassVar[float] = 180.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root = self.url
        for fault in NOISE:
            self.proxy.add(fault, times=None, probability=NOISY)

    def serve(self) -> Daemon:
        return Daemon(self.folder, *self.options(), root=self.url)

    def options(self) -> tuple[str, ...]:
        return *super().options(), *(("--spool", str(self.folder / self.SPOOL)) if self.spools else ())

    def at_store(self) -> set[int]:
        return asyncio.run(self.committed()) | {-1}

    async def committed(self) -> set[int]:
        async with open_store(self.direct, read_only=True) as store:
            return {checkpoint.commit.step for checkpoint in await root_view.checkpoints(store)}

    def was_used(self) -> bool:
        return True

    def strike(self, job: Torchrun, target: str) -> None:
        if target == "away":
            self.proxy.go_away()
            threading.Event().wait(self.chance.uniform(0, AWAY_S_MAX))
            self.proxy.come_back()
        elif target.startswith("server"):
            self.server.kill()
            if target.endswith("daemon"):
                super().strike(job, "daemon")
            self.server.restart()
        else:
            super().strike(job, target)


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("spools", [False, True], ids=["without a spool", "with a spool"])
def test_no_strike_at_a_job_in_a_bucket_loses_a_committed_checkpoint(
    tmp_path: Path, own_seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, spools: bool
) -> None:
    seed = pytestconfig.getoption("--sidecar-seed") or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    place = Place(own_seaweed, own_seaweed.make_bucket("rounds"), "run")
    direct = root_at(place, monkeypatch)
    with FaultyProxy(own_seaweed.endpoint, seed=seed) as proxy:
        url = root_at(place, monkeypatch, endpoint=proxy.endpoint, request_s="5")
        rounds = BucketRounds(tmp_path, seed, server=own_seaweed, proxy=proxy, url=url, direct=direct, spools=spools)
        try:
            for number in range(pytestconfig.getoption("--bucket-rounds")):
                rounds.run(TARGETS[(number + seed) % len(TARGETS)])
                asyncio.run(rounds.verify_new())
            rounds.job = rounds.job or rounds.launch()
            rounds.check_the_start(rounds.job)
            wait_until(lambda: committed_steps(rounds.ranks) - {rounds.promised}, "the job goes on")
        finally:
            rounds.close()
        print(dict(rounds.kills), dict(rounds.sources), f"{rounds.promised} is the newest step promised before the last strike")
        asyncio.run(rounds.verify_new())
    asyncio.run(check_all(direct, seed, at_least=committed_steps(rounds.ranks) | rounds.said_committed(), nbytes=rounds.nbytes))
