from __future__ import annotations

from pathlib import Path

from checkpointd.store.base import Store
from tests.builders import break_file, leave_in_doubt, objects, rank_arrays, save_checkpoint
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
    assert header == ["TAG", "STEP", "STATE", "RANKS", "RAW", "STORED", "RATIO", "DECIDED", "LATEST"]
    assert [row[0] for row in rows] == ["aside", "global_step3", "global_step1"]
    assert [row[8] for row in rows] == ["-", "latest", "-"]
    assert [row[3] for row in rows] == ["2", "2", "2"]
    assert rows[2][4:7] == ["24.3KiB", "24.3KiB", "1.000"]
    assert float(rows[1][6]) < 1


def test_json_has_the_sizes_in_bytes(root: Path, at: With, cli: Cli) -> None:
    at(many)
    answer = cli("list", root, "--json")
    found = answer.json
    assert found["root"] == str(root)
    assert found["latest"] == {"tag": "global_step3", "damage": "", "behind": ""}
    by_tag = {row["tag"]: row for row in found["rows"]}
    assert set(by_tag) == {"aside", "global_step3", "global_step1"}
    assert by_tag["global_step1"]["raw_bytes"] == by_tag["global_step1"]["stored_bytes"] == RAW
    assert by_tag["global_step3"]["stored_bytes"] < RAW == by_tag["global_step3"]["raw_bytes"]
    assert [tag for tag, row in by_tag.items() if row["latest"]] == ["global_step3"]
    on_disk = sum(path.stat().st_size for path in (root / "global_step3").rglob("*") if path.is_file())
    assert by_tag["global_step3"]["object_bytes"] == on_disk


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
    assert whys["global_step5", "in-doubt"] == "no outcome; no vote of rank 0"
    assert "rank 1 failed while staging: boom" in whys["global_step2", "aborted"]
    assert whys["global_step1", "deleted"] == "the tag was saved again since"
    assert whys["aside", "committed"] == ""
    text = cli("list", "--all", root).out
    assert "StagingError, rank 1" in text


def test_a_damaged_outcome_is_listed_and_warned_of(root: Path, at: With, cli: Cli) -> None:
    at(many)
    break_file(root / "global_step3/00000001-0/outcome", "flip")
    answer = cli("list", root)
    assert answer.code == 0
    assert {line.split()[0]: line.split()[2] for line in answer.lines[1:]} == {
        "global_step1": "committed",
        "aside": "committed",
        "global_step3": "damaged",
    }
    assert "warning: global_step3: global_step3/00000001-0/outcome is damaged" in answer.err
    assert "warning: latest names global_step3, which cannot be loaded" in answer.err


def test_sizes_are_unknown_where_a_vote_is_gone(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    break_file(objects(root, "00001.vote")[0], "remove")
    [row] = cli("list", root, "--json").json["rows"]
    assert (row["raw_bytes"], row["stored_bytes"], row["world_size"]) == (None, None, 2)


def test_latest_that_lags_behind_is_warned_of(root: Path, at: With, cli: Cli) -> None:
    at(many)
    (root / "latest").write_text("global_step1\n")
    assert "latest names global_step1, although global_step3 was committed since" in cli("list", root).err
    (root / "latest").unlink()
    assert "latest does not exist, although global_step3 was committed since" in cli("list", root).err
    (root / "latest").write_text("../../etc\n")
    assert "holds '../../etc', which is no tag" in cli("list", root).err


def test_an_empty_root_has_no_checkpoints_and_that_is_no_error(root: Path, cli: Cli) -> None:
    answer = cli("list", root)
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == f"warning: there are no checkpoints at {root}\n"
    assert cli("list", root, "--json").json["rows"] == []


def test_looking_writes_nothing(root: Path, at: With, cli: Cli) -> None:
    at(many)
    before = contents(root)
    for call in (("list", root), ("list", "--all", root), ("status", root), ("verify", root), ("recover", "--dry-run", root)):
        assert cli(*call).code == 0
    for tag in ("global_step1", "global_step2", "global_step3", "global_step5"):
        cli("explain", root, tag)
        cli("inspect", root, tag)
    assert contents(root) == before
