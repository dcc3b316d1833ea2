"""The catalog of a root: its attempts and checkpoints, as the catalog's log and the attempts' own objects tell them.

The log (`catalog_log.py`) names the attempts. A look reads the objects of the attempts that may still change, and of the newest
ones; it believes the log about the others (CATALOG-5).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, TypeAlias

from checkpointd.commands import at_tag, command
from checkpointd.commit.facts import AttemptFacts, Order, State
from checkpointd.errors import DamagedError, LinkError, NotFoundError, UnreadableError
from checkpointd.layout.catalog_records import CatalogEntry
from checkpointd.layout.indexes import Index, decode_index
from checkpointd.layout.keys import (
    BALLOT,
    DAMAGED,
    DELETED,
    JOINT_PLAN,
    LATEST,
    LEFT_BEHIND,
    OUTCOME,
    PASSED_OVER,
    VERIFIED,
    AttemptId,
    attempt_prefix,
    check_tag,
    group_of,
    group_prefix,
    holds_bytes,
    index_rank,
    is_bulk,
    is_group,
    is_tag,
    object_key,
    object_rank,
    object_takeover,
    vote_name,
    vote_rank,
)
from checkpointd.layout.manifest import VOTE_BYTES_MAX, IndexRef, Outcome, Vote, decode, digest
from checkpointd.phrases import listed
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.workers import run_workers, uncollected
from checkpointd.store.base import Entry, Store, each

logger = logging.getLogger("checkpointd")

LATEST_BYTES_MAX = 4096
LISTINGS = 16
"""The number of directories of an attempt that are listed at once."""
_RECORDS = (DELETED, VERIFIED, DAMAGED, PASSED_OVER, LEFT_BEHIND)
_LOOKS = 3
"""How many times to look at an attempt whose outcome disappears between listing and reading, as when records are removed."""

NEWEST_LOOKED = 20
"""A look at a root reads the objects of this many of the newest attempts, in case they have changed since the last record."""
RANKS_LOOKED = 256
"""It looks at fewer attempts, but at one, if these have more ranks in all."""

_UNSEEN: Mapping[str, int] = MappingProxyType({})

ReadBackState: TypeAlias = Literal["no", "whole", "damaged"]


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt: its objects with their sizes in bytes, and its outcome.

    `damage` says what is wrong with the bytes of the outcome, `unreadable` why they cannot be read now. `entry`: what the log
    says, if nobody looked at the objects; then `sizes` is empty. `is_void`: the commit was put after the attempt had been
    aborted and forgotten (COMMIT-5), so nothing is there that a commit needs.
    """

    tag: str
    attempt: AttemptId
    sizes: Mapping[str, int]
    outcome: Outcome | None
    damage: str | None = None
    unreadable: UnreadableError | None = None
    entry: CatalogEntry | None = None
    is_void: bool = False
    is_copy: bool = False
    """Whether its outcome names another tag or attempt: somebody copied or renamed a directory. `damage` says which."""

    @property
    def has_objects(self) -> bool:
        """Whether it has any objects, or had when they were recorded."""
        return bool(self.sizes) or self.entry is not None

    @property
    def has_shards(self) -> bool:
        """Whether it has chunks, files or an index of any rank, if somebody looked at the objects."""
        return any(holds_bytes(name) or index_rank(name) is not None for name in self.sizes)

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    @property
    def nbytes(self) -> int:
        """The bytes of its objects; of its own chunks alone, if nobody looked at the objects."""
        if self.entry is None or self.outcome is None or self.outcome.cost is None:
            return sum(self.sizes.values())
        return self.outcome.cost.written_bytes

    @property
    def state(self) -> State:
        if DELETED in self.sizes:
            return "deleted"
        if self.entry is not None and self.entry.removed and (self.outcome is None or self.outcome.outcome == "commit"):
            return "deleted"  # what was a checkpoint has a mark, and what was aborted stays so
        if self.damage:
            return "damaged"
        if self.unreadable:
            return "unreadable"
        if self.outcome is None:
            return "in-doubt"
        return "committed" if self.outcome.outcome == "commit" and not self.is_void else "aborted"

    @property
    def read_back(self) -> ReadBackState:
        """Whether it was read back since it was written, and the result."""
        if self.entry is not None:
            return "damaged" if self.entry.damaged else "whole" if self.entry.verified else "no"
        return "damaged" if DAMAGED in self.sizes else "whole" if VERIFIED in self.sizes else "no"

    @property
    def is_verified(self) -> bool:
        """Whether a record says that it was read back whole, even if another record says that it is damaged."""
        return VERIFIED in self.sizes or (self.entry is not None and self.entry.verified)

    @property
    def passed_over(self) -> bool:
        """Whether a load found it damaged and passed over it."""
        return PASSED_OVER in self.sizes or (self.entry is not None and self.entry.passed_over)

    @property
    def left_behind(self) -> bool:
        """Whether training went on from an older checkpoint, so that this one is of a branch that was left."""
        return LEFT_BEHIND in self.sizes or (self.entry is not None and self.entry.left_behind)

    @property
    def is_left_checkpoint(self) -> bool:
        """Whether it is a checkpoint of a branch that was left. The current branch may have saved the same tag again."""
        return self.left_behind and self.state == "committed"

    @property
    def order(self) -> Order | None:
        return self.outcome.order if self.outcome and self.state == "committed" else None

    @property
    def facts(self) -> AttemptFacts:
        if self.entry is None:
            return self._facts()
        known: dict[str, AttemptFacts] = self.entry.__dict__  # made once for each entry: there are thousands
        if "facts" not in known:
            known["facts"] = self._facts()
        return known["facts"]

    def _facts(self) -> AttemptFacts:
        bulk = any(map(is_bulk, self.sizes)) or (self.entry is not None and _has_bulk(self.entry))
        order = None if self.outcome is None else self.outcome.order
        kept = () if self.entry is None else tuple(object_key(self.prefix, name) for name in self.entry.kept)
        holders = self.outcome.holders if self.outcome is not None else ()
        return AttemptFacts(self.tag, self.attempt, self.state, order, bulk, self._contested, kept, holders)

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
    left_behind: bool = field(default=False, compare=False)
    """Whether it is of a branch that was left."""

    @property
    def may_be_latest(self) -> bool:
        """Whether `latest` may move to it."""
        return self.outcome.save_latest and not self.left_behind

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)


