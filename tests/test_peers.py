"""The index of the failures of other checkpointers: for each number of docs/PEERS.md, the tests which show that it does not
happen here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "PEERS.md"

RANKS = "faults/test_ranks.py"
LASTING = "unit/pipeline/test_attempt_lasting.py"
SIMULATED = "simulation/test_job.py"
MISTAKES = "simulation/test_job_mutations.py"
UNTRUSTED = "unit/client/test_checkpointer_untrusted.py"
OVERLAPPING = "unit/client/test_checkpointer_overlapping.py"
KILLED = "faults/test_killed_trainer.py"

SHOWN_BY = {
    "1": (
        f"{KILLED}::test_a_trainer_that_is_killed_right_after_save_returned_loses_nothing_with_a_sidecar",
        "faults/test_kill_rounds.py::test_no_kill_loses_a_committed_checkpoint",
        f"{RANKS}::test_ranks_that_leave_right_after_save_have_committed",
    ),
    "2": ("faults/test_full_disk_job.py::test_an_error_of_the_device_under_one_rank",),
    "3": (f"{LASTING}::test_every_rank_raises_the_class_that_the_failed_rank_had",),
    "4": (f"{LASTING}::test_every_rank_raises_the_class_that_the_failed_rank_had",),
    "5": (f"{SIMULATED}::test_kill_of_one_rank_at_every_effect",),
    "6": (f"{SIMULATED}::test_kill_that_leaves_the_others_at_every_effect",),
    "7": (
        f"{UNTRUSTED}::test_overwritten_bytes_are_found_before_they_reach_a_tensor",
        f"{UNTRUSTED}::test_overwritten_bytes_that_reached_a_tensor_are_told_as_a_mixture_or_overwritten",
    ),
    "8": (f"{UNTRUSTED}::test_per_rank_values_of_two_ranks_are_not_half_loaded_by_one",),
    "9": (
        f"{MISTAKES}::test_mutations_are_caught",
        "faults/test_power_cut_job.py",
        "simulation/test_posix_mutations.py",
    ),
    "10": (f"{MISTAKES}::test_mutations_are_caught",),
    "11": (f"{OVERLAPPING}::test_a_snapshot_is_not_overwritten_while_it_is_persisted",),
    "12": (f"{RANKS}::test_a_rank_that_never_calls_save_is_named_and_the_next_save_works",),
    "13": (f"{OVERLAPPING}::test_staging_can_be_awaited_and_a_save_at_every_step_holds_that_steps_state",),
    "14": (f"{UNTRUSTED}::test_nothing_is_unpickled_whatever_lies_at_the_root",),
    "15": (
        "faults/test_full_disk_job.py::test_space_that_ends_in_the_middle_of_a_save",
        "unit/client/test_hard_cases.py::test_two_steps_under_one_tag_do_not_commit_as_one",
        f"{OVERLAPPING}::test_a_failed_save_that_nobody_looks_at_is_heard",
        f"{OVERLAPPING}::test_a_save_may_begin_while_another_is_in_flight",
    ),
}
"""The number of a failure in docs/PEERS.md -> the tests below tests/ that show it: a test, or a whole file of them."""


DEEPSPEEDS = {"zero_to_fp32", "save_16bit_model"}
"""Names on the page of a script and a function of DeepSpeed, not of tests."""


def functions(text: str) -> set[str]:
    """The names of all functions and methods of a module."""
    return set(re.findall(r"^ *(?:async )?def (\w+)\(", text, re.MULTILINE))


def exists(test: str) -> bool:
    """Whether there is such a file below tests/, and the function in it, if one is named."""
    path, _, name = test.partition("::")
    return (TESTS / path).is_file() and (not name or name in functions((TESTS / path).read_text()))


@pytest.mark.parametrize("number", SHOWN_BY)
def test_each_named_test_exists(number: str) -> None:
    assert [test for test in SHOWN_BY[number] if not exists(test)] == []


def test_a_test_that_is_gone_is_noticed() -> None:
    assert exists("test_peers.py::test_a_test_that_is_gone_is_noticed")
    assert not exists("test_peers.py::test_of_nothing")
    assert not exists("test_nothing.py")


def test_the_page_and_the_index_have_the_same_failures() -> None:
    assert re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE) == list(SHOWN_BY)


def test_every_test_that_the_page_names_exists() -> None:
    """The page names files by their path, and tests and cases of rank scripts by their function."""
    known = set().union(*(functions(path.read_text()) for path in TESTS.rglob("*.py")))
    words = re.findall(r"`([\w/.]+)`", PAGE.read_text())
    paths = [word for word in words if word.startswith("tests/")]
    names = [word for word in words if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){2,}", word)]
    assert len(paths) > 3
    assert len(names) > 10
    assert [path for path in paths if not (TESTS.parent / path).exists()] == []
    assert [name for name in names if name not in known | DEEPSPEEDS] == []
