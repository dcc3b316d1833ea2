"""The state_dict() answers of objects that load themselves: each object is asked once per load.

state_dict() may be a meeting of the ranks, as where it gathers shards. So the ranks agree on the objects that they ask, and ask
all of them in one order before any rank begins to match: a match may end early on one rank, or be made a second time there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpointd.errors import StateError
from checkpointd_client.capture import objects
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.sharding.dtensor import is_dtensor


@dataclass(frozen=True, slots=True)
class HandedOutState:
    """What `live` handed out, if that holds DTensors, or the error that it ended with."""

    live: object
    state: object | None = None
    error: StateError | None = None


@dataclass(slots=True)
class HandedOutStates:
    """The answers of one load, by FQN."""

    lazily: bool = True
    """Whether an object that was not asked yet is asked when the match comes to it, as where one rank loads alone."""
    _given: dict[str, HandedOutState] = field(default_factory=dict)

    def of_all(self, found: Mapping[str, object]) -> HandedOutStates:
        """The answers of `found` and no others, by FQN. Those that were not asked yet are asked, in the order of their FQNs.

        Nothing is raised here, since the other ranks may wait in the next object.
        """
        for fqn in sorted(found):
            self._ask(found[fqn], fqn)
        return HandedOutStates(lazily=False, _given={fqn: self._given[fqn] for fqn in found})

    def of(self, live: object, fqn: str) -> object | None:
        """What `live` handed out. None where that holds no DTensor, or where `live` may not be asked. Raises its StateError."""
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
        words = f"{fqn}: what state_dict() of {type_name(live)} returned cannot be read: {type(error).__name__}: {error}"
        return HandedOutState(live, error=StateError(words))


def _holds_dtensors(value: object) -> bool:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return is_dtensor(value) or any(map(_holds_dtensors, children))
