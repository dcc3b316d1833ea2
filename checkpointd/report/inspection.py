"""The content of one checkpoint: tensors, sizes, codecs and values, rank by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

import msgspec

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Alias, Chunk, Index, Scope, TensorEntry
from checkpointd.layout.log_records import LoggedAttempt, ReadBackState
from checkpointd.layout.manifest import ObjectRef
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.verify import Damage
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import Lost, seen_lost
from checkpointd.report.log import look
from checkpointd.report.values import Value, values_of
from checkpointd.store.base import Store

Totals: TypeAlias = tuple["CodecTotal", ...]


class CodecTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All chunks of one codec; sizes in bytes before and after encoding."""

    codec: str
    chunks: int
    raw_bytes: int
    stored_bytes: int


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One box of one tensor on one rank; `box` is None if it is the whole tensor."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    scope: Scope
    raw_bytes: int
    stored_bytes: int
    referred_bytes: int = 0
    """The part of `stored_bytes` that lies in objects of older checkpoints."""
    codecs: Totals


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a global tensor, and the rank that stored it."""

    rank: int
    box: Box
    raw_bytes: int
    stored_bytes: int


class GlobalReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that the ranks hold together: its whole shape, and the box that each rank stored."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartReport, ...]
    raw_bytes: int
    stored_bytes: int
    codecs: Totals


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one rank's index, or the damage that makes the index unreadable."""

    rank: int
    raw_bytes: int = 0
    stored_bytes: int = 0
    referred_bytes: int = 0
    objects: tuple[ObjectRef, ...] = ()
    tensors: tuple[TensorReport, ...] = ()
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    values: tuple[Value, ...] | None = None
    damage: Damage | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and totals count only the ranks and tensors that were asked for, by default the whole checkpoint.

    `stored_bytes` is the sum of `written_bytes`, which this checkpoint wrote, and `referred_bytes`, which lie in older ones and
    did not change. `tensors` has the global tensors, put together from all ranks; `ranks` lists their boxes as well.
    """

    root: str
    tag: str
    attempt: str
    step: int
    world_size: int
    time: str
    raw_bytes: int
    stored_bytes: int
    written_bytes: int
    referred_bytes: int
    metrics: dict[str, float]
    read_back: ReadBackState
    """Whether it was read back since it was written, and the result."""
    damaged: str = ""
    """What is wrong, if it is recorded as damaged."""
    codecs: Totals
    tensors: tuple[GlobalReport, ...]
    ranks: tuple[RankReport, ...]
    lost: tuple[Lost, ...] = ()
    """Objects of the checkpoint that are gone."""
    log_damage: str = ""
    """Why the log could not be read to its end, so that the tag may have a newer checkpoint; empty if it could."""

    @property
    def damage(self) -> list[Damage]:
        return [report.damage for report in self.ranks if report.damage]


async def inspection(
    store: Store, tag: str, *, rank: int | None = None, tensors: str = "*", values: bool = False
) -> Inspection:
    """Read the indexes of checkpoint `tag`: of `rank` or of all, tensors whose FQN matches the glob `tensors`.

    Raises NotFoundError if there is no such checkpoint or tensor, and UsageError if there is no such rank.
    """
    _, log_damage = await look(store)
    checkpoint = await root_view.find(store, tag)
    reports = [await _rank(store, checkpoint, r, tensors, values) for r in _ranks(checkpoint, rank)]
    shown = [tensor for report in reports for tensor in report.tensors]
    if tensors != "*" and not shown and not any(report.damage for report in reports):
        raise NotFoundError(f"no tensor of {tag} matches {tensors!r}; leave --tensors out to see all of them")
    commit = checkpoint.commit
    return Inspection(
        root=store.url,
        tag=tag,
        attempt=str(checkpoint.id),
        step=commit.step,
        world_size=commit.world_size,
        time=commit.writer.time,
        raw_bytes=sum(t.raw_bytes for t in shown),
        stored_bytes=sum(t.stored_bytes for t in shown),
        written_bytes=sum(t.stored_bytes - t.referred_bytes for t in shown),
        referred_bytes=sum(t.referred_bytes for t in shown),
        metrics=commit.metrics,
        read_back=checkpoint.read_back,
        damaged=checkpoint.damaged,
        codecs=_merged(total for tensor in shown for total in tensor.codecs),
        tensors=tuple(_together(reports)),
        ranks=tuple(reports),
        lost=await seen_lost(store, checkpoint),
        log_damage=log_damage,
    )


def _ranks(checkpoint: LoggedAttempt, rank: int | None) -> list[int]:
    size = checkpoint.commit.world_size
    if rank is None:
        return list(range(size))
    if not 0 <= rank < size:
        raise UsageError(f"there is no rank {rank}: {checkpoint.tag} was saved by {size} ranks, 0 to {size - 1}")
    return [rank]


async def _rank(store: Store, checkpoint: LoggedAttempt, rank: int, pattern: str, values: bool) -> RankReport:
    try:
        index = await read_index(store, checkpoint, rank)
        found = tuple(values_of(tree.decode(index.tree, f"the index of rank {rank}"))) if values else None
    except DamagedError as error:
        return RankReport(rank=rank, damage=Damage.of(error, rank))
    return _report(index, pattern, found)


def _report(index: Index, pattern: str, values: tuple[Value, ...] | None) -> RankReport:
    older = frozenset(number for number, ref in enumerate(index.objects) if ref.held_by)
    tensors = tuple(_tensor(entry, older) for entry in index.tensors if fnmatchcase(entry.fqn, pattern))
    return RankReport(
        rank=index.rank,
        raw_bytes=sum(t.raw_bytes for t in tensors),
        stored_bytes=sum(t.stored_bytes for t in tensors),
        referred_bytes=sum(t.referred_bytes for t in tensors),
        objects=index.objects,
        tensors=tensors,
        aliases=tuple(alias for alias in index.aliases if fnmatchcase(alias.fqn, pattern)),
        excluded=tuple(fqn for fqn in index.excluded if fnmatchcase(fqn, pattern)),
        values=values,
    )


def _tensor(entry: TensorEntry, older: frozenset[int]) -> TensorReport:
    """`older` has the positions of the objects that lie in older attempts."""
    return TensorReport(
        fqn=entry.fqn,
        dtype=entry.dtype,
        shape=entry.shape,
        box=None if entry.box == whole(entry.shape) else entry.box,
        scope=entry.scope,
        raw_bytes=sum(chunk.raw for chunk in entry.chunks),
        stored_bytes=sum(chunk.stored for chunk in entry.chunks),
        referred_bytes=sum(chunk.stored for chunk in entry.chunks if chunk.object in older),
        codecs=_merged(_of_chunks(entry.chunks)),
    )


def _together(reports: Iterable[RankReport]) -> Iterator[GlobalReport]:
    """The global tensors of the ranks. If ranks give a tensor different dtypes or shapes, each of them is listed."""
    found: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, TensorReport]]] = defaultdict(list)
    for report in reports:
        for tensor in report.tensors:
            if tensor.scope == "global":
                found[tensor.fqn, tensor.dtype, tensor.shape].append((report.rank, tensor))
    for (fqn, dtype, shape), parts in found.items():
        yield GlobalReport(
            fqn=fqn,
            dtype=dtype,
            shape=shape,
            parts=tuple(
                PartReport(rank=rank, box=t.box or whole(shape), raw_bytes=t.raw_bytes, stored_bytes=t.stored_bytes)
                for rank, t in parts
            ),
            raw_bytes=sum(tensor.raw_bytes for _, tensor in parts),
            stored_bytes=sum(tensor.stored_bytes for _, tensor in parts),
            codecs=_merged(total for _, tensor in parts for total in tensor.codecs),
        )


def _of_chunks(chunks: Iterable[Chunk]) -> Iterator[CodecTotal]:
    for chunk in chunks:
        yield CodecTotal(codec=chunk.codec, chunks=1, raw_bytes=chunk.raw, stored_bytes=chunk.stored)


def _merged(parts: Iterable[CodecTotal]) -> Totals:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for part in parts:
        known = sums[part.codec]
        known[0] += part.chunks
        known[1] += part.raw_bytes
        known[2] += part.stored_bytes
    return tuple(
        CodecTotal(codec=codec, chunks=chunks, raw_bytes=raw, stored_bytes=stored)
        for codec, (chunks, raw, stored) in sorted(sums.items())
    )
