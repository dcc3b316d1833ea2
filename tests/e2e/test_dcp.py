"""DCP on a checkpointd root, by two ranks; what they saved is then loaded by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointd.config import LoadConfig
from checkpointd.layout.boxes import tiling_fault
from checkpointd.pipeline.read.checkpoint_view import read_view
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.integrations.dcp import CheckpointdReader
from tests.builders import attempts_at
from tests.e2e.dcp_ranks import PROCESSES, plain_state
from tests.e2e.rank_cases import show_cases

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the two ranks once they have ended, and what they wrote."""
    folder = tmp_path_factory.mktemp("dcp")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.e2e.dcp_ranks", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(number)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for number in range(PROCESSES)
    ]
    outputs = [rank.communicate(timeout=800)[0] for rank in ranks]
    return folder, "".join(outputs)


@pytest.fixture
def root(job: tuple[Path, str]) -> Path:
    return job[0] / "root"


def test_two_ranks_save_and_load(job: tuple[Path, str], subtests: pytest.Subtests) -> None:
    show_cases(subtests, job[0], PROCESSES, job[1])


@pytest.mark.parametrize("tag", ["one", "two", "global_step7"])
def test_one_rank_loads_what_two_have_saved(root: Path, tag: str) -> None:
    expected = plain_state()
    nested = {
        "model": {name.removeprefix("model."): torch.zeros_like(t) for name, t in expected.items() if name.startswith("model.")}
    }
    target = {**nested, **{name: torch.zeros_like(expected[name]) for name in ("tp", "both")}, "epoch": 0}
    dcp.load(target, storage_reader=CheckpointdReader(root, tag), no_dist=True)
    assert all(tensor.equal(expected[f"model.{name}"]) for name, tensor in target["model"].items())
    assert target["tp"].equal(expected["tp"])
    assert target["both"].equal(expected["both"])
    assert target["epoch"] == 5


async def test_a_rank_that_failed_has_kept_all_from_committing(root: Path) -> None:
    async with PosixStore(root) as store:
        (failed,) = [attempt for attempt in await attempts_at(store) if attempt.tag == "failed"]
        committed = {checkpoint.tag for checkpoint in await root_view.checkpoints(store)}
    assert failed.status == "aborted"
    assert committed == {"one", "two", "after", "global_step7"}


async def test_both_ranks_have_written_and_each_element_once(root: Path) -> None:
    async with PosixStore(root) as store:
        world = await read_view(store, await root_view.find(store, "one"), LoadConfig())
    parts = [part for tensor in world.tensors.values() for part in tensor.parts if part.entry.chunks]
    assert {part.rank for part in parts} == set(range(PROCESSES))
    for tensor in world.tensors.values():
        assert tiling_fault(tensor.shape, [part.entry.box for part in tensor.parts]) is None