async def tags(store: Store, known: Collection[str] = ()) -> list[str]:
    """The tags at the root. `known`: names of which it is known that they can be tags."""
    entries = await store.list("")
    return [entry.name for entry in entries if entry.is_prefix and (entry.name in known or is_tag(entry.name))]


async def attempts_of(store: Store, tag: str) -> list[AttemptView]:
    """The attempts at `tag`, oldest first. A damaged or unreadable outcome is noted in the view and not raised."""
    return await _attempts_at(store, [tag])


async def _attempts_at(store: Store, at: Sequence[str]) -> list[AttemptView]:
    """The attempts at these tags, in their order, and oldest first at each."""
    return await each(lambda one: view(store, *one), await _named_at(store, at))


async def _named_at(store: Store, at: Sequence[str]) -> list[tuple[str, AttemptId]]:
    """The same, but only the attempts' names."""
    names = await each(partial(_names, store), at)
    return [(tag, attempt) for tag, attempts in zip(at, names, strict=True) for attempt in attempts]


async def _names(store: Store, tag: str) -> list[AttemptId]:
    entries = await store.list(check_tag(tag))
    return sorted(found for entry in entries if entry.is_prefix and (found := AttemptId.parse(entry.name)))


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
    prefix = attempt_prefix(tag, attempt)
    seen = AttemptView(tag, attempt, {}, None)
    for _ in range(_LOOKS):
        sizes = {entry.name: entry.size for entry in await objects_of(store, prefix)}
        if OUTCOME not in sizes:
            return replace(seen, sizes=sizes, unreadable=None)
        seen = replace(await _decided(store, tag, attempt), sizes=sizes)
        if seen.state != "in-doubt":
            is_commit = seen.outcome is not None and seen.outcome.outcome == "commit"
            return replace(seen, is_void=is_commit and sizes.keys() <= {OUTCOME, BALLOT, JOINT_PLAN})
        seen = replace(seen, unreadable=UnreadableError(f"{prefix}/{OUTCOME} is listed and is not there"))
    return seen


