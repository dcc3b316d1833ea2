from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from checkpointd.pipeline.root.candidates import note_passed_over
from checkpointd.report.listing import listing
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, rank_arrays, save_checkpoint
from tests.log_only_roots import commit_of, logged_root
from tests.unit.cli.conftest import Cli, With, contents

RAW = sum(array.nbytes for rank in range(2) for array in rank_arrays(rank).values())


async def many(store: Store) -> None:
    """A committed, a replaced, a failed and an undecided attempt, and one saved beside latest."""
    await save_checkpoint(store, tag="global_step1", k=0, n=0)
    await save_checkpoint(store, tag="global_step1", k=1, n=1, step=1)
    await save_checkpoint(store, tag="global_step2", failing={1: RuntimeError("boom")})
    await save_checkpoint(store, tag="global_step3", compression="planes")
    await save_checkpoint(store, tag="aside", step=4, n=4, save_latest=False)
    await leave_in_doubt(store, tag="global_step5", voting=(1,))


def test_checkpoints_newest_first_in_plain_columns(root: Path, at: With, cli: Cli) -> None:
    at(many)
    answer = cli("list", root)
    assert (answer.code, answer.err) == (0, "")
    header, *rows = [line.split() for line in answer.lines]
    assert header == ["TAG", "STEP", "STATE", "RANKS", "RAW", "STORED", "RATIO", "DECIDED", "READ", "BACK", "LATEST"]
    assert [row[0] for row in rows] == ["aside", "global_step3", "global_step1"]
    assert [row[8:10] for row in rows] == [["no", "-"], ["no", "latest"], ["whole", "-"]]
    assert [row[3] for row in rows] == ["2", "2", "2"]
    assert rows[2][4:7] == ["24.3KiB", "24.3KiB", "1.000"]
    assert float(rows[1][6]) < 1


def test_json_has_the_sizes_in_bytes(root: Path, at: With, cli: Cli) -> None:
    at(many)
    answer = cli("list", root, "--json")
    found = answer.json
    assert found["root"] == str(root)
    assert found["latest"] == {"tag": "global_step3", "newest": "global_step3", "note": ""}
    by_tag = {row["tag"]: row for row in found["rows"]}
    assert set(by_tag) == {"aside", "global_step3", "global_step1"}
    assert by_tag["global_step1"]["raw_bytes"] == by_tag["global_step1"]["stored_bytes"] == RAW
    assert by_tag["global_step3"]["stored_bytes"] < RAW == by_tag["global_step3"]["raw_bytes"]
    assert [tag for tag, row in by_tag.items() if row["latest"]] == ["global_step3"]
    on_disk = sum(path.stat().st_size for path in (root / "global_step3").rglob("*.chunks"))
    assert by_tag["global_step3"]["object_bytes"] == on_disk
    assert found["log_damage"] == ""


def test_all_shows_every_attempt_with_its_state_and_why(root: Path, at: With, cli: Cli) -> None:
    at(many)
    rows = cli("list", "--all", "--json", root).json["rows"]
    assert [(row["tag"], row["attempt"], row["state"]) for row in rows] == [
        ("global_step5", "00000001-0", "in-doubt"),
        ("aside", "00000001-0", "committed"),
        ("global_step3", "00000001-0", "committed"),
        ("global_step2", "00000001-0", "aborted"),
        ("global_step1", "00000001-1", "committed"),
        ("global_step1", "00000001-0", "deleted"),
    ]
    whys = {(row["tag"], row["state"]): row["why"] for row in rows}
    assert whys["global_step5", "in-doubt"] == "it is not decided, and there is no vote of rank 0"
    assert "rank 1 failed while staging: boom" in whys["global_step2", "aborted"]
    assert whys["global_step1", "deleted"] == "the tag was saved again since"
    assert whys["aside", "committed"] == ""
    text = cli("list", "--all", root).out
    assert "StagingError, rank 1" in text


def test_a_removed_attempt_says_why_it_was_removed(root: Path, at: With, cli: Cli) -> None:
    at(many)
    assert cli("delete", root, "aside", "--yes").code == 0
    rows = cli("list", "--all", "--json", root).json["rows"]
    assert [row["why"] for row in rows if row["tag"] == "aside"] == ["deleted on request"]


