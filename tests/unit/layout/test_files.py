"""The names of stored files, and where they are shown."""

from __future__ import annotations

import pytest

from checkpointd.errors import FormatError
from checkpointd.layout.files import (
    WHOLE,
    by_directory,
    check_names,
    check_unfinished,
    clash,
    numberless,
    unfinished_folder,
    unfinished_start,
)


def test_names_may_lie_in_directories_and_none_is_the_directory_of_another() -> None:
    """FILE-2."""
    assert by_directory(["b", "a/c/d", "a/e"]) == {"": {"b"}, "a": {"e"}, "a/c": {"d"}}
    assert list(by_directory(["z/y/x", "a"])) == ["", "z", "z/y"], "a directory comes before those in it"
    assert by_directory([]) == {}
    check_names(["a/b", "a/c", "ab"])
    assert (clash(["a/b", "a"]), clash(["a/b/c", "a/b"]), clash(["a/b", "ab"])) == ("a", "a/b", None)
    with pytest.raises(FormatError, match="other files have it as their directory"):
        check_names(["a/b/c", "a/b"])


def test_the_name_of_an_unfinished_directory_says_which_directory_it_will_be() -> None:
    assert unfinished_folder("00000003-1", "runs/checkpoint-8/step8") == "runs/checkpoint-8"
    assert unfinished_folder("00000003-1", "step8") == ""
    assert unfinished_folder(check_unfinished(f"00000003-1{WHOLE}"), "runs/checkpoint-8") == "runs/checkpoint-8"
    assert unfinished_start(f"00000003-1{WHOLE}") == unfinished_start("00000003-1") == 3
    for wrong in ("", WHOLE, f"3{WHOLE}", f"00000003-1{WHOLE}{WHOLE}", "../00000003-1"):
        with pytest.raises(FormatError, match="unfinished directory"):
            check_unfinished(wrong)


def test_the_files_of_several_ranks_are_called_alike_but_for_numbers() -> None:
    assert numberless("step8/zero_pp_rank_1_mp_rank_00_optim_states.pt") == "step8/zero_pp_rank_#_mp_rank_#_optim_states.pt"
    assert numberless("0.pt") == "#.pt"
    assert numberless("step8/notes.txt") == "step8/notes.txt"
