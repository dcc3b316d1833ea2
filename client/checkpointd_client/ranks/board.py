"""The board: the ranks' messages on torch.distributed's Store during a start, and a broadcast before there is a start.

Calls of DeepSpeed's engines, before there is a Checkpointer, begin with the same broadcast (`convening.py`).

Invariants
  BOARD-1  Every key contains the start's nonce, or the token of one call: no rank ever reads a message of an earlier start.
  BOARD-2  Every wait has our own time-out, and its error names the missing ranks. checkpointd makes no collective call: such a
      call ends only at the process group's time-out, and names no rank.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import DeviceMesh, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]  # exported, but not in __all__

from checkpointd.arguments import shown
from checkpointd.config import Ranks, environment_world_size
from checkpointd.errors import ERRORS, CheckpointdError, DeadlineError, UsageError
from checkpointd.phrases import rank_runs
from checkpointd.waits import Waiting

T = TypeVar("T")
COORDINATOR = 0
ERROR_CHARS_MAX = 2048
_POLL_MIN_S, _POLL_MAX_S = 0.002, 0.1
_AT_WORK = "rank 0 has not answered; see its log"


class Board(Protocol):
    """A notice board for the ranks of one start. Each rank posts its own message under a key, or all agree on one message."""

    def post(self, key: str, text: str) -> None:
        """Post `text` as this rank's message under `key`. It replaces an older one."""
        ...

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        """Wait for the messages of `ranks` (None: all) under `key`. DeadlineError names the missing ranks, and says that they
        should be `doing` the same.
        """
        ...

    def posted(self, key: str) -> dict[int, str]:
        """The messages under `key` that ranks have posted so far."""
        ...

    def absent(self, key: str, ranks: list[int] | None = None) -> list[int]:
        """The ranks, out of `ranks` (None: all), that have not posted under `key`."""
        ...

    def agree(self, key: str, proposal: str) -> str:
        """The first proposal of any rank under `key`: `proposal` if there was none before."""
        ...

    def peek(self, key: str) -> str | None:
        """The message that was agreed under `key`; None if there is none yet."""
        ...

    def forget(self, key: str, *, agreed: bool = False) -> None:
        """Delete this rank's message under `key`, or with `agreed` the shared one, when no rank will read it any more."""
        ...


def group_ranks(group: ProcessGroup | None = None) -> Ranks | None:
    """This process's rank and the world size in `group`, by default the group of all ranks; None if there is no such group,
    whatever a launcher says.
    """
    if dist.is_available() and dist.is_initialized():
        return Ranks(rank=dist.get_rank(group), world_size=dist.get_world_size(group))
    return None


def check_group(group: object) -> None:
    """UsageError unless this process is one of a process group's ranks."""
    if isinstance(group, DeviceMesh):
        raise UsageError("process_group is a DeviceMesh: give the group of one of its dimensions, mesh.get_group(...)")
    if group == dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, ProcessGroup) and dist.get_rank(group) < 0):
        raise UsageError("this rank is not in process_group: make the Checkpointer on the ranks of that group only")
    if not isinstance(group, ProcessGroup):
        raise UsageError(f"process_group is {shown(group)}; it must be what torch.distributed.new_group() returns, or None")


def find_ranks(group: ProcessGroup | None = None) -> Ranks:
    """As `group_ranks`; the only rank, if there is no group. UsageError if a launcher started several ranks without one."""
    found = group_ranks(group)
    if found is not None:
        return found
    started = environment_world_size()
    if started > 1:
        raise UsageError(
            f"this job has {started} ranks, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Checkpointer(...), on every rank"
        )
    return Ranks()