def test_what_a_load_went_past_says_so(root: Path, at: With, cli: Cli) -> None:
    at(many)
    at(lambda store: note_passed_over(store, "global_step3/00000001-0", "its index is damaged"))
    assert "warning: global_step3: load() took an older checkpoint, so retention keeps this one: its index is damaged" in (
        cli("list", root).err
    )
    rows = {row["tag"]: row["why"] for row in cli("list", root, "--json").json["rows"]}
    assert {why for tag, why in rows.items() if tag != "global_step3"} == {""}
    assert "load() took an older checkpoint" in cli("explain", root, "global_step3").out


def test_latest_that_lags_behind_is_warned_of(root: Path, at: With, cli: Cli) -> None:
    at(many)
    (root / "latest").write_text("global_step1\n")
    assert "latest names global_step1, although loads take global_step3" in cli("list", root).err
    (root / "latest").unlink()
    assert "latest does not exist: loads take global_step3" in cli("list", root).err
    (root / "latest").write_text("../../etc\n")
    assert "holds '../../etc', which is not a tag" in cli("list", root).err


def test_an_empty_root_has_no_checkpoints_and_that_is_no_error(root: Path, cli: Cli) -> None:
    answer = cli("list", root)
    assert (answer.code, answer.out) == (0, "")
    hint = "no job ever saved there: give the root that the job was given"
    assert answer.err == f"warning: there are no checkpoints at {root}, {hint}\n"
    assert cli("list", root, "--json").json["rows"] == []


@pytest.mark.parametrize("latest", ["global_step5", "global_step5\n", "a\nb", b"\xff", Path("global_step5")])
def test_latest_of_another_program_suggests_no_recovery(cli: Cli, tmp_path: Path, latest: str | bytes | Path) -> None:
    place = tmp_path / "latest"
    if isinstance(latest, Path):
        place.symlink_to(latest)
    else:
        place.write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    for command in ("list", "status"):
        answer = cli(command, tmp_path)
        assert answer.code == 0
        assert "checkpointd recover" not in answer.out + answer.err
        assert "give the root that the job was given" in answer.err


def test_looking_writes_nothing(root: Path, at: With, cli: Cli) -> None:
    at(many)
    before = contents(root)
    for call in (("list", root), ("list", "--all", root), ("status", root), ("verify", root), ("recover", "--dry-run", root)):
        assert cli(*call).code == 0
    for tag in ("global_step1", "global_step2", "global_step3", "global_step5"):
        cli("explain", root, tag)
        cli("inspect", root, tag)
    assert contents(root) == before


def test_a_limit_shows_the_newest_and_reads_no_vote(root: Path, at: With, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    at(many)
    read: list[str] = []
    get = PosixStore.get

    async def noted(self: PosixStore, key: str, **options: int) -> bytes:
        read.append(key)
        return await get(self, key, **options)

    monkeypatch.setattr(PosixStore, "get", noted)
    found = cli("list", root, "--limit", "2", "--json").json
    assert ([row["tag"] for row in found["rows"]], found["left_out"]) == (["aside", "global_step3"], 1)
    assert {key.split("/")[0] for key in read} <= {"log", "latest"}
    assert len(cli("list", root, "--all", "--limit", "1").lines) == 2
    assert cli("list", root, "--limit", "9", "--json").json["left_out"] == 0
    assert cli("list", root, "--limit", "0").code == 2


def test_metrics_have_a_column_where_there_are_any(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="global_step1", metrics={"loss": 2.3125, "accuracy": 0.91})
        await save_checkpoint(store, tag="global_step2")

    at(saves)
    header, unmeasured, measured = (line.split() for line in cli("list", root).lines)
    assert (header[-1], unmeasured[-1], measured[-2:]) == ("METRICS", "-", ["accuracy=0.91", "loss=2.3125"])
    rows = cli("list", root, "--json").json["rows"]
    assert [row["metrics"] for row in rows] == [{}, {"loss": 2.3125, "accuracy": 0.91}]
    assert "metrics: accuracy=0.91 loss=2.3125" in cli("inspect", root, "1").lines
    assert "metrics" not in cli("inspect", root, "2").out


async def test_of_many_tags_the_log_is_read_and_the_root_is_listed_once() -> None:
    store = MemoryStore("many")
    await logged_root(store, *(commit_of(f"global_step{step}", step) for step in range(300)))
    listed: list[str] = []
    whole = store.list

    async def noted(prefix: str) -> list[Entry]:
        listed.append(prefix)
        return await whole(prefix)

    with mock.patch.object(store, "list", noted):
        found = await listing(store)
    assert [row.state for row in found.rows] == ["committed"] * 300
    assert sorted(set(listed)) == ["", "log"]
    assert listed.count("") == 1
