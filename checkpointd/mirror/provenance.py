"""Whether one root may be mirrored to another: they are two roots, and all that lies at the mirror came from the origin.

Each root has an id (`log/root`). The starts of a mirror name the id of the root that it follows, so the newest start tells
whether a root is a mirror, and of which other, or whether a job has begun there. A start that a recovery took tells nothing.

Nothing here writes.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.commands import at_tag, command
from checkpointd.errors import FencedError, NotFoundError, UsageError
from checkpointd.layout.log_records import BeginRecord, BeginRef, CommitRecord, LogState
from checkpointd.phrases import listed
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import read_id
from checkpointd.store.base import Store

NAMED = 3
"""The most checkpoints that a refusal names."""
ANOTHER = "Mirror to an empty place instead"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two roots at one look."""

    url: str
    id: str
    """Empty if there is no root yet."""
    state: LogState

    @property
    def newest(self) -> BeginRecord | None:
        """The newest start of a job or of a mirror."""
        return next((one for one in reversed(self.state.begins) if one.world_size or one.origin), None)

    @property
    def begin(self) -> BeginRef:
        """The newest start of anybody."""
        return (0, "") if self.state.begin is None else (self.state.begin.start, self.state.begin.nonce)

    @property
    def newest_job(self) -> BeginRecord | None:
        """The newest start of a job."""
        return next((one for one in reversed(self.state.begins) if one.world_size), None)

    def follows(self, other: Side) -> bool:
        """Whether this is a mirror of `other`, and no job has begun here since."""
        return bool(other.id) and self.newest is not None and self.newest.origin == other.id

    def has_followed(self, other: Side) -> bool:
        """Whether this was a mirror of `other` at some time after the newest job began there."""
        job = other.newest_job
        since = 0 if job is None else job.start
        return bool(other.id) and any(one.origin == other.id and one.start > since for one in self.state.begins)


async def side_of(store: Store) -> Side:
    """The root at `store` now."""
    try:
        root = await read_id(store)
    except NotFoundError:
        root = ""
    return Side(store.url, root, await RootLog.of(store).look())


def check_apart(origin: Store, mirror: Store) -> None:
    """Raise UsageError if the two are one place, or if one lies in the other."""
    one, two = _place(origin.url), _place(mirror.url)
    if origin is mirror or one == two:
        raise UsageError(f"{origin.url} and {mirror.url} are the same root: a mirror is another one")
    for (inner, url), (outer, other) in itertools.permutations(((one, origin.url), (two, mirror.url))):
        if inner.startswith(outer.rstrip("/") + "/"):
            raise UsageError(f"{url} lies in {other}: a mirror is a root of its own, beside the other one")


def _place(url: str) -> str:
    """The place of a store as text that tells whether one lies in another. Servers have buckets of one name."""
    if is_bucket_url(url):
        bucket = parse(url)
        return f"{bucket.options.get('endpoint', '')} {bucket.place}".rstrip("/")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/") if parts.scheme else os.path.realpath(url)


def check_mirror(origin: Side, mirror: Side, *, removes: bool = False) -> None:
    """Raise FencedError if a job has gone on at the mirror, and UsageError if it holds anything else that is not of the origin,
    or if it seems that somebody has swapped the two. `removes`: whether rules will remove checkpoints there.
    """
    if origin.id == mirror.id:
        raise UsageError(
            f"{mirror.url} is {origin.url} itself at another address, or a copy of it: both have the same id. {ANOTHER}"
        )
    swapped = ""
    if origin.follows(mirror) and mirror.newest_job is not None:
        swapped = (
            f"{origin.url} is a mirror of {mirror.url}, and no job has begun there since. Did you swap the two? "
            f"{command('mirror', mirror.url, origin.url)} brings the mirror up to date"
        )
        if removes:
            raise UsageError(f"{swapped}. The rules would remove checkpoints at {mirror.url}, which {origin.url} may not have")
    if mirror.newest is not None and not mirror.follows(origin) and not origin.has_followed(mirror):
        raise UsageError(swapped) if swapped else _stranger(mirror.newest, origin, mirror)
    _check_checkpoints(origin, mirror, swapped)
    _check_begins(origin, mirror)


def _stranger(newest: BeginRecord, origin: Side, mirror: Side) -> FencedError | UsageError:
    if newest.origin:
        return UsageError(
            f"{mirror.url} mirrors another root than {origin.url}: process {newest.writer.pid} on {newest.writer.host} began "
            f"a {newest.job} at {newest.writer.time}. {ANOTHER}"
        )
    who = f"process {newest.writer.pid} on {newest.writer.host}"
    job = f"job {newest.job!r}" if newest.job else "a job"
    began = f"{job} began there at {newest.writer.time} (start {newest.start}, {who})"
    if any(one.origin == origin.id for one in mirror.state.begins):
        return FencedError(
            f"{mirror.url} is no mirror of {origin.url} any more: {began}, and the job goes on there. Nothing is copied. "
            f"If {origin.url} is to go on instead, mirror it to an empty place; if {mirror.url} goes on, mirror that one"
        )
    return UsageError(f"{mirror.url} is the root of another run: {began}, which {origin.url} does not know. {ANOTHER}")


def _check_begins(origin: Side, mirror: Side) -> None:
    """Refuse an origin that has lost a start that the mirror has followed. Other saves use its numbers again there."""
    now = {one.start: one.nonce for one in origin.state.begins}
    for start, nonce in (one.origin_begin for one in mirror.state.begins if one.origin == origin.id):
        if nonce and start >= min(now) and now.get(start) != nonce:
            raise UsageError(
                f"{origin.url} was put back to an older state: {mirror.url} has followed its start {start}, which is not there "
                f"any more. Nothing is copied, since the mirror holds saves that the origin has lost. {ANOTHER}"
            )


def _check_checkpoints(origin: Side, mirror: Side, swapped: str) -> None:
    """Refuse checkpoints that the origin never had. A root that was its mirror all the time may have what it has forgotten."""
    own = []
    for name, one in mirror.state.attempts.items():
        if one.status != "checkpoint":
            continue
        there = origin.state.attempts.get(name)
        commit = None if there is None else there.committed
        if commit is None:
            own.append(one)
        elif not is_same(one.commit, commit):
            raise UsageError(
                f"{name} at {mirror.url} is another checkpoint than {name} at {origin.url}: nothing is copied. {ANOTHER}"
            )
    if own and not mirror.follows(origin):
        names = listed([one.tag for one in sorted(own, key=lambda one: one.order)], NAMED)
        says = f"{command('explain', *at_tag(mirror.url, own[0].tag))} says more. {ANOTHER}"
        raise UsageError(
            f"{mirror.url} holds checkpoints that {origin.url} does not know ({names}): nothing is copied. {swapped or says}"
        )


def is_same(one: CommitRecord, two: CommitRecord) -> bool:
    """Whether two records are the commit of the same bytes. A recovery may have put one of them, with another writer."""
    return (one.attempt, one.ballot, one.order) == (two.attempt, two.ballot, two.order)
