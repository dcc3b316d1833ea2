"""Records, summaries, and the state that follows from them."""

from __future__ import annotations

import msgspec
import pytest

from checkpointd.errors import DamagedError
from checkpointd.layout import catalog_records
from checkpointd.layout.catalog_records import (
    CatalogRecord,
    CatalogState,
    Kind,
    RecordBatch,
    batch_key,
    batches,
    close_of,
    decode_batch,
    encode_batch,
    summary_key,
)
from checkpointd.layout.manifest import VERSION, BallotRef, ErrorReport, Outcome, WriterIdentity, digest, encode
from checkpointd.store.base import SMALL_BYTES_MAX

WRITER = WriterIdentity(host="node1", pid=7, time="2026-11-23T10:00:00.000+00:00")
COMMIT = Outcome(
    tag="global_step5",
    attempt="00000001-0",
    step=5,
    world_size=1,
    outcome="commit",
    order=(1, 3),
    save_latest=True,
    ballot=BallotRef(digest="0" * 32, size=100),
    holders=("global_step1/00000001-0",),
    metrics={"loss": 0.5},
    decided_by=0,
    writer=WRITER,
)
ABORT = msgspec.structs.replace(
    COMMIT,
    outcome="abort",
    ballot=None,
    holders=(),
    metrics={},
    error=ErrorReport(code="AbortedError", message="no"),
    ranks=(2,),
)
PREFIX = "global_step5/00000001-0"


def record(kind: Kind, **keys: object) -> CatalogRecord:
    made = CatalogRecord(kind=kind, tag="global_step5", attempt="00000001-0")
    return msgspec.structs.replace(made, **keys)


def batch(*records: CatalogRecord, number: int = 1) -> RecordBatch:
    return RecordBatch(version=VERSION, number=number, writer=WRITER, records=records)


def after(*records: CatalogRecord) -> CatalogState:
    """The state after these records, each in a batch of its own."""
    state = CatalogState()
    for number, one in enumerate(records, 1):
        state.apply(batch(one, number=number))
    return state


@pytest.mark.parametrize("outcome", [COMMIT, ABORT], ids=["commit", "abort"])
def test_a_close_has_the_outcome_whole(outcome: Outcome) -> None:
    entry = after(record("intent", n=3, step=5), close_of(outcome)).entries[PREFIX]
    assert entry.decoded == outcome
    assert (entry.digest, entry.size) == (digest(encode(outcome)), len(encode(outcome)))
    assert (entry.n, entry.step, entry.is_open) == (3, 5, False)


def test_the_first_close_counts() -> None:
    entry = after(record("intent"), close_of(COMMIT), record("intent"), close_of(ABORT)).entries[PREFIX]
    assert entry.decoded == COMMIT


def test_an_attempt_is_open_until_it_is_decided_or_removed() -> None:
    assert after(record("intent")).entries[PREFIX].is_open
    assert not after(record("intent"), record("removed")).entries[PREFIX].is_open
    assert PREFIX not in after(record("intent"), record("forgotten")).entries


@pytest.mark.parametrize(
    ("kinds", "verified", "damaged"),
    [(("verified",), True, False), (("verified", "damaged"), False, True), (("damaged", "verified"), True, False)],
)
def test_the_last_reading_counts(kinds: tuple[Kind, ...], verified: bool, damaged: bool) -> None:
    entry = after(record("intent"), *map(record, kinds)).entries[PREFIX]
    assert (entry.verified, entry.damaged, entry.passed_over) == (verified, damaged, False)


def test_a_summary_gives_the_same_state_as_the_records() -> None:
    state = after(record("intent"), close_of(COMMIT), record("removed", reason="old", kept=("00000-0.chunks",)))
    data = catalog_records.encode_summary(state)
    assert CatalogState.read(data, 3) == state
    assert state.entries[PREFIX].kept == ("00000-0.chunks",)
    empty = catalog_records.encode_summary(CatalogState())
    assert CatalogState.read(empty, 0) == CatalogState()