async def view_of_records(store: Store, tag: str, attempt: AttemptId) -> AttemptView:
    """The same by a few looks at the records of a commit, however many objects its ranks have; `sizes` has these records alone.

    Lists the objects of any other attempt: only a listing tells a missing outcome from one that a file server does not show.
    """
    prefix = attempt_prefix(tag, attempt)
    seen = await _decided(store, tag, attempt)
    if seen.outcome is None or seen.outcome.outcome != "commit":
        return await view(store, tag, attempt)
    # Without the first vote, there may be nothing beside the outcome (COMMIT-5). The outcome comes last here: as the marks of a
    # removed attempt go last (MARK-5), none was there if the outcome still is.
    first_vote = await store.stat(f"{prefix}/{vote_name(0)}")
    found = {name: await store.stat(f"{prefix}/{name}") for name in (*_RECORDS, OUTCOME)}
    if first_vote is None or found[OUTCOME] is None:
        return await view(store, tag, attempt)
    return replace(seen, sizes={name: size for name, size in found.items() if size is not None})


async def _decided(store: Store, tag: str, attempt: AttemptId) -> AttemptView:
    """The attempt with its outcome, or with what is wrong with it: an unreadable one must not hide all other checkpoints."""
    seen = AttemptView(tag, attempt, {}, None)
    try:
        outcome = await _stored_outcome(store, tag, attempt)
        if outcome.prefix != seen.prefix:
            return replace(seen, damage=await _copy_text(store, seen, outcome), is_copy=True)
        return replace(seen, outcome=outcome)
    except NotFoundError:
        return seen
    except DamagedError as error:
        return replace(seen, damage=str(error))
    except UnreadableError as error:
        return replace(seen, unreadable=error)


async def read_outcome(store: Store, tag: str, attempt: AttemptId) -> Outcome:
    """The outcome of this attempt. Raises NotFoundError if there is none, DamagedError if it belongs to another attempt."""
    outcome = await _stored_outcome(store, tag, attempt)
    if (outcome.tag, outcome.attempt) != (tag, str(attempt)):
        key = f"{attempt_prefix(tag, attempt)}/{OUTCOME}"
        raise DamagedError(f"{key} belongs to {outcome.tag}/{outcome.attempt}; somebody moved it", key=key)
    return outcome


async def _stored_outcome(store: Store, tag: str, attempt: AttemptId) -> Outcome:
    key = f"{attempt_prefix(tag, attempt)}/{OUTCOME}"
    return decode(await store.get(key), Outcome, key)


async def _copy_text(store: Store, seen: AttemptView, outcome: Outcome) -> str:
    """What somebody has done by hand to the directory of an attempt whose `outcome` names another one."""
    if not is_tag(outcome.tag) or AttemptId.parse(outcome.attempt) is None:
        raise DamagedError(f"{seen.prefix}/{OUTCOME} belongs to {outcome.prefix!r}, which is no attempt; somebody moved it")
    own, other = (seen.tag, outcome.tag) if seen.tag != outcome.tag else (seen.prefix, outcome.prefix)
    if await store.stat(f"{outcome.prefix}/{OUTCOME}") is None:
        return f"{own} at {store.url} is {other} under another name, so it cannot be loaded: rename it back to {other}"
    export = command("consolidate", *at_tag(store.url, outcome.tag), "OUT")
    return (
        f"{own} at {store.url} is a copy of the directory of {other}, and cannot be loaded: a tag's directory may need objects "
        f"of other tags. {other} itself is as it was. To keep it elsewhere, copy the whole root, or export it ({export}); then "
        f"remove the directory {own}"
    )


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


