"""Single S3 requests, signed, sent once, with no headers but those asked for: a test sees what the server answers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

REGION = "us-east-1"


class Identity(NamedTuple):
    """The keys of somebody whom a server knows."""

    access_key: str
    secret_key: str


@dataclass(frozen=True)
class Answer:
    """What came back. The names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The error's code in the XML body, as `NoSuchKey`; "" where there is none."""
        return self.body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


def send(
    endpoint: str,
    identity: Identity,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Answer:
    """One request to `/bucket/key`, on a connection of its own. Raises OSError or HTTPException where no answer comes."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    url = urlsplit(endpoint)
    target = quote(path) + (f"?{urlencode(query)}" if query else "")
    request = AWSRequest(method, f"{endpoint}{target}", dict(headers or {}), body)
    S3SigV4Auth(Credentials(*identity), "s3", REGION).add_auth(request)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    try:
        connection.request(method, target, body, dict(request.headers.items()))
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()