def test_names_have_one_spelling() -> None:
    names = [batch_key(3), summary_key(12), batch_key(1)]
    short = [name.rpartition("/")[2] for name in names]
    assert catalog_records.numbers([*short, "1.records", "000000000004.records~", "latest"]) == ([12], [1, 3])


@pytest.mark.parametrize(
    "change",
    [{"attempt": "1-0"}, {"tag": "../elsewhere"}, {"tag": ".checkpointd"}, {"kind": "close", "digest": "0" * 32}],
    ids=lambda c: next(iter(c)),
)
def test_what_no_writer_puts_is_damage(change: dict[str, object]) -> None:
    put = msgspec.structs.replace(record("intent"), **change)
    with pytest.raises(DamagedError):
        decode_batch(encode_batch(batch(record("intent"), put)), 1)


def test_a_batch_of_another_number_is_damage() -> None:
    with pytest.raises(DamagedError, match="moved"):
        decode_batch(encode_batch(batch(record("intent"))), 2)


def test_a_batch_has_the_same_effect_as_its_records_one_by_one() -> None:
    records = [record("intent"), close_of(COMMIT), record("removing"), record("removed", reason="old")]
    state = CatalogState()
    state.apply(decode_batch(encode_batch(batch(*records, number=4)), 4))
    summary = catalog_records.encode_summary(state)
    assert summary == catalog_records.encode_summary(after(*records))
    assert len(summary.splitlines()) == 4, "one line for the attempt"


def test_batches_hold_all_records_in_order_and_are_small_enough_to_read() -> None:
    """A record with tens of thousands of kept objects is a batch of its own."""
    large = record("removed", kept=tuple(f"{n:05d}-0.chunks" for n in range(20_000)))
    records = [*(record("intent", step=n) for n in range(9_000)), large, *(record("verified", step=n) for n in range(9))]
    found = list(batches(records))
    assert [one for part in found for one in part] == records
    assert (large,) in found
    assert 3 < len(found) < 15
    assert max(len(encode_batch(batch(*part))) for part in found) <= SMALL_BYTES_MAX


def test_a_changed_byte_is_damage() -> None:
    data = encode_batch(batch(record("intent")))
    with pytest.raises(DamagedError, match="checksum"):
        decode_batch(data.replace(b"global_step5", b"global_step6"), 1)


@pytest.mark.parametrize("kind", ["close", "removing", "removed", "verified", "damaged", "passed-over", "forgotten"])
def test_catalog_7_a_late_record_brings_nothing_back(kind: Kind) -> None:
    """A process was stopped before it put the record, and meanwhile a newer start decided, removed or forgot the attempt."""
    late = close_of(COMMIT) if kind == "close" else record(kind)
    assert after(record("intent"), close_of(COMMIT), record("removed"), record("forgotten"), late).entries == {}
    assert after(late).entries == {}


@pytest.mark.parametrize("before", [("removing",), ("removed",), ("removing", "removed"), ("removed", "removing")])
def test_catalog_7_a_late_close_does_not_end_a_removal(before: tuple[Kind, ...]) -> None:
    removal = [record("intent"), close_of(COMMIT), *map(record, before)]
    assert after(*removal, close_of(COMMIT)).entries == after(*removal).entries
    unclosed = after(record("intent"), *map(record, before), close_of(COMMIT)).entries[PREFIX]
    assert unclosed.is_open == (before[-1] == "removing")
    assert bool(unclosed.removed) == ("removed" in before)


def test_catalog_7_a_late_close_of_another_outcome_changes_nothing() -> None:
    """The attempt was aborted by a newer start."""
    entry = after(record("intent"), close_of(ABORT), close_of(COMMIT)).entries[PREFIX]
    assert entry.decoded == ABORT


def test_an_attempt_is_open_while_it_is_being_removed() -> None:
    entry = after(record("intent"), close_of(COMMIT), record("removing")).entries[PREFIX]
    assert (entry.is_decided, entry.is_open) == (True, True)