async def look_everywhere(store: Store) -> list[AttemptView]:
    """Every attempt at the root, from its own objects. This takes time for each attempt that the root has ever had."""
    return await _attempts_at(store, await tags(store))


async def scan(
    store: Store,
    known: CatalogLog | None = None,
    *,
    newest: int | None = None,
    wanted: Callable[[CatalogEntry], bool] | None = None,
) -> list[AttemptView]:
    """Every attempt at the root. `known`: the catalog's log as this process has read it already.

    Looks at the objects of tags that the log does not know or that have an undecided attempt, and of the `newest` attempts, by
    default NEWEST_LOOKED. If the log cannot be used, it looks everywhere (CATALOG-6). `wanted`: of the attempts that only the
    log tells of, those for which this is true are enough.
    """
    log = CatalogLog(store) if known is None else known
    # First the log: an attempt that is announced after this look at it may have a directory already, but not the other way.
    await log.refresh()
    if not log.fault:
        try:
            return await _scanned(store, log, NEWEST_LOOKED if newest is None else newest, wanted)
        except DamagedError as error:
            logger.error("%s; all directories are read", error)
    return await look_everywhere(store)


async def _scanned(
    store: Store, log: CatalogLog, newest: int, wanted: Callable[[CatalogEntry], bool] | None
) -> list[AttemptView]:
    # A copy: another task may refresh the log while this one looks, and an entry may be forgotten.
    entries, named = dict(log.state.entries), dict(log.state.by_tag)
    there = await tags(store, named)
    looked = {tag for tag in there if tag not in named} | {entry.tag for entry in entries.values() if entry.is_open}
    looked |= _newest(reversed(entries.values()), newest)  # the log has them in the order of their announcements
    told = [entries[prefix] for tag in there if tag not in looked for prefix in named[tag]]
    found = uncollected(lambda: list(map(_as_recorded, filter(wanted, told) if wanted is not None else told)))
    found += await _attempts_at(store, [tag for tag in there if tag in looked])
    # What was announced may have no objects yet. A decided attempt without its directory was removed by hand.
    seen = {attempt.prefix for attempt in found if attempt.tag in looked}
    announced = [entry for prefix, entry in entries.items() if not entry.is_decided and prefix not in seen]
    return found + [AttemptView(entry.tag, _attempt(entry), {}, None) for entry in announced]


async def vanished(store: Store, *, removed: bool = False) -> list[AttemptView]:
    """The checkpoints of which nothing is left at the root, newest first, as the log describes them: somebody removed their
    directories, and no start has noticed it yet; with `removed` those that were removed as they should. Empty without a log.
    """
    log = CatalogLog(store)
    await log.refresh()
    if log.fault:
        return []
    there = set(await tags(store, log.state.by_tag))
    found = [tag for tag in log.state.by_tag if tag not in there]
    found = [tag for tag in found if not await store.list(tag)]  # a listing of the whole root may be old
    await log.refresh()  # a checkpoint that was removed meanwhile has a record of that
    views = [_as_recorded(log.state.entries[prefix]) for tag in found for prefix in log.state.by_tag.get(tag, ())]
    gone = [v for v in views if v.entry is not None and v.entry.removed and v.entry.digest]
    wanted = {one.prefix for one in (gone if removed else checkpoints_of(views))}
    return sorted((v for v in views if v.prefix in wanted), key=lambda v: v.order or (0, 0), reverse=True)


async def may_be_undecided(store: Store, known: CatalogLog | None = None) -> tuple[list[tuple[str, AttemptId]], int]:
    """The attempts whose outcome the log does not tell, and the newest start in the name of any attempt, 0 if there is none.
    `known`: as of `scan`.
    """
    log = CatalogLog(store) if known is None else known
    await log.refresh()
    entries = {} if log.fault else log.state.entries
    named = {entry.tag for entry in entries.values()}
    found = [(entry.tag, _attempt(entry)) for entry in entries.values() if entry.is_open]
    found += await _named_at(store, [tag for tag in await tags(store, named) if tag not in named])
    attempts = {entry.attempt: entry for entry in entries.values()}  # names repeat
    starts = {_attempt(entry).start for entry in attempts.values()} | {attempt.start for _, attempt in found}
    return found, max(starts, default=0)