class SoloBoard:
    """The board of a job of one process."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self._notes[key] = text

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        del ranks, timeout_s, doing  # the only rank posts before it reads
        return {0: self._notes[key]}

    def posted(self, key: str) -> dict[int, str]:
        return {0: self._notes[key]} if key in self._notes else {}

    def absent(self, key: str, ranks: list[int] | None = None) -> list[int]:
        del ranks
        return [] if key in self._notes else [0]

    def agree(self, key: str, proposal: str) -> str:
        return self._notes.setdefault(key, proposal)

    def peek(self, key: str) -> str | None:
        return self._notes.get(key)

    def forget(self, key: str, *, agreed: bool = False) -> None:
        del agreed
        self._notes.pop(key, None)


@dataclass(frozen=True, slots=True)
class StoreBoard:
    """The board on torch.distributed's Store. All keys lie below the start's nonce."""

    store: Store
    ranks: Ranks

    def post(self, key: str, text: str) -> None:
        _translated(lambda: self.store.set(f"{key}/{self.ranks.rank}", text))

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        wanted = list(range(self.ranks.world_size)) if ranks is None else ranks
        names = [f"{key}/{rank}" for rank in wanted]
        came = partial(_translated, lambda: self.store.check(names))
        if not poll(came, timeout_s, lambda: missing_words(self.absent(key, wanted), doing)):
            raise absent_error(self.absent(key, wanted), timeout_s, doing)
        found = _translated(lambda: self.store.multi_get(names))
        return {rank: bytes(text).decode() for rank, text in zip(wanted, found, strict=True)}

    def posted(self, key: str) -> dict[int, str]:
        return _posted(self.store, {f"{key}/{rank}": rank for rank in range(self.ranks.world_size)})

    def absent(self, key: str, ranks: list[int] | None = None) -> list[int]:
        came = self.posted(key)
        return [rank for rank in (range(self.ranks.world_size) if ranks is None else ranks) if rank not in came]

    def agree(self, key: str, proposal: str) -> str:
        return str(_translated(lambda: self.store.compare_set(key, "", proposal)).decode())

    def peek(self, key: str) -> str | None:
        if not _translated(lambda: self.store.check([key])):
            return None
        return str(_translated(lambda: self.store.get(key)).decode())

    def forget(self, key: str, *, agreed: bool = False) -> None:
        _translated(lambda: self.store.delete_key(key if agreed else f"{key}/{self.ranks.rank}"))


def open_board(ranks: Ranks, nonce: str) -> Board:
    """The board of the start with this nonce."""
    if ranks.world_size == 1:
        return SoloBoard()
    return StoreBoard(PrefixStore(f"checkpointd/{nonce}", own_store()), ranks)


def group_store(group: ProcessGroup) -> Store:
    """A part of the job's store for the ranks of `group`, whose numbers are ranks of other groups, too."""
    members = ",".join(map(str, dist.get_process_group_ranks(group)))
    return PrefixStore(f"checkpointd/group/{group.group_name}/{members}", own_store())


def own_store() -> Store:
    """A client of the job's store for checkpointd alone. On a shared client, a wait of training would block our calls, and the
    other way round.
    """
    base: Store = dist.distributed_c10d._get_default_store()
    if not hasattr(base, "clone"):
        return base
    own: Store = base.clone()
    own.set_timeout(timedelta(seconds=60))
    return own


def broadcast_from_coordinator(
    ranks: Ranks,
    make: Callable[[], dict[str, object]],
    *,
    doing: str,
    come_s: float,
    make_s: float,
    store: Store | None = None,
) -> dict[str, object]:
    """Rank 0 calls `make`; every rank gets its result, or raises its error. Use it while there is no board.

    Every rank must be `doing` the same. Rank 0 waits `come_s` seconds until all have come, and then calls `make`. The others
    then wait `make_s` seconds for the result. DeadlineError names the missing ranks. `store`: by default, the job's.
    """
    if ranks.world_size == 1:
        return make()
    call = _Broadcast(ranks, own_store() if store is None else store, doing, come_s, make_s)
    answer = call.lead(make) if ranks.rank == COORDINATOR else call.follow()
    if "missing" in answer:
        raise absent_error(cast(list[int], answer["missing"]), come_s, doing)
    if "error" in answer:
        code = str(answer["code"])
        raise ERRORS.get(code, CheckpointdError)(f"rank 0 could not open the root: {code}: {answer['error']}")
    return cast(dict[str, object], answer["value"])


