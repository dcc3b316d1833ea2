"""A failed read does not prove damage: one error or many, at every kind of object that a load reads.

load() may give the newest checkpoint, every bit of it right, or raise an UnreadableError. It never gives an older one, and
nothing is removed.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from checkpointd.errors import DamagedError, StoreError, UnreadableError
from checkpointd.layout.log_records import VerifyRecord
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, consolidate
from checkpointd_client.checkpointer import core_of
from tests.builders import break_file
from tests.faults.failing_reads import FOR_EVER, FailingReads, Fault, read_impatiently
from tests.faults.jobs import Job, Rank
from tests.faults.predictable_training import KIB, Training
from tests.logged_roots import log_state

SEED = 5
NBYTES = 160 * KIB
NEWEST = "global_step3/00000001-0"
SOON_S = 0.5
"""How long a load tries to read what cannot be read, where a test waits for that."""

KINDS = {
    "ballot": rf"{NEWEST}/ballot-\w+$",
    "index": rf"{NEWEST}/00000\.index$",
    "chunks": rf"{NEWEST}/00000-\d\.chunks$",
    "the log's listing": r"/log$",
}
LISTINGS = [kind for kind in KINDS if "listing" in kind]
NUMBERS = [errno.ENOENT, errno.ESTALE, errno.EMFILE, errno.EIO]
"""What may pass by itself."""


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> FailingReads:
    disk = FailingReads()
    disk.install(monkeypatch.setattr)
    return disk


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    read_impatiently(monkeypatch.setattr, SOON_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints, of steps 1 to 3."""
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    with Checkpointer(tmp_path / "root", compression="none", chunk_bytes=8 * KIB, dedup=False) as ckpt:
        for step in (1, 2, 3):
            training.advance(step)
            ckpt.save(step, training.state, client_state=training.client_state).wait()
    return tmp_path / "root"


def new_training() -> Training:
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    training.advance(99)
    return training


def must_load(ckpt: Checkpointer, step: int) -> tuple[str, ...]:
    training = new_training()
    loaded = ckpt.load(training.state)
    assert loaded is not None
    assert (loaded.step, training.wrong(step)) == (step, [])
    return loaded.fell_back_from


def objects_of(root: Path) -> set[str]:
    """But for what comes and goes with jobs: their leases, which go with the next start."""
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(".checkpointd/leases/")}


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", KINDS)
def test_one_error_costs_nothing_at_whatever_object(root: Path, failing_reads: FailingReads, kind: str, number: int) -> None:
    """Each of the first three reads of it, one after the other: of choosing, examining, and filling."""
    with Checkpointer(root, commit_timeout_s=60.0) as ckpt:
        before = objects_of(root)
        failed = 0
        for works in range(3):
            fault = failing_reads.add(Fault(KINDS[kind], number, works=works))
            assert must_load(ckpt, 3) == ()
            failed += fault.failed
            failing_reads.faults.clear()
        assert failed
        assert objects_of(root) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT], ids=errno.errorcode.get)
@pytest.mark.parametrize("like", [r"/log/\d{12}\.json$", KINDS["index"], KINDS["chunks"]], ids=["entry", "index", "chunks"])
def test_an_export_goes_on_after_one_error(root: Path, failing_reads: FailingReads, like: str, number: int) -> None:
    fault = failing_reads.add(Fault(like, number))
    assert consolidate(root, root.parent / "out.safetensors", rank=0).step == 3
    assert fault.failed == 1


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, number) for kind in KINDS for number in (errno.EIO, errno.EACCES)),
        *((kind, errno.ENOENT) for kind in KINDS if kind not in LISTINGS),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value,
)
def test_a_lasting_error_is_raised_at_the_deadline_and_nothing_falls_back(
    root: Path, soon: None, failing_reads: FailingReads, kind: str, number: int
) -> None:
    """ENOENT: the name is listed all the time, as by a file server that lags behind."""
    with Checkpointer(root, absence_s=0.1) as ckpt:
        before = objects_of(root)
        calls = tuple(call for call in ("read", "read_at", "read_parts", "children") if kind in LISTINGS or call != "children")
        fault = failing_reads.add(Fault(KINDS[kind], number, fails=FOR_EVER, calls=calls))
        training = new_training()
        for options in ({}, {"tag": "global_step3"}):
            with pytest.raises(UnreadableError) as caught:
                ckpt.load(training.state, **options, verify_first=True)  # type: ignore[arg-type]  # options of load(), named by the test
            assert (caught.value.exit_code, caught.value.retryable) == (6, True)
        assert fault.failed > (0 if number == errno.EACCES else 1)
        assert training.wrong(99) == []
        failing_reads.faults.clear()
        assert must_load(ckpt, 3) == ()
        assert objects_of(root) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_permission_is_raised_at_once_and_nothing_falls_back(
    root: Path, failing_reads: FailingReads, kind: str
) -> None:
    """The deadline is one that no test lives to see."""
    with Checkpointer(root, commit_timeout_s=3600.0) as ckpt:
        before = objects_of(root)
        failing_reads.add(Fault(KINDS[kind], errno.EACCES, fails=FOR_EVER))
        training = new_training()
        with pytest.raises(UnreadableError, match=r"\[EACCES\]"):
            ckpt.load(training.state, verify_first=True)
        assert training.wrong(99) == []
        failing_reads.faults.clear()
        assert must_load(ckpt, 3) == ()
        assert objects_of(root) == before


