from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointd.commit.log import following
from checkpointd.config import LoadConfig
from checkpointd.errors import StoreFullError
from checkpointd.layout.log_records import LogState, decode_entry, encode_state, entry_key, state_key
from checkpointd.pipeline.gc.collect import remove
from checkpointd.pipeline.gc.retire import retire_tag
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.report import verification
from checkpointd.report.verification import to_verify, verified
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from tests.builders import begin_start, break_file, save_checkpoint
from tests.faults.failing_reads import FOR_EVER, FailingReads, Fault
from tests.unit.cli.conftest import Cli, With


async def three(store: Store) -> None:
    for step in (1, 2, 3):
        await save_checkpoint(store, tag=f"global_step{step}")


def test_whole_checkpoints_end_with_code_0(root: Path, at: With, cli: Cli) -> None:
    at(three)
    answer = cli("verify", root)
    assert (answer.code, answer.err) == (0, "")
    assert [line.split()[:3] for line in answer.lines[1:]] == [
        ["global_step3", "00000001-0", "whole"],
        ["global_step2", "00000001-0", "whole"],
        ["global_step1", "00000001-0", "whole"],
    ]
    found = cli("verify", root, "--json").json
    assert all(verdict["bytes_read"] > 0 and verdict["damage"] == [] for verdict in found["checkpoints"])


def test_every_damage_is_listed_with_its_object_tensor_and_rank(root: Path, at: With, cli: Cli) -> None:
    at(three)
    for rank in range(2):
        break_file(root / f"global_step2/00000001-0/{rank:05d}-0.chunks", "flip")
    break_file(root / "global_step3/00000001-0/00001.index", "truncate")
    answer = cli("verify", root, "--json")
    assert answer.code == 5
    damage = {v["tag"]: [(d["key"], d["fqn"], d["rank"]) for d in v["damage"]] for v in answer.json["checkpoints"]}
    assert damage == {
        "global_step1": [],
        "global_step2": [
            ("global_step2/00000001-0/00000-0.chunks", "model.weight", 0),
            ("global_step2/00000001-0/00001-0.chunks", "model.weight", 1),
        ],
        "global_step3": [("global_step3/00000001-0/00001.index", "", 1)],
    }
    text = cli("verify", root)
    assert text.code == 5
    assert "3 damages found" in text.lines
    assert "global_step2/00000001-0/00001-0.chunks is damaged" in text.out
    assert "(rank 1, model.weight)" in text.out


def test_one_tag_alone(root: Path, at: With, cli: Cli) -> None:
    at(three)
    break_file(root / "global_step2/00000001-0/00000-0.chunks", "remove")
    assert cli("verify", root, "global_step1").code == 0
    assert cli("verify", root, "latest").lines[1].split()[0] == "global_step3"
    answer = cli("verify", root, "global_step2")
    assert answer.code == 5
    assert "rank 0" in answer.out


