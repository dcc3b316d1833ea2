"""The training example under torchrun: killed whole and started again, it ends bit for bit where an undisturbed run ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(EXAMPLES))  # the examples import each other as scripts do

from compare import Comparison, compare_runs  # noqa: E402
from corpus import Batches  # noqa: E402
from launch import Job, data_bytes  # noqa: E402

torch = pytest.importorskip("torch")

STEPS = 60
SMALL = ["--steps", str(STEPS), "--layers", "2", "--width", "128", "--length", "32", "--batch", "4"]


def job(folder: Path, *arguments: str) -> Job:
    out, root = folder / "log", folder / "checkpoints"
    script = [*SMALL, "--root", str(root), "--out", str(out), *arguments]
    return Job(EXAMPLES / "train_gpt.py", script, errors=folder / "stderr")


def finish(folder: Path, *arguments: str) -> list[str]:
    """Run to the end; what rank 0 printed."""
    with job(folder, *arguments) as running:
        return list(running)


def kill_all_when_committed(folder: Path) -> int:
    """Kill torchrun and both ranks as soon as there is a checkpoint; how many losses rank 0 had written."""
    latest = folder / "checkpoints" / "latest"
    with job(folder, "--save-every", "3", "--print-every", "1") as running:
        assert any(latest.exists() for _ in running), "ended without a checkpoint"
        running.kill_all()
    return len((folder / "log" / "losses-0.jsonl").read_text().splitlines())


def differences(comparisons: list[Comparison]) -> list[str]:
    return [f"{c.kind} of rank {c.rank}: {name}" for c in comparisons for name in c.different]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder, "--save-every", str(STEPS + 1))
    return folder / "log"


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_that_was_killed_whole_ends_where_the_undisturbed_run_ends(tmp_path: Path, undisturbed: Path) -> None:
    written = kill_all_when_committed(tmp_path)
    assert 3 <= written < STEPS, f"the kill came after {written} of {STEPS} steps: nothing was interrupted"

    printed = finish(tmp_path, "--save-every", "3")

    assert any(line.startswith("resumed from global_step") for line in printed), printed
    comparisons = compare_runs(tmp_path / "log", undisturbed, ranks=2)
    assert differences(comparisons) == []
    counted = {c.kind: c.values for c in comparisons if c.rank == 1}
    assert counted["losses"] == STEPS
    assert min(counted[kind] for kind in ("model", "optimizer", "scheduler", "batches", "rng")) > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_the_comparison_sees_one_changed_bit(tmp_path: Path, undisturbed: Path) -> None:
    for name, kind in {"losses-1.jsonl": "losses", "final-0.json": "model", "final-1.json": "optimizer"}.items():
        changed = tmp_path / kind
        shutil.copytree(undisturbed, changed)
        tamper(changed / name, kind)
        found = differences(compare_runs(changed, undisturbed, ranks=2))
        assert len(found) == 1
        assert found[0].startswith(kind)


def tamper(path: Path, kind: str) -> None:
    """Change the last digit of one loss, or of one digest of `kind`."""
    if kind == "losses":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        loss = float.fromhex(lines[7]["loss"])
        lines[7]["loss"] = (loss * (1 + 2**-52)).hex()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    digests = json.loads(path.read_text())
    name = next(name for name, digest in digests.items() if name.startswith(f"{kind}.") and "torch." in digest)
    digests[name] = digests[name][:-1] + ("0" if digests[name][-1] != "0" else "1")
    path.write_text(json.dumps(digests))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_kills_a_rank_in_the_middle_of_a_save_and_ends_equal(tmp_path: Path) -> None:
    small = ["--steps", "21", "--save-every", "3", "--layers", "4", "--width", "256", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", *small], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL rank 1" in done.stdout
    assert "No vote of rank 1 and no outcome." in done.stdout
    assert "resumed from global_step" in done.stdout
    assert "Equal, bit for bit." in done.stdout


def test_a_value_that_one_run_lacks_counts_as_different(tmp_path: Path) -> None:
    for folder, final in {"a": {"model.w": "1"}, "b": {"model.w": "1", "rng.torch": "2"}}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "losses-0.jsonl").write_text('{"step": 0, "loss": "0x1p0"}\n')
        (tmp_path / folder / "final-0.json").write_text(json.dumps(final))
    assert differences(compare_runs(tmp_path / "a", tmp_path / "b", ranks=1)) == ["rng of rank 0: rng.torch"]


def test_reserved_space_does_not_count_as_written(tmp_path: Path) -> None:
    path = tmp_path / "object"
    with path.open("wb") as file:
        file.truncate(1 << 20)
        assert data_bytes(path) == 0
        file.seek(1 << 19)
        file.write(b"x" * 65536)
        file.flush()
        assert data_bytes(path) == 65536


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_batches_are_the_same_on_any_number_of_ranks(ranks: int) -> None:
    """Over two passes, and gone on with from where another number of ranks was."""
    text = torch.arange(100, dtype=torch.uint8)
    whole = Batches(text, batch=6, length=8, part=0, parts=1, seed=3)
    parts = [Batches(text, batch=6, length=8, part=part, parts=ranks, seed=3) for part in range(ranks)]
    for number in range(4):
        expected, _ = next(whole)
        found = torch.cat([next(part)[0] for part in parts])
        assert sorted(found.tolist()) == sorted(expected.tolist())
        assert all(part.state_dict() == whole.state_dict() for part in parts)
        if number == 1:
            parts[0].load_state_dict(whole.state_dict())
    assert whole.passes > 0


def test_a_batch_that_ranks_cannot_share_equally_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks cannot share a batch of 6 windows equally"):
        Batches(torch.arange(100, dtype=torch.uint8), batch=6, length=8, part=0, parts=4, seed=3)
