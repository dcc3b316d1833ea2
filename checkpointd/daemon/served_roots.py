"""The roots that the daemon serves, and their stores.

Invariant: a path that a client names reaches a store only if it lies at or below a configured root and contains no `..`. The
stores follow no symbolic links, so nobody can lead them elsewhere by replacing a name. A root named `.checkpointd`, which shows
files beside itself, is served if the directory that contains it is served.

A store has the rights of the user for whom it was opened, so each user of a root has a separate store.

A root in a bucket is reached with the daemon's own credentials, and with the options that the daemon was given for it: a client
cannot send them to another server. Such roots are served to one user only (`ServeConfig`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from checkpointd.bucket_urls import BucketUrl, is_bucket_url, parse
from checkpointd.daemon.process.process_exit import NO_ROOM
from checkpointd.daemon.status.history import SpaceSample
from checkpointd.daemon.users import looks_as, may_look
from checkpointd.errors import StoreError, UsageError
from checkpointd.layout.keys import LOG_ROOT, SERVICE
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.posix.anchor import Anchor, LinkMet
from checkpointd.store.posix.plain import can_show
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.users import User, become, may_write
from checkpointd.store.requests import Requests, requests_of
from checkpointd.system_errors import explained, in_words

log = logging.getLogger("checkpointd")

STORES_KEPT = 64
"""Stores that stay open. Beyond that, stores without connected ranks and saves in flight are closed."""

ANSWER_S = 5.0
"""How long a file system may take to answer a question about a path."""
ASKED_MAX = 64
"""Questions to file systems that may wait for an answer, each on a thread."""
_AT_ONCE = {"retry_s": "1", "request_s": "3"}
"""The options of a store that asks once."""
BUCKET_ROOTS_MAX = 64
"""The places below a configured bucket that are looked at: each is a request."""
T = TypeVar("T")


class ServedRoots:
    """The stores by root, opened at first use and kept. All together write at most `bandwidth_bps` bytes per second, if set."""

    def __init__(
        self, allowed: Iterable[str], bandwidth_bps: float | None = None, *, uids: Collection[int] | None = None
    ) -> None:
        allowed = list(allowed)
        directories = [root for root in allowed if not is_bucket_url(root)]
        self._allowed = tuple(promptly(partial(os.path.realpath, path), path) or path for path in directories)
        self._buckets = tuple(parse(root) for root in allowed if is_bucket_url(root))
        self._bucket = None if bandwidth_bps is None else TokenBucket(bandwidth_bps)
        self._uids = (os.geteuid(),) if uids is None else uids
        self._stores: dict[tuple[str, User | None], Store] = {}
        self._impatient: dict[str, Store] = {}
        """Stores in buckets that repeat no request for long, by root."""
        self._in_bucket: dict[str, list[str]] = {}
        """The roots that were found last in each configured bucket."""
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def checked(self, root: str) -> str:
        """As `check`, on a thread, so that a file system that hangs blocks nobody else. StoreError if it does not answer."""
        return (await self._ask(f"check {root}", lambda: self._with_owner(root)))[0]

    async def check_writable(self, root: str, user: User | None) -> None:
        """UsageError if `user` may not write at `root`, so that users decide nothing at the roots of others. As `checked`."""
        if is_bucket_url(root):
            return  # the server tells, at the first write
        if not await self._ask(f"ask for the rights of {user} at {root}", lambda: _may_write_at(root, user)):
            raise UsageError(
                f"root {root}: this user may not write there, or in the nearest directory above it that exists. Run as the "
                "user whose root it is, or let this one write there"
            )

    async def opened(self, root: str, user: User | None = None) -> Store:
        """As `store`, with the time limit of `checked`."""
        return self._open(await self.checked(root), user)

    def as_served(self, root: str) -> str:
        """The URL of `root`, which an earlier daemon served, with the options that this one uses; `root` if it has none."""
        if is_bucket_url(root):
            place = parse(root)
            served = [replace(one, prefix=place.prefix) for one in self._buckets if one.holds(place)]
            return next((one.url for one in served if one.identity == place.identity), root)
        return root

    async def looked_after(self, root: str, joined: Sequence[User | None]) -> Store:
        """The store for scans of `root`, which the users `joined` have joined in this order; see `looks_as`."""
        path, owner = await self._ask(f"check {root}", lambda: self._with_owner(root))
        # On a thread, too: the user database may be on another machine.
        return self._open(path, await self._ask(f"find the user for {root}", lambda: looks_as(owner, joined, self._uids)))

    def _with_owner(self, root: str) -> tuple[str, os.stat_result | None]:
        path = self.check(root)
        return path, None if is_bucket_url(path) else _owner_of(path)

    async def room(self, root: str) -> SpaceSample | None:
        """The free space of the file system of `root`; None if it cannot be read, or if it is a bucket. As `checked`."""
        if is_bucket_url(root):
            return None
        return await self._ask(f"measure {root}", lambda: room_at(root))

    async def seen_on_disk(self) -> list[str]:
        """As `found`, with the time limit of `checked`."""
        return await self._ask("find", self.found)

    async def check_answers(self, root: str) -> None:
        """Ask for a root in a bucket once. Raises StoreError with the reason if the answer does not come at once: the store
        itself repeats its requests for minutes before it gives a reason.
        """
        if not is_bucket_url(root):
            return
        if root not in self._impatient:
            for oldest in [*self._impatient][: max(0, len(self._impatient) - STORES_KEPT + 1)]:
                await self._impatient.pop(oldest).close()
            place = parse(root)
            self._impatient[root] = open_store(replace(place, options={**place.options, **_AT_ONCE}).url)
        store = self._impatient[root]
        try:
            await store.stat(LOG_ROOT)
        except StoreError as error:
            raise type(error)(str(error).replace(store.url, root)) from error

    async def seen_in_buckets(self) -> list[str]:
        """The roots in buckets: those configured, or directly below. Those of a bucket that does not answer: as they were."""
        for allowed in self._buckets:
            with contextlib.suppress(StoreError):  # the scans of its roots, or its trainers, report it
                self._in_bucket[allowed.url] = await self._found_in(allowed)
        return [root for allowed in self._buckets for root in self._in_bucket.get(allowed.url, ())]

    async def _found_in(self, allowed: BucketUrl) -> list[str]:
        store = self._open(allowed.url, None)
        if await store.stat(LOG_ROOT) is not None:
            return [allowed.url]
        below = [entry.name for entry in await store.list("") if entry.is_prefix][:BUCKET_ROOTS_MAX]
        return [allowed.below(name).url for name in below if await store.stat(f"{name}/{LOG_ROOT}") is not None]

    async def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on a thread. Callers that ask the same question at the same time share the answer."""
        asked = self._asked.get(what)
        if asked is None:
            if len(self._asked) >= ASKED_MAX:
                raise StoreError(f"{len(self._asked)} file systems have not answered yet; find out which of them hang")
            asked = self._asked[what] = on_a_thread(call)
            asked.add_done_callback(lambda _: self._asked.pop(what, None))
        try:
            async with asyncio.timeout(ANSWER_S):
                answer: T = await asyncio.shield(asked)
        except TimeoutError as error:
            raise StoreError(f"the file system has not answered for {ANSWER_S:g} s ({what})") from error
        return answer

    def store(self, root: str, user: User | None = None) -> Store:
        """The store at `root` with the rights of `user` (None: the daemon's). UsageError if this daemon does not serve it."""
        return self._open(self.check(root), user)

    def _open(self, path: str, user: User | None) -> Store:
        key = (path, user)
        if key not in self._stores:
            store = open_store(path) if is_bucket_url(path) else PosixStore(path, anchor="/", user=user)
            self._stores[key] = store if self._bucket is None else LimitedStore(store, self._bucket)
        return self._stores[key]

    async def trim(self, in_use: set[str]) -> None:
        """Close the oldest stores that are not in use, until `STORES_KEPT` are left."""
        for key in [key for key in self._stores if key[0] not in in_use][: max(0, len(self._stores) - STORES_KEPT)]:
            await self._stores.pop(key).close()

    @property
    def serves(self) -> tuple[str, ...]:
        """The directories and buckets at or below which roots may be."""
        return (*self._allowed, *(one.url for one in self._buckets))

    def check(self, root: str) -> str:
        """The normal path or URL of `root`; UsageError, with the reason, if it is not served."""
        if is_bucket_url(root):
            return self._check_bucket(parse(root))
        if not os.path.isabs(root) or "\0" in root or not root.isprintable():
            raise UsageError(f"root {root!r} must be an absolute path")
        if ".." in root.split("/"):
            raise UsageError(f"root {root!r} has '..' in it: give the path itself")
        path = os.path.normpath(root)
        written = os.path.dirname(path) if can_show(path) else path
        if not any(_within(written, allowed) for allowed in self._allowed):
            raise UsageError(
                f"this daemon does not serve {written}: it serves {', '.join(self.serves)} and what lies below; "
                "start it with --root for this one"
            )
        try:
            Anchor("/").check(path)
        except LinkMet as met:
            raise UsageError(f"root {path} has a symbolic link in it ({met.filename}): give the path that it leads to") from met
        return path

    def _check_bucket(self, root: BucketUrl) -> str:
        allowed = next((one for one in self._buckets if one.holds(root)), None)
        if allowed is None:
            served = ", ".join(self.serves)
            raise UsageError(
                f"this daemon does not serve {root.place}: it serves {served} and what lies below; start it with --root "
                "for this one"
            )
        if root.options and root.options != allowed.options:
            raise UsageError(
                f"this daemon serves {root.place} as {allowed.url}, and {root.url} has other options: name the root with the "
                "same options on both sides"
            )
        return replace(allowed, prefix=root.prefix).url

    async def usable(self) -> None:
        """UsageError if a configured root is not a directory that this process can use. As `checked`."""
        await self._ask("look at the roots", lambda: check_served(self._allowed))

    def found(self) -> list[str]:
        """The roots on disk at the configured paths and directly below them, including those named `.checkpointd` there."""
        places: list[str] = []
        for allowed in self._allowed:
            try:
                below = sorted(entry.path for entry in os.scandir(allowed) if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue
            here = dict.fromkeys(path for place in (allowed, *below) for path in (place, f"{place}/{SERVICE}"))
            places += [path for path in here if os.path.isfile(f"{path}/{LOG_ROOT}")]
        return [path for path in places if may_look(_owner_of(path), self._uids)]

    def requests(self, root: str) -> Requests | None:
        """The requests that this daemon has sent for a root in a bucket, since it opened it; None for other roots."""
        store = self._stores.get((root, None)) if is_bucket_url(root) else None
        return None if store is None else requests_of(store)

    def lift_limit(self) -> None:
        """Lift the bandwidth limit: the daemon is leaving, and its saves in flight should become durable first."""
        if self._bucket is not None:
            self._bucket.lift()

    async def close(self) -> None:
        for store in (*self._stores.values(), *self._impatient.values()):
            await store.close()
        self._stores.clear()
        self._impatient.clear()


def on_a_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `call` on a daemon thread of its own: a call that hangs neither fills a pool nor blocks the exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def give(error: BaseException | None, value: T | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)  # type: ignore[arg-type]  # without an error there is a value
        else:
            answer.set_exception(error)
            answer.exception()  # mark it as retrieved: the caller may have given up

    def work() -> None:
        error, value = None, None
        try:
            value = call()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has left
            loop.call_soon_threadsafe(give, error, value)

    threading.Thread(target=work, name="checkpointd-roots", daemon=True).start()
    return answer


def promptly(call: Callable[[], T], root: str) -> T | None:
    """The result of `call` about `root`; None, with a line in the log, if its file system does not answer. Blocks."""
    answer: SimpleQueue[T] = SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), name="checkpointd-roots", daemon=True).start()
    try:
        return answer.get(timeout=ANSWER_S)
    except Empty:
        log.warning("the file system of the root %s has not answered for %g s: going on without it", root, ANSWER_S)
        return None


