"""What the doctor says when requests are refused."""

from __future__ import annotations

import asyncio

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from checkpointd.doctor.bucket import rights
from checkpointd.doctor.finding import Finding
from checkpointd.store.objects.failures import store_error
from tests.unit.store.objects.fake_bucket import FakeBucket

DENIED = "status code: 403 Forbidden: <Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"


class Refusing(FakeBucket):
    """Refuses some kinds of requests, as the client tells it."""

    def __init__(self, *kinds: str, words: str = DENIED) -> None:
        super().__init__()

        def answer(name: str, key: str, found: object) -> object:
            if name in kinds:
                kind = GenericError if name in ("list", "delete") else PermissionDeniedError
                error = kind(words)
                raise store_error(f"asking ({name}) for", key, self.url, error, reads=False) from error
            return found

        self.answer = answer


def tried(bucket: FakeBucket) -> Finding:
    return asyncio.run(rights.rights(bucket))


def test_all_rights() -> None:
    found = tried(FakeBucket())
    assert (found.level, found.seen) == ("ok", "these credentials may list, put, get, head, delete")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("put",), "may not put; they may list, get, head, delete"),
        (("list", "look"), "may not list, head; they may put, get, delete"),
        (("list", "put", "get", "look", "delete"), "may not list, put, get, head, delete: "),
    ],
)
def test_rights_that_are_missing(kinds: tuple[str, ...], words: str) -> None:
    found = tried(Refusing(*kinds))
    assert found.level == "fail"
    assert words in found.seen
    assert "403 Forbidden (AccessDenied)" in found.seen
    assert "docs/OBJECT_STORES.md" in found.fix


def test_only_the_right_to_delete_is_missing() -> None:
    found = tried(Refusing("delete", words="DeleteObjects request failed for key rights: Access Denied. (code: AccessDenied)"))
    assert found.level == "warn"
    assert "may not delete" in found.seen
    assert "retention" in found.fix


def test_a_clock_that_the_server_refuses() -> None:
    words = "status code: 403 Forbidden: <Error><Code>RequestTimeTooSkewed</Code><Message>Too large.</Message></Error>"
    found = asyncio.run(rights.reached(Refusing("list", words=words)))
    assert (found.check, found.level) == ("clock", "fail")
    assert "NTP" in found.fix


def test_a_server_that_fails_otherwise() -> None:
    words = "status code: 500 Internal Server Error: <Error><Code>InternalError</Code></Error>"
    assert asyncio.run(rights.reached(Refusing("list", words=words))).level == "fail"
    found = tried(Refusing("delete", words=words))
    assert (found.level, "may not" in found.seen) == ("fail", False)
    assert "500 Internal Server Error" in found.seen
