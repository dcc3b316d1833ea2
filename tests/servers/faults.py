"""The faults that a proxy can make, and the rules that say which requests they hit.

proxy.add(LoseReply(), operation="PutObject", header="if-none-match")  # the first conditional PUT
proxy.add(SLOW_DOWN, operation="UploadPart", nth=2, times=3)           # the second to the fourth part
proxy.add(CutBefore(), times=None, probability=0.1)                    # one request of ten, until the rule is removed
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.servers.http_messages import RequestHead
from tests.servers.s3_operations import operation


@dataclass(frozen=True)
class CutBefore:
    """The connection is cut; the server hears nothing of the request."""


@dataclass(frozen=True)
class CutBody:
    """The connection is cut, to the server as well, after so many bytes of the request's body went to it."""

    after_bytes: int


@dataclass(frozen=True)
class LoseReply:
    """The server does what it is asked, and its reply is lost: the connection is cut, or stays open in silence."""

    silent: bool = False


@dataclass(frozen=True)
class CutReply:
    """The client gets the head of the reply and so many bytes of its body."""

    after_bytes: int


@dataclass(frozen=True)
class Delay:
    """The request waits before it goes to the server, or the reply before it goes to the client."""

    before_s: float = 0.0
    after_s: float = 0.0


@dataclass(frozen=True)
class Twice:
    """The server gets the request twice, one after the other; the client gets the second reply."""


@dataclass(frozen=True)
class RepeatLater:
    """The client gets its reply. The server gets the request once more: after so many other requests, or at `deliver`."""

    requests: int | None = None


@dataclass(frozen=True)
class ArriveLate:
    """The connection is cut. The server gets the request later: after so many other requests, or at `deliver`."""

    requests: int | None = None


@dataclass(frozen=True)
class Refuse:
    """The client gets an error of S3; the server hears nothing of the request."""

    status: int
    code: str


SLOW_DOWN = Refuse(503, "SlowDown")
TOO_MANY_REQUESTS = Refuse(429, "TooManyRequests")
INTERNAL_ERROR = Refuse(500, "InternalError")
CONFLICT = Refuse(409, "ConditionalRequestConflict")
"""AWS answers so if another request for the key is under way: it is to be tried again."""


@dataclass(frozen=True)
class Slow:
    """The bodies of the request and of the reply go at so many bytes a second."""

    bytes_per_s: float


@dataclass(frozen=True)
class BlackHole:
    """The request is read and never answered; the server hears nothing of it. It ends when the client leaves."""


Fault = (
    CutBefore | CutBody | LoseReply | CutReply | Delay | Twice | RepeatLater | ArriveLate | Refuse | Slow | BlackHole
)  # fmt: skip


@dataclass
class Rule:
    """A fault, and which requests it hits: all that `method`, `path` and the others name, from the nth on, `times` times.

    `path` is searched as a regular expression in `/bucket/key`; `query` and `header` have to be there, whatever their value.
    """

    fault: Fault
    chance: random.Random
    operation: str | None = None
    method: str | None = None
    path: str | None = None
    query: str | None = None
    header: str | None = None
    where: Callable[[RequestHead], bool] | None = None
    nth: int = 1
    times: int | None = 1
    probability: float = 1.0
    matched: int = field(default=0, init=False)
    """How many requests were of this kind, those that other rules hit included."""
    hits: int = field(default=0, init=False)
    """How many of them this rule hit."""

    def matches(self, request: RequestHead) -> bool:
        return (
            (self.operation is None or self.operation == operation(request))
            and (self.method is None or self.method == request.method)
            and (self.path is None or re.search(self.path, request.path) is not None)
            and (self.query is None or self.query in request.query)
            and (self.header is None or self.header.lower() in request.headers)
            and (self.where is None or self.where(request))
        )

    def strikes(self, request: RequestHead, *, taken: bool) -> bool:
        """Whether it hits this request, unless another rule has `taken` it; counts it."""
        if not self.matches(request):
            return False
        self.matched += 1
        chosen = self.chance.random() < self.probability
        if taken or not chosen or self.matched < self.nth or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True
