"""Each fault of the proxy, as clients see it and as the server does."""

from __future__ import annotations

import http.client
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from tests.servers.faults import (
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    ArriveLate,
    BlackHole,
    CutBefore,
    CutBody,
    CutReply,
    Delay,
    Fault,
    LoseReply,
    Refuse,
    RepeatLater,
    Slow,
    Twice,
)
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place
from tests.servers.s3_requests import Answer, send

CREATE = {"If-None-Match": "*"}
LARGE = 8 << 20


@dataclass(frozen=True)
class Asked:
    """A place that is asked through a proxy, or past it."""

    place: Place
    proxy: FaultyProxy

    def path(self, key: str) -> str:
        return "/" + "/".join(filter(None, (self.place.bucket, self.place.prefix, key)))

    def ask(self, method: str, key: str = "key", body: bytes = b"", *, timeout_s: float = 60, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        who = self.place.server.admin
        return send(self.proxy.endpoint, who, method, self.path(key), body, headers=named, timeout_s=timeout_s)

    def stored(self, key: str = "key") -> bytes | None:
        answer = send(self.place.server.endpoint, self.place.server.admin, "GET", self.path(key))
        return answer.body if answer.status == 200 else None


@pytest.fixture
def asked(seaweed_place: Place, seaweed_proxy: FaultyProxy) -> Asked:
    return Asked(seaweed_place, seaweed_proxy)


def create(asked: Asked, body: bytes = b"text") -> Answer:
    return asked.ask("PUT", body=body, If_None_Match="*")


GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


def test_without_faults_all_goes_through(asked: Asked) -> None:
    body = os.urandom(LARGE)
    assert asked.ask("PUT", body=body).status == 200
    assert asked.ask("HEAD").headers["content-length"] == str(LARGE)
    assert asked.ask("GET").body == body
    assert asked.ask("GET", Range="bytes=1000-1999").body == body[1000:2000]
    assert asked.ask("GET", "missing").status == 404
    assert asked.proxy.received == asked.proxy.forwarded == {"PutObject": 1, "HeadObject": 1, "GetObject": 3}
    assert re.fullmatch(
        r"#4 \+\d+\.\d{3}s GetObject GET /\S+ range=bytes=1000-1999 server 206, client 206",
        str(asked.proxy.journal).splitlines()[3],
    )


def test_a_request_that_is_cut_off_reaches_nobody(asked: Asked) -> None:
    asked.proxy.add(CutBefore())
    with pytest.raises(GONE):
        create(asked)
    assert asked.stored() is None
    assert create(asked).status == 200
    assert (asked.proxy.received["PutObject"], asked.proxy.forwarded["PutObject"]) == (2, 1)
    assert "[CutBefore] server not asked, client cut" in str(asked.proxy.journal)


def test_a_body_that_is_cut_off_stores_nothing(asked: Asked) -> None:
    asked.proxy.add(CutBody(LARGE // 2))
    with pytest.raises(GONE):
        create(asked, bytes(LARGE))
    assert asked.proxy.forwarded["PutObject"] == 1
    assert asked.stored() is None
    assert create(asked).status == 200


def test_a_lost_reply_leaves_the_object(asked: Asked) -> None:
    asked.proxy.add(LoseReply())
    with pytest.raises(GONE):
        create(asked)
    assert asked.stored() == b"text"
    assert create(asked).status == 412
    assert str(asked.proxy.journal.entries[0]).endswith("if-none-match=* [LoseReply] server 200, client cut")


def test_a_reply_is_lost_in_silence(asked: Asked) -> None:
    asked.proxy.add(LoseReply(silent=True))
    with pytest.raises(TimeoutError):
        asked.ask("PUT", body=b"text", timeout_s=0.5)
    asked.proxy.journal.wait_until(lambda: [one.server for one in asked.proxy.journal.entries] == [["200"]])
    assert asked.stored() == b"text"


def test_a_reply_is_cut_in_its_body(asked: Asked) -> None:
    body = os.urandom(1 << 20)
    asked.ask("PUT", body=body)
    asked.proxy.add(CutReply(300_000), operation="GetObject")
    with pytest.raises(http.client.IncompleteRead) as caught:
        asked.ask("GET")
    assert caught.value.partial == body[:300_000]
    assert asked.ask("GET").body == body


def test_a_delayed_request_is_made_in_the_end(asked: Asked) -> None:
    asked.proxy.add(Delay(before_s=0.05, after_s=0.05))
    assert create(asked).status == 200
    assert asked.stored() == b"text"


@pytest.mark.parametrize(
    ("fault", "stored"), [(Delay(before_s=60), None), (Delay(after_s=60), b"text")], ids=["before", "after"]
)
def test_a_delay_is_on_one_side_of_the_server(asked: Asked, fault: Delay, stored: bytes | None) -> None:
    asked.proxy.add(fault)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(create, asked)
        asked.proxy.journal.wait_until(lambda: asked.proxy.received["PutObject"] == 1)
        if stored is not None:
            asked.proxy.journal.wait_until(lambda: asked.proxy.journal.entries[0].server == ["200"])
        with pytest.raises(FutureTimeout):
            answer.result(timeout=0.2)
        assert asked.stored() == stored
        asked.proxy.go_away()
        with pytest.raises(GONE):
            answer.result()


def test_a_conditional_put_that_arrives_twice_meets_itself(asked: Asked) -> None:
    asked.proxy.add(Twice())
    answer = create(asked)
    assert (answer.status, answer.code) == (412, "PreconditionFailed")
    assert asked.stored() == b"text"
    assert (asked.proxy.received["PutObject"], asked.proxy.forwarded["PutObject"]) == (1, 2)
    assert str(asked.proxy.journal.entries[0]).endswith("[Twice] server 200 and 412, client 412")


def test_a_large_body_arrives_twice(asked: Asked) -> None:
    body = os.urandom(LARGE)
    asked.proxy.add(Twice())
    assert asked.ask("PUT", body=body).status == 200
    assert asked.proxy.journal.entries[0].server == ["200", "200"]
    assert asked.stored() == body


def test_a_copy_that_comes_later_undoes_what_came_between(asked: Asked) -> None:
    asked.proxy.add(RepeatLater())
    assert asked.ask("PUT", body=b"first").status == 200
    assert asked.ask("PUT", body=b"second").status == 200
    assert asked.stored() == b"second"
    (copy,) = asked.proxy.deliver()
    assert (copy.server, copy.copy_of) == (["200"], 1)
    assert asked.stored() == b"first"
    assert asked.proxy.deliver() == []


def test_a_copy_comes_after_so_many_requests(asked: Asked) -> None:
    asked.proxy.add(RepeatLater(requests=2))
    for body in (b"first", b"second", b"third"):
        asked.ask("PUT", body=body)
    asked.proxy.journal.wait_until(lambda: asked.proxy.journal.entries[-1].client == "nothing")
    assert [one.copy_of for one in asked.proxy.journal.entries] == [None, None, None, 1]
    assert asked.stored() == b"first"


def test_a_request_arrives_after_its_client_has_left(asked: Asked) -> None:
    asked.proxy.add(ArriveLate())
    with pytest.raises(GONE):
        create(asked, b"late")
    assert asked.stored() is None
    assert [one.server for one in asked.proxy.deliver()] == [["200"]]
    assert asked.stored() == b"late"


def test_a_late_conditional_put_loses(asked: Asked) -> None:
    asked.proxy.add(ArriveLate(requests=1))
    with pytest.raises(GONE):
        create(asked, b"late")
    assert create(asked, b"in time").status == 200
    asked.proxy.journal.wait_until(lambda: asked.proxy.journal.entries[-1].server == ["412"])
    assert asked.stored() == b"in time"


@pytest.mark.parametrize("fault", [SLOW_DOWN, TOO_MANY_REQUESTS, INTERNAL_ERROR], ids=lambda fault: str(fault.status))
def test_a_request_is_refused_with_an_error_of_s3(asked: Asked, fault: Refuse) -> None:
    asked.proxy.add(fault)
    answer = create(asked)
    assert (answer.status, answer.code) == (fault.status, fault.code)
    assert asked.proxy.forwarded["PutObject"] == 0
    assert create(asked).status == 200


def test_a_slow_body_does_not_come_to_the_server_at_once(asked: Asked) -> None:
    asked.proxy.add(Slow(bytes_per_s=100))
    with pytest.raises(TimeoutError):
        asked.ask("PUT", body=bytes(10_000), timeout_s=0.3)
    asked.proxy.journal.wait_until(lambda: [one.server for one in asked.proxy.journal.entries] == [["asked"]])
    assert asked.stored() is None


def test_a_slow_body_does_not_come_to_the_client_at_once(asked: Asked) -> None:
    asked.ask("PUT", body=bytes(10_000))
    asked.proxy.add(Slow(bytes_per_s=100))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked.ask, "GET")
        asked.proxy.journal.wait_until(lambda: [one.client for one in asked.proxy.journal.entries] == ["200", "200"])
        with pytest.raises(FutureTimeout):
            answer.result(timeout=0.2)
        asked.proxy.go_away()
        with pytest.raises(http.client.IncompleteRead):
            answer.result()
    assert asked.proxy.journal.entries[-1].client == "200 cut"


def test_a_black_hole_answers_nobody(asked: Asked) -> None:
    asked.proxy.add(BlackHole())
    with pytest.raises(TimeoutError):
        asked.ask("PUT", body=b"text", timeout_s=0.3)
    asked.proxy.journal.wait_until(lambda: [one.client for one in asked.proxy.journal.entries] == ["cut"])
    assert (asked.proxy.forwarded["PutObject"], asked.stored()) == (0, None)


def test_the_server_goes_away_and_comes_back(asked: Asked) -> None:
    asked.ask("PUT", body=b"text")
    waiting = http.client.HTTPConnection("127.0.0.1", urlsplit(asked.proxy.endpoint).port)
    waiting.connect()
    assert waiting.sock is not None
    with closing(waiting):
        asked.proxy.go_away()
        with suppress(ConnectionResetError):  # if the proxy had not accepted it yet
            assert waiting.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        asked.ask("GET")
    asked.proxy.come_back()
    assert asked.ask("GET").body == b"text"


def test_a_server_that_is_not_there_is_seen(asked: Asked) -> None:
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        with pytest.raises(GONE):
            send(proxy.endpoint, asked.place.server.admin, "GET", "/a/b")
        assert proxy.journal.entries[0].server == ["away"]
        assert (proxy.received["GetObject"], proxy.forwarded["GetObject"]) == (1, 0)


AT_RANDOM: list[Fault] = [
    *(CutBefore(), CutBody(2), CutReply(1), Delay(0.01, 0.01), Slow(1000), SLOW_DOWN),
    *(LoseReply(), Twice(), ArriveLate(3), RepeatLater(2)),
]


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_journal_are_right_when_all_goes_wrong_at_once(moto_place: Place, seed: int) -> None:
    """And no more than one request of those that create a key is ever answered with success."""
    with FaultyProxy(moto_place.server.endpoint, seed=seed) as proxy:
        asked = Asked(moto_place, proxy)
        rules = [proxy.add(fault, times=None, probability=0.15) for fault in AT_RANDOM]
        heard = Counter[str]()

        def work(number: int) -> None:
            key = f"key-{number % 10}"
            try:
                if number % 3:
                    heard[str(asked.ask("PUT", key, b"%d" % number, If_None_Match="*").status)] += 1
                else:
                    heard[str(asked.ask("GET", key).status)] += 1
            except (*GONE, http.client.IncompleteRead):
                heard["cut"] += 1

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(120)))
        proxy.settle()
        proxy.deliver()
        proxy.go_away()
        journal = proxy.journal.entries

        of_clients = [one for one in journal if one.copy_of is None]
        assert len(of_clients) == sum(proxy.received.values()) == 120
        assert sum(len(one.server) for one in journal) == sum(proxy.forwarded.values())
        assert Counter("cut" if "cut" in one.client else one.client for one in of_clients) == heard
        assert all(rule.hits for rule in rules)
        puts = [one for one in journal if one.operation == "PutObject"]
        created = Counter(one.request.path for one in puts for answer in one.server if answer == "200")
        there = [asked.path(key) for key in (f"key-{number}" for number in range(10)) if asked.stored(key) is not None]
        assert created == Counter(there)
