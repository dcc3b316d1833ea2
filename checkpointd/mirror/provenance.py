"""Whether one root may be mirrored to another: they are two roots, and all that lies at the mirror came from the origin.

The starts tell roots apart. Each has a random nonce, so a root is known by the numbers and nonces of its starts. A mirror keeps
those of its origin in a record of its own, since a root keeps the newest few only.

Nothing here writes.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, FencedError, NotFoundError, RootGoneError, UsageError
from checkpointd.layout.keys import MIRROR, SERVICE, start_key, start_of
from checkpointd.layout.manifest import STARTS_MAX, VERSION, Header, Mirrored, Outcome, Start, decode
from checkpointd.phrases import listed
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.store.base import Store
from checkpointd.store.identity import identity_of

log = logging.getLogger("checkpointd")

NAMED = 3
"""The most checkpoints that a refusal names."""
ANOTHER = "Mirror to an empty place instead"

StartId = tuple[int, str]
"""The number and the nonce of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The starts of the jobs whose checkpoints a root holds, by the root's own starts and by its record if it is a mirror.
    `newest`: the newest of its own starts, 0 if it has none. `followed`: those of the root that it mirrors, if it is a mirror
    at which no job has begun.
    """

    starts: frozenset[StartId]
    newest: int = 0
    followed: frozenset[StartId] = frozenset()

    def record(self, origin: Store, before: Mirrored | None) -> Mirrored:
        """The record of a mirror of this root; `before`: the one that it has."""
        known = self.starts | set(before.starts if before is not None else ())
        return Mirrored(
            origin=origin.url,
            starts=tuple(sorted(known)[-STARTS_MAX:]),
            reached=before.reached if before is not None else (0, 0),
            writer=writer(),
        )


async def lineage_of(origin: Store) -> Lineage:
    """The lineage of the root `origin`."""
    record, starts_there = await read_record(origin), await _starts(origin)
    own, jobs = _ids(starts_there), _ids(start for start in starts_there if start.world_size)
    followed = frozenset(record.starts if record is not None else ())
    return Lineage(
        starts=followed.union(own),
        newest=max((number for number, _ in own), default=0),
        followed=followed if followed.issuperset(jobs) else frozenset(),
    )


async def looked_again(origin: Store, known: Lineage) -> Lineage:
    """The lineage of `origin` now; `known` if no job has begun there since. Raises RootGoneError if the origin is not there."""
    newest = await starts.newest(origin)
    if newest < known.newest:
        raise RootGoneError(f"{origin.url} shows no start of its job any more: was it unmounted, or removed?")
    if newest == known.newest:
        with suppress(NotFoundError, DamagedError):
            if not newest or (newest, (await starts.read(origin, newest)).nonce) in known.starts:
                return known
    return await lineage_of(origin)


async def read_record(store: Store) -> Mirrored | None:
    """The record of the mirror `store`; None if it is none, or if the record is damaged. The starts and the commits tell then
    whether all that lies there came from the origin, and a run puts the record again. Raises FormatError if another release
    wrote it.
    """
    try:
        data = await store.get(MIRROR)
    except NotFoundError:
        return None
    try:
        return decode(data, Mirrored, MIRROR)
    except DamagedError as error:
        with suppress(msgspec.DecodeError):
            if msgspec.json.decode(data, type=Header).version != VERSION:
                raise
        log.error("%s (at %s)", error, store.url)
        return None


async def _starts(store: Store) -> list[Start]:
    """The starts whose records are at `store` and whole."""
    found: list[Start] = []
    for entry in await store.list(f"{SERVICE}/starts"):
        number = start_of(entry.name)
        if number is not None:
            try:
                found.append(await starts.read(store, number))
            except (NotFoundError, DamagedError):
                continue  # removed meanwhile, or damaged: the commits tell, too
    return found


async def is_of_job(mirror: Store, number: int) -> bool:
    """Whether a job took `number` at the root `mirror`. An undecided attempt of it is no copy; the next start decides it."""
    with suppress(NotFoundError, DamagedError):
        return (await starts.read(mirror, number)).world_size > 0
    return False


def _ids(found: Iterable[Start]) -> list[StartId]:
    return [(start.start, start.nonce) for start in found]


async def check_apart(origin: Store, mirror: Store) -> None:
    """Raise UsageError if the two are one root, or if one lies in the other."""
    one, two = _place(origin.url), _place(mirror.url)
    if origin is mirror or one == two:
        raise UsageError(f"{origin.url} and {mirror.url} are the same root: a mirror is another one")
    for (inner, url), (outer, other) in itertools.permutations(((one, origin.url), (two, mirror.url))):
        if inner.startswith(outer.rstrip("/") + "/"):
            raise UsageError(f"{url} lies in {other}: a mirror is a root of its own, beside the other one")
    if origin.capabilities.shared and mirror.capabilities.shared and await _is_one_directory(origin, mirror):
        raise UsageError(f"{origin.url} and {mirror.url} lead to the same directory: a mirror is another one")


def _place(url: str) -> str:
    """The place of a store as text that tells whether one lies in another. Servers have buckets of one name."""
    if is_bucket_url(url):
        bucket = parse(url)
        return f"{bucket.options.get('endpoint', '')} {bucket.place}".rstrip("/")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/") if parts.scheme else os.path.realpath(url)


async def check_begun_apart(origin: Store, mirror: Store, begun: Start) -> None:
    """Raise UsageError if `origin` shows the start that this process has just taken at `mirror`."""
    with suppress(NotFoundError, DamagedError):
        if (await starts.read(origin, begun.start)).nonce == begun.nonce:
            raise UsageError(f"{origin.url} and {mirror.url} are two addresses of one place: a mirror is another one")


async def _is_one_directory(origin: Store, mirror: Store) -> bool:
    newest = await starts.newest(origin)
    if not newest or newest != await starts.newest(mirror):
        return False
    try:
        one, two = await identity_of(origin, start_key(newest)), await identity_of(mirror, start_key(newest))
    except NotFoundError:
        return False
    return one is not None and two is not None and one.is_same_root(two)


async def check_mirror(
    lineage: Lineage,
    origin: Store,
    outcomes: Mapping[str, Outcome],
    mirror: Store,
    views: Sequence[AttemptView],
    *,
    removes: bool = False,
) -> Mirrored | None:
    """The record of the mirror; None if it has none yet. `outcomes`: the commits that the origin knows, removed ones included,
    by attempt (`<tag>/<attempt>`); `views`: the attempts at the mirror. `removes`: whether rules will remove checkpoints there.

    Raises FencedError if a job has gone on there, and UsageError if it holds anything else that is not of the origin, or if it
    seems that somebody has swapped the two.
    """
    record = await read_record(mirror)
    known = lineage.starts | set(record.starts if record is not None else ())
    jobs = [start for start in await _starts(mirror) if start.world_size]
    swapped = "" if lineage.followed.isdisjoint(_ids(jobs)) else _swapped(origin, mirror)
    for start in jobs:
        if (start.start, start.nonce) not in known:
            raise UsageError(swapped) if swapped else _stranger(start, origin, mirror, was_mirror=record is not None)
    if swapped and removes:
        raise UsageError(f"{swapped}. The rules would remove checkpoints at {mirror.url}, which {origin.url} may not have")
    commits = {v.prefix: v for v in views if v.outcome is not None and v.outcome.outcome == "commit"}
    shared = {prefix for prefix in commits if prefix in outcomes}
    for prefix in sorted(shared):
        found = commits[prefix].outcome
        if found is not None and not is_same(found, outcomes[prefix]):
            raise UsageError(
                f"{prefix} at {mirror.url} is another checkpoint than {prefix} at {origin.url}: nothing is copied. {ANOTHER}"
            )
    if record is not None:
        check_record(record, lineage, origin, mirror, is_shared=bool(shared))
    _check_own(commits, outcomes, record, origin, mirror, swapped)
    return record


def _swapped(origin: Store, mirror: Store) -> str:
    return (
        f"{origin.url} is a mirror of {mirror.url}, and no job has begun there since. Did you swap the two? "
        f"{command('mirror', mirror.url, origin.url)} brings the mirror up to date"
    )


def is_same(one: Outcome, two: Outcome) -> bool:
    """Whether two outcomes are the commit of the same bytes. A recovery may have put one of them, with another writer."""
    return (one.outcome, one.ballot, one.order) == (two.outcome, two.ballot, two.order)


def _stranger(start: Start, origin: Store, mirror: Store, *, was_mirror: bool) -> FencedError | UsageError:
    who = f"process {start.writer.pid} on {start.writer.host}"
    job = f"job {start.job!r}" if start.job else "a job"
    began = f"{job} began there at {start.writer.time} (start {start.start}, {who})"
    if was_mirror:
        return FencedError(
            f"{mirror.url} is no mirror of {origin.url} any more: {began}, and the job goes on there. Nothing is copied. "
            f"If {origin.url} is to go on instead, mirror it to an empty place; if {mirror.url} goes on, mirror that one"
        )
    return UsageError(f"{mirror.url} is the root of another run: {began}, which {origin.url} does not know. {ANOTHER}")


def check_record(record: Mirrored, lineage: Lineage, origin: Store, mirror: Store, *, is_shared: bool) -> None:
    """Raise UsageError if `record` of the mirror speaks of another root. `is_shared`: whether both have a commit in common."""
    if record.starts and not lineage.starts:
        raise RootGoneError(f"{origin.url} shows no start of a job, and {mirror.url} mirrors one that had some: is it mounted?")
    then, now = _by_number(record.starts), _by_number(lineage.starts)
    other = sorted(number for number in then.keys() & now.keys() if then[number].isdisjoint(now[number]))
    if other:
        raise UsageError(
            f"{mirror.url} mirrors another root than {origin.url}: start {other[0]} is of another process in each "
            f"(it followed {record.origin}). {ANOTHER}"
        )
    if record.starts and not is_shared and lineage.starts.isdisjoint(record.starts):
        raise UsageError(
            f"{mirror.url} is the mirror of {record.origin}, and has neither a start nor a checkpoint in common with "
            f"{origin.url}. {ANOTHER}"
        )


def _by_number(starts: Iterable[StartId]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for number, nonce in starts:
        found.setdefault(number, set()).add(nonce)
    return found


def _check_own(
    commits: Mapping[str, AttemptView],
    known: Collection[str],
    record: Mirrored | None,
    origin: Store,
    mirror: Store,
    swapped: str,
) -> None:
    """Refuse checkpoints that the origin never had. It may have forgotten old ones, which the record's `reached` covers."""
    reached = record.reached if record is not None else (0, 0)
    own = [v for prefix, v in commits.items() if prefix not in known and v.order is not None and v.order > reached]
    if own:
        names = listed([view.tag for view in sorted(own, key=lambda view: view.order or (0, 0))], NAMED)
        says = f"{command('explain', *at_tag(mirror.url, own[0].tag))} says more. {ANOTHER}"
        raise UsageError(
            f"{mirror.url} holds checkpoints that {origin.url} does not know ({names}): nothing is copied. {swapped or says}"
        )
