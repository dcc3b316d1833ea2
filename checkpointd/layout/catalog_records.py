"""The catalog's objects: batches of records of what was decided at a root, summaries of the state after them, and how one
follows from the other. `docs/FORMAT.md` describes the same for other languages.

Everything here can be made again from the attempts' own objects. So a reader that finds one damaged reads those instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from checkpointd.errors import FormatError
from checkpointd.layout.keys import SERVICE, AttemptId
from checkpointd.layout.manifest import VERSION, Outcome, WriterIdentity, decode_sealed, digest, encode, outcome_fault, sealed

CATALOG = f"{SERVICE}/catalog"
SUMMARY_BYTES_MAX = 1 << 30
"""The largest summary: a few hundred bytes for each attempt, so millions of attempts."""
BATCH_BYTES_MAX = 1 << 18
"""Larger batches of records are cut. JSON with indents takes a few times as much, which is small enough for one read."""
_NAME = re.compile(r"(\d{12})\.(records|summary)\Z", re.ASCII)

_OUTCOMES = msgspec.json.Decoder(Outcome)

Kind = Literal[
    "intent",
    "close",
    "removing",
    "removed",
    "verified",
    "damaged",
    "passed-over",
    "left-behind",
    "current",
    "forgotten",
    "rebuilt",
]


class CatalogRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to an attempt. `docs/FORMAT.md` says what each kind means."""

    kind: Kind
    tag: str = ""
    attempt: str = ""
    n: int = 0
    step: int = -1
    digest: str = ""
    """Of a close: the digest of the outcome's bytes."""
    size: int = 0
    outcome: msgspec.Raw = msgspec.Raw()
    """Of a close: the outcome, without keys that have their default."""
    reason: str = ""
    kept: tuple[str, ...] = ()
    """Of a removal: the chunks objects that newer checkpoints still need."""

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"


class RecordBatch(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.records"):
    """Records that one process added at once, in order."""

    version: int
    number: int
    writer: WriterIdentity
    records: tuple[CatalogRecord, ...]


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """One attempt as the records describe it. It is open until its outcome is recorded."""

    tag: str
    attempt: str
    n: int = 0
    """The number of the save in its start."""
    step: int = -1
    digest: str = ""
    size: int = 0
    outcome: msgspec.Raw = msgspec.Raw()
    removed: str = ""
    """Why its chunks and indexes were removed; empty if they were not."""
    kept: tuple[str, ...] = ()
    removing: bool = False
    """Whether somebody has begun to remove it, and may have died before the mark or before the record."""
    verified: bool = False
    damaged: bool = False
    passed_over: bool = False
    left_behind: bool = False

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"

    @property
    def order(self) -> tuple[int, int]:
        """The order of its commit, if it has committed: the start, and the number of the save in it."""
        attempt = AttemptId.parse(self.attempt)
        return (0 if attempt is None else attempt.start, self.n)

    @property
    def is_decided(self) -> bool:
        """Whether an outcome or a removal is recorded."""
        return bool(self.digest or self.removed)

    @property
    def is_open(self) -> bool:
        """Whether only its objects tell what became of it: it is not decided, or somebody has begun to remove it."""
        return self.removing or not (self.digest or self.removed)

    @property
    def decoded(self) -> Outcome | None:
        """The outcome; None if none is recorded. Raises FormatError if no writer puts such an outcome."""
        if not self.digest:
            return None
        known: dict[str, Outcome] = self.__dict__
        if "outcome" not in known:  # a cached_property takes a lock each time, and there are thousands of entries
            known["outcome"] = self._decode()
        return known["outcome"]

    def _decode(self) -> Outcome:
        try:
            outcome = _OUTCOMES.decode(self.outcome)
        except msgspec.DecodeError as error:
            raise FormatError(f"the catalog has an outcome of {self.prefix} that cannot be: {error}") from error
        fault = outcome_fault(outcome)
        if fault:
            raise FormatError(f"the catalog has an outcome of {self.prefix} that {fault}")
        return outcome


class CatalogSummary(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.summary"):
    """The state after all batches up to `number`."""

    version: int
    number: int
    entries: tuple[CatalogEntry, ...]


@dataclass(slots=True)
class CatalogState:
    """The attempts by prefix (`<tag>/<attempt>`), after all batches up to `number`."""

    number: int = 0
    entries: dict[str, CatalogEntry] = field(default_factory=dict)
    _by_tag: dict[str, list[str]] = field(default_factory=dict)
    """`by_tag`, empty if it is not known."""

    @classmethod
    def read(cls, data: bytes, number: int) -> CatalogState:
        """The state in the summary `data`. Raises FormatError as `decode_summary`."""
        summary = decode_summary(data, number)
        return cls(summary.number, {entry.prefix: entry for entry in summary.entries})

    def apply(self, batch: RecordBatch) -> None:
        """Add the records of the next batch. A record that came before, or twice, changes nothing; the first outcome counts.

        Only an intent adds an attempt. So what a late writer says of an attempt that was forgotten changes nothing.
        """
        self.number = batch.number
        for record in batch.records:
            self._add(record)

    def _add(self, record: CatalogRecord) -> None:
        prefix = record.prefix
        if record.kind == "intent":
            entry = CatalogEntry(tag=record.tag, attempt=record.attempt, n=record.n, step=record.step)
            self.entries.setdefault(prefix, entry)
            self._by_tag = {}
        elif record.kind == "forgotten":
            self.entries.pop(prefix, None)
            self._by_tag = {}
        elif prefix in self.entries:
            self.entries[prefix] = _after(self.entries[prefix], record)

    @property
    def by_tag(self) -> Mapping[str, Sequence[str]]:
        """The prefixes of the attempts of each tag."""
        if not self._by_tag:
            for prefix, entry in self.entries.items():
                self._by_tag.setdefault(entry.tag, []).append(prefix)
        return self._by_tag


def _after(entry: CatalogEntry, record: CatalogRecord) -> CatalogEntry:
    match record.kind:
        case "close" if not entry.digest:
            outcome = msgspec.Raw(msgspec.json.format(record.outcome, indent=-1))  # a summary has a line for each attempt
            return msgspec.structs.replace(
                entry, n=record.n, step=record.step, digest=record.digest, size=record.size, outcome=outcome
            )
        case "removing":
            return msgspec.structs.replace(entry, removing=True)
        case "removed":
            return msgspec.structs.replace(entry, removed=record.reason or "removed", kept=record.kept, removing=False)
        case "verified":
            return msgspec.structs.replace(entry, verified=True, damaged=False)
        case "damaged":
            return msgspec.structs.replace(entry, verified=False, damaged=True)
        case "passed-over":
            return msgspec.structs.replace(entry, passed_over=True)
        case "left-behind":
            return msgspec.structs.replace(entry, left_behind=True)
        case "current":
            return msgspec.structs.replace(entry, left_behind=False)
        case _:
            return entry


def close_of(outcome: Outcome) -> CatalogRecord:
    """The record that `outcome` is durable."""
    data = encode(outcome)
    return CatalogRecord(
        kind="close",
        tag=outcome.tag,
        attempt=outcome.attempt,
        n=outcome.order[1],
        step=outcome.step,
        digest=digest(data),
        size=len(data),
        outcome=msgspec.Raw(compact(outcome)),
    )


_OPTIONAL = {
    one.encode_name: msgspec.to_builtins(one.default if one.default is not msgspec.NODEFAULT else one.default_factory())
    for one in msgspec.structs.fields(Outcome)
    if not one.required
}


def compact(outcome: Outcome) -> bytes:
    """`outcome` as JSON without its format, its version, and keys that have their default."""
    fields = msgspec.to_builtins(outcome)
    del fields["format"]
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in _OPTIONAL or v != _OPTIONAL[k]})


