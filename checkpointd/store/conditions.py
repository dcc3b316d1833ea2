"""Finds out whether a server honours the conditions of requests: a capability of stores in a bucket.

A file system refuses the second link to a name by itself. A server of an object store may be too old for conditional requests,
or a proxy may drop the condition on the way. Then two writers of one object would both be told that they have won (STORE-1).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from checkpointd.store.base import Store


@runtime_checkable
class SupportsConditionCheck(Protocol):
    """A store whose server may ignore conditions."""

    async def check_conditions(self, *, new: bool) -> None:
        """Raise ConditionsIgnoredError if the server ignores them. Tries them once per root and server, and then remembers it.

        `new`: no job has ever begun at this root, so nothing is remembered there yet.
        """
        ...


async def check_conditions_of(store: Store, *, new: bool) -> None:
    """The same for any store; nothing to check if it is not in a bucket."""
    if isinstance(store, SupportsConditionCheck):
        await store.check_conditions(new=new)
