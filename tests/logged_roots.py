"""The log of a root on disk, read without a store."""

from __future__ import annotations

from pathlib import Path

from checkpointd.commit.log import following
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import (
    LoggedAttempt,
    LogListing,
    LogState,
    Record,
    decode_entry,
    decode_state,
    entry_key,
    state_key,
)


def log_state(root: Path) -> LogState:
    """The state at the end of the log; the empty state if there is no log yet."""
    listing = _listing(root)
    base = max(listing.states, default=0)
    state = decode_state((root / state_key(base)).read_bytes(), base) if base else LogState()
    return following(state, [decode_entry((root / entry_key(n)).read_bytes(), n) for n in listing.entries if n > base])


def attempts(root: Path, status: str) -> list[LoggedAttempt]:
    """The attempts with this status."""
    return [one for one in log_state(root).attempts.values() if one.status == status]


def entry_of(root: Path, kind: type[Record], attempt: str = "") -> Path:
    """The newest entry with a record of this kind, about `attempt` (`<tag>/<attempt>`) if that is given."""
    for number in reversed(_listing(root).entries):
        path = root / entry_key(number)
        records = decode_entry(path.read_bytes(), number).records
        if any(isinstance(one, kind) and (not attempt or getattr(one, "attempt", "") == attempt) for one in records):
            return path
    raise AssertionError(f"{root} has no entry with a {kind.__name__} of {attempt or 'anything'}")


def _listing(root: Path) -> LogListing:
    return LogListing.of(path.name for path in (root / LOG).iterdir()) if (root / LOG).is_dir() else LogListing()