class _Broadcast:
    """One call of `broadcast_from_coordinator` on one rank.

    Each rank shows a token of its call. Rank 0 takes the tokens of all ranks, and answers each token. So calls need no numbers,
    a rank that gave up can call again, and keys that an earlier call or start left in the store answer no rank.
    """

    def __init__(self, ranks: Ranks, store: Store, doing: str, come_s: float, make_s: float) -> None:
        self._ranks, self._store = ranks, PrefixStore("checkpointd/broadcast", store)
        self._doing, self._come_s, self._make_s = doing, come_s, make_s
        self._token = secrets.token_hex(16)

    def lead(self, make: Callable[[], dict[str, object]]) -> dict[str, object]:
        """On rank 0: wait for all, call `make`, and answer the ranks that came. Raises what `make` raises."""
        self._show()
        failure: BaseException | None = None
        answer: dict[str, object] = {}
        try:
            poll(self._everybody_came, self._come_s, self._missing_words)
            missing = self._missing()
            answer = {"missing": missing} if missing else {"value": make()}
        except BaseException as error:  # every rank must hear of any error
            failure = error
            answer = {"code": type(error).__name__, "error": str(error)[:ERROR_CHARS_MAX]}
        self._answer(answer)
        if failure is not None:
            raise failure
        return answer

    def follow(self) -> dict[str, object]:
        """On any other rank: wait for rank 0's answer."""
        self._show()
        try:
            if not poll(self._answered, self._come_s, self._missing_words):
                missing = self._missing()
                if missing:
                    return {"missing": missing}
                poll(self._answered, self._make_s, lambda: _AT_WORK)
            if not self._answered():
                raise DeadlineError(
                    f"rank 0 has not answered within {self._come_s + self._make_s:g} s: look at its log, and start the job "
                    "again if it is gone",
                    ranks=(COORDINATOR,),
                )
            key = _translated(lambda: self._store.get(self._to(self._token))).decode()
            heard = json.loads(_translated(lambda: self._store.get(key)))
            _translated(lambda: self._store.delete_key(self._to(self._token)))
        finally:
            self._take(self._ranks.rank, self._token)  # from here on, rank 0 must not answer this call
        assert isinstance(heard, dict)
        return heard

    def _show(self) -> None:
        _translated(lambda: self._store.set(self._at(self._ranks.rank), self._token))

    def _answer(self, answer: dict[str, object]) -> None:
        """Answer each token that a rank shows, even if the rank has called again meanwhile and shows a new one."""
        key = f"said/{self._token}"
        _translated(lambda: self._store.set(key, json.dumps(answer)))
        for rank, token in self._shown().items():
            while token and not self._take(rank, token):
                token = self._shown().get(rank, "")
            if token and rank != COORDINATOR:
                _translated(partial(self._store.set, self._to(token), key))

    def _everybody_came(self) -> bool:
        names = [self._at(rank) for rank in range(self._ranks.world_size)]
        return _translated(lambda: self._store.check(names)) and not self._missing()

    def _answered(self) -> bool:
        return bool(_translated(lambda: self._store.check([self._to(self._token)])))

    def _missing(self) -> list[int]:
        shown = self._shown()
        return [rank for rank in range(self._ranks.world_size) if not shown.get(rank)]

    def _missing_words(self) -> str:
        missing = self._missing()
        return missing_words(missing, self._doing) if missing else _AT_WORK

    def _shown(self) -> dict[int, str]:
        """The token that each rank shows; "" if it was taken."""
        return _posted(self._store, {self._at(rank): rank for rank in range(self._ranks.world_size)})

    def _take(self, rank: int, token: str) -> bool:
        """Take the token that `rank` shows, so that it counts once; False if the rank shows another token by now."""
        return bool(_translated(lambda: self._store.compare_set(self._at(rank), token, "")).decode() == "")

    @staticmethod
    def _at(rank: int) -> str:
        return f"here/{rank}"

    @staticmethod
    def _to(token: str) -> str:
        return f"to/{token}"


def pauses() -> Iterator[float]:
    """Seconds to pause between two looks at a board, longer and longer."""
    pause_s = _POLL_MIN_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)


def poll(done: Callable[[], bool], timeout_s: float, missing: Callable[[], str]) -> bool:
    """Ask `done` again and again until it returns True; False after `timeout_s`. `missing` says what the wait is for."""
    until, waiting = time.monotonic() + timeout_s, Waiting(missing)
    for pause_s in pauses():
        is_late = time.monotonic() >= until  # before the look: what came while this process stood still counts
        if done():
            return True
        if is_late:
            return False
        waiting.look()
        threading.Event().wait(pause_s)
    raise AssertionError("unreachable")


def _posted(store: Store, names: Mapping[str, T]) -> dict[T, str]:
    """The values under those of `names` that are in the store now, by the value of each name."""
    wanted = list(names)
    if not _translated(lambda: store.check(wanted)):
        wanted = [name for name in wanted if _translated(partial(store.check, [name]))]
    if not wanted:
        return {}
    found = _translated(lambda: store.multi_get(wanted))
    return {names[name]: bytes(text).decode() for name, text in zip(wanted, found, strict=True)}


def missing_words(missing: list[int], doing: str) -> str:
    """The line of the log while `missing` ranks are waited for."""
    return f"{rank_runs(missing)} {'has' if len(missing) == 1 else 'have'} not come yet: every rank must be {doing}"


def absent_error(missing: list[int], timeout_s: float, doing: str) -> DeadlineError:
    """The error for `missing` ranks, which did not come although every rank must be `doing` the same."""
    return DeadlineError(
        f"{rank_runs(missing)} did not answer within {timeout_s:g} s: every rank must be {doing}; "
        "look at their logs, and start the job again if they are gone",
        ranks=tuple(missing),
    )


def _translated(call: Callable[[], T]) -> T:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        raise CheckpointdError(
            f"torch.distributed's store does not answer: {error}. Its host (the launcher, or rank 0) is gone or out of reach"
        ) from error
