"""What lies at a root: attempts and checkpoints, as a listing and the outcomes show them."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointd.commit.retention import AttemptFacts, Order, State
from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import (
    DELETED,
    LATEST,
    OUTCOME,
    AttemptId,
    attempt_prefix,
    check_tag,
    is_bulk,
    is_tag,
    object_hand,
    object_rank,
    plan_key,
    vote_name,
    vote_rank,
)
from checkpointd.layout.manifest import LISTING_BYTES_MAX, Index, Outcome, Plan, Vote, decode, decode_index, digest
from checkpointd.store.base import Store

LATEST_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt: its objects with their sizes in bytes, and its outcome; `damage` says why the outcome cannot be read."""

    tag: str
    attempt: AttemptId
    sizes: dict[str, int]
    outcome: Outcome | None
    damage: str | None = None

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    @property
    def state(self) -> State:
        if DELETED in self.sizes:
            return "deleted"
        if self.damage:
            return "damaged"
        if self.outcome is None:
            return "in-doubt"
        return "committed" if self.outcome.outcome == "commit" else "aborted"

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
        """The ranks for which more than one hand left objects."""
        hands: dict[int, set[int]] = {}
        for name in self.sizes:
            rank, hand = object_rank(name), object_hand(name)
            if rank is not None and hand is not None:
                hands.setdefault(rank, set()).add(hand)
        return tuple(sorted(rank for rank, found in hands.items() if len(found) > 1))

    @property
    def vote_ranks(self) -> list[int]:
        return sorted(rank for name in self.sizes if (rank := vote_rank(name)) is not None)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An attempt whose outcome is commit."""

    tag: str
    attempt: AttemptId
    outcome: Outcome

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)


async def tags(store: Store) -> list[str]:
    return [entry.name for entry in await store.list("") if entry.is_prefix and is_tag(entry.name)]


async def attempts_of(store: Store, tag: str) -> list[AttemptView]:
    """The attempts at `tag`, oldest first; damage is reported in them, not raised."""
    found = [
        (attempt, entry.name)
        for entry in await store.list(check_tag(tag))
        if entry.is_prefix and (attempt := AttemptId.parse(entry.name))
    ]
    return [await _view(store, tag, attempt) for attempt, _ in sorted(found)]


async def view(store: Store, tag: str, attempt: AttemptId) -> AttemptView:
    """One attempt as it stands now."""
    return await _view(store, tag, attempt)


async def _view(store: Store, tag: str, attempt: AttemptId) -> AttemptView:
    prefix = attempt_prefix(tag, attempt)
    sizes = {entry.name: entry.size for entry in await store.list(prefix) if not entry.is_prefix}
    if OUTCOME not in sizes:
        return AttemptView(tag, attempt, sizes, None)
    try:
        return AttemptView(tag, attempt, sizes, await read_outcome(store, tag, attempt))
    except (DamagedError, NotFoundError, StoreError) as error:
        # One sector that cannot be read must not hide every other checkpoint.
        return AttemptView(tag, attempt, sizes, None, str(error))


async def read_outcome(store: Store, tag: str, attempt: AttemptId) -> Outcome:
    """The outcome, checked to be this attempt's. NotFoundError where the attempt is undecided."""
    key = f"{attempt_prefix(tag, attempt)}/{OUTCOME}"
    outcome = decode(await store.get(key), Outcome, key)
    if (outcome.tag, outcome.attempt) != (tag, str(attempt)):
        raise DamagedError(f"{key} belongs to {outcome.tag}/{outcome.attempt}; somebody moved it", key=key)
    return outcome


async def read_vote(store: Store, key: str, expected_digest: str | None = None) -> Vote:
    """The vote at `key`; DamagedError where its bytes are not those that the outcome names."""
    data = await store.get(key)
    if expected_digest is not None and digest(data) != expected_digest:
        raise DamagedError(f"{key} is not the vote that the outcome names: its bytes changed since the commit", key=key)
    return decode(data, Vote, key)


async def index_named_by(store: Store, prefix: str, vote: Vote) -> Index:
    """The index that `vote` names, checked to be that rank's, of this attempt. DamagedError where it is not."""
    ref = vote.index
    if ref is None:
        raise DamagedError(f"{prefix}/{vote_name(vote.rank)} names no index")
    key = f"{prefix}/{ref.name}"
    data = await store.get(key, size_max=ref.size)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise DamagedError(f"{key} is damaged: its bytes are not those that its vote names", key=key)
    index = decode_index(data, key)
    if (index.tag, index.attempt, index.rank, index.step) != (vote.tag, vote.attempt, vote.rank, vote.step):
        raise DamagedError(f"{key} belongs to rank {index.rank} of {index.tag}/{index.attempt}, step {index.step}", key=key)
    return index


async def read_plan(store: Store, name: str) -> Plan:
    """The plan whose digest is `name`. FormatError where that is no digest, DamagedError where the bytes do not have it."""
    key = plan_key(name)
    data = await store.get(key, size_max=LISTING_BYTES_MAX)
    if digest(data) != name:
        raise DamagedError(f"{key} is damaged: its digest is {digest(data)}", key=key)
    return decode(data, Plan, key)


async def scan(store: Store) -> list[AttemptView]:
    """Every attempt at the root."""
    return [attempt for tag in await tags(store) for attempt in await attempts_of(store, tag)]


def checkpoints_of(attempts: list[AttemptView]) -> list[Checkpoint]:
    """The checkpoints among `attempts`, one per tag (the last commit of a tag counts), newest first."""
    newest: dict[str, AttemptView] = {}
    for attempt in attempts:
        known = newest.get(attempt.tag)
        if attempt.order is not None and (known is None or known.order is None or attempt.order > known.order):
            newest[attempt.tag] = attempt
    found = [Checkpoint(a.tag, a.attempt, a.outcome) for a in newest.values() if a.outcome is not None]
    return sorted(found, key=lambda c: c.outcome.order, reverse=True)


async def checkpoints(store: Store) -> list[Checkpoint]:
    """All checkpoints, newest first."""
    return checkpoints_of(await scan(store))


async def find(store: Store, tag: str) -> Checkpoint:
    """The checkpoint of `tag`. NotFoundError where there is none, saying what is there instead; DamagedError where its
    outcome cannot be read.
    """
    attempts = await attempts_of(store, tag)
    found = checkpoints_of(attempts)
    damaged = next((a for a in reversed(attempts) if a.state == "damaged"), None)
    if damaged is not None and (not found or damaged.attempt > found[0].attempt):
        raise DamagedError(
            f"the outcome of {damaged.prefix} cannot be read: {damaged.damage}", key=f"{damaged.prefix}/{OUTCOME}"
        )
    if found:
        return found[0]
    if attempts:
        states = ", ".join(f"{a.attempt} is {a.state}" for a in attempts)
        raise NotFoundError(f"{tag} is not a checkpoint: {states}; `checkpointd explain {tag}` says why")
    known = [c.tag for c in await checkpoints(store)][:8]
    raise NotFoundError(f"there is no tag {tag!r} at {store.url}; checkpoints are: {', '.join(known) or 'none'}")


async def latest(store: Store) -> str | None:
    """The tag that `latest` names, or None where there is no pointer. DamagedError where it holds no tag."""
    try:
        text = (await store.get(LATEST, size_max=LATEST_BYTES_MAX)).decode()
    except NotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds no text: {error}", key=LATEST) from error
    tag = text.removesuffix("\n")
    if not is_tag(tag):
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds {tag!r}, which is no tag", key=LATEST)
    return tag
