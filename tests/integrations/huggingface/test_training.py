"""Hugging Face's Trainer and Accelerate with checkpointd behind them, by one line: real trainings of tiny models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs accelerate: make test-all installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-all installs it")

from tests.e2e.deepspeed_launch import run_ranks
from tests.e2e.rank_cases import noted_cases, show_cases

SCRIPT = Path(__file__).with_name("training.py")
TRAINER = ("eight_steps_are_four_and_four_that_are_resumed", "the_best_checkpoint_stays_and_is_loaded_in_the_end")
REFUSED = ("a_damaged_checkpoint_is_not_resumed_from", "what_cannot_be_pickled_ends_the_save_and_leaves_nothing")
OWN = ("what_a_method_of_the_user_writes_is_there_when_its_call_returns", "a_push_to_the_hub_leaves_the_store_out")
STATE = ("a_state_is_saved_and_loaded",)
SHARDED = ("eight_sharded_steps_are_four_and_four_that_are_resumed", "a_sharded_state_is_saved_and_loaded")
GATHERED = ("eight_gathered_steps_are_four_and_four_that_are_resumed", "a_gathered_state_is_saved_and_loaded")
WITHOUT_DCP = ("shards_without_dcp_are_saved_and_loaded",)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


def alone(folder: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    """One process that runs the cases."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *cases]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


@pytest.mark.nightly
def test_one_process(tmp_path: Path, subtests: pytest.Subtests) -> None:
    show_cases(subtests, tmp_path, ranks=1, output=said(alone(tmp_path, *TRAINER, *REFUSED, *OWN, *STATE)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases", [TRAINER, REFUSED[:1], STATE, *zip(SHARDED + GATHERED + WITHOUT_DCP)], ids=lambda cases: cases[0]
)
def test_two_ranks(tmp_path: Path, subtests: pytest.Subtests, cases: tuple[str, ...]) -> None:
    show_cases(subtests, tmp_path, ranks=2, output=said(run_ranks(SCRIPT, tmp_path, *cases, limit_s=450)))


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["filling", "persisting", "showing"])
def test_a_process_that_is_killed_in_the_middle_of_a_save_goes_on(
    tmp_path: Path, subtests: pytest.Subtests, point: str
) -> None:
    done = alone(tmp_path, f"dies_{point}")
    assert done.returncode == -signal.SIGKILL, said(done)
    assert not noted_cases(tmp_path, 0)
    names = {path.name for path in (tmp_path / "killed").iterdir()}
    assert names == {".checkpointd", "checkpoint-2", "checkpoint-4"}, "the one that was killed is not seen"
    show_cases(subtests, tmp_path, ranks=1, output=said(alone(tmp_path, "goes_on")))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_with_checkpointd_and_again_without_it(
    tmp_path: Path, subtests: pytest.Subtests, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, stock in (("stock_saves_four_steps", "1"), ("ours_goes_on_to_six", ""), ("stock_goes_on_to_eight", "1")):
        monkeypatch.setenv("STOCK", stock)
        done = alone(tmp_path, case) if ranks == 1 else run_ranks(SCRIPT, tmp_path, case, limit_s=450)
        show_cases(subtests, tmp_path, ranks=ranks, output=said(done))


@pytest.mark.nightly
def test_gathered_adapters(tmp_path: Path, subtests: pytest.Subtests) -> None:
    pytest.importorskip("peft", reason="needs peft: make test-all installs it")
    cases = ("gathered_adapters_have_the_shards_of_all_ranks",)
    show_cases(subtests, tmp_path, ranks=2, output=said(run_ranks(SCRIPT, tmp_path, *cases, limit_s=450)))


@pytest.mark.nightly
def test_adapters(tmp_path: Path, subtests: pytest.Subtests) -> None:
    pytest.importorskip("peft", reason="needs peft: make test-all installs it")
    show_cases(subtests, tmp_path, ranks=1, output=said(alone(tmp_path, "adapters_are_saved_alone_and_resumed")))
