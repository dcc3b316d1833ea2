"""One Checkpointer per root in a process, and an orderly end when the interpreter exits."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.errors import UsageError
from checkpointd.layout.keys import SERVICE, AttemptId, is_tag, vote_name
from checkpointd.other_formats import is_root

_claimed: set[str] = set()
_lock = threading.Lock()


def claim_root(root: str | os.PathLike[str]) -> Callable[[], None]:
    """Claim `root` for one Checkpointer of this process; call the result to release it. UsageError if another one has it."""
    text = os.fspath(root)
    name = parse(text).place if is_bucket_url(text) else text if "://" in text else os.path.realpath(text)
    with _lock:
        if name in _claimed:
            raise UsageError(
                f"another Checkpointer of this process uses {text}: close() it first, or use it here as well. With two, the "
                "saves of the older one would fail. If nothing refers to it any more, as when a notebook's cell ran twice, "
                "restart the process"
            )
        _claimed.add(name)

    def give_back() -> None:
        with _lock:
            _claimed.discard(name)

    return give_back


def check_no_tag(path: str) -> None:
    """Raise UsageError if `path` is the directory of a tag, or lies in one, and is no root itself.

    The directory of a tag that was copied alone has no root around it.
    """
    if is_root(path):
        return
    below = given = os.path.abspath(path)
    root, name = os.path.split(below)
    while root != below:
        if is_tag(name) and (_has_attempts(below) if is_root(root) else below == given and _has_votes(below)):
            where = "is" if below == given else "lies in"
            raise UsageError(
                f"{path} {where} the directory of the tag {name!r}; its root is {root}. Give the root, and name the "
                f"tag when you load: tag={name!r}. If only this directory was copied, copy the whole root instead: a "
                "checkpoint may need objects of other tags"
            )
        below = root
        root, name = os.path.split(below)


def _has_attempts(directory: str) -> bool:
    try:
        return any(AttemptId.parse(attempt) for attempt in os.listdir(directory))
    except OSError:
        return False


def _has_votes(directory: str) -> bool:
    """Whether there is an attempt with a vote. In a root, a tag may be called like an attempt, but it holds no votes."""
    try:
        found = [name for name in os.listdir(directory) if AttemptId.parse(name)]
    except OSError:
        return False
    return any(os.path.isfile(os.path.join(directory, name, vote_name(0))) for name in found)


def check_apart(root: str) -> None:
    """UsageError if the directory `root` and another root would share tags or `latest`, or if it is a tag's directory."""
    check_no_tag(root)
    beside, name = os.path.split(os.path.abspath(root))
    if name == SERVICE and is_root(beside):
        raise UsageError(
            f"{beside} is a root of checkpoints in this project's own format (layout='checkpointd'): no files can be shown "
            "in it, since both would move the same `latest`. Load them with that layout, and save files in another directory"
        )
    if is_root(os.path.join(root, SERVICE)):
        raise UsageError(
            f"{root} shows the files of checkpoints whose root is {os.path.join(root, SERVICE)} (layout='deepspeed'): it "
            "cannot be a root as well, since both would move the same `latest`. Save in another directory"
        )


def at_exit(method: Callable[[], None]) -> None:
    """Call the bound `method` when the interpreter exits, while threads still work. This does not keep the object alive.

    `atexit` is too late: thread pools refuse work by then. So this uses the private hook that thread pools use.
    """
    reference, process = weakref.WeakMethod(method), os.getpid()

    def leave() -> None:
        call = reference()
        # A forked child, such as a data loader's worker, runs this as well, but lacks the threads.
        if call is not None and os.getpid() == process:
            call()

    threading._register_atexit(leave)  # type: ignore[attr-defined]  # private to CPython 3.9+, see above
