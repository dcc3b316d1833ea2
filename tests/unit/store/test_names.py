"""Which keys there are; the contract suite tries the bad ones on every call."""

from __future__ import annotations

import pytest

from checkpointd.errors import UsageError
from checkpointd.store.names import check_key, check_prefix, is_key


@pytest.mark.parametrize(
    "key",
    ["latest", "t/00000001-0/outcome", ".checkpointd/starts/00000001", ".checkpointd/locks", ".checkpointd/tmp2/x", "tmp/x"],
)
def test_keys(key: str) -> None:
    assert check_key(key) == key
    assert check_prefix(key) == key
    assert is_key(key)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("a/../../b", r"'\.\.'"),
        ("./a", r"'\.'"),
        ("a\0", "NUL"),
        ("a\udc80", "UTF-8"),
        (".checkpointd/tmp", "belongs to the store"),
        (".checkpointd/tmp/x", "belongs to the store"),
        (".checkpointd/lock", "belongs to the store"),
        (".checkpointd/lock/x", "belongs to the store"),
    ],
)
def test_what_is_no_key_is_refused_with_the_reason(key: str, why: str) -> None:
    assert not is_key(key)
    with pytest.raises(UsageError, match=why):
        check_key(key)


def test_the_empty_prefix_is_the_root() -> None:
    assert check_prefix("") == ""