def _may_write_at(root: str, user: User | None) -> bool:
    """Call this on a thread of its own, because the thread keeps the rights of `user`."""
    if user is not None:
        become(user)
    while True:
        try:
            with Anchor("/").at(root) as place:
                return may_write(place.directory, place.name, user)
        except FileNotFoundError:
            root = os.path.dirname(root)
        except PermissionError:
            return False
        except OSError as error:
            if user is None and error.errno in NO_ROOM:
                return True  # no descriptor is free; the daemon's own user finds out at each write
            raise StoreError(f"cannot find out who may write at {root}: {in_words(error, 'read')}") from error


def _owner_of(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False)
    return None


def room_at(path: str) -> SpaceSample | None:
    """The free space for this user at `path`, or at the directory above if `path` does not exist yet."""
    for place in (path, os.path.dirname(path)):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            return SpaceSample(time.time(), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


def check_served(paths: Iterable[str]) -> None:
    """Raise UsageError, with advice, for the first of `paths` at which no job could save.

    A read-only directory is fine if a directory directly below is writable: each job can then have a root there.
    """
    for path in paths:
        fault = _unfit(path)
        if fault:
            raise UsageError(f"the daemon cannot serve the root {path}: {fault}")


def _unfit(path: str) -> str | None:
    user = f"user {os.geteuid()}, which runs the daemon,"
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return f"it does not exist; make it as the user that trains: `{shlex.join(['mkdir', '-p', path])}`"
    except OSError as error:
        return (
            f"{user} cannot look at it ({explained(error, 'read')[0]}): see that it is mounted, and that this user may reach it"
        )
    if not is_directory:
        return "it is not a directory; give --root the directory in which the jobs' roots lie"
    owner = f"run the daemon as the user that trains, or give this one the right: `{shlex.join(['chmod', 'u+rwx', path])}`"
    if not _may(path, os.R_OK | os.X_OK):
        return f"{user} may not list it; {owner}"
    if not _may(path, os.W_OK) and not any(_may(below, os.W_OK | os.X_OK) for below in _directories_in(path)):
        return f"{user} may write neither there nor in any directory directly below; {owner}"
    return None


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _directories_in(path: str) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(above.rstrip("/") + "/")
