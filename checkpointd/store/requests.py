"""Counts the requests of a store: a capability of stores in a bucket, where each request is charged and limited."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from checkpointd.store.base import Store


class Requests(msgspec.Struct, kw_only=True):
    """The requests that one store has sent, without those that were repeated after a failure.

    Most providers charge `puts`, `parts` and `lists` alike, a tenth of that for `gets` and `heads`, and nothing for `deletes`.
    """

    puts: int = 0
    """Small objects, and the beginnings and ends of multipart uploads."""
    parts: int = 0
    """The parts of multipart uploads."""
    gets: int = 0
    heads: int = 0
    lists: int = 0
    """Pages of listings, each of up to 1,000 names."""
    deletes: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """The counts by their names."""
        return msgspec.structs.asdict(self)

    def __add__(self, other: Requests) -> Requests:
        return Requests(**{kind: count + getattr(other, kind) for kind, count in self.by_kind().items()})

    def __sub__(self, other: Requests) -> Requests:
        return Requests(**{kind: count - getattr(other, kind) for kind, count in self.by_kind().items()})


@runtime_checkable
class SupportsRequests(Protocol):
    """A store that counts its requests."""

    @property
    def requests(self) -> Requests | None:
        """Those sent so far; None if a store behind this one does not count them."""
        ...


def requests_of(store: Store) -> Requests | None:
    """The requests that any store has sent so far, as they are now; None if it does not count them."""
    found = store.requests if isinstance(store, SupportsRequests) else None
    return None if found is None else found + Requests()
