"""The directory of a log, as a store keeps it. Directories, entries and states are numbered, so that a world is a few integers.

Entries and states are kept as the bytes that the real code writes, and decoded by the real code.
"""

from __future__ import annotations

from typing import NamedTuple

from checkpointd.commit.log import following
from checkpointd.commit.log_access import ABSENT, Got, Reply, Unusable
from checkpointd.errors import FormatError
from checkpointd.layout.log_records import (
    LogEntry,
    LogListing,
    LogState,
    decode_entry,
    decode_state,
    encode_entry,
    encode_state,
)

NONE, BAD = 0, -1
"""In place of the number of an entry or a state: there is none, or it is unreadable."""
UNUSABLE = Unusable(FormatError("its bytes are damaged"))


class Directory(NamedTuple):
    """`log`: the entry under each number. `states`: number and state, in order. `marks`: of rebuilds."""

    log: tuple[int, ...]
    states: tuple[tuple[int, int], ...] = ()
    marks: tuple[int, ...] = ()

    def with_entry(self, number: int, entry: int) -> Directory:
        return self._replace(log=(*self.log[:number], entry, *self.log[number + 1 :]))

    def with_state(self, number: int, state: int) -> Directory:
        return self._replace(states=tuple(sorted((*self.without_state(number).states, (number, state)))))

    def without_state(self, number: int) -> Directory:
        return self._replace(states=tuple(one for one in self.states if one[0] != number))

    def has_state(self, number: int) -> bool:
        return any(one == number for one, _ in self.states)


class Objects:
    """Numbers of values: equal values have one number."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self.entries: list[LogEntry | None] = [None]
        self._states: dict[bytes, int] = {}
        self.states: list[LogState | None] = [None]
        self._canonical: dict[int, int] = {}
        self._directories: dict[Directory, int] = {}
        self.directories: list[Directory] = []
        self._listings: dict[LogListing, int] = {}
        self.listings: list[LogListing] = []
        self.listing_of: list[int] = []
        """The listing of each directory."""
        self._applied: dict[tuple[int, int], int] = {}

    def entry(self, entry: LogEntry) -> int:
        data = encode_entry(entry)
        if data not in self._entries:
            self._entries[data] = len(self.entries)
            self.entries.append(decode_entry(data, entry.number))
        return self._entries[data]

    def state(self, state: LogState) -> int:
        if (known := self._canonical.get(id(state))) is not None:
            return known
        data = encode_state(state)
        if data not in self._states:
            self._states[data] = number = len(self.states)
            canonical = decode_state(data, state.number)
            self.states.append(canonical)
            self._canonical[id(canonical)] = number
        return self._states[data]

    def canonical(self, state: LogState) -> LogState:
        """The one object that is equal to `state`."""
        found = self.states[self.state(state)]
        assert found is not None
        return found

    def directory(self, directory: Directory) -> int:
        if directory not in self._directories:
            self._directories[directory] = len(self.directories)
            self.directories.append(directory)
            entries = tuple(number for number, one in enumerate(directory.log) if one)
            listing = LogListing(entries, tuple(number for number, _ in directory.states), directory.marks)
            self.listing_of.append(self.listing(listing))
        return self._directories[directory]

    def listing(self, listing: LogListing) -> int:
        if listing not in self._listings:
            self._listings[listing] = len(self.listings)
            self.listings.append(listing)
        return self._listings[listing]

    def got_entry(self, entry: int) -> Got:
        if entry in (NONE, BAD):
            return UNUSABLE if entry else ABSENT
        found = self.entries[entry]
        assert found is not None
        return found

    def got_state(self, state: int) -> Reply:
        if state in (NONE, BAD):
            return UNUSABLE if state else ABSENT
        found = self.states[state]
        assert found is not None
        return found

    def after(self, state: int, entry: int) -> int:
        """The state after an entry."""
        if (state, entry) not in self._applied:
            before, one = self.states[state], self.entries[entry]
            assert before is not None
            assert one is not None
            self._applied[state, entry] = self.state(following(before, [one]))
        return self._applied[state, entry]

    def told(self, directory: Directory, place: int = -1) -> int:
        """The state at the end of the log as it is stored, from one of its states on. NONE: nothing tells it."""
        usable = [one for one in directory.states if one[1] != BAD]
        if not usable and not directory.states:
            usable = [(0, self.state(LogState()))]
        if len(usable) < -place:
            return NONE
        number, state = usable[place]
        while number + 1 < len(directory.log) and (entry := directory.log[number + 1]) > 0:
            one, before = self.entries[entry], self.states[state]
            assert one is not None
            assert before is not None
            if one.before != before.nonce:
                break
            number, state = number + 1, self.after(state, entry)
        return state
