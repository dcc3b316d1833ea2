"""What passed through a proxy: counts of requests by operation, and one entry for each exchange.

#3 +0.132s PutObject PUT /bucket/key if-none-match=* [LoseReply] server 200, client cut
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.servers.faults import Fault
from tests.servers.http_messages import RequestHead
from tests.servers.s3_operations import operation

LENGTH = 10_000
SHOWN = ("if-match", "if-none-match", "range")


@dataclass
class Exchange:
    """One request of a client, or a late copy of one, and what became of it."""

    number: int
    at_s: float
    """Since the journal began."""
    request: RequestHead
    fault: Fault | None = None
    copy_of: int | None = None
    server: list[str] = field(default_factory=list)
    """What the server answered, each time it was asked: a status, or `away`, `cut`, or `asked` if it has not yet."""
    client: str = "waits"
    """What the client heard: a status, `cut`, or `200 cut` within a body; `nothing` where there is no client."""

    @property
    def operation(self) -> str:
        return operation(self.request)

    def __str__(self) -> str:
        headers = [f"{name}={self.request.headers[name]}" for name in SHOWN if name in self.request.headers]
        line = [f"#{self.number} +{self.at_s:.3f}s", self.operation, self.request.method, self.request.target, *headers]
        line += [f"[{type(self.fault).__name__}]"] if self.fault else []
        line += [f"(late copy of #{self.copy_of})"] if self.copy_of else []
        return f"{' '.join(line)} server {' and '.join(self.server) or 'not asked'}, client {self.client}"


class Journal:
    """Written on the proxy's thread and read on any other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards all that is here, and is notified of each change."""
        self._began = time.monotonic()
        self._entries: deque[Exchange] = deque(maxlen=LENGTH)
        self._received: Counter[str] = Counter()
        self._forwarded: Counter[str] = Counter()
        self._number = 0

    @property
    def received(self) -> Counter[str]:
        """How many requests of each operation came from clients."""
        with self.changed:
            return self._received.copy()

    @property
    def forwarded(self) -> Counter[str]:
        """How many requests of each operation went to the server, with repeated and late ones."""
        with self.changed:
            return self._forwarded.copy()

    @property
    def entries(self) -> list[Exchange]:
        """The last exchanges, in the order in which they began."""
        with self.changed:
            return [replace(one, server=list(one.server)) for one in self._entries]

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))

    def forget(self) -> None:
        """Begin the counts and the entries anew."""
        with self.changed:
            self._entries.clear()
            self._received.clear()
            self._forwarded.clear()

    def wait_until(self, holds: Callable[[], bool], limit_s: float = 60) -> None:
        """Wait until something is true of the counts or the entries. It blocks: a coroutine calls it by `asyncio.to_thread`."""
        with self.changed:
            assert self.changed.wait_for(holds, limit_s), f"not within {limit_s:g} s:\n{self}"

    def begin(self, request: RequestHead, fault: Fault | None, copy_of: int | None = None) -> Exchange:
        with self.changed:
            self._number += 1
            exchange = Exchange(self._number, time.monotonic() - self._began, request, fault, copy_of)
            self._entries.append(exchange)
            if copy_of is None:
                self._received[exchange.operation] += 1
            self.changed.notify_all()
        return exchange

    def asked(self, exchange: Exchange, *, reached: bool) -> None:
        """The request goes to the server, if that could be reached."""
        with self.changed:
            self._forwarded[exchange.operation] += reached
            exchange.server.append("asked" if reached else "away")
            self.changed.notify_all()

    def answered(self, exchange: Exchange, what: str) -> None:
        with self.changed:
            exchange.server[-1] = what
            self.changed.notify_all()

    def heard(self, exchange: Exchange, what: str) -> None:
        """What the client is about to hear, so that who has its reply finds it in the journal."""
        with self.changed:
            exchange.client = what
            self.changed.notify_all()

    def ended(self, exchange: Exchange) -> None:
        with self.changed:
            if exchange.client == "waits":
                exchange.client = "nothing" if exchange.copy_of else "cut"
            self.changed.notify_all()
