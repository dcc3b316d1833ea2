"""The benchmark of requests at its smallest size, so that it goes on working when the code changes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import bucket_requests

pytestmark = pytest.mark.nightly


def test_rank_0_reads_one_vote_of_each_rank(seaweed_root: str) -> None:
    few, more = (asyncio.run(bucket_requests.commit(bucket_requests.below(seaweed_root, str(n)), n)) for n in (2, 6))
    assert more["gets"] - few["gets"] == pytest.approx(4, abs=3)  # a wait costs one now and then
    assert few["puts"] > 0
    table = bucket_requests.table([few, more])
    assert f"| {bucket_requests.COMMIT}, 6 ranks | 0 | 0 MiB | {more['puts']} |" in table


@pytest.mark.timeout(240)
def test_a_job_counts_what_each_rank_sends(seaweed_root: str, tmp_path: Path) -> None:
    rows = bucket_requests.jobs(seaweed_root, 10 << 20, tmp_path)
    assert {(row["what"], row["rank"]) for row in rows} == {
        (what, rank)
        for what in (bucket_requests.START, bucket_requests.SAVE, bucket_requests.READ_BACK, bucket_requests.LOAD)
        for rank in range(bucket_requests.RANKS)
    }
    assert {row["parts"] for row in rows if row["what"] == bucket_requests.SAVE} == {2}, "of 8 MiB"
