"""The root's log in every order of the steps of a few processes, and each of its rules changed by itself."""

from __future__ import annotations

import pytest

from checkpointd.commit import log_access
from tests.model.explore import Verdict, explore
from tests.model.mutations import MUTATIONS, Mutation, is_right
from tests.model.scopes import SCOPES

OF_THE_NIGHT = {
    "a rollback is put without a begin",
    "the state is read before the entries",
    "entries go before older states",
    "a list may miss the own put",
    "compaction does not make durable what it has listed",
}
"""The mutations that take more than a second."""
WORLDS_OF_THE_GATE, WORLDS_OF_A_NIGHT = 40_000, 3_000_000
"""Of a larger scope only so many worlds are explored. It goes breadth first, so the shortest ways are tried all the same."""
GATE = [one for one in MUTATIONS if one.promises and one.name not in OF_THE_NIGHT]


def words(found: Verdict) -> str:
    return "\n".join([found.words, *found.trace])


@pytest.mark.parametrize("name", SCOPES)
def test_a_small_scope_keeps_all_promises(name: str, pytestconfig: pytest.Config) -> None:
    night = pytestconfig.getoption("nightly")
    found = explore(SCOPES[name](0, ""), worlds_max=WORLDS_OF_A_NIGHT if night else WORLDS_OF_THE_GATE)
    assert found.violation is None, words(found)
    assert found.is_complete or not night


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_keeps_all_promises(name: str) -> None:
    found = explore(SCOPES[name](1, ""), worlds_max=WORLDS_OF_A_NIGHT)
    assert found.violation is None, words(found)


@pytest.mark.parametrize("mutation", GATE, ids=lambda one: one.name)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    found = mutation.explored()
    assert is_right(mutation, found), words(found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one not in GATE], ids=lambda one: one.name)
def test_a_mutation_is_found_or_is_unnecessary(mutation: Mutation) -> None:
    found = mutation.explored()
    assert is_right(mutation, found), words(found)


def test_constants_are_given_back() -> None:
    explore(SCOPES["new root"](0, ""))
    assert (log_access.STATE_EVERY, log_access.STATES_KEPT, log_access.LOOKS) == (64, 4, 3)
