"""Tells what is missing of committed checkpoints, by listings and ballots alone. It writes nothing, and reads no chunk and no
index.

A person may remove the directory of a checkpoint, or that of an older tag whose objects newer checkpoints refer to. Whoever
lists, loads or removes checkpoints looks here first, so all of them agree on what is left, and say it in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import CheckpointdError, DamagedError, LinkError, NotFoundError, UnreadableError
from checkpointd.layout.keys import COORDINATOR, holder_of, object_key, object_rank
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import Vote
from checkpointd.phrases import listed, rank_runs
from checkpointd.pipeline.root import ballots, root_view
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd.pipeline.root.tag_directories import abandoned
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint needs and is gone, or has another size."""

    text: str
    """What it is, in words: `it needs a/b/c, which is gone: somebody removed it`."""
    things: tuple[str, ...]
    """What to bring back: tags, keys of objects, or the directory that showed its files."""
    is_removed: bool = False
    """Whether it is the directory that showed its files. Then the checkpoint counts as removed."""

    @property
    def state(self) -> Literal["incomplete", "removed"]:
        """The state of the checkpoint."""
        return "removed" if self.is_removed else "incomplete"

    def advice(self, root: str, tag: str) -> str:
        """What to do about the checkpoint `tag`."""
        if self.is_removed:
            return f"bring it back from a copy, or remove what is left of it: {command('gc', root)}"
        what = "it" if self.things == (tag,) else self.things[0] if len(self.things) == 1 else "what is gone"
        others = any("/" not in thing and thing != tag for thing in self.things)
        copied = f" (if only the directory of {tag} was copied here, copy the whole root instead)" if others else ""
        left = command("delete", *at_tag(root, tag))
        return f"bring {what} back from a copy of the root{copied}, or remove what is left: {left}"


async def missing(store: Store, checkpoints: Iterable[LoggedAttempt], *, objects: bool = False) -> dict[str, Loss]:
    """What is missing of `checkpoints`, by prefix (`<tag>/<attempt>`). One that is removed meanwhile is left out.

    One listing of the root shows the tags that are gone. With `objects`, all objects that they need are looked at instead.
    Raises StoreError if the storage cannot be read.
    """
    asked = [one for one in checkpoints if one.status == "checkpoint"]
    removed = await abandoned(store) if any(one.commit.shown_at for one in asked) else set[str]()
    tags = set[str]() if objects else set(await root_view.tags(store))
    found = dict[str, Loss]()
    for one in asked:
        if one.prefix in removed:
            at = one.commit.shown_at
            what: Loss | None = Loss(text=f"somebody removed its directory {at}", things=(at,), is_removed=True)
        elif objects:
            what = await _of_objects(store, one.commit)
        else:
            what = await _of_directories(store, [name for name in (one.prefix, *one.holders) if _tag_of(name) not in tags])
        if what is not None:
            found[one.prefix] = what
    known = (await root_view.state_of(store)).attempts if found else {}
    return {prefix: what for prefix, what in found.items() if prefix in known and known[prefix].status == "checkpoint"}


async def missing_of(store: Store, checkpoint: LoggedAttempt) -> Loss | None:
    """What is missing of this checkpoint, by a look at all objects that it needs. Raises as `missing`."""
    return (await missing(store, [checkpoint], objects=True)).get(checkpoint.prefix)


async def check_whole(store: Store, checkpoint: LoggedAttempt, patience: Patience) -> None:
    """Raise DamagedError if anything is missing that `checkpoint` needs, before a load fills anything."""
    with patience.looks() as looks:
        while True:
            try:
                found = await missing_of(store, checkpoint)
            except UnreadableError as error:
                await looks.unreadable(error)
                continue
            if found is None:
                return
            if await looks.is_lost(found.things[0]):
                [words] = in_words(store.url, {checkpoint.prefix: found})
                key = found.things[0]
                raise DamagedError(words, key=key, rank=_rank_of(key) if "/" in key else None)


