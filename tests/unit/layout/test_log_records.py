"""The bytes of a log's entries and states: what is written is read, what was changed is noticed, what cannot be is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given

from checkpointd.commit.log import following
from checkpointd.errors import FormatError
from checkpointd.layout.keys import START_MAX, STEP_MAX, WORLD_SIZE_MAX
from checkpointd.layout.log_records import (
    LogEntry,
    LogListing,
    LogState,
    Record,
    decode_entry,
    decode_state,
    encode_entry,
    encode_state,
    entry_key,
    state_key,
)
from checkpointd.layout.manifest import BALLOT_BYTES_MAX, VERSION, JointPlanRef
from checkpointd.layout.save_timings import Cost
from tests.forged_roots import opened, sealed
from tests.unit.commit.log_histories import (
    abort,
    after,
    announce,
    begin,
    commit,
    damaged,
    histories,
    hold,
    nonce,
    passed_over,
    remove,
    rollback,
    saved,
    swept,
    verified,
)

A, B, C, D = "step10/00000001-0", "step20/00000001-1", "schritt ü 🚀/00000001-2", "step40/00000001-3"
FULL = commit(
    A,
    step=STEP_MAX,
    world_size=WORLD_SIZE_MAX,
    save_latest=False,
    plan=JointPlanRef(digest="cd" * 16, size=77),
    holders=(B, D),
    metrics={"loss": 1.5, "größe": -0.0},
    left=(((1, 2), (3, 4)), ((5, 6), (7, 8))),
    no_progress=True,
    cost=Cost(took_s=1.5, held_s=0.1, raw_bytes=1 << 60, stored_bytes=1, written_bytes=0),
    files=3,
    shown_at="runs/checkpoint-10",
    unfinished="00000001-0",
    rebuilt=True,
    decided_by=-1,
)
"""A commit in which nothing is left out."""
RECORDS: tuple[Record, ...] = (
    begin(START_MAX, A, C, origin="s3://bucket/run", job="night", process="node-1/boot/77", commit_timeout_s=600.0),
    announce(C, base=A, step=0),
    FULL,
    abort(B, "x" * 100_000),
    remove(A, C),
    swept(B),
    verified(A),
    damaged(C, "größe 🚀\n\x00"),
    passed_over(A),
    rollback(A),
    hold(D),
)
"""One of each kind."""
ENTRY = LogEntry(number=513, nonce=nonce(513), before=nonce(512), records=RECORDS)
SMALL = LogEntry(number=7, nonce=nonce(7), before=nonce(6), records=(announce(A, base=B), commit(A, holders=(B,)), swept(C)))
STATE = after(
    LogState(),
    begin(1),
    saved(A, metrics={"loss": 0.5}),
    saved(B, base=A, holders=(A,)),
    verified(B),
    [announce(C), abort(C)],
    remove(A),
    rollback(B),
    announce(D, base=B),
    begin(2, D),
)
NUMBER = STATE.number


# --- what is written is read ------------------------------------------------------------------------------------------


def test_each_kind_of_record_is_read_as_it_was_written() -> None:
    assert decode_entry(encode_entry(ENTRY), 513) == ENTRY
    assert {type(record) for record in RECORDS} == set(Record.__args__)  # type: ignore[attr-defined]


def test_a_state_has_a_line_for_each_attempt() -> None:
    lines = encode_state(STATE).decode().splitlines()
    assert [line.split(",")[0] for line in lines[1:-2]] == [f'{{"attempt":"{name}"' for name in STATE.attempts]


@given(histories)
def test_any_state_is_read_as_it_was_written_and_any_entry(records: list[Record]) -> None:
    one = LogEntry(number=1, nonce=nonce(1), before="", records=tuple(records))
    assert decode_entry(encode_entry(one), 1) == one
    state = following(LogState(), [one])
    assert decode_state(encode_state(state), 1) == state


def test_keys_that_this_release_does_not_know_are_left_alone() -> None:
    """As in all small objects: what changes the meaning of an object raises the version, or is a new kind of record."""

    def with_more(fields: dict[str, Any]) -> None:
        fields["newer"] = {"deep": [1, 2, 3]}
        for record in fields.get("records", []):
            record["newer"] = "x"

    assert decode_entry(edited(encode_entry(SMALL), with_more), 7) == SMALL
    assert decode_state(edited(encode_state(STATE), with_more), NUMBER) == STATE


# --- what was changed is noticed --------------------------------------------------------------------------------------

DATA = {"entry": encode_entry(SMALL), "state": encode_state(STATE)}
READ: dict[str, Callable[[bytes], object]] = {
    "entry": lambda data: decode_entry(data, 7),
    "state": lambda data: decode_state(data, NUMBER),
}
KEYS = {"entry": entry_key(7), "state": state_key(NUMBER)}
both = pytest.mark.parametrize("kind", ["entry", "state"])


def refused(kind: str, data: bytes) -> str:
    """The words in which `data` is refused, after the key that they name."""
    with pytest.raises(FormatError) as caught:
        READ[kind](data)
    assert caught.value.key == KEYS[kind]
    words = str(caught.value)
    assert words.startswith(f"{KEYS[kind]} ")
    assert len(words) < 1000
    return words.removeprefix(f"{KEYS[kind]} ")


@both
def test_what_somebody_moved_is_noticed(kind: str) -> None:
    read = {"entry": decode_entry, "state": decode_state}[kind]
    with pytest.raises(FormatError, match=r"has the number \d+; somebody moved it"):
        read(DATA[kind], 8_000)


# --- what cannot be is refused ----------------------------------------------------------------------------------------


def edited(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """`data` after `change`, with the checksum that it then has: what another program may have written."""
    fields = opened(data)
    change(fields)
    return sealed(fields)


def at(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets what is at `path`, whose parts are keys and numbers of items."""

    def change(fields: Any) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in way:
            fields = fields[part]
        fields[last] = value

    return change


