"""Calls of DeepSpeed's engines on several ranks, here threads with one store between them, that are not alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.config import Ranks
from checkpointd.errors import DeadlineError, UsageError
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.directories import agreement
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.convening import Assembly
from tests.unit.client.integrations.deepspeed.deepspeed_engine import Engine

WORLD = 2
LONG_S, SHORT_S = 60.0, 0.3

MakesJob = Callable[[float], "Job"]


class Job:
    """The plugs of all ranks, whose threads meet as processes do."""

    def __init__(self, timeout_s: float) -> None:
        self.store = HashStore()
        self.plugs = [FilesAdapter(Engine(), {"commit_timeout_s": timeout_s}) for _ in range(WORLD)]
        self._assemblies = [self._assembly(rank) for rank in range(WORLD)]
        self._here = threading.local()
        for plug in self.plugs:
            plug.connect()

    def _assembly(self, rank: int) -> Assembly:
        def board(ranks: Ranks, nonce: str) -> StoreBoard:
            return StoreBoard(PrefixStore(nonce, self.store), ranks)

        return Assembly(Ranks(rank=rank, world_size=WORLD), lambda: self.store, board)

    def convene(self, said: str, doing: str, timeout_s: float) -> dict[int, str]:
        return self._assemblies[self._here.rank].meet(said, doing, timeout_s)

    def errors(self, *calls: Callable[[FilesAdapter], Any] | None) -> list[BaseException | None]:
        """What each rank's call raises."""

        def rank(number: int, call: Callable[[FilesAdapter], Any]) -> None:
            self._here.rank = number
            call(self.plugs[number])

        with ThreadPoolExecutor(WORLD) as pool:
            begun = [pool.submit(rank, number, call) for number, call in enumerate(calls) if call]
            return [one.exception(60) for one in begun]


@pytest.fixture
def job_of(monkeypatch: pytest.MonkeyPatch) -> MakesJob:
    def made(timeout_s: float) -> Job:
        job = Job(timeout_s)
        monkeypatch.setattr(agreement, "convene", job.convene)
        return job

    return made


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
def test_a_first_call_of_rank_0_alone_ends_by_its_own_deadline(job_of: MakesJob, tmp_path: Path, call: str) -> None:
    """A Checkpointer would be waited for two minutes at least; DeepSpeed's barrier for as long as torch.distributed waits."""
    [error] = job_of(SHORT_S).errors(lambda plug: getattr(plug, call)(str(tmp_path / "root")), None)
    assert isinstance(error, DeadlineError)
    assert f"rank 1 did not answer within {SHORT_S:g} s: every rank must be calling {call}()" in str(error)
    assert not (tmp_path / "root").exists(), "nothing was begun there"


def test_other_directories_or_calls_are_told_on_every_rank(job_of: MakesJob, tmp_path: Path) -> None:
    job = job_of(LONG_S)

    def saves(name: str) -> Callable[[FilesAdapter], Any]:
        return lambda plug: plug.save_checkpoint(str(tmp_path / name))

    def loads(plug: FilesAdapter) -> Any:
        return plug.load_checkpoint(str(tmp_path / "a"))

    def other_step(plug: FilesAdapter) -> Any:
        plug.engine.global_steps = 7
        return saves("a")(plug)

    for calls in (saves("a"), saves("b")), (saves("a"), loads), (saves("a"), other_step):
        for error in job.errors(*calls):
            assert isinstance(error, UsageError)
            assert "the ranks made different calls: rank 0 said" in str(error)
    assert not list(tmp_path.iterdir())


def test_a_time_to_wait_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="commit_timeout_s is 'long'"):
        FilesAdapter(Engine(), {"commit_timeout_s": "long"})
