"""Somebody ran `rm -r` below a root: every command shows at once which checkpoints are not whole any more, and why."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointd.report.listing import listing
from checkpointd.store.base import Entry, Store
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.builders import Arrays, break_file, objects, save_checkpoint
from tests.unit.cli.conftest import Cli, With


def _state(step: int, _rank: int) -> Arrays:
    return {"frozen": np.arange(3000, dtype=np.int32), "moving": np.full(2000, step, dtype=np.float32)}


async def _three(store: Store) -> None:
    for step in (1, 2, 3):
        await save_checkpoint(store, tag=f"global_step{step}", world_size=1, dedup=True, tensors=partial(_state, step))


@pytest.fixture
def three(root: Path, at: With) -> Path:
    """A root of three checkpoints, of which the later ones refer to the first."""
    at(_three)
    return root


def states(cli: Cli, root: Path) -> dict[str, str]:
    return {row["tag"]: row["state"] for row in cli("list", root, "--json").json["rows"]}


BASE = "global_step1/00000001-0"


def test_a_tag_to_which_newer_checkpoints_referred_was_removed(cli: Cli, three: Path) -> None:
    shutil.rmtree(three / "global_step1")
    answer = cli("list", three)
    assert (answer.code, [line.split()[2] for line in answer.lines[1:]]) == (0, ["incomplete"] * 3)
    assert f"it needs {BASE}, which is gone: somebody removed global_step1" in answer.err
    assert f"`checkpointd delete {three} global_step3`" in answer.err
    assert answer.err.count("3 checkpoints are not whole (global_step3, global_step2, global_step1)") == 1
    newest = cli("list", three, "--json").json["rows"][0]
    assert newest["latest"]
    assert newest["missing"]["things"] == ["global_step1"]


def test_every_other_command_says_so_as_well(cli: Cli, three: Path) -> None:
    shutil.rmtree(three / "global_step1")
    why = f"it needs {BASE}, which is gone: somebody removed global_step1"
    for call in (("verify", three), ("verify", three, "global_step2"), ("inspect", three, "global_step3")):
        answer = cli(*call)
        assert (answer.code, why in answer.out) == (5, True), call
    status = cli("status", three)
    assert "3 checkpoints are not whole (global_step3, global_step2, global_step1)" in status.out
    found = [name.partition("/")[0] for name in cli("status", three, "--json").json["missing"]]
    assert found == ["global_step3", "global_step2", "global_step1"]
    explained = cli("explain", three, "global_step3")
    assert explained.lines[0].startswith("global_step3 was committed, and is not whole any more")
    assert why in explained.out
    assert "next: Bring global_step1 back from a copy of the root" in explained.out
    assert f"remove what is left: `checkpointd delete {three}" in explained.out
    assert cli("explain", three, "global_step3", "--json").json["attempts"][0]["state"] == "incomplete"


@pytest.mark.parametrize("pattern", ["ballot-*", "*.index", "*.chunks"])
def test_an_object_of_its_own_was_removed(cli: Cli, three: Path, pattern: str) -> None:
    [lost] = (three / "global_step2").rglob(pattern)
    lost.unlink()
    gone = f"it needs {lost.relative_to(three)}, which is gone: somebody removed it"
    for command, code in (("explain", 0), ("inspect", 5), ("verify", 5)):
        answer = cli(command, three, "global_step2")
        assert (answer.code, gone in answer.out) == (code, True), command
    assert set(states(cli, three).values()) == {"committed"}, "no directory is listed for that"


@pytest.mark.parametrize("pattern", ["*.chunks", "*.file", "ballot-*"])
def test_bytes_behind_the_end_of_an_object_are_damage_to_verify_as_well(
    cli: Cli, three: Path, tmp_path: Path, pattern: str
) -> None:
    root = three
    if pattern == "*.file":
        root = tmp_path / "files" / ".checkpointd"
        with Checkpointer(root) as ckpt:
            core_of(ckpt).save_files(2, {"model.pt": {"weight": torch.ones(9)}}).wait(60)
    [longer] = (root / "global_step2").rglob(pattern)
    size = longer.stat().st_size
    longer.chmod(0o600)
    with longer.open("ab") as file:
        file.write(b"more")
    assert f"whose size was changed to {size + 4} bytes" in cli("explain", root, "global_step2").out
    answer = cli("verify", root, "global_step2")
    assert answer.code == 5
    assert f"has {size + 4} bytes, and was written with {size}" in answer.out + answer.err


def test_an_object_that_was_cut_is_seen_by_its_size(cli: Cli, three: Path) -> None:
    [cut] = objects(three / "global_step2", ".chunks")
    break_file(cut, "truncate")
    left = cut.stat().st_size
    assert (
        f"it needs {cut.relative_to(three)}, whose size was changed to {left} bytes"
        in cli("explain", three, "global_step2").out
    )


@pytest.mark.parametrize("removed", ["00000-0.chunks", ""])
def test_the_object_that_others_refer_to_was_removed_without_its_tag(cli: Cli, three: Path, removed: str) -> None:
    if removed:
        (three / BASE / removed).unlink()
    else:
        shutil.rmtree(three / BASE)
    lost = f"{BASE}/{removed}".rstrip("/")
    for tag in ("global_step2", "global_step3"):
        assert f"it needs {lost}, which is gone: somebody removed" in cli("verify", three, tag).out


def test_what_is_left_can_be_deleted(cli: Cli, three: Path) -> None:
    shutil.rmtree(three / "global_step1")
    assert cli("delete", three, "global_step2", "--yes").code == 0
    assert states(cli, three) == {"global_step3": "incomplete", "global_step1": "incomplete"}


def test_checkpoints_removed_by_the_command_leave_the_others_whole(cli: Cli, three: Path) -> None:
    assert cli("delete", three, "global_step1", "--yes").code == 0
    answer = cli("list", three)
    assert answer.err == ""
    assert set(states(cli, three).values()) == {"committed"}


def test_gc_removes_nothing_while_what_would_stay_cannot_be_loaded(cli: Cli, three: Path) -> None:
    objects(three / "global_step3", ".chunks")[0].unlink()
    refused = cli("gc", three, "--keep-last", "1")
    assert "2 checkpoints, since no checkpoint that was to stay could be read back whole: `checkpointd verify" in refused.out
    assert len(states(cli, three)) == 3
    assert cli("delete", three, "global_step3", "--yes").code == 0
    assert cli("gc", three, "--keep-last", "1").code == 0
    assert set(states(cli, three)) == {"global_step2"}
    assert cli("verify", three, "global_step2").code == 0


def test_gc_removes_nothing_in_favour_of_what_cannot_be_loaded(cli: Cli, three: Path) -> None:
    shutil.rmtree(three / "global_step1")
    assert cli("gc", three, "--keep-last", "1").code == 0
    assert states(cli, three) == {"global_step3": "incomplete", "global_step2": "incomplete", "global_step1": "incomplete"}


def test_what_a_restart_would_load_needs_force(cli: Cli, three: Path) -> None:
    objects(three / "global_step3", ".chunks")[0].unlink()
    refused = cli("delete", three, "global_step2", "--yes")
    assert refused.code == 2
    assert "global_step2 is the newest checkpoint that can be loaded" in refused.err
    assert cli("delete", three, "global_step1", "--yes").code == 0


def test_what_was_removed_by_hand_is_told_until_it_is_deleted(cli: Cli, three: Path) -> None:
    shutil.rmtree(three / "global_step3")
    for command in ("list", "status", "verify", "explain"):
        said = cli(command, three, *(["global_step3"] if command == "explain" else []))
        assert "somebody removed global_step3" in said.out + said.err, command
    assert cli("delete", three, "global_step3", "--yes").code == 0, "it cannot be loaded, so it is not the newest"
    assert (three / "latest").read_text() == "global_step2\n"
    assert states(cli, three) == {"global_step2": "committed", "global_step1": "committed"}


def test_no_page_tells_anyone_to_remove_files_below_a_root() -> None:
    here = Path(__file__).parents[3]
    pages = [here / "README.md", *(page for folder in ("docs", "deploy", "examples") for page in (here / folder).rglob("*.md"))]
    lines = [line for page in pages for line in page.read_text().splitlines() if "rm -r" in line]
    assert len(pages) > 10
    assert all("never by `rm -r`" in line for line in lines), lines


async def test_a_checkpoint_that_is_removed_while_it_is_listed_is_not_called_incomplete(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted between the look at the log and the listing of the root."""
    from checkpointd.admin.gc import deletion

    async with PosixStore(root) as store:
        await _three(store)
        whole = PosixStore.list

        async def list_late(self: PosixStore, prefix: str) -> list[Entry]:
            if prefix == "":
                monkeypatch.setattr(PosixStore, "list", whole)
                await deletion(store, "global_step2", force=False, dry_run=False)
                shutil.rmtree(root / "global_step2", ignore_errors=True)
            return await whole(self, prefix)

        monkeypatch.setattr(PosixStore, "list", list_late)
        rows = {row.tag: row.state for row in (await listing(store)).rows}
        assert rows["global_step2"] == "committed"  # as it was at the look at the log
