"""Replaces functions of the libraries, and remembers the saves that go through them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from checkpointd_client.integrations.huggingface.rotating import Saves

log = logging.getLogger("checkpointd")

Function = Callable[..., Any]
SAVES = Saves()
"""The saves of this process to directories."""


def replace(home: Any, name: str, wrap: Callable[[Function], Function]) -> None:
    """Replace `name` of `home` by the wrapped function, unless that has been done."""
    original = getattr(home, name, None)
    if original is None:
        log.warning("this release has no %s: docs/howto/HUGGINGFACE.md names the releases that were tested", name)
    elif not hasattr(original, "checkpointd"):
        wrapped = wrap(original)
        wrapped.checkpointd = True  # type: ignore[attr-defined]  # says that it is done
        setattr(home, name, wrapped)


def after(first: Callable[[], None]) -> Callable[[Function], Function]:
    """A wrapper for functions, which calls `first` before the function."""

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            first()
            return original(*args, **kwargs)

        return call

    return wrap


settled = after(lambda: SAVES.settle())


@contextmanager
def instead(home: Any, **functions: Function) -> Iterator[None]:
    """Replace attributes of an object within the block."""
    with ExitStack() as stack:
        for name, function in functions.items():
            own = vars(home).get(name)
            stack.callback(*((delattr, home, name) if own is None else (setattr, home, name, own)))
            setattr(home, name, function)
        yield
