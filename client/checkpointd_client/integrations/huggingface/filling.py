"""Directories such as `checkpoint-8` that the libraries fill: they get their name at the commit.

Hugging Face's Trainer writes weights, its own state and the state of random-number generators there, and lets DeepSpeed's
engine save there if there is one; Accelerate does likewise. All of that is one checkpoint.

Invariants
  FILLING-1  The libraries write to a directory without that name. The save begins on each rank when they have written
      everything.
  FILLING-2  An error of the storage meanwhile fails this save, on every rank, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")

_OF_STORAGE = ("os error", "PytorchStreamWriter", "unexpected pos", "Parent directory")
"""Words in the errors of safetensors and torch.save, which raise no OSError if a file cannot be written."""


@dataclass(slots=True)
class Filled:
    """The directory at `path` that was filled; the save knows it as `name`. `fault`: the first error of the storage."""

    name: str
    path: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a library wants to save: to `directory`, at `step`, with the `engine` of DeepSpeed that takes part, if one does.

    `optimizers`: those whose steps change the model.
    """

    directory: str
    step: int
    engine: Any | None
    optimizers: tuple[Any, ...] = ()


@dataclass(slots=True)
class Filling:
    """The filling for one save: `directory` is the final name, `filled` the directory now.

    `save` begins the save when all is filled, on every rank; None if no save has begun. An error of the storage may keep a
    library from asking the engine to save: then it uses the `usual` arguments of the library. `taking`: entered while the
    libraries fill the directory. `refused`: called if they raise.
    """

    directory: str
    filled: Filled
    save: Callable[[Filling, tuple[str, ...]], OwnHandle | None]
    taking: Callable[[], AbstractContextManager[None]] = nullcontext
    refused: Callable[[BaseException], None] = lambda _: None
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments of the engine's save_checkpoint, without the directory."""
    is_taking: bool = True
    """Whether files of tensors are taken, and not written before the call returns."""

    @property
    def above(self) -> str:
        """The hidden directory in which all directories are filled."""
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
        """While the libraries fill it. If they raise, the filled directory is removed."""
        token = _CURRENT.set(self)
        try:
            with self.keeping():
                os.makedirs(self.filled.path, exist_ok=True)
            with self.taking():
                yield
        except BaseException as error:
            self.drop()
            self.refused(error)
            raise
        finally:
            _CURRENT.reset(token)

    def drop(self) -> None:
        """Remove the filled directory."""
        shutil.rmtree(os.path.dirname(self.filled.path), ignore_errors=True)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep an error of the storage in the block as this save's fault (FILLING-2)."""
        try:
            yield
        except Exception as error:
            # If the directory could not be made, writing into it raises RuntimeErrors with other words.
            follows = self.filled.fault is not None and isinstance(error, RuntimeError)
            if not (follows or is_of_storage(error)):
                raise
            if self.filled.fault is None:
                log.error("%s cannot be written, and the save fails: %s", self.directory, error)
                self.filled.fault = f"what belongs to {self.directory} beside the engine's files cannot be written: {error}"

    def kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called within `keeping`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.keeping():
                return function(*args, **kwargs)

        return call

    def written_at_once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose files are all written before their calls return."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.is_taking = False
            try:
                return function(*args, **kwargs)
            finally:
                self.is_taking = True

        return call


class SupportsFilling(Protocol):
    """Saves what the libraries want to save."""

    def serves(self, engine: Any | None) -> bool:
        """Whether it saves a model with that engine of DeepSpeed, or a model without one."""
        ...

    def filling(self, wanted: Wanted) -> Filling | None:
        """The filling of a save; None if it does not save there."""
        ...

    def chosen(self, engine: Any | None, folder: str, asked: str | None) -> str | None:
        """The checkpoint to load: `asked`, or the newest in `folder`. None if the library's own choice stands."""
        ...

    def leave(self) -> None:
        """A training has ended: close its roots, which a later save opens again. Raises nothing."""
        ...


SAVERS: list[SupportsFilling] = []
"""Those that are installed."""


def serves(engine: Any | None) -> bool:
    """Whether any of those that are installed saves a model with that engine, or without one."""
    return any(saver.serves(engine) for saver in SAVERS)


def filling_of(wanted: Wanted) -> Filling | None:
    """The filling of a save; None if checkpointd does not save there."""
    for saver in SAVERS:
        if saver.serves(wanted.engine) and (found := saver.filling(wanted)) is not None:
            return found
    return None


def chosen(engine: Any | None, folder: str, asked: str | None) -> str | None:
    """The checkpoint to load: `asked`, or the newest in `folder`. None if the library's own choice stands."""
    found = (saver.chosen(engine, folder, asked) for saver in SAVERS if saver.serves(engine))
    return next((one for one in found if one is not None), None)


def leave() -> None:
    """A training has ended, or another one begins: all savers close their roots."""
    for saver in SAVERS:
        saver.leave()


_CURRENT: ContextVar[Filling | None] = ContextVar("the directory that is being filled", default=None)


def current() -> Filling | None:
    """The filling of this thread, if there is one."""
    return _CURRENT.get()


def is_of_storage(error: BaseException) -> bool:
    """Whether `error` means that a file could not be written."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) or any(words in str(link) for words in _OF_STORAGE):
            return True
        link = link.__cause__ or link.__context__
    return False
