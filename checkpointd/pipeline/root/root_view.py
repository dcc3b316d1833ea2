"""What is at a root: its attempts and checkpoints, as its log has them, and the objects in their directories.

The log alone decides. A listing shows only which objects of an attempt are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, TypeAlias

from checkpointd.commands import at_tag, command
from checkpointd.commit.facts import Order, State
from checkpointd.errors import DamagedError, LinkError, NotFoundError, UnreadableError
from checkpointd.layout.indexes import Index, decode_index
from checkpointd.layout.keys import (
    LATEST,
    AttemptId,
    attempt_prefix,
    check_tag,
    group_of,
    group_prefix,
    holds_bytes,
    index_rank,
    is_group,
    is_tag,
    object_key,
    vote_name,
    vote_rank,
)
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState
from checkpointd.layout.manifest import VOTE_BYTES_MAX, IndexRef, Vote, decode, digest
from checkpointd.phrases import listed
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.workers import run_workers, uncollected
from checkpointd.store.base import Entry, Store, each

LATEST_BYTES_MAX = 4096
LISTINGS = 16
"""The number of directories of an attempt that are listed at once."""
_UNSEEN: Mapping[str, int] = MappingProxyType({})
_STATES: Mapping[str, State] = {
    "undecided": "in-doubt",
    "checkpoint": "committed",
    "aborted": "aborted",
    "removed": "deleted",
}

ReadBackState: TypeAlias = Literal["no", "whole", "damaged"]


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt as the log has it, with the sizes in bytes of its objects, by name, if somebody looked at them."""

    logged: LoggedAttempt
    sizes: Mapping[str, int] = field(default_factory=lambda: _UNSEEN)
    is_looked: bool = False
    """Whether `sizes` are known."""

    @property
    def tag(self) -> str:
        return self.logged.tag

    @property
    def attempt(self) -> AttemptId:
        return self.logged.id

    @property
    def prefix(self) -> str:
        return self.logged.attempt

    @property
    def order(self) -> Order:
        """The place of its commit, if it commits."""
        return self.logged.order

    @property
    def commit(self) -> CommitRecord | None:
        """Of a checkpoint, also of one that was removed."""
        return self.logged.commit

    @property
    def state(self) -> State:
        return _STATES[self.logged.status]

    @property
    def has_shards(self) -> bool:
        """Whether it has chunks, files or an index of any rank, if somebody looked at the objects."""
        return any(holds_bytes(name) or index_rank(name) is not None for name in self.sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of its objects; of its own chunks alone, if nobody looked at the objects."""
        if self.is_looked or self.commit is None or self.commit.cost is None:
            return sum(self.sizes.values())
        return self.commit.cost.written_bytes

    @property
    def read_back(self) -> ReadBackState:
        """Whether it was read back since it was written, and the result."""
        return "damaged" if self.logged.damaged else "whole" if self.logged.verified else "no"

    @property
    def passed_over(self) -> bool:
        """Whether a load found it damaged and passed over it."""
        return bool(self.logged.passed_over)

    @property
    def left_behind(self) -> bool:
        """Whether training went on from an older checkpoint, so that this one is of a branch that was left."""
        return self.logged.left_behind

    @property
    def is_left_checkpoint(self) -> bool:
        """Whether it is a checkpoint of a branch that was left. The current branch may have saved the same tag again."""
        return self.left_behind and self.state == "committed"

    @property
    def vote_ranks(self) -> list[int]:
        return sorted(rank for name in self.sizes if (rank := vote_rank(name)) is not None)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An attempt that has committed."""

    tag: str
    attempt: AttemptId
    commit: CommitRecord
    read_back: ReadBackState = field(default="no", compare=False)
    left_behind: bool = field(default=False, compare=False)
    """Whether it is of a branch that was left."""

    @property
    def may_be_latest(self) -> bool:
        """Whether `latest` may move to it."""
        return self.commit.save_latest and not self.left_behind

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)


# --- the log --------------------------------------------------------------------------------------------------------