HOSTILE_NAMES = [
    "../x/00000001-0",
    "/x/00000001-0",
    "x/../00000001-0",
    "a/b/00000001-0",
    "a\\b/00000001-0",
    "x\0/00000001-0",
    "x\n/00000001-0",
    "x/00000001-0\n",
    "./00000001-0",
    ".hidden/00000001-0",
    "/00000001-0",
    "x/1-0",
    "x/00000001-00",
    "x/00000001--1",
    "x/١٢٣٤٥٦٧٨-0",  # digits, but not those of a name
    "x/00000001-0/00000.chunks",
    "x/9999999999999-0",
    "x/00000001-9999999999",
    "x",
    "",
    "y" * 201 + "/00000001-0",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_record_or_state_that_names_no_attempt_is_refused(name: str) -> None:
    places = ["records.0.attempt", "records.1.attempt", "records.1.holders.0", "records.2.attempts.0"]
    for path in [*places, *(["records.0.base"] if name else [])]:
        assert refused("entry", edited(DATA["entry"], at(path, name))) == f"names {name!r:.100}, which is no attempt"
    assert "names" in refused("state", edited(DATA["state"], at("attempts.2.attempt", name)))
    for path in ["attempts.1.commit.holders.0", "heads.", *(["attempts.1.base"] if name else [])]:
        assert refused("state", edited(DATA["state"], at(path, name))) == f"names {name!r:.100}, which is no attempt"


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_each_kind_of_record_names_attempts_alone(name: str) -> None:
    kinds = [begin(1, name), announce(name), commit(name), abort(name), remove(A, name), swept(name), verified(name)]
    for record in [*kinds, damaged(name), passed_over(name), rollback(name), hold(name)]:
        one = LogEntry(number=7, nonce=nonce(7), before="", records=(announce(A), record))
        assert refused("entry", encode_entry(one)) == f"names {name!r:.100}, which is no attempt"


@both
@pytest.mark.parametrize("version", [1, VERSION + 1, 10**30])
def test_another_version_is_refused_whatever_else_it_has(kind: str, version: int) -> None:
    def newer(fields: dict[str, Any]) -> None:
        fields["version"] = version
        fields["number"] = "seven"

    words = refused(kind, edited(DATA[kind], newer))
    assert words.startswith(f"has format version {version}, and this release reads version {VERSION}: ")
    assert words.endswith("read it with the release that wrote it, or a newer one")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("number", 0, "Expected `int` >= 1 - at `$.number`"),
        ("number", -1, "Expected `int` >= 1 - at `$.number`"),
        ("number", 10**12, "Expected `int` <= 999999999999 - at `$.number`"),
        pytest.param("number", 10**4000, "Expected `int` <= 999999999999 - at `$.number`", id="4000 digits"),
        ("number", "7", "Expected `int`, got `str` - at `$.number`"),
        ("number", 7.5, "Expected `int`, got `float` - at `$.number`"),
        ("number", None, "Expected `int`, got `null` - at `$.number`"),
        ("nonce", "", "Expected `str` matching regex"),
        ("nonce", "f" * 15, "Expected `str` matching regex"),
        ("nonce", "F" * 32, "Expected `str` matching regex"),
        ("before", None, "Expected `str`, got `null` - at `$.before`"),
        ("before", "../x", "Expected `str` matching regex"),
        ("records", {}, "Expected `array`, got `object` - at `$.records`"),
        ("records.0", [], "Expected `object`, got `array` - at `$.records[0]`"),
        ("records.0.step", -1, "Expected `int` >= 0 - at `$.records[0].step`"),
        ("records.0.step", "1", "Expected `int`, got `str` - at `$.records[0].step`"),
        ("records.1.world_size", 0, "Expected `int` >= 1 - at `$.records[1].world_size`"),
        ("records.1.world_size", WORLD_SIZE_MAX + 1, "Expected `int` <= 262144 - at `$.records[1].world_size`"),
        ("records.1.metrics", {"loss": None}, "Expected `float`, got `null` - at `$.records[1].metrics[...]`"),
        ("records.1.ballot", None, "Expected `object`, got `null` - at `$.records[1].ballot`"),
        ("records.1.left", [[1, 2]], "Expected `array`, got `int` - at `$.records[1].left[0][0]`"),
    ],
)
def test_an_entry_with_a_value_that_cannot_be_is_refused(path: str, value: object, words: str) -> None:
    assert refused("entry", edited(DATA["entry"], at(path, value))).startswith(f"is damaged: {words}")


