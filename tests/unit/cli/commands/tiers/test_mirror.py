"""`checkpointd mirror`: pages, JSON, exit codes, following, and what lies at the mirror afterwards."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from checkpointd.mirror import copying
from checkpointd.store import open_store
from checkpointd.store.base import Store
from tests.builders import break_file
from tests.unit.cli.conftest import Cli, With, contents
from tests.unit.mirror.origins import save


@pytest.fixture(autouse=True)
def soon_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "RETRY_S", 0.1)
    monkeypatch.setattr(copying, "ABSENCE_S", 0.1)


def saved(at: With, *steps: int, **options: Any) -> None:
    async def run(store: Store) -> None:
        await save(store, *steps, **options)

    at(run)


def test_a_mirror_is_a_root_like_any_other(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1, 2)
    before = contents(root)
    answer = cli("mirror", root, tmp_path / "mirror")
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == f"{root} -> {tmp_path}/mirror"
    assert answer.lines[1].startswith("mirrored: 2 checkpoints, ")
    assert answer.lines[2] == "latest: global_step2"
    assert answer.lines[4].split()[:3] == ["global_step1", "1", "mirrored"]
    assert contents(root) == before
    mirror = tmp_path / "mirror"
    assert [line.split()[0] for line in cli("list", mirror).lines[1:]] == ["global_step2", "global_step1"]
    assert [line.split()[2] for line in cli("verify", mirror, "--record").lines[1:]] == ["whole", "whole"]
    assert cli("gc", mirror, "--keep-last", "1").lines[0] == "deleted: 1 checkpoint"
    assert cli("explain", mirror, "global_step2").code == 0
    assert "mirrors" in cli("status", mirror).lines[1]


def test_json_is_one_document(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1, 2, 3)
    found = cli("mirror", root, tmp_path / "mirror", "--keep-last", "1", "--verify", "--json").json
    assert (found["origin"], found["mirror"], found["latest"]) == (str(root), f"{tmp_path}/mirror", "global_step3")
    assert [(one["tag"], one["kind"]) for one in found["checkpoints"]] == [
        ("global_step1", "left-out"),
        ("global_step2", "left-out"),
        ("global_step3", "mirrored"),
    ]
    assert found["checkpoints"][2]["verified"] is True
    assert cli("mirror", root, tmp_path / "mirror", "--json").json["checkpoints"][0]["kind"] == "mirrored"


def test_rules_all_and_limit(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1, 2)
    answer = cli("mirror", root, tmp_path / "mirror", "--keep-last", "1", "--all", "--limit", "100MiB")
    assert answer.lines[1].startswith("mirrored: 2 checkpoints")
    assert answer.lines[3].startswith("deleted: 1 checkpoint")
    saved(at, 3, 4)
    answer = cli("mirror", root, tmp_path / "mirror", "--keep-last", "1")
    assert "left out: 1 checkpoint that the rules would remove again: global_step3" in answer.lines


def test_damage_is_named_and_ends_with_code_5(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1, 2, dedup=False)
    break_file(root / "global_step1/00000001-0/00001-0.chunks", "flip")
    answer = cli("mirror", root, tmp_path / "mirror")
    assert answer.code == 5
    assert "global_step1/00000001-0/00001-0.chunks is damaged at byte" in answer.lines[-1]
    assert [line.split()[0] for line in cli("list", tmp_path / "mirror").lines[1:]] == ["global_step2"]


def test_damage_at_the_mirror_is_healed(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1, 2, dedup=False)
    mirror = tmp_path / "mirror"
    cli("mirror", root, mirror)
    break_file(mirror / "global_step1/00000001-0/00001-0.chunks", "flip")
    assert cli("verify", mirror, "--record").code == 5
    answer = cli("mirror", root, mirror)
    assert answer.code == 0
    assert answer.lines[3].startswith("healed: 1 checkpoint, damaged at the mirror before, ")
    assert answer.lines[-1].split()[:3] == ["global_step1", "1", "healed"]
    assert cli("verify", mirror).code == 0
    assert "healed" not in cli("mirror", root, mirror).out


def test_damage_at_a_mirror_in_a_bucket_is_healed(root: Path, at: With, cli: Cli, seaweed_root: str) -> None:
    saved(at, 1, 2)
    assert cli("mirror", root, seaweed_root).code == 0

    async def damage() -> None:
        async with open_store(seaweed_root) as store:
            key = "global_step1/00000001-0/00001-0.chunks"
            data = bytearray(await store.get(key))
            data[len(data) // 3] ^= 1
            await store.put(key, bytes(data))

    asyncio.run(damage())
    assert cli("verify", seaweed_root, "--record").code == 5
    answer = cli("mirror", root, seaweed_root, "--json").json
    assert {one["kind"] for one in answer["checkpoints"]} == {"healed"}
    assert cli("verify", seaweed_root).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{root}"], 2, "give two roots|Give two roots"),
        (["{root}", "{root}"], 2, "are the same root"),
        (["{root}", "{root}/mirror"], 2, "lies in the root"),
        (["{root}/..", "{root}"], 4, "is not a root"),
        (["{tmp}/nowhere", "{tmp}/mirror"], 4, "there is no directory"),
        (["{root}", "memory://mirror"], 2, "exists only in the process"),
        (["{root}", "{tmp}/mirror", "--limit", "fast"], 2, "--limit is 'fast'"),
        (["{root}", "{tmp}/mirror", "--keep-last", "0"], 2, "keep_last"),
        (["{root}", "{tmp}/mirror", "more"], 2, "wo roots"),
    ],
)
def test_wrong_calls_write_nothing(
    root: Path, tmp_path: Path, at: With, cli: Cli, arguments: list[str], code: int, words: str
) -> None:
    saved(at, 1)
    before = contents(tmp_path)
    answer = cli("mirror", *(word.format(root=root, tmp=tmp_path) for word in arguments))
    assert (answer.code, answer.out) == (code, "")
    assert any(word in answer.err for word in words.split("|"))
    assert contents(tmp_path) == before


def test_wrong_places_in_a_bucket_are_refused_as_directories_are(root: Path, at: With, cli: Cli, seaweed_root: str) -> None:
    saved(at, 1)
    place, _, query = seaweed_root.partition("?")
    names = ("mirror", "empty", "mirror/inner", "mirror/global_step1")
    mirror, empty, inner, tag = (f"{place}/{name}?{query}" for name in names)
    answer = cli("mirror", empty, root.parent / "copy")
    assert (answer.code, answer.out) == (4, "")
    assert "is not a root (no job ever saved there)" in answer.err
    assert not (root.parent / "copy").exists()
    assert cli("mirror", root, mirror).code == 0
    for origin, target in ((tag, empty), (root, inner), (root, tag)):
        answer = cli("mirror", origin, target)
        assert (answer.code, answer.out) == (2, "")
        assert "lies in the root" in answer.err
    assert cli("mirror", mirror, root.parent / "copy").lines[1].startswith("mirrored: 1 checkpoint, ")


def test_a_job_that_went_on_at_the_mirror_ends_it_with_code_9(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    saved(at, 1)
    assert cli("mirror", root, tmp_path / "mirror").code == 0
    mirror = tmp_path / "mirror"
    subprocess.run([sys.executable, "-c", GOES_ON, str(mirror)], check=True, cwd=Path(__file__).parents[5], capture_output=True)
    answer = cli("mirror", root, mirror)
    assert (answer.code, answer.out) == (9, "")
    assert "is no mirror of" in answer.err
    assert cli("list", mirror).lines[1].startswith("global_step9")
    assert cli("mirror", mirror, root).lines[1].startswith("mirrored: 1 checkpoint")


def test_training_goes_on_at_the_mirror_when_the_origin_is_lost(tmp_path: Path, cli: Cli) -> None:
    """The whole way: a job saves, the command mirrors, the storage is lost, the job goes on from the mirror."""
    torch = pytest.importorskip("torch")
    from checkpointd_client import Checkpointer

    def trained(root: Path, steps: range) -> tuple[int | None, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        for parameter in model[0].parameters():
            parameter.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        with Checkpointer(root, dedup=True) as checkpointer:
            loaded = checkpointer.load(state)
            for step in steps:
                optimizer.zero_grad()
                model(torch.full((4, 40), float(step))).square().mean().backward()
                optimizer.step()
                checkpointer.save(step, state).wait()
        return (loaded.step if loaded else None), {name: value.clone() for name, value in model.state_dict().items()}

    origin, mirror = tmp_path / "origin", tmp_path / "mirror"
    trained(tmp_path / "straight", range(1, 4))
    _, expected = trained(tmp_path / "straight", range(4, 7))
    trained(origin, range(1, 4))
    assert cli("mirror", origin, mirror, "--keep-last", "1").code == 0
    shutil.move(origin, tmp_path / "lost")
    began_at, found = trained(mirror, range(4, 7))
    assert began_at == 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {line.split()[2] for line in cli("verify", mirror).lines[1:]} == {"whole"}
    shutil.move(tmp_path / "lost", origin)
    before = contents(mirror)
    answer = cli("mirror", origin, mirror)
    assert answer.code == 9
    assert contents(mirror) == before


GOES_ON = """
import asyncio, sys
from checkpointd.pipeline.root import starts
from checkpointd.store.posix.store import PosixStore
from tests.unit.mirror.origins import save