def test_the_message_says_what_to_do(root: Path, soon: None, failing_reads: FailingReads) -> None:
    with Checkpointer(root) as ckpt:
        failing_reads.add(Fault(KINDS["index"], errno.ESTALE, fails=FOR_EVER))
        with pytest.raises(UnreadableError) as caught:
            ckpt.load(new_training().state)
    said = str(caught.value)
    assert re.match(
        r"global_step3 cannot be read now on rank 0: reading 'global_step3/00000001-0/00000\.index' .* \[ESTALE\]", said
    )
    assert f"`checkpointd verify {root} global_step3`" in said
    assert "tag=" in said


@pytest.mark.parametrize("kind", ["ballot", "index", "chunks"])
def test_an_absence_that_lasts_is_damage_and_what_was_passed_over_says_so(root: Path, kind: str) -> None:
    for path in [path for path in root.rglob("*") if re.search(KINDS[kind], path.as_posix())]:
        break_file(path, "remove")
    with Checkpointer(root, absence_s=0.1) as ckpt:
        [why] = must_load(ckpt, 2)
        before = log_state(root)
        assert before.attempts[NEWEST].passed_over == why
        assert must_load(ckpt, 2) == (why,)
        with pytest.raises(DamagedError):
            ckpt.load(new_training().state, fallback=False, verify_first=True)
    assert log_state(root).attempts[NEWEST] == before.attempts[NEWEST]


def _refuses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry with a record of a load can be put."""
    put = PosixStore.put_if_absent

    async def refusing(self: PosixStore, key: str, data: bytes, *, durable: bool = True) -> bool:
        if b'"kind": "passed-over"' in data:
            raise StoreError("the storage is gone")
        return await put(self, key, data, durable=durable)

    monkeypatch.setattr(PosixStore, "put_if_absent", refusing)


def test_a_record_that_cannot_be_left_is_no_reason_not_to_load(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_file(root / NEWEST / "00000.index", "flip")
    _refuses_entries(monkeypatch)
    with Checkpointer(root) as ckpt:
        must_load(ckpt, 2)
    assert f"{NEWEST}: no record could be put that it was passed over" in caplog.text


def test_a_job_that_cannot_leave_the_record_removes_nothing_of_earlier_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged one had been read back whole before: by the rules it would stand for the one that was loaded."""
    with Checkpointer(root) as ckpt:
        assert core_of(ckpt)._writer.call(_verify(core_of(ckpt)._store), 60) == ""
    break_file(root / NEWEST / "00000.index", "flip")
    with monkeypatch.context() as patch:
        _refuses_entries(patch)
        with Checkpointer(root, retention=1, on_no_progress="ignore", read_back=False) as ckpt:
            must_load(ckpt, 2)
            training = new_training()
            ckpt.save(4, training.state, client_state=training.client_state).wait()
    break_file(root / "global_step4" / "00000003-0" / "00000.index", "flip")
    with Checkpointer(root) as ckpt:
        must_load(ckpt, 2)


async def _verify(store: Store) -> str:
    return await RootLog.of(store).add(VerifyRecord(attempt=NEWEST, nbytes=1))


# --- while the objects are filled --------------------------------------------------------------------------------------


def chunk_reads(ckpt: Checkpointer, failing_reads: FailingReads) -> int:
    """How many reads of chunks a load makes."""
    count = failing_reads.add(Fault(r"\.chunks$", 0, fails=0, calls=("read_parts",)))
    must_load(ckpt, 3)
    assert count.seen
    return count.seen


def test_an_error_while_filling_is_tried_again(root: Path, failing_reads: FailingReads) -> None:
    with Checkpointer(root) as ckpt:
        half = chunk_reads(ckpt, failing_reads) // 2  # 0 if one read is enough
        fault = failing_reads.add(Fault(r"\.chunks$", errno.EIO, works=half, fails=3, calls=("read_parts",)))
        assert must_load(ckpt, 3) == ()
        assert fault.failed == 3


def ask(rank: Rank, command: str, **arguments: object) -> Any:
    rank.tell(command, **arguments)
    return rank.answer()


@pytest.mark.e2e
def test_ranks_hear_alike_of_what_one_of_them_cannot_read(pair: Job, tmp_path: Path) -> None:
    root = tmp_path / "root"
    pair.open(root)
    pair.must_commit(1)
    pair.must_commit(2)
    pair.all("close")
    before = objects_of(root)
    pair.open(root)
    pair.all("read_impatiently", seconds=SOON_S)
    ask(pair.ranks[1], "fail_reads", like=r"global_step2/.*00001\.index$", number=errno.EIO)
    for error in pair.errors_of("load"):
        assert error.code == "UnreadableError"
        assert "rank 1" in error.message
        assert "00001.index" in error.message
    ask(pair.ranks[1], "mend_reads")
    pair.ranks[0].tell("load")
    reads = ask(pair.ranks[1], "reads_of_chunks")
    pair.ranks[0].answer()
    ask(pair.ranks[1], "fail_reads", like=r"00001-\d\.chunks$", number=errno.EIO, works=reads // 2)
    for error in pair.errors_of("load"):
        assert error.code == "PartlyLoadedError"
        assert "rank 1" in error.message
    ask(pair.ranks[1], "mend_reads")
    pair.must_load(2)
    assert {name for name in objects_of(root) if "log/" not in name} == {name for name in before if "log/" not in name}