def in_words(root: str, found: Mapping[str, Loss]) -> list[str]:
    """One line for all checkpoints (by `<tag>/<attempt>`) that miss the same, with advice."""
    causes: dict[tuple[str, ...], list[str]] = {}
    for prefix, what in found.items():
        causes.setdefault((what.state, *what.things), []).append(prefix)
    lines = []
    for prefixes in causes.values():
        first, tags = found[prefixes[0]], [_tag_of(prefix) for prefix in prefixes]
        who = tags[0] if first.is_removed else f"{tags[0]} is not whole"
        if len(tags) > 1:
            who = f"{len(tags)} checkpoints are not whole ({listed(tags)}); of {tags[0]}"
        lines.append(f"{who}: {first.text}; {first.advice(root, tags[0])}")
    return lines


def _tag_of(prefix: str) -> str:
    return prefix.rpartition("/")[0]


async def _of_directories(store: Store, gone: Sequence[str]) -> Loss | None:
    """The loss of these directories of attempts, each with its tag."""
    tags = tuple(sorted(set(map(_tag_of, gone))))
    for tag in tags:
        try:
            await store.list(tag)
        except LinkError as error:  # it is not gone
            return Loss(text=f"it cannot be read: {error}", things=(tag,))
    return Loss(text=f"it needs {_which_are_gone(gone)}: somebody removed {listed(tags, 4)}", things=tags) if gone else None


async def _of_objects(store: Store, commit: CommitRecord) -> Loss | None:
    there = {prefix: await root_view.sizes_of(store, prefix) for prefix in (commit.attempt, *commit.holders)}
    if gone := [prefix for prefix, sizes in there.items() if not sizes]:
        return await _of_directories(store, gone)
    needed = _needed(commit, await counted_votes(store, commit))
    left = {key: there.get(holder_of(key), {}).get(key.rpartition("/")[2]) for key in sorted(needed)}
    keys = [key for key, size in left.items() if size is None]
    text = f"it needs {_which_are_gone(keys)}: somebody removed {'it' if len(keys) == 1 else 'them'}" if keys else ""
    if not keys:
        keys = [key for key, size in left.items() if needed[key] not in (None, size)]
        text = f"it needs {_and_others(keys)}, whose size was changed to {left[keys[0]]} bytes" if keys else ""
    who = f"{rank_runs(map(_rank_of, keys))} wrote {'it' if len(keys) == 1 else 'them'}"
    return Loss(text=f"{text} ({who})", things=tuple(keys)) if keys else None


def _needed(commit: CommitRecord, votes: Mapping[int, Vote | CheckpointdError]) -> dict[str, int | None]:
    """The keys that the checkpoint needs, with their sizes in bytes where these are known. A load does without a joint plan."""
    needed: dict[str, int | None] = {ballot_key(commit): commit.ballot.size}
    referred: set[str] = set()
    for vote in votes.values():
        if not isinstance(vote, Vote):
            continue
        if vote.index is not None:
            needed[object_key(commit.attempt, vote.index.name)] = vote.index.size
        needed |= {object_key(commit.attempt, ref.name): ref.size for ref in vote.objects}
        referred |= set(vote.refers)
    return needed | dict.fromkeys(referred)


async def counted_votes(store: Store, commit: CommitRecord) -> dict[int, Vote | CheckpointdError]:
    """The votes that `commit` counted, by rank; in place of a vote that cannot be read, the error."""
    try:
        return {**await ballots.votes_of(store, commit)}
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return dict.fromkeys(range(commit.world_size), error)


def _rank_of(key: str) -> int:
    """The rank that wrote the object `key`; the coordinator writes those of the whole attempt."""
    rank = object_rank(key.rpartition("/")[2])
    return COORDINATOR if rank is None else rank


def _which_are_gone(keys: Sequence[str]) -> str:
    return f"{_and_others(keys)}, which {'is' if len(keys) == 1 else 'are'} gone"


def _and_others(keys: Sequence[str]) -> str:
    others = len(keys) - 1
    return f"{keys[0]} and {others} other{'s' if others > 1 else ''}" if others else keys[0]