async def main(root):
    async with PosixStore(root) as store:
        await save(store, 9, start=await starts.newest(store) + 1)

asyncio.run(main(sys.argv[1]))
"""


class Following:
    """`checkpointd mirror --follow` as a process whose lines are read."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "checkpointd", "mirror", *map(str, arguments), "--follow", "--interval", "0.05"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_copies_what_is_committed_later_and_ends_when_told(
    root: Path, tmp_path: Path, at: With, cli: Cli, number: signal.Signals
) -> None:
    saved(at, 1)
    with Following(root, tmp_path / "mirror") as mirror:
        assert "global_step1 (step 1) mirrored: " in mirror.line()
        refused = cli("mirror", root, tmp_path / "mirror")
        assert refused.code == 16
        assert "mirror of" in refused.err
        saved(at, 2)
        assert "global_step2 (step 2) mirrored: " in mirror.line()
        assert mirror.end(number) == 0
    assert cli("mirror", root, tmp_path / "mirror").lines[1].startswith("mirrored: 0 checkpoints")  # it let go of the mirror


def test_follow_says_what_fails_and_goes_on(root: Path, tmp_path: Path, at: With) -> None:
    saved(at, 1)
    with Following(root, tmp_path / "mirror") as mirror:
        assert "global_step1" in mirror.line()
        root.rename(tmp_path / "away")
        assert mirror.process.stderr is not None
        assert mirror.process.stderr.readline().endswith("; trying again\n")
        (tmp_path / "away").rename(root)
        saved(at, 2)
        assert "global_step2" in mirror.line()
        assert mirror.end(signal.SIGTERM) == 0


def test_follow_with_json_is_one_document_per_checkpoint(root: Path, tmp_path: Path, at: With) -> None:
    saved(at, 1)
    with Following(root, tmp_path / "mirror", "--json") as mirror:
        assert json.loads(mirror.line())["tag"] == "global_step1"
        saved(at, 2)
        assert json.loads(mirror.line())["tag"] == "global_step2"
        assert mirror.end(signal.SIGINT) == 0


def test_a_killed_run_is_finished_by_the_next_one_at_once(root: Path, tmp_path: Path, at: With, cli: Cli) -> None:
    """The kernel knows that the killed process is gone, so nobody waits for its lease."""
    saved(at, 1)
    with Following(root, tmp_path / "mirror") as mirror:
        assert "global_step1" in mirror.line()
        assert mirror.end(signal.SIGKILL) == -signal.SIGKILL
    saved(at, 2)
    assert cli("mirror", root, tmp_path / "mirror").lines[1].startswith("mirrored: 1 checkpoint")
