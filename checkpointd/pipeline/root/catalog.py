"""The catalog of a root: its attempts and checkpoints, from a listing and the outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

from checkpointd.commands import at_tag, command
from checkpointd.commit.facts import AttemptFacts, Order, State
from checkpointd.errors import DamagedError, LinkError, NotFoundError, UnreadableError
from checkpointd.layout.indexes import decode_index
from checkpointd.layout.keys import (
    DAMAGED,
    DELETED,
    LATEST,
    OUTCOME,
    PASSED_OVER,
    VERIFIED,
    AttemptId,
    attempt_prefix,
    check_tag,
    group_of,
    group_prefix,
    is_bulk,
    is_group,
    is_tag,
    object_key,
    object_rank,
    object_takeover,
    vote_name,
    vote_rank,
)
from checkpointd.layout.manifest import VOTE_BYTES_MAX, Index, Outcome, Vote, decode, digest
from checkpointd.phrases import listed
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Entry, Store

LATEST_BYTES_MAX = 4096
LISTINGS = 16
"""The number of directories of an attempt that are listed at once."""
_LOOKS = 3
"""How many times to look at an attempt whose outcome disappears between listing and reading, as when records are removed."""

ReadBackState: TypeAlias = Literal["no", "whole", "damaged"]


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt: its objects with their sizes in bytes, and its outcome.

    `damage` says what is wrong with the bytes of the outcome, `unreadable` why they cannot be read now.
    """

    tag: str
    attempt: AttemptId
    sizes: dict[str, int]
    outcome: Outcome | None
    damage: str | None = None
    unreadable: str | None = None

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    @property
    def state(self) -> State:
        if DELETED in self.sizes:
            return "deleted"
        if self.damage:
            return "damaged"
        if self.unreadable:
            return "unreadable"
        if self.outcome is None:
            return "in-doubt"
        return "committed" if self.outcome.outcome == "commit" else "aborted"

    @property
    def read_back(self) -> ReadBackState:
        """Whether it was read back since it was written, and the result."""
        return "damaged" if DAMAGED in self.sizes else "whole" if VERIFIED in self.sizes else "no"

    @property
    def passed_over(self) -> bool:
        """Whether a load found it damaged and passed over it."""
        return PASSED_OVER in self.sizes

    @property
    def order(self) -> Order | None:
        return self.outcome.order if self.outcome and self.state == "committed" else None

    @property
    def facts(self) -> AttemptFacts:
        bulk = any(map(is_bulk, self.sizes))
        order = self.outcome.order if self.outcome and self.state == "deleted" else self.order
        return AttemptFacts(self.tag, self.attempt, self.state, order, bulk, self._contested)

    @property
    def _contested(self) -> tuple[int, ...]:
        """The ranks for which more than one writer left objects."""
        takeovers: dict[int, set[int]] = {}
        for name in self.sizes:
            rank, takeover = object_rank(name), object_takeover(name)
            if rank is not None and takeover is not None:
                takeovers.setdefault(rank, set()).add(takeover)
        return tuple(sorted(rank for rank, found in takeovers.items() if len(found) > 1))

    @property
    def vote_ranks(self) -> list[int]:
        return sorted(rank for name in self.sizes if (rank := vote_rank(name)) is not None)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An attempt whose outcome is commit."""

    tag: str
    attempt: AttemptId
    outcome: Outcome
    read_back: ReadBackState = field(default="no", compare=False)

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)


async def tags(store: Store) -> list[str]:
    return [entry.name for entry in await store.list("") if entry.is_prefix and is_tag(entry.name)]


async def attempts_of(store: Store, tag: str, known: Mapping[str, AttemptView] = MappingProxyType({})) -> list[AttemptView]:
    """The attempts at `tag`, oldest first. A damaged or unreadable outcome is noted in the view and not raised. The `known`
    views, by prefix, are returned without a look at the store.
    """
    found = [
        attempt for entry in await store.list(check_tag(tag)) if entry.is_prefix and (attempt := AttemptId.parse(entry.name))
    ]
    return [known.get(attempt_prefix(tag, attempt)) or await view(store, tag, attempt) for attempt in sorted(found)]


async def objects_of(store: Store, prefix: str) -> list[Entry]:
    """The objects of the attempt `prefix` (`<tag>/<attempt>`), of all groups of ranks, sorted by name."""
    top = await store.list(prefix)
    groups = [int(entry.name) for entry in top if entry.is_prefix and is_group(entry.name)]
    return sorted([*_of_group(top, 0), *await objects_of_groups(store, prefix, groups)], key=lambda entry: entry.name)


async def objects_of_groups(store: Store, prefix: str, groups: Iterable[int]) -> list[Entry]:
    """The objects of these groups of ranks in the attempt `prefix`; group 0 has the records of the whole attempt, too."""
    found: list[Entry] = []

    async def look(group: int) -> None:
        found.extend(_of_group(await store.list(group_prefix(prefix, group)), group))

    await run_workers([partial(look, group) for group in groups], LISTINGS)
    return found


def _of_group(entries: Iterable[Entry], group: int) -> list[Entry]:
    return [entry for entry in entries if not entry.is_prefix and group_of(entry.name) == group]


async def view(store: Store, tag: str, attempt: AttemptId) -> AttemptView:
    """One attempt as the store shows it now."""
    prefix, why = attempt_prefix(tag, attempt), ""
    sizes: dict[str, int] = {}
    for _ in range(_LOOKS):
        sizes = {entry.name: entry.size for entry in await objects_of(store, prefix)}
        if OUTCOME not in sizes:
            return AttemptView(tag, attempt, sizes, None)
        # An unreadable sector under one outcome must not hide all other checkpoints.
        try:
            return AttemptView(tag, attempt, sizes, await read_outcome(store, tag, attempt))
        except DamagedError as error:
            return AttemptView(tag, attempt, sizes, None, damage=str(error))
        except UnreadableError as error:
            return AttemptView(tag, attempt, sizes, None, unreadable=str(error))
        except NotFoundError as error:
            why = f"{error}, although it is listed"
    return AttemptView(tag, attempt, sizes, None, unreadable=why)


async def read_outcome(store: Store, tag: str, attempt: AttemptId) -> Outcome:
    """The outcome of this attempt. Raises NotFoundError if there is none, DamagedError if it belongs to another attempt."""
    key = f"{attempt_prefix(tag, attempt)}/{OUTCOME}"
    outcome = decode(await store.get(key), Outcome, key)
    if (outcome.tag, outcome.attempt) != (tag, str(attempt)):
        raise DamagedError(f"{key} belongs to {outcome.tag}/{outcome.attempt}; somebody moved it", key=key)
    return outcome


async def read_vote(store: Store, key: str) -> Vote:
    """The vote at `key`, of an attempt that is not committed. A commit counts the votes in its ballot (`ballots.py`)."""
    return decode(await store.get(key, size_max=VOTE_BYTES_MAX), Vote, key)


async def index_named_by(store: Store, prefix: str, vote: Vote) -> Index:
    """The index that `vote` names. Raises DamagedError if its bytes, rank, attempt or step are not those of the vote."""
    ref = vote.index
    if ref is None:
        raise DamagedError(f"{prefix}/{vote_name(vote.rank)} names no index")
    key = object_key(prefix, ref.name)
    data = await store.get(key, size_max=ref.size)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise DamagedError(f"{key} is damaged: its bytes are not those that its vote names", key=key)
    index = decode_index(data, key)
    if (index.tag, index.attempt, index.rank, index.step) != (vote.tag, vote.attempt, vote.rank, vote.step):
        raise DamagedError(f"{key} belongs to rank {index.rank} of {index.tag}/{index.attempt}, step {index.step}", key=key)
    return index


async def scan(store: Store, known: Mapping[str, AttemptView] = MappingProxyType({})) -> list[AttemptView]:
    """Every attempt at the root; `known` as in `attempts_of`."""
    return [attempt for tag in await tags(store) for attempt in await attempts_of(store, tag, known)]


def commits_of(attempts: Iterable[AttemptView]) -> list[Checkpoint]:
    """All committed attempts among `attempts`, newest first. A tag that was saved again may have several."""
    found = [
        Checkpoint(a.tag, a.attempt, a.outcome, a.read_back)
        for a in attempts
        if a.state == "committed" and a.outcome is not None
    ]
    return sorted(found, key=lambda c: c.outcome.order, reverse=True)


def checkpoints_of(attempts: Iterable[AttemptView]) -> list[Checkpoint]:
    """The checkpoints among `attempts`, newest first: the newest commit of each tag."""
    newest: dict[str, Checkpoint] = {}
    for commit in commits_of(attempts):
        newest.setdefault(commit.tag, commit)
    return list(newest.values())


async def checkpoints(store: Store) -> list[Checkpoint]:
    """All checkpoints, newest first."""
    return checkpoints_of(await scan(store))


async def find(store: Store, tag: str) -> Checkpoint:
    """The checkpoint of `tag`. Raises NotFoundError, which says what is there instead, if there is none; DamagedError or
    UnreadableError if the outcome of a later attempt is damaged, or cannot be read now.
    """
    attempts = await attempts_of(store, tag)
    found = checkpoints_of(attempts)
    later = [a for a in attempts if not found or a.attempt > found[0].attempt]
    fault = next(filter(None, map(fault_of, reversed(later))), None)
    if fault is not None:
        raise fault
    if found:
        return found[0]
    if attempts:
        states = ", ".join(f"{a.attempt} is {a.state}" for a in attempts)
        raise NotFoundError(f"{tag} is not a checkpoint: {states}; {command('explain', *at_tag(store.url, tag))} says why")
    known = [c.tag for c in await checkpoints(store)]
    raise NotFoundError(f"there is no tag {tag!r} at {store.url}; checkpoints are: {listed(known) or 'none'}")


def fault_of(attempt: AttemptView) -> DamagedError | UnreadableError | None:
    """The error that keeps the outcome of `attempt` from being known; None if it is known, or if there is none."""
    if attempt.state == "damaged":
        key = f"{attempt.prefix}/{OUTCOME}"
        return DamagedError(f"the outcome of {attempt.prefix} is damaged: {attempt.damage}", key=key)
    if attempt.state == "unreadable":
        return UnreadableError(f"the outcome of {attempt.prefix} cannot be read now: {attempt.unreadable}")
    return None


async def latest(store: Store) -> str | None:
    """The tag that `latest` names; None if there is no `latest`, or if another program wrote it.

    Raises DamagedError if it holds no tag, or is a symbolic link, which is never followed.
    """
    try:
        content = await _pointer(store)
        if content is None:
            return None
        text = content.decode()
    except LinkError as error:
        raise DamagedError(f"the pointer {LATEST} names nothing: {error}", key=LATEST) from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds no text: {error}", key=LATEST) from error
    tag = text.removesuffix("\n")
    if not is_tag(tag):
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds {tag!r}, which is not a tag", key=LATEST)
    return None if await is_of_another_program(store, text) else tag


async def readable_latest(store: Store) -> str | None:
    """The same, but None for a damaged `latest`, which the next start sets right."""
    try:
        return await latest(store)
    except DamagedError:
        return None


async def _pointer(store: Store) -> bytes | None:
    """The content of `latest`; None if it is missing. The first commit may make it between reading and listing."""
    try:
        return await store.get(LATEST, size_max=LATEST_BYTES_MAX)
    except NotFoundError:
        if not any(entry.name == LATEST and not entry.is_prefix for entry in await store.list("")):
            return None
    try:
        return await store.get(LATEST, size_max=LATEST_BYTES_MAX)
    except NotFoundError as error:
        raise UnreadableError(f"{error}, although it is listed: does the file server lag behind?") from error


async def is_of_another_program(store: Store, pointer: str) -> bool:
    """Whether another program, such as DeepSpeed, wrote `pointer`, the content of `latest`: it does not end in a newline, and
    the directory that it names holds files. The directory of a tag of checkpointd holds only the directories of attempts.
    """
    if not is_tag(pointer):  # a pointer of checkpointd ends in a newline, so it is not a tag
        return False
    return any(not entry.is_prefix and not entry.name.startswith(".") for entry in await store.list(pointer))
