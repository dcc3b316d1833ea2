"""A real bucket, through `obstore`, whose client in Rust signs the requests, sends them, and repeats them with jitter.

Its requests end on threads of its own, which need Python's lock for a moment after the answer has arrived. Python ends such a
thread in a way that ends the whole process with SIGABRT, if it happens while the interpreter shuts down. So this module keeps
sight of every request's future until the client has dropped it, and lets the interpreter shut down only then (`_rest`).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import threading
import time
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast
from weakref import WeakSet

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store
from typing_extensions import Buffer

from checkpointd import waits
from checkpointd.bucket_urls import BucketUrl
from checkpointd.errors import NotFoundError, UsageError
from checkpointd.store.base import Entry, each
from checkpointd.store.objects.bucket import Bucket, ObjectHead, Version
from checkpointd.store.objects.credentials import s3_authorities, s3_credentials, s3_place, s3_session
from checkpointd.store.objects.failures import (
    FAILURES,
    is_answer,
    is_conflict,
    is_missing,
    is_past_the_end,
    missing,
    reason_of,
    store_error,
)
from checkpointd.store.objects.paths import name_of, path_of
from checkpointd.store.objects.unfinished import S3Uploads
from checkpointd.store.requests import Requests
from checkpointd.store.uploads import UnfinishedUpload
from checkpointd.system_errors import NeverReached
from checkpointd.waits import FIRST_REPORT_S

if TYPE_CHECKING:
    from obstore import Attributes, GetResult, UpdateVersion
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

T = TypeVar("T")

REQUESTS_AT_ONCE: Final = 64
"""How many requests of a bucket are under way, beside uploads. Each has a connection."""
PARTS_AT_ONCE: Final = 8
"""How many parts of one upload are under way."""
QUIET_S: Final = 60.0
"""The least time between two words about a server that does not answer."""
FIRST_RETRY_S: Final = 4.0
"""How long a request is repeated, unless the URL has `retry_s`, while the server has never answered this process."""
PAUSE_S: Final = 0.2
"""The pause before a request is repeated that met another one for the same object, or got no answer."""
PAGE: Final = 1000
"""The names in one page of a listing, and the objects in one request to delete."""
_MARK: Final = "checkpointdmark"
"""A word that every provider takes: Azure refuses hyphens, and proxies drop underscores."""
_REST_S: Final = 5.0
_AZURE: Final = {"account": "account_name", "endpoint": "endpoint"}


_under_way: WeakSet[Future[Any]] = WeakSet()
_user = 0
"""The process that has made requests. In a forked one they would never end."""


@atexit.register
def _rest() -> None:
    """Wait until the client has dropped every request that has ended."""
    until, pause = time.monotonic() + _REST_S, threading.Event()
    while any(request.done() for request in list(_under_way)) and time.monotonic() < until:
        pause.wait(0.001)
        MemoryStore()  # any call into the client lets it drop what its threads, which had no GIL, could not


class RemoteBucket(Bucket):
    """The bucket at `location`. Makes no request before the first call."""

    def __init__(self, location: BucketUrl) -> None:
        self._location = location
        self._trying = location if "retry_s" in location.options else location.trying_for(FIRST_RETRY_S)
        """The same, as long as the server has never answered: a wrong address is not tried for `retry_s`."""
        self._was_reached = False
        try:
            self._client = _client(self._trying)
        except FAILURES as error:
            reason, advice = reason_of(error)
            raise UsageError(f"{location.url} cannot be used: {reason}; {advice or 'see docs/OBJECT_STORES.md'}") from error
        self._requests, self._free = Requests(), asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._quiet_until = 0.0
        self._uploads = S3Uploads(location) if location.scheme == "s3" else None

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def requests(self) -> Requests:
        return self._requests

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        return await self._put(key, data, "create", {_MARK: mark}, exceptions.AlreadyExistsError)

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        expected: UpdateVersion = {}
        if version.e_tag is not None:
            expected["e_tag"] = version.e_tag
        if version.version is not None:
            expected["version"] = version.version
        # A server may call a missing object a failed condition (412) or missing (404).
        lost = (exceptions.PreconditionError, FileNotFoundError)
        return await self._put(key, data, expected, {_MARK: mark}, lost)

    async def put(self, key: str, data: Buffer) -> None:
        await self._put(key, data, "overwrite", {}, ())

    async def _put(
        self,
        key: str,
        data: Buffer,
        mode: Any,
        attributes: Attributes,
        lost: type[BaseException] | tuple[type[BaseException], ...],
    ) -> bool:
        self._requests.puts += 1
        until, path = asyncio.get_running_loop().time() + self._trying.retry_s, self._path(key)
        while True:
            try:
                async with self._free:
                    await self._answer(
                        obstore.put_async(
                            self._client, path, cast(Any, data), mode=mode, attributes=attributes, use_multipart=False
                        )
                    )
            except lost as error:
                if is_conflict(error):  # others write it at this moment; there may be no object afterwards
                    await self._pause("writing", key, error, until)
                    continue
                if isinstance(error, FileNotFoundError) and not is_missing(error):
                    raise store_error("writing", key, self.url, error, reads=False) from error
                return False
            except FAILURES as error:
                # The client does not repeat a conditional request that got no answer, since it knows nothing of marks.
                if is_answer(error) and not is_conflict(error):
                    raise store_error("writing", key, self.url, error, reads=False) from error
                await self._pause("writing", key, error, until)
            else:
                return True

    async def _pause(self, doing: str, key: str, error: BaseException, until: float) -> None:
        """Pause before the next try. Raises if the time is over."""
        now = asyncio.get_running_loop().time()
        if now >= until:
            raise store_error(doing, key, self.url, error, reads=False) from error
        if not is_answer(error) and now >= until - self._trying.retry_s + FIRST_REPORT_S:
            self._say_silent()
        await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        self._requests.puts += 2
        try:
            await _answer(
                obstore.put_async(
                    self._client,
                    self._path(key),
                    cast(Any, _Counted(parts, self._requests)),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                )
            )
        except FAILURES as error:
            raise store_error("writing", key, self.url, error, reads=False) from error

    async def get(self, key: str, size_max: int) -> tuple[bytes, ObjectHead] | int:
        self._requests.gets += 1
        try:
            async with self._free:
                found = await self._answer(obstore.get_async(self._client, self._path(key)))
                if found.meta["size"] > size_max:
                    return found.meta["size"]
                return (await self._answer(found.bytes_async())).to_bytes(), _head(found)
        except FAILURES as error:
            raise self._unreadable("reading", key, error) from error

    async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
        self._requests.gets += 1
        try:
            async with self._free:
                return await self._answer(obstore.get_range_async(self._client, self._path(key), start=offset, length=nbytes))
        except FAILURES as error:
            if is_past_the_end(error):
                return b""
            raise self._unreadable("reading", key, error) from error

    async def look(self, key: str) -> ObjectHead | None:
        self._requests.heads += 1
        try:
            async with self._free:
                found = await self._answer(obstore.get_async(self._client, self._path(key), options={"head": True}))
        except FAILURES as error:
            unreadable = self._unreadable("looking for", key, error)
            if isinstance(unreadable, NotFoundError):
                return None
            raise unreadable from error
        return _head(found)

    async def list(self, prefix: str) -> list[Entry]:
        path = self._path(prefix)
        try:
            async with self._free:
                found = await self._answer(obstore.list_with_delimiter_async(self._client, path or None))
        except FAILURES as error:
            self._requests.lists += 1
            raise store_error("listing", prefix or "the root", self.url, error, reads=True) from error
        # Some servers show an empty object of the prefix's own name, the marker of a directory.
        listed = [one for one in found["objects"] if one["path"].rstrip("/") != path]
        objects = [Entry(name_of(one["path"]), one["size"], False) for one in listed]
        deeper = [Entry(name_of(one), 0, True) for one in found["common_prefixes"]]
        self._requests.lists += 1 + (len(objects) + len(deeper) - 1) // PAGE if objects or deeper else 1
        return sorted((*objects, *deeper), key=lambda entry: entry.name)

    async def delete(self, keys: Sequence[str]) -> None:
        self._requests.deletes += 1 + (len(keys) - 1) // PAGE
        try:
            async with self._free:
                await self._answer(obstore.delete_async(self._client, [self._path(key) for key in keys]))
        except FAILURES as error:
            if not is_missing(error):
                raise store_error("removing", keys[0], self.url, error, reads=False) from error
            if len(keys) > 1:  # Google's client has stopped at the first object that is not there
                await each(lambda key: self.delete([key]), keys)

    async def unfinished(self) -> Sequence[UnfinishedUpload]:
        if self._uploads is None:
            return []
        self._requests.lists += 1
        return await self._uploads.found()

    async def abort(self, upload: UnfinishedUpload) -> None:
        assert self._uploads is not None
        self._requests.deletes += 1
        await self._uploads.abort(upload)

    async def close(self) -> None:
        """Nothing to release: the client has no state but its connections."""

    async def _answer(self, request: Awaitable[T]) -> T:
        """The answer to a request that is short, so that a long wait for it deserves a word."""
        reminder = asyncio.get_running_loop().call_later(FIRST_REPORT_S, self._say_silent)
        try:
            answer = await _answer(request)
        except FAILURES as error:
            if is_answer(error) or isinstance(error, FileNotFoundError | exceptions.AlreadyExistsError):
                self._is_reached()
            elif not self._was_reached:
                error.__cause__ = error.__cause__ or NeverReached(str(error))
            raise
        finally:
            reminder.cancel()
            del request  # as below
        self._is_reached()
        return answer

    def _is_reached(self) -> None:
        self._was_reached = True
        if self._trying is not self._location:
            self._trying, self._client = self._location, _client(self._location)

    def _say_silent(self) -> None:
        """One word for all requests that wait, and one a minute while the server is away."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            waits.log.warning(
                "%s has not answered for %.0f s; a request is repeated for %g s (the option retry_s)",
                *(self._location.place, FIRST_REPORT_S, self._trying.retry_s),
            )

    def _path(self, key: str) -> str:
        return path_of(self._location.prefix, key)

    def _unreadable(self, doing: str, key: str, error: BaseException) -> Exception:
        if is_missing(error):
            return missing(key, self.url)
        return store_error(doing, key, self.url, error, reads=True)


