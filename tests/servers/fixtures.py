"""Fixtures for tests that need an S3 server. tests/conftest.py makes them known to all folders.

Tests that use `seaweed` or `moto`, directly or through another fixture, go to one worker, so each server starts once. A test
that kills its server asks for `own_seaweed`. Those with SeaweedFS are for the night, since it takes much of a core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlencode

import pytest

from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.moto_server import MotoServer, why_no_moto
from tests.servers.s3_requests import REGION
from tests.servers.s3_server import S3Server
from tests.servers.seaweed import SeaweedFS, why_no_seaweed

GROUP = "object-store"
SERVERS = {"seaweed", "own_seaweed", "moto", "s3_place", "s3_root"}
SHARED = "shared"
COUNT = itertools.count(1)
RUNNING: dict[str, S3Server] = {}
"""The servers of all tests that run in this process, by the names of their fixtures."""


@dataclass(frozen=True)
class Place:
    """A bucket, and a prefix in it, as `test-12`, below which nothing lies yet."""

    server: S3Server
    bucket: str
    prefix: str


# Before xdist, which reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _uses_a_server(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(GROUP))
        if {"seaweed", "own_seaweed"} & _asked_for(item):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The servers of all tests rest while tests run that do not use them: SeaweedFS would take a tenth of a core."""
    used = _asked_for(item)
    for name, server in RUNNING.items():
        if name in used:
            server.wake()
    try:
        return (yield)
    finally:
        used_next = _asked_for(nextitem) if nextitem is not None else RUNNING.keys()
        for name, server in RUNNING.items():
            if name not in used_next:
                server.rest()


def _uses_a_server(item: pytest.Item) -> bool:
    return not SERVERS.isdisjoint(getattr(item, "fixturenames", ()))


def _asked_for(item: pytest.Item) -> set[str]:
    """The names of the fixtures that the test uses, and of those that fixtures as `s3_place` ask for by their parameter."""
    call = getattr(item, "callspec", None)
    return {
        *getattr(item, "fixturenames", ()),
        *(value for value in (call.params.values() if call else ()) if isinstance(value, str)),
    }


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """The SeaweedFS of all tests. Do not kill it."""
    if missing := why_no_seaweed():
        pytest.skip(missing)
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket(SHARED)
        RUNNING["seaweed"] = server
        yield server
        del RUNNING["seaweed"]


@pytest.fixture
def own_seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A SeaweedFS for one test, which may kill it and start it again."""
    if missing := why_no_seaweed():
        pytest.skip(missing)
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    """The moto of all tests. Do not kill it."""
    if missing := why_no_moto():
        pytest.skip(missing)
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        server.make_bucket(SHARED)
        RUNNING["moto"] = server
        yield server
        del RUNNING["moto"]


@pytest.fixture
def seaweed_place(seaweed: SeaweedFS) -> Place:
    """A fresh prefix in a bucket that tests share: a fresh bucket costs 0.2 s more."""
    return Place(seaweed, SHARED, f"test-{next(COUNT)}")


@pytest.fixture
def seaweed_bucket(seaweed: SeaweedFS) -> Place:
    """A fresh bucket, with an empty prefix."""
    return Place(seaweed, seaweed.make_bucket(f"bucket-{next(COUNT)}"), "")


@pytest.fixture
def moto_place(moto: MotoServer) -> Place:
    """A fresh bucket of moto, with an empty prefix."""
    return Place(moto, moto.make_bucket(f"bucket-{next(COUNT)}"), "")


@pytest.fixture(params=["seaweed", "moto"])
def s3_place(request: pytest.FixtureRequest) -> Place:
    """A place on each of the servers in turn."""
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def s3_root(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a root on each of the servers in turn. The environment has the credentials."""
    return root_at(s3_place, monkeypatch)


@pytest.fixture
def seaweed_root(seaweed_place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same on SeaweedFS alone."""
    return root_at(seaweed_place, monkeypatch)


def root_at(place: Place, monkeypatch: pytest.MonkeyPatch, *, endpoint: str = "", **options: str) -> str:
    """The URL of `place`, perhaps through another `endpoint`, with `options`. The environment gets the credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", place.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", place.server.secret_key)
    monkeypatch.setenv("AWS_REGION", REGION)
    query = urlencode({"endpoint": endpoint or place.server.endpoint, **options})
    return f"s3://{place.bucket}/{place.prefix}?{query}"


@pytest.fixture
def seaweed_proxy(seaweed: SeaweedFS) -> Iterator[FaultyProxy]:
    """A proxy without faults yet, between a test and SeaweedFS."""
    with FaultyProxy(seaweed.endpoint) as proxy:
        yield proxy
    print(proxy.journal)  # pytest shows it where the test failed


@pytest.fixture
def moto_proxy(moto: MotoServer) -> Iterator[FaultyProxy]:
    """A proxy without faults yet, between a test and moto."""
    with FaultyProxy(moto.endpoint) as proxy:
        yield proxy
    print(proxy.journal)  # pytest shows it where the test failed
