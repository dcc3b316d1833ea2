"""Which roots the daemon serves, and the stores behind them.

Invariant: no path that a client names reaches a store unless it lies at or below a configured root, spelt without `..` and
with no symbolic link in it. A root that shows files beside itself (one named `.checkpointd`) is served where the directory in
which it lies is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import stat
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from checkpointd.errors import StoreError, UsageError
from checkpointd.layout.keys import SERVICE
from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.plain import can_show
from checkpointd.store.posix import PosixStore

STORES_KEPT = 64
"""Stores that stay open where no rank is connected and no save is in flight: a node sees many jobs in its life."""


ANSWER_S = 5.0
"""How long a file system may take to say what lies at a path."""
ASKED_MAX = 64
"""Questions to file systems that have not answered yet, each on a thread."""
T = TypeVar("T")


class Roots:
    """Stores by root, opened at the first use and kept. All together write `bandwidth_bps` bytes per second where it is set."""

    def __init__(self, allowed: Iterable[str], bandwidth_bps: float | None = None) -> None:
        self._allowed = tuple(os.path.realpath(path) for path in allowed)
        self._bucket = None if bandwidth_bps is None else TokenBucket(bandwidth_bps)
        self._stores: dict[str, Store] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def checked(self, root: str) -> str:
        """As `check`, which looks at a file system: one that hangs holds nobody else. StoreError where it does not answer."""
        return await self._ask(f"check {root}", lambda: self.check(root))

    async def opened(self, root: str) -> Store:
        """As `store`, and like `checked`."""
        return self._open(await self.checked(root))

    async def seen(self) -> list[str]:
        """As `found`, and like `checked`."""
        return await self._ask("find", self.found)

    async def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on a thread; whoever asks the same while it has not answered waits with those who asked before."""
        asked = self._asked.get(what)
        if asked is None:
            if len(self._asked) >= ASKED_MAX:
                raise StoreError(f"{len(self._asked)} file systems have not answered yet; see what hangs")
            asked = self._asked[what] = _on_a_thread(call)
            asked.add_done_callback(lambda _: self._asked.pop(what, None))
        try:
            async with asyncio.timeout(ANSWER_S):
                answer: T = await asyncio.shield(asked)
        except TimeoutError as error:
            raise StoreError(f"the file system has not answered for {ANSWER_S:g} s ({what})") from error
        return answer

    def known(self) -> dict[str, Store]:
        """The stores that were opened, by root."""
        return dict(self._stores)

    def store(self, root: str) -> Store:
        """The store at `root`. UsageError where this daemon does not serve it."""
        return self._open(self.check(root))

    def _open(self, path: str) -> Store:
        if path not in self._stores:
            store = PosixStore(path)
            self._stores[path] = store if self._bucket is None else LimitedStore(store, self._bucket)
        return self._stores[path]

    async def trim(self, in_use: set[str]) -> None:
        """Close the stores that were opened first and are not in use, so that `STORES_KEPT` are left."""
        for root in [root for root in self._stores if root not in in_use][: max(0, len(self._stores) - STORES_KEPT)]:
            await self._stores.pop(root).close()

    def check(self, root: str) -> str:
        """`root` as this daemon calls it; UsageError saying why it is not served."""
        if not os.path.isabs(root) or "\0" in root or not root.isprintable():
            raise UsageError(f"root {root!r} must be an absolute path")
        if ".." in root.split("/"):
            raise UsageError(f"root {root!r} has '..' in it: give the path itself")
        path = os.path.normpath(root)
        written = os.path.dirname(path) if can_show(path) else path
        if not any(_within(written, allowed) for allowed in self._allowed):
            raise UsageError(
                f"this daemon does not serve {written}: it serves {', '.join(self._allowed)} and what lies below; "
                "start it with --root for this one"
            )
        link = _first_link(path)
        if link is not None:
            raise UsageError(f"root {path} has a symbolic link in it ({link}): give the path that it leads to")
        return path

    async def usable(self) -> None:
        """UsageError where a configured root is no directory, or one that this process cannot use; bounded like `checked`."""
        await self._ask("look at the roots", lambda: check_served(self._allowed))

    def found(self) -> list[str]:
        """The roots that lie at, or directly below, the configured ones, and those of plain files in these places."""
        places: list[str] = []
        for allowed in self._allowed:
            try:
                below = sorted(entry.path for entry in os.scandir(allowed) if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue
            here = dict.fromkeys(path for place in (allowed, *below) for path in (place, f"{place}/{SERVICE}"))
            places += [path for path in here if os.path.isdir(f"{path}/{SERVICE}/epochs")]
        return places

    def lift_limit(self) -> None:
        """Write as fast as the storage takes it: the daemon is leaving, and what is in flight should be durable before."""
        if self._bucket is not None:
            self._bucket.lift()

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()
        self._stores.clear()


def _on_a_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """`call` on a thread of its own, which does not keep the process from ending: no pool is used up by those that hang."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def give(error: BaseException | None, value: T | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)  # type: ignore[arg-type]  # there is a value where there is no error
        else:
            answer.set_exception(error)
            answer.exception()  # whoever asked may have given up

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


def check_served(paths: Iterable[str]) -> None:
    """Raise UsageError, with what to do, for the first of `paths` at which no job could save.

    A directory that cannot be written will do where one directly below it can: each job then has a root of its own there.
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
        return f"{user} cannot look at it ({error.strerror}): see that it is mounted, and that this user may reach it"
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


def _first_link(path: str) -> str | None:
    """The first part of `path` that is a symbolic link, also one that leads nowhere; None where there is none."""
    for end in (i for i in range(1, len(path) + 1) if i == len(path) or path[i] == "/"):
        if os.path.islink(path[:end]):
            return path[:end]
    return None


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(above.rstrip("/") + "/")