class _Counted:
    """`parts`, counted. No frame of it goes on referring to a part, as that of a generator would."""

    def __init__(self, parts: AsyncIterator[Buffer], requests: Requests) -> None:
        self._parts, self._requests = parts, requests

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Buffer:
        part = await anext(self._parts)
        self._requests.parts += 1
        return part


async def _answer(request: Awaitable[T]) -> T:
    """The answer to a request of the client, which is kept in sight until the client has dropped it."""
    global _user
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise UsageError(
            "this process was forked from one that had used a bucket, and the client's threads did not come along: start it by "
            'the method "spawn" or "forkserver" of multiprocessing'
        )
    _under_way.add(cast("Future[Any]", request))
    try:
        return await request
    finally:
        del request  # the traceback of an error must not keep it in sight


def _head(found: GetResult) -> ObjectHead:
    version = Version(found.meta["e_tag"], found.meta["version"])
    written = found.meta["last_modified"].timestamp()
    return ObjectHead(found.meta["size"], version, found.attributes.get(_MARK, ""), written)


def _client(location: BucketUrl) -> ObjectStore:
    retry: RetryConfig = {
        "max_retries": 1000,  # the time ends them
        "retry_timeout": timedelta(seconds=location.retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=max(1.0, min(10.0, location.retry_s / 4))),
            "base": 2,
        },
    }
    options: ClientConfig = {
        "allow_http": True,  # an endpoint of http:// is the user's own choice; the providers' own are https://
        "timeout": timedelta(seconds=location.request_s),
        "connect_timeout": timedelta(seconds=min(10.0, location.request_s)),
        "pool_max_idle_per_host": str(REQUESTS_AT_ONCE),
    }
    given = location.options
    if location.scheme == "s3":
        session = s3_session(given.get("profile"))
        credentials = None if location.flag("anonymous") else cast(Any, s3_credentials(session))
        if authorities := s3_authorities(session):  # the client itself knows SSL_CERT_FILE only
            options["root_certificate"] = Path(authorities).read_bytes()
        return S3Store(
            location.bucket,
            config=_s3(s3_place(location, session)),
            client_options=options,
            retry_config=retry,
            credential_provider=credentials,
        )
    config: dict[str, Any] = {"skip_signature": True} if location.flag("anonymous") else {}
    if location.scheme == "gs":
        if "endpoint" in given:
            config["base_url"] = given["endpoint"]
        return GCSStore(location.bucket, config=cast(Any, config), client_options=options, retry_config=retry)
    config |= {name: given[option] for option, name in _AZURE.items() if option in given}
    return AzureStore(location.bucket, config=cast(Any, config), client_options=options, retry_config=retry)


def _s3(location: BucketUrl) -> S3Config:
    given = location.options
    config: S3Config = {
        "unsigned_payload": "checksum" not in given,  # every chunk has its own digest, and is read back
        "skip_signature": location.flag("anonymous"),
        "request_payer": location.flag("requester_pays"),
        # The client would take both from variables of its own, of which the endpoint and botocore know nothing.
        "virtual_hosted_style_request": given.get("addressing") == "virtual",
        "conditional_put": "etag",
    }
    if "region" in given:
        config["region"] = given["region"]
    if "checksum" in given:
        config["checksum_algorithm"] = given["checksum"]
    if "encryption" in given:
        config["server_side_encryption"] = given["encryption"]
    if "kms_key" in given:
        config["sse_kms_key_id"] = given["kms_key"]
    if "endpoint" in given:
        config["endpoint"] = _endpoint(given["endpoint"].rstrip("/"), location)
    return config


def _endpoint(endpoint: str, location: BucketUrl) -> str:
    """`endpoint` as the client wants it: with the bucket in its name if that is the addressing."""
    if location.options.get("addressing") != "virtual":
        return endpoint
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{location.bucket}.{host}"