@pytest.mark.parametrize("name", ["ballot-*", "00001.index", "00001-0.chunks"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
def test_damage_to_any_object_is_found(root: Path, at: With, cli: Cli, name: str, fault: str) -> None:
    at(three)
    [broken] = (root / "global_step3").rglob(name)
    break_file(broken, fault)
    answer = cli("verify", root)
    assert answer.code == 5
    assert broken.name in answer.out


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", ["000000000002.json", "000000000064.json", "000000000064.state", "000000000066.json"])
def test_damage_to_any_object_of_the_log_is_found(root: Path, at: With, cli: Cli, name: str, fault: str) -> None:
    """Also where readers do not notice, since a state or the entries tell the same."""

    async def long(store: Store) -> None:
        await save_checkpoint(store, world_size=1)
        for _ in range(64):
            await starts.take(store, 1)
        await RootLog.of(store).compact()

    at(long)
    assert cli("verify", root).code == 0
    break_file(root / "log" / name, fault)
    answer = cli("verify", root, "global_step1")
    is_told = (name, fault) != ("000000000064.state", "remove")  # a job may not have put it yet
    assert (answer.code, f"log/{name}" in answer.out) == ((5, True) if is_told else (0, False))
    assert cli("list", root, "--json").json["rows"][0]["tag"] == "global_step1"


def test_a_log_without_the_roots_id_is_damaged(root: Path, at: With, cli: Cli) -> None:
    at(three)
    break_file(root / "log/root", "flip")
    answer = cli("verify", root)
    assert (answer.code, "log/root is damaged" in answer.out) == (5, True)
    assert "the log can be read to its end all the same" in answer.out


def test_a_state_that_says_something_else_is_found(root: Path, at: With, cli: Cli) -> None:
    """As one that somebody has put from the same log of another root."""

    async def long(store: Store) -> None:
        await save_checkpoint(store, world_size=1)
        for _ in range(64):
            await starts.take(store, 1)
        state = await root_view.state_of(store)
        at_64 = following(LogState(), [decode_entry((root / entry_key(n)).read_bytes(), n) for n in range(1, 65)])
        await store.put(state_key(64), encode_state(replace(at_64, begins=state.begins)))

    at(long)
    answer = cli("verify", root)
    assert answer.code == 5
    assert "log/000000000064.state does not say what the entries up to it say" in answer.out


def test_what_lies_beside_the_checkpoints_is_named_and_no_damage(root: Path, at: With, cli: Cli) -> None:
    at(three)
    shutil.copytree(root / "global_step1", root / "brought")
    kept = root / "global_step2/00000001-0/00000-0.chunks"
    data = kept.read_bytes()
    assert cli("delete", root, "global_step1", "--yes").code == 0
    at(lambda store: remove(store, {"a test": ["global_step2/00000001-0"]}))
    answer = cli("verify", root, "--json")
    assert answer.code == 0
    assert (answer.json["unknown"], answer.json["leftovers"]) == (["brought/00000001-0"], ["global_step2/00000001-0"])
    text = cli("verify", root).out
    assert "brought/00000001-0: somebody brought them here" in text
    assert f"global_step2/00000001-0: `checkpointd gc {root}` removes these objects" in text
    assert cli("gc", root).code == 0
    assert not kept.exists()
    assert (root / "brought/00000001-0/00000-0.chunks").stat().st_size == len(data)
    found = cli("verify", root, "--json").json
    assert (found["unknown"], found["leftovers"]) == (["brought/00000001-0"], [])


OBJECTS = ["ballot-.*", "00001.index", "00001-0.chunks"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_cannot_be_read_is_unreadable_and_no_damage(
    root: Path, at: With, cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    at(three)
    assert cli("verify", root, "--record").code == 0
    monkeypatch.setattr(verification, "PATIENCE", LoadConfig(retry_s=0.2))
    failing_reads = FailingReads()
    failing_reads.install(monkeypatch.setattr)
    like = f"global_step3/.*/{name}$"
    failing_reads.add(Fault(like, number, fails=FOR_EVER, calls=("read", "read_at")))
    answer = cli("verify", root, "--record", "--json")
    assert answer.code == 6
    found = {v["tag"]: v for v in answer.json["checkpoints"]}
    assert all(v["damage"] == [] for v in found.values())
    hit = {"global_step3"}
    assert {tag for tag, v in found.items() if v["state"] == "unreadable"} == hit
    assert {tag for tag, v in found.items() if v["state"] == "whole"} == set(found) - hit
    for tag in hit:
        assert all(
            one["code"] == "UnreadableError" and errno.errorcode[number] in one["message"] for one in found[tag]["unreadable"]
        )
    text = cli("verify", root)
    assert text.code == 6
    assert "cannot be read now" in text.out
    assert errno.errorcode[number] in text.out
    # The record that it was found whole once is not taken back.
    assert {row["read_back"] for row in cli("list", root, "--json").json["rows"]} == {"whole"}


def test_a_result_that_cannot_be_recorded_is_told(root: Path, at: With, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    at(three)
    put = PosixStore.put_if_absent

    async def full(*_: object, **__: object) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(PosixStore, "put_if_absent", full)
    answer = cli("verify", root, "--record")
    assert answer.code == 6
    assert "3 results could not be recorded (global_step3, global_step2, global_step1): the disk is full" in answer.err
    answer = cli("verify", root, "--record", "--json")
    assert answer.code == 6
    assert {(v["state"], v["record_error"]) for v in answer.json["checkpoints"]} == {("whole", "the disk is full")}
    assert cli("verify", root).code == 0
    assert {row["read_back"] for row in cli("list", root, "--json").json["rows"]} == {"no"}
    monkeypatch.setattr(PosixStore, "put_if_absent", put)
    assert cli("verify", root, "--record").code == 0
    assert {row["read_back"] for row in cli("list", root, "--json").json["rows"]} == {"whole"}


def test_damage_beside_what_cannot_be_read_ends_with_the_code_of_damage(
    root: Path, at: With, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(three)
    monkeypatch.setattr(verification, "PATIENCE", LoadConfig(retry_s=0.2))
    failing_reads = FailingReads()
    failing_reads.install(monkeypatch.setattr)
    failing_reads.add(Fault("global_step3/.*/00000.index$", errno.EACCES, fails=FOR_EVER))
    break_file(root / "global_step3/00000001-0/00001.index", "flip")
    answer = cli("verify", root, "global_step3", "--json")
    assert answer.code == 5
    [verdict] = answer.json["checkpoints"]
    assert (verdict["state"], len(verdict["damage"]), len(verdict["unreadable"])) == ("damaged", 1, 1)


@pytest.mark.parametrize("loss", ["removed", "a link"])
def test_a_log_without_its_end_is_damaged_although_all_of_it_can_be_read(root: Path, at: With, cli: Cli, loss: str) -> None:
    at(three)
    last = max(root.glob("log/*.json"), key=lambda path: ("commit" in path.read_text(), path.name))
    for path in root.glob("log/*.json"):
        if path.name >= last.name:
            path.unlink()
    if loss == "a link":
        last.symlink_to(root / "latest")
    answer = cli("verify", root)
    assert answer.code == 5
    assert f"the end of the log of {root} is missing, or latest was edited: latest names global_step3" in answer.out
    assert "whole" in answer.out


def test_nothing_to_verify_is_no_damage(root: Path, at: With, cli: Cli) -> None:
    at(begin_start)
    answer = cli("verify", root)
    assert (answer.code, answer.out) == (0, "")
    assert "there are no checkpoints" in answer.err


def test_what_is_replaced_while_it_is_read_is_removed_not_damaged(at: With) -> None:
    async def race(store: Store) -> None:
        await save_checkpoint(store, tag="best", k=0, n=0)
        todo = await to_verify(store, None)
        await save_checkpoint(store, tag="best", k=1, n=1)
        await retire_tag(store, "best", 1)
        assert (await root_view.find(store, "best")).id.k == 1
        [verdict] = await verified(store, todo)
        assert (verdict.state, verdict.damage) == ("removed", [])

    at(race)
