"""The state_dict() answers of objects that load themselves: each object is asked once per load.

state_dict() may wait for all ranks, for example to gather shards. So the ranks agree on the objects that they ask, and ask all
of them in one order before any rank begins to match: a match may end early on one rank, or happen twice there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpointd.errors import StateError
from checkpointd_client.capture import objects
from checkpointd_client.capture.plain.containers import pairs_in
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.sharding.dtensor import is_dtensor


@dataclass(frozen=True, slots=True)
class HandedOutState:
    """The state that `live` handed out, if it holds DTensors, or the error that `live` raised."""

    live: object
    state: object | None = None
    error: StateError | None = None


@dataclass(slots=True)
class HandedOutStates:
    """The answers of one load, by FQN."""

    lazily: bool = True
    """Whether an object is asked only when the match comes to it. So it is when one rank loads alone."""
    _given: dict[str, HandedOutState] = field(default_factory=dict)

    def of_all(self, found: Mapping[str, object]) -> HandedOutStates:
        """The answers of exactly the objects `found`, by FQN. Asks those that were not asked yet, in the order of their FQNs.

        Raises nothing, since the other ranks may already wait in the state_dict() of the next object.
        """
        for fqn in sorted(found):
            self._ask(found[fqn], fqn)
        return HandedOutStates(lazily=False, _given={fqn: self._given[fqn] for fqn in found})

    def of(self, live: object, fqn: str) -> object | None:
        """The state that `live` handed out; None if it holds no DTensor, or if not all ranks ask `live`. Raises StateError."""
        if self.lazily:
            self._ask(live, fqn)
        answer = self._given.get(fqn)
        if answer is None:
            return None
        if answer.error is not None:
            raise answer.error
        return answer.state

    def _ask(self, live: object, fqn: str) -> None:
        if fqn not in self._given or self._given[fqn].live is not live:
            self._given[fqn] = _asked(live, fqn)


def _asked(live: object, fqn: str) -> HandedOutState:
    try:
        state = objects.state_dict_of(live, fqn)
        return HandedOutState(live, state if _holds_dtensors(state) else None)
    except StateError as error:
        return HandedOutState(live, error=error)
    except Exception as error:  # the user's dict, or one that holds itself
        words = f"{fqn}: the result of state_dict() of {type_name(live)} cannot be read: {type(error).__name__}: {error}"
        return HandedOutState(live, error=StateError(words))


def _holds_dtensors(value: object) -> bool:
    return is_dtensor(value) or any(_holds_dtensors(child) for _, child in pairs_in(value))
