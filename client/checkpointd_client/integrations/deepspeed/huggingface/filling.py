"""Directories such as `checkpoint-8` that other programs fill beside an engine's files: they get their name at the commit.

Hugging Face's Trainer writes weights, its own state and the state of random-number generators there, before and after it calls
the engine; Accelerate does likewise. All of that is one checkpoint.

Invariants
  FILLING-1  What they write goes to a directory without that name. The engine's save begins when all of it is written, on each
      rank.
  FILLING-2  What the storage refuses meanwhile fails this save, on every rank, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("checkpointd")

_OF_STORAGE = ("os error", "PytorchStreamWriter", "unexpected pos", "Parent directory")
"""Words of safetensors and of torch.save, which do not raise OSError where a file cannot be written."""


@dataclass(slots=True)
class Filled:
    """What was filled at `path`; the save knows it by `name`. `fault`: what could not be written."""

    name: str
    path: str
    fault: str | None = None


@dataclass(slots=True)
class Filling:
    """One save of one engine: `directory` is what it is to become, `filled` where it is now."""

    directory: str
    filled: Filled
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What the engine was asked to save, beside the directory."""

    @property
    def above(self) -> str:
        """Where all directories are filled: out of sight."""
        return os.path.dirname(os.path.dirname(self.filled.path))

    def takes(self, save_dir: object) -> bool:
        return os.path.abspath(str(save_dir)) == self.filled.path

    def real(self, path: str) -> str:
        """The name that `path` has or will have: of the directory that is being filled, and of the one above it."""
        absolute = os.path.abspath(path)
        names = {self.filled.path: self.directory, os.path.dirname(self.filled.path): os.path.dirname(self.directory)}
        return names.get(absolute, path)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Others fill it now; whatever they raise ends it, and what was written goes."""
        token = _CURRENT.set(self)
        try:
            with self.keeping():
                os.makedirs(self.filled.path, exist_ok=True)
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            _CURRENT.reset(token)

    def drop(self) -> None:
        """Remove what was filled."""
        shutil.rmtree(os.path.dirname(self.filled.path), ignore_errors=True)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What the storage refuses in the body becomes this save's fault (FILLING-2)."""
        try:
            yield
        except Exception as error:
            # Where the directory could not even be made, what is written into it fails in words of its own.
            follows = self.filled.fault is not None and isinstance(error, RuntimeError)
            if not (follows or is_of_storage(error)):
                raise
            if self.filled.fault is None:
                log.error("%s cannot be written, and the save fails: %s", self.directory, error)
                self.filled.fault = f"what belongs to {self.directory} beside the engine's files cannot be written: {error}"

    def kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, `keeping`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.keeping():
                return function(*args, **kwargs)

        return call


_CURRENT: ContextVar[Filling | None] = ContextVar("the directory that is being filled", default=None)


def current() -> Filling | None:
    """What is being filled by this thread."""
    return _CURRENT.get()


def is_of_storage(error: BaseException) -> bool:
    """Whether a file could not be written, rather than what was to be in it made."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) or any(words in str(link) for words in _OF_STORAGE):
            return True
        link = link.__cause__ or link.__context__
    return False