@pytest.mark.parametrize(
    "record",
    [begin(0), begin(-1), begin(START_MAX + 1), begin(10**300)],
    ids=["zero", "below zero", "too great", "far too great"],
)
def test_a_start_that_has_no_number_is_refused(record: Record) -> None:
    one = LogEntry(number=7, nonce=nonce(7), before="", records=(record,))
    assert re.match(r"is damaged: Expected `int` [<>]= \d+ - at `\$\.records\[0\]\.start`", refused("entry", encode_entry(one)))


@pytest.mark.parametrize("size", [0, -1, BALLOT_BYTES_MAX + 1])
def test_a_commit_without_a_ballot_that_can_have_all_votes_is_refused(size: int) -> None:
    for kind, path in (("entry", "records.1.ballot.size"), ("state", "attempts.1.commit.ballot.size")):
        words = refused(kind, edited(DATA[kind], at(path, size)))
        assert words == f"has a commit of {(B if kind == 'state' else A)!r} with a ballot of {size} bytes, which cannot be"


@both
def test_what_lacks_a_key_is_refused(kind: str) -> None:
    def without(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda fields: fields.pop(name)

    for name in msgspec.json.decode(DATA[kind]):
        if name not in ("checksum", "begin", "begins", "used", "heads"):
            refused(kind, edited(DATA[kind], without(name)))


def twice(fields: dict[str, Any]) -> None:
    fields["attempts"].append(fields["attempts"][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (twice, "lists an attempt twice"),
        (at("attempts.1.commit", None), f"lists {B!r} as a checkpoint without its commit"),
        (at("attempts.1.commit.attempt", A), f"lists {B!r} with the commit of {A!r}"),
        (at("attempts.1.status", "lost"), "is damaged: Invalid enum value 'lost' - at `$.attempts[1].status`"),
        (at("heads.", "../../x"), "names '../../x', which is no attempt"),
        (at("heads.", A), f"names {A!r} as a training's newest, which is no checkpoint"),
        (at("begins.0.spared", ["../x/00000001-0"]), "names '../x/00000001-0', which is no attempt"),
        (at("attempts.2.abort.attempt", "../x"), "names '../x', which is no attempt"),
        (at("attempts.0.removal.attempts", ["../x"]), "names '../x', which is no attempt"),
        (at("used", {"one": []}), "is damaged: Expected `int`, got `str` - at `key` in `$.used`"),
        (at("used", {"1": [[0, 1, 2]]}), "is damaged: Expected `array` of length 2 - at `$.used[...][0]`"),
        (at("number", 10**4000), "is damaged: Expected `int` <= 999999999999 - at `$.number`"),
        (at("number", -1), "is damaged: Expected `int` >= 0 - at `$.number`"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    assert refused("state", edited(DATA["state"], change)) == words


def test_a_name_of_megabytes_is_not_repeated() -> None:
    words = refused("state", edited(DATA["state"], at("attempts.1.base", "x" * 10_000_000)))
    assert words == f"names '{'x' * 99}, which is no attempt"


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_listing_tells_what_lies_in_a_log() -> None:
    names = ["000000000007.json", "000000000005.json", "000000000004.state", "000001000000.rebuild", "root", "x.json"]
    listing = LogListing.of([*names, "7.json", "000000000007.json.tmp", "000000000007.json\n", "١٢٣٤٥٦٧٨٩٠١٢.json"])
    assert listing == LogListing((5, 7), (4,), (10**6,))
    assert (listing.covered, listing.last, listing.is_being_rebuilt) == (10**6, 10**6, True)
    finished = LogListing((5, 7, 10**6 + 1), (4, 10**6), (10**6,))
    assert (finished.covered, finished.last, finished.is_being_rebuilt) == (10**6, 10**6 + 1, False)
    assert (LogListing().covered, LogListing().last, LogListing().is_being_rebuilt) == (0, 0, False)
    assert LogListing((5, 7), (4,)).covered == 4