async def state_of(store: Store) -> LogState:
    """The state at the end of the root's log, or as far as it can be proved: then an error is logged."""
    return await RootLog.of(store).look()


async def logged(store: Store, tag: str, attempt: AttemptId) -> LoggedAttempt | None:
    """The attempt as the log has it now; None if the log does not know it."""
    return (await state_of(store)).attempts.get(attempt_prefix(tag, attempt))


def views_of(state: LogState) -> list[AttemptView]:
    """The attempts in `state`, in the order of their announcements. Nobody looks at their objects."""
    return uncollected(lambda: list(map(AttemptView, state.attempts.values())))


async def scan(store: Store, objects: Store | None = None) -> list[AttemptView]:
    """The attempts at the root. The objects of those that are undecided are looked at, through `objects` if that is given."""
    views = views_of(await state_of(store))
    places = [place for place, view in enumerate(views) if view.state == "in-doubt"]
    looked = await each(partial(with_objects, objects or store), [views[place] for place in places])
    for place, view in zip(places, looked, strict=True):
        views[place] = view
    return views


async def attempts_of(store: Store, tag: str, objects: Store | None = None) -> list[AttemptView]:
    """The attempts of `tag`, oldest first, with their objects, which are listed through `objects` if that is given."""
    found = [view for view in views_of(await state_of(store)) if view.tag == tag]
    return sorted(await each(partial(with_objects, objects or store), found), key=attrgetter("attempt"))


async def view(store: Store, tag: str, attempt: AttemptId) -> AttemptView | None:
    """One attempt with its objects; None if the log does not know it."""
    found = await logged(store, tag, attempt)
    return None if found is None else await with_objects(store, AttemptView(found))


async def with_objects(store: Store, attempt: AttemptView) -> AttemptView:
    """`attempt` with the objects that are there now."""
    sizes = {entry.name: entry.size for entry in await objects_of(store, attempt.prefix)}
    return replace(attempt, sizes=sizes, is_looked=True)


def commits_of(attempts: Iterable[AttemptView]) -> list[Checkpoint]:
    """All checkpoints among `attempts`, newest first, and those of branches that were left after all others. A tag that was
    saved again may have several.
    """
    found = [one for one in attempts if one.state == "committed"]
    found.sort(key=lambda one: (not one.left_behind, one.order), reverse=True)
    return uncollected(lambda: [checkpoint_of(one.logged) for one in found])


def checkpoint_of(attempt: LoggedAttempt) -> Checkpoint:
    """`attempt`, which has committed, as a checkpoint."""
    assert attempt.commit is not None
    read_back: ReadBackState = "damaged" if attempt.damaged else "whole" if attempt.verified else "no"
    return Checkpoint(attempt.tag, attempt.id, attempt.commit, read_back, attempt.left_behind)


def checkpoints_of(attempts: Iterable[AttemptView]) -> list[Checkpoint]:
    """The checkpoints among `attempts`, newest first: the newest commit of each tag."""
    return newest_of_tags(commits_of(attempts))