def _newest(newest_first: Iterable[CatalogEntry], count: int) -> set[str]:
    """The tags of the newest `count` attempts, of fewer if these have many ranks."""
    left, found = RANKS_LOOKED, set[str]()
    for entry in islice(newest_first, count):
        outcome = entry.decoded
        left -= outcome.world_size if outcome is not None else 1
        if left >= 0 or not found:
            found.add(entry.tag)
    return found


def _as_recorded(entry: CatalogEntry) -> AttemptView:
    return AttemptView(entry.tag, _attempt(entry), _UNSEEN, entry.decoded, entry=entry)


def _attempt(entry: CatalogEntry) -> AttemptId:
    found = AttemptId.parse(entry.attempt)
    assert found is not None  # CatalogState takes no other
    return found


def _has_bulk(entry: CatalogEntry) -> bool:
    """Whether chunks or indexes may be left."""
    return not entry.removed or bool(entry.kept)


async def with_newest_looked(store: Store, attempts: list[AttemptView], tried: Collection[str] = ()) -> list[AttemptView]:
    """`attempts`, of which the newest checkpoint that asked for `latest` has been looked at, for those who take it (CATALOG-5).
    `tried`: those (`<tag>/<attempt>`) that nobody takes.
    """
    attempts = [*attempts]
    for _, place in _newest_first(attempts):
        newest = attempts[place]
        if newest.outcome is None or not newest.outcome.save_latest or newest.left_behind or newest.prefix in tried:
            continue
        if newest.entry is not None:
            attempts[place] = newest = await view(store, newest.tag, newest.attempt)
        if newest.state == "committed" and not newest.left_behind:
            break
    return attempts


def commits_of(attempts: Iterable[AttemptView]) -> list[Checkpoint]:
    """All committed attempts among `attempts`, newest first, and those of branches that were left after all others. A tag that
    was saved again may have several.
    """
    attempts = [*attempts]
    return uncollected(lambda: [_checkpoint(attempts[place]) for _, place in _newest_first(attempts)])


def _checkpoint(committed: AttemptView) -> Checkpoint:
    assert committed.outcome is not None
    return Checkpoint(committed.tag, committed.attempt, committed.outcome, committed.read_back, committed.left_behind)


def _newest_first(attempts: Iterable[AttemptView]) -> list[tuple[Order, int]]:
    """The orders of the committed ones among `attempts`, and their places there, in the order of `commits_of`."""
    found = [(not one.left_behind, order, place) for place, one in enumerate(attempts) if (order := one.order) is not None]
    return [(order, place) for _, order, place in sorted(found, key=itemgetter(0, 1), reverse=True)]


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
    return checkpoints_of(await scan(store))


async def find(store: Store, tag: str) -> Checkpoint:
    """The checkpoint of `tag`. Raises NotFoundError, which says what is there instead, if there is none; DamagedError or
    UnreadableError if the outcome of a later attempt is damaged, or cannot be read now.
    """
    attempts = await each(partial(view_of_records, store, tag), await _names(store, tag))
    found = checkpoints_of(attempts)
    later = [a for a in attempts if not a.left_behind and (not found or a.attempt > found[0].attempt)]
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
        damage = attempt.damage or ""
        return DamagedError(damage if attempt.is_copy else f"the outcome of {attempt.prefix} is damaged: {damage}", key=key)
    if attempt.state == "unreadable":
        error = UnreadableError(f"the outcome of {attempt.prefix} cannot be read now: {attempt.unreadable}")
        error.__cause__ = attempt.unreadable  # tells whether waiting can help
        return error
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
    """Whether another program, such as DeepSpeed, wrote `pointer`, the content of `latest`: it does not end in a newline, as
    those of checkpointd do, and the directory that it names holds files; that of a tag of checkpointd holds only directories.
    """
    return is_tag(pointer) and any(not one.is_prefix and not one.name.startswith(".") for one in await store.list(pointer))