# --- names and bytes ------------------------------------------------------------------------------------------------


def batch_key(number: int) -> str:
    return f"{CATALOG}/{number:012d}.records"


def summary_key(number: int) -> str:
    return f"{CATALOG}/{number:012d}.summary"


def numbers(names: Iterable[str]) -> tuple[list[int], list[int]]:
    """The numbers of the summaries and of the batches among the objects `names` of the catalog, in order."""
    found: dict[str, list[int]] = {"summary": [], "records": []}
    for match in map(_NAME.match, names):
        if match:
            found[match[2]].append(int(match[1]))
    return sorted(found["summary"]), sorted(found["records"])


def batches(records: Iterable[CatalogRecord]) -> Iterator[tuple[CatalogRecord, ...]]:
    """`records` in their order, in as few batches as BATCH_BYTES_MAX allows."""
    batch: list[CatalogRecord] = []
    nbytes = 0
    for record in records:
        size = len(msgspec.json.encode(record))
        if batch and nbytes + size > BATCH_BYTES_MAX:
            yield tuple(batch)
            batch, nbytes = [], 0
        batch.append(record)
        nbytes += size
    if batch:
        yield tuple(batch)


def encode_batch(batch: RecordBatch) -> bytes:
    return sealed(msgspec.json.format(msgspec.json.encode(batch), indent=2))


def decode_batch(data: bytes, number: int) -> RecordBatch:
    """The batch with this number. Raises FormatError if the bytes are damaged, or of another number."""
    return decode_sealed(data, RecordBatch, batch_key(number), lambda found: _fault(found, number, found.records))


def encode_summary(state: CatalogState) -> bytes:
    """The summary of `state`, one line for each attempt."""
    head = f'{{"format": "checkpointd.summary", "version": {VERSION}, "number": {state.number}, "entries": [\n'
    return sealed(head.encode() + b",\n".join(map(msgspec.json.encode, state.entries.values())) + b"]\n}\n")


def decode_summary(data: bytes, number: int) -> CatalogSummary:
    """The summary with this number. Raises FormatError if the bytes are damaged, or of another number."""
    return decode_sealed(data, CatalogSummary, summary_key(number), lambda found: _fault(found, number, found.entries))


def _fault(found: RecordBatch | CatalogSummary, number: int, named: Sequence[CatalogRecord | CatalogEntry]) -> str | None:
    if found.number != number:
        return f"has the number {found.number}; somebody moved it"
    for one in named:
        # A tag is compared with the names of directories, or checked as a key, before anything is read there.
        if AttemptId.parse(one.attempt) is None or "/" in one.tag or one.tag.startswith("."):
            if isinstance(one, CatalogRecord) and one.kind == "rebuilt":
                continue
            return f"names an attempt {one.tag!r}/{one.attempt!r}, which cannot be"
        if isinstance(one, CatalogRecord) and one.kind == "close" and not bytes(one.outcome):
            return f"closes {one.prefix} without its outcome"
    return None