def newest_of_tags(newest_first: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The first checkpoint of each tag."""
    newest: dict[str, Checkpoint] = {}
    for commit in newest_first:
        newest.setdefault(commit.tag, commit)
    return list(newest.values())


async def checkpoints(store: Store) -> list[Checkpoint]:
    """All checkpoints, newest first."""
    return checkpoints_of(views_of(await state_of(store)))


async def find(store: Store, tag: str) -> Checkpoint:
    """The checkpoint of `tag`. Raises NotFoundError, which says what is there instead, if there is none."""
    views = views_of(await state_of(store))
    own = [view for view in views if view.tag == check_tag(tag)]
    found = checkpoints_of(own)
    if found:
        return found[0]
    if own:
        states = ", ".join(f"{a.attempt} is {a.state}" for a in own)
        raise NotFoundError(f"{tag} is not a checkpoint: {states}; {command('explain', *at_tag(store.url, tag))} says why")
    known = [c.tag for c in checkpoints_of(views)]
    raise NotFoundError(f"there is no tag {tag!r} at {store.url}; checkpoints are: {listed(known) or 'none'}")


# --- objects ----------------------------------------------------------------------------------------------------------


async def tags(store: Store) -> list[str]:
    """The directories at the root that can be those of tags."""
    return [entry.name for entry in await store.list("") if entry.is_prefix and is_tag(entry.name)]


async def is_log_gone(store: Store, state: LogState) -> bool:
    """Whether the root has no log, of which the `state` is, although directories of attempts are there (LOG-8)."""
    return state.number == 0 and bool(await directories(store))


async def directories(store: Store) -> list[tuple[str, AttemptId]]:
    """The directories of attempts at the root, whether the log knows them or not."""
    at = await tags(store)
    found = await each(store.list, at)
    return [
        (tag, attempt)
        for tag, entries in zip(at, found, strict=True)
        for entry in entries
        if entry.is_prefix and (attempt := AttemptId.parse(entry.name)) is not None
    ]


async def objects_of(store: Store, prefix: str) -> list[Entry]:
    """The objects of the attempt `prefix` (`<tag>/<attempt>`), of all groups of ranks, sorted by name."""
    top = await store.list(prefix)
    groups = [int(entry.name) for entry in top if entry.is_prefix and is_group(entry.name)]
    return sorted([*_of_group(top, 0), *await objects_of_groups(store, prefix, groups)], key=lambda entry: entry.name)


async def objects_of_groups(store: Store, prefix: str, groups: Iterable[int]) -> list[Entry]:
    """The objects of these groups of ranks in the attempt `prefix`; group 0 has the objects of the whole attempt, too."""
    found: list[Entry] = []

    async def look(group: int) -> None:
        found.extend(_of_group(await store.list(group_prefix(prefix, group)), group))

    await run_workers([partial(look, group) for group in groups], LISTINGS)
    return found


def _of_group(entries: Iterable[Entry], group: int) -> list[Entry]:
    return [entry for entry in entries if not entry.is_prefix and group_of(entry.name) == group]


async def read_vote(store: Store, key: str) -> Vote:
    """The vote at `key`, of an attempt that is not committed. A commit counts the votes in its ballot (`ballots.py`)."""
    return decode(await store.get(key, size_max=VOTE_BYTES_MAX), Vote, key)


async def index_named_by(store: Store, prefix: str, vote: Vote) -> Index:
    """The index that `vote` names. Raises DamagedError if its bytes, rank, attempt or step are not those of the vote."""
    ref = vote.index
    if ref is None:
        raise DamagedError(f"{prefix}/{vote_name(vote.rank)} names no index")
    key = object_key(prefix, ref.name)
    return index_in(await store.get(key, size_max=ref.size), prefix, vote, ref)


def index_in(data: bytes, prefix: str, vote: Vote, ref: IndexRef) -> Index:
    """The index with the bytes `data`, which `vote` names as `ref`. Raises DamagedError as `index_named_by`."""
    key = object_key(prefix, ref.name)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise DamagedError(f"{key} is damaged: its bytes are not those that its vote names", key=key)
    index = uncollected(lambda: decode_index(data, key))
    if (index.tag, index.attempt, index.rank, index.step) != (vote.tag, vote.attempt, vote.rank, vote.step):
        raise DamagedError(f"{key} belongs to rank {index.rank} of {index.tag}/{index.attempt}, step {index.step}", key=key)
    return index


# --- latest, which others read ------------------------------------------------------------------------------------------


async def latest(store: Store) -> str | None:
    """The tag that `latest` names; None if there is no `latest`, or if another program wrote it.

    Raises DamagedError if it holds no tag, or is a symbolic link, which is never followed.
    """
    try:
        content = await pointer(store)
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


async def pointer(store: Store) -> bytes | None:
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


async def is_of_another_program(store: Store, text: str) -> bool:
    """Whether another program, such as DeepSpeed, wrote `text`, the content of `latest`: it does not end in a newline, as
    those of checkpointd do, and the directory that it names holds files; that of a tag of checkpointd holds only directories.
    """
    return is_tag(text) and any(not one.is_prefix and not one.name.startswith(".") for one in await store.list(text))
