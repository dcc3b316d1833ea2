"""torchdata's StatefulDataLoader across numbers of ranks and workers, in jobs of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata", reason="needs torchdata: make test-all installs it")

import torch
from torch.utils.data import DistributedSampler

from tests.integrations.torchdata.reading import SAMPLES, Stream, loader_of

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 calls it
]

ROOT = Path(__file__).parents[3]
_meetings = count()


def job(
    root: Path, ranks: int, workers: int, steps: int | None, *, kind: str = "resharding", batch_size: int = 2
) -> list[dict[str, Any]]:
    """What each rank of a job said."""
    meeting = root.parent / f"meeting-{next(_meetings)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = {"root": str(root), "kind": kind, "ranks": ranks, "workers": workers, "batch_size": batch_size, "steps": steps}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integrations.torchdata.reading",
                json.dumps({**options, "rank": rank, "meeting": str(meeting)}),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ended = [process.communicate() for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(err for _, err in ended)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def samples(said: list[dict[str, Any]]) -> list[int]:
    """The samples that the ranks have read, step by step, in the order of the epoch."""
    steps = zip(*(rank["steps"] for rank in said), strict=True)
    return [sample for step in steps for turn in zip(*step, strict=True) for sample in turn]


def order() -> list[int]:
    numbers: Any = range(SAMPLES)
    return list(DistributedSampler(numbers, 1, 0, seed=3))


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [(2, 1, (0, 2)), (1, 2, (2, 1)), pytest.param(2, 3, (1, 0), marks=pytest.mark.nightly)],
    ids=["2 to 1", "1 to 2", "2 to 3"],
)
def test_another_number_of_ranks_and_workers_goes_on_with_the_samples_that_no_rank_has_read(
    tmp_path: Path, before: int, after: int, workers: tuple[int, int]
) -> None:
    seen = samples(job(tmp_path / "root", before, workers[0], 5))
    assert seen == order()[: 10 * before]
    said = job(tmp_path / "root", after, workers[1], None)
    assert [rank["left"] for rank in said] == [[]] * after
    seen += samples(said)
    assert seen[:SAMPLES] == order()
    assert len(seen) - SAMPLES < after


@pytest.mark.nightly
def test_jobs_one_after_the_other_read_an_epoch_and_begin_the_next(tmp_path: Path) -> None:
    seen: list[int] = []
    for ranks, workers, batch_size in ((2, 0, 2), (1, 2, 3), (3, 1, 1), (2, 2, 2)):
        seen += samples(job(tmp_path / "root", ranks, workers, 4, batch_size=batch_size))
    assert seen == order()[: 4 * (4 + 3 + 3) + 10]  # the last job has read only the rest of the epoch
    again = samples(job(tmp_path / "root", 1, 0, 3))
    numbers: Any = range(SAMPLES)
    following = DistributedSampler(numbers, 1, 0, seed=3)
    following.set_epoch(1)
    assert again == list(following)[:6]


def test_a_stateful_data_loader_is_left_and_named_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Both ranks have stored the same position, 4 samples of their own, which are 8 of the epoch and not 4."""
    job(tmp_path / "root", 2, 0, 2, kind="stateful")
    [said] = job(tmp_path / "root", 1, 0, 2, kind="stateful")
    assert said["left"] == ["loader"]
    assert samples([said]) == order()[:4]  # as if nothing had been loaded


@pytest.mark.parametrize(("kind", "before", "after"), [("stateful", 0, 1), ("stream", 1, 0)])
def test_a_stateful_data_loader_with_other_workers_is_refused_before_anything_is_loaded(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    job(tmp_path / "root", 1, before, 2, kind=kind)
    [said] = job(tmp_path / "root", 1, after, 2, kind=kind)
    assert said["error"].startswith("MismatchError")
    assert f"loader: a StatefulDataLoader with {before} workers is stored, and it has {after} now" in said["error"]
    assert f"num_workers={before}" in said["error"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["stateful", "stream"])
def test_a_stateful_data_loader_goes_on_where_it_was_on_as_many_ranks_and_workers(tmp_path: Path, kind: str) -> None:
    seen = [rank["steps"] for rank in job(tmp_path / "root", 2, 1, 2, kind=kind)]
    more = [rank["steps"] for rank in job(tmp_path / "root", 2, 1, 2, kind=kind)]
    for rank in range(2):
        whole = list(loader_of(kind, rank, 2, batch_size=2))
        assert seen[rank] + more[rank] == [batch.tolist() for batch in whole[:4]]


def test_a_class_that_loads_its_state_in_its_own_way_decides_itself() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from checkpointd_client.restore.matching import data_loaders

    class Own(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict["own"])

    assert data_loaders.is_of_one_rank(StatefulDataLoader(Stream(0, 1)))
    assert not data_loaders.is_of_one_rank(Own(Stream(0, 1)))
    assert not data_loaders.is_of_one_rank(torch.utils.data.DataLoader(Stream(0, 1)))
