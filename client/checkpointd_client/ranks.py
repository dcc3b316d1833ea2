"""The control plane between the ranks: torch.distributed's own Store, and a broadcast before there is one, in the constructor.

A DeepSpeed engine's load_checkpoint, itself full of collective calls, asks by the same broadcast what rank 0 sees.

Invariants
  K1  Every key carries the epoch's nonce: nothing of an earlier incarnation is ever read.
  K2  Every wait has a limit, and running into it names the ranks that are missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported, but not in __all__

from checkpointd.config import Ranks, environment_world_size
from checkpointd.errors import CheckpointdError, DeadlineError, UsageError

T = TypeVar("T")
_MESSAGE_BYTES = 8192
_POLL_MIN_S, _POLL_MAX_S = 0.002, 0.1


class Board(Protocol):
    """A notice board for the ranks of one epoch: each key is written once, by anyone, and read by all."""

    @property
    def is_solo(self) -> bool:
        """Whether there is one rank only."""
        ...

    def post(self, key: str, text: str) -> None: ...

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        """`key` of each of `ranks` (None: of all), waited for; DeadlineError names who is missing and should be `doing`
        what.
        """
        ...

    def post_count(self, key: str, count: int) -> None:
        """Note how far this rank has come; the newest count stands."""
        ...

    def counts(self, key: str) -> list[int]:
        """How far the ranks have come that noted it, without waiting for the others."""
        ...

    def agree(self, key: str, proposal: str) -> str:
        """The first proposal made under `key` by any rank; ours if we are first."""
        ...

    def peek(self, key: str) -> str | None:
        """What was agreed under `key`, or None."""
        ...

    def forget(self, key: str, *, agreed: bool = False) -> None:
        """Take back what this rank posted under `key`, or what was agreed under it, once nobody will read it any more."""
        ...


def find_ranks() -> Ranks:
    """This process's rank and the world's size. UsageError where a launcher started several ranks without a process group."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size())
    started = environment_world_size()
    if started > 1:
        raise UsageError(
            f"this job has {started} ranks, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Checkpointer(...), on every rank"
        )
    return Ranks()


class SoloBoard:
    """The board of a job of one process."""

    is_solo = True

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self._notes[key] = text

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        del ranks, timeout_s, doing  # the only rank posts before it reads
        return {0: self._notes[key]}

    def post_count(self, key: str, count: int) -> None:
        self._notes[key] = str(count)

    def counts(self, key: str) -> list[int]:
        return [int(self._notes[key])]

    def agree(self, key: str, proposal: str) -> str:
        return self._notes.setdefault(key, proposal)

    def peek(self, key: str) -> str | None:
        return self._notes.get(key)

    def forget(self, key: str, *, agreed: bool = False) -> None:
        del agreed
        self._notes.pop(key, None)


@dataclass(frozen=True, slots=True)
class StoreBoard:
    """The board on torch.distributed's Store, all keys below the epoch's nonce."""

    store: Store
    ranks: Ranks

    @property
    def is_solo(self) -> bool:
        return False

    def post(self, key: str, text: str) -> None:
        _translated(lambda: self.store.set(f"{key}/{self.ranks.rank}", text))

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        wanted = list(range(self.ranks.world_size)) if ranks is None else ranks
        names = [f"{key}/{rank}" for rank in wanted]
        until, delay = time.monotonic() + timeout_s, _POLL_MIN_S
        never = threading.Event()
        while not _translated(lambda: self.store.check(names)):
            if time.monotonic() >= until:
                missing = [r for r, n in zip(wanted, names, strict=True) if not _translated(partial(self.store.check, [n]))]
                raise DeadlineError(
                    f"ranks {missing} did not answer within {timeout_s:g} s: every rank must be {doing}; "
                    "look at their logs, and start the job again if they are gone",
                    ranks=tuple(missing),
                )
            never.wait(delay)
            delay = min(delay * 1.5, _POLL_MAX_S)
        found = _translated(lambda: self.store.multi_get(names))
        return {rank: bytes(text).decode() for rank, text in zip(wanted, found, strict=True)}

    def post_count(self, key: str, count: int) -> None:
        self.post(key, str(count))

    def counts(self, key: str) -> list[int]:
        names = [f"{key}/{rank}" for rank in range(self.ranks.world_size)]
        noted = [name for name in names if _translated(partial(self.store.check, [name]))]
        return [int(_translated(partial(self.store.get, name))) for name in noted]

    def agree(self, key: str, proposal: str) -> str:
        return str(_translated(lambda: self.store.compare_set(key, "", proposal)).decode())

    def peek(self, key: str) -> str | None:
        if not _translated(lambda: self.store.check([key])):
            return None
        return str(_translated(lambda: self.store.get(key)).decode())

    def forget(self, key: str, *, agreed: bool = False) -> None:
        _translated(lambda: self.store.delete_key(key if agreed else f"{key}/{self.ranks.rank}"))


def open_board(ranks: Ranks, nonce: str) -> Board:
    """The board of the epoch with this nonce."""
    if ranks.world_size == 1:
        return SoloBoard()
    base = dist.distributed_c10d._get_default_store()
    # A client of its own: a wait of training on the shared one would hold ours, and the other way round.
    own = base
    if hasattr(base, "clone"):
        own = base.clone()
        own.set_timeout(timedelta(seconds=60))
    return StoreBoard(PrefixStore(f"checkpointd/{nonce}", own), ranks)


def broadcast_from_coordinator(ranks: Ranks, make: Callable[[], dict[str, object]]) -> dict[str, object]:
    """What `make` returns on rank 0, on every rank; an error there is raised everywhere. The one collective call."""
    if ranks.world_size == 1:
        return make()
    failure: BaseException | None = None
    message: dict[str, object] = {}
    if ranks.rank == 0:
        try:
            message = {"value": make()}
        except Exception as error:  # every rank must hear of it, whatever it is
            failure = error
            message = {"error": f"{type(error).__name__}: {error}"[: _MESSAGE_BYTES // 4]}
    heard = _broadcast(message)
    if failure is not None:
        raise failure
    if "error" in heard:
        raise CheckpointdError(f"rank 0 could not open the root: {heard['error']}")
    value = heard["value"]
    assert isinstance(value, dict)
    return value


def _broadcast(message: dict[str, object]) -> dict[str, object]:
    """JSON in a tensor of bytes: nothing is pickled."""
    device = torch.device("cpu") if _has_host_backend() else torch.device("cuda", torch.cuda.current_device())
    text = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
    buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, src=0)
    heard = json.loads(bytes(buffer.cpu().tolist()))
    assert isinstance(heard, dict)
    return heard


def _has_host_backend() -> bool:
    """Whether the default group can broadcast from host memory."""
    if not torch.cuda.is_available():
        return True
    # "undefined" is what get_backend() says where the group has a backend for each kind of device.
    return any(name in str(dist.get_backend_config()) for name in ("gloo", "mpi", "ucc"))


def _translated(call: Callable[[], T]) -> T:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        raise CheckpointdError(
            f"torch.distributed's store does not answer: {error}. Its host (the launcher, or rank 0) is gone or out of reach"
        ) from error
