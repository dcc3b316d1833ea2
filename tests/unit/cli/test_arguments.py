from __future__ import annotations

import pytest

from checkpointd.cli.arguments import only_root, root_and_maybe_tag, root_and_tag
from checkpointd.errors import UsageError


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINTD_ROOT", "/mnt/default")


def test_root_as_given_or_from_the_environment(default: None) -> None:
    assert only_root(("here",), "list") == "here"
    assert only_root((), "list") == "/mnt/default"


def test_one_argument_is_the_tag_where_a_tag_is_needed(default: None) -> None:
    assert root_and_tag(("/r", "t"), "inspect") == ("/r", "t")
    assert root_and_tag(("t",), "inspect") == ("/mnt/default", "t")


def test_one_argument_to_verify_is_a_tag_only_if_it_can_be_one_and_the_root_is_known(default: None) -> None:
    assert root_and_maybe_tag(("t",), "verify") == ("/mnt/default", "t")
    assert root_and_maybe_tag(("./t",), "verify") == ("./t", None)
    assert root_and_maybe_tag(("..",), "verify") == ("..", None)
    assert root_and_maybe_tag(("/r", "t"), "verify") == ("/r", "t")
    assert root_and_maybe_tag((), "verify") == ("/mnt/default", None)


def test_without_the_environment_one_argument_to_verify_is_the_root() -> None:
    assert root_and_maybe_tag(("t",), "verify") == ("t", None)


def test_what_is_missing_is_named_with_an_example() -> None:
    with pytest.raises(UsageError, match=r"which root\? .* `checkpointd list /mnt/ckpts/run1`, or set CHECKPOINTD_ROOT"):
        only_root((), "list")
    with pytest.raises(UsageError, match="which root"):
        root_and_tag(("global_step1",), "explain")
    with pytest.raises(UsageError, match=r"which tag\? .* `checkpointd explain /mnt/x global_step100`"):
        root_and_tag(("/mnt/x",), "explain")


def test_no_tag_at_all(default: None) -> None:
    with pytest.raises(UsageError, match=r"which tag\? .* `checkpointd explain /mnt/default global_step100`"):
        root_and_tag((), "explain")


def test_too_many_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="'c d' is left over"):
        root_and_tag(("a", "b", "c", "d"), "explain")
