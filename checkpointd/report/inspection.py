"""The content of one checkpoint: tensors, sizes, codecs and values, rank by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import msgspec

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Alias, Chunk, Index, Scope, TensorEntry
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.verify import Damage
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import missing_of
from checkpointd.report.listing import AttemptRow, row_of
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


class TensorBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of one or more tensors. `referred_bytes` is the part of `stored_bytes` that lies in older checkpoints."""

    raw_bytes: int
    stored_bytes: int
    referred_bytes: int
    codecs: Totals


class TensorReport(TensorBytes, frozen=True, kw_only=True):
    """One box of one tensor on one rank; `box` is None if it is the whole tensor."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    scope: Scope


class GlobalReport(TensorBytes, frozen=True, kw_only=True):
    """A tensor that the ranks hold together: its whole shape, and the boxes that ranks stored."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, Box], ...]
    """Each with its rank."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one rank's index, or the damage that makes the index unreadable."""

    rank: int
    tensors: tuple[TensorReport, ...] = ()
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    values: tuple[Value, ...] | None = None
    damage: Damage | None = None


class Inspection(AttemptRow, frozen=True, kw_only=True):
    """The sizes count only the ranks and tensors that were asked for, by default the whole checkpoint. `tensors` has the global
    tensors, put together from all ranks; `ranks` lists their boxes as well.
    """

    root: str
    contents: TensorBytes
    tensors: tuple[GlobalReport, ...]
    ranks: tuple[RankReport, ...]
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
    return Inspection(
        **msgspec.structs.asdict(row_of(checkpoint, await missing_of(store, checkpoint))),
        root=store.url,
        contents=TensorBytes(**_summed(shown)),
        tensors=tuple(_together(reports)),
        ranks=tuple(reports),
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
        **_summed(map(partial(_of_chunk, older), entry.chunks)),
    )


def _together(reports: Iterable[RankReport]) -> Iterator[GlobalReport]:
    """The global tensors of the ranks. If ranks give a tensor different dtypes or shapes, each of them is listed."""
    found: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, TensorReport]]] = defaultdict(list)
    for report in reports:
        for tensor in report.tensors:
            if tensor.scope == "global":
                found[tensor.fqn, tensor.dtype, tensor.shape].append((report.rank, tensor))
    for (fqn, dtype, shape), parts in found.items():
        boxes = tuple((rank, tensor.box or whole(shape)) for rank, tensor in parts)
        yield GlobalReport(fqn=fqn, dtype=dtype, shape=shape, boxes=boxes, **_summed(tensor for _, tensor in parts))


def _of_chunk(older: frozenset[int], chunk: Chunk) -> TensorBytes:
    total = CodecTotal(codec=chunk.codec, chunks=1, raw_bytes=chunk.raw, stored_bytes=chunk.stored)
    referred_bytes = chunk.stored if chunk.object in older else 0
    return TensorBytes(raw_bytes=chunk.raw, stored_bytes=chunk.stored, referred_bytes=referred_bytes, codecs=(total,))


def _summed(parts: Iterable[TensorBytes]) -> dict[str, Any]:
    """The fields of the TensorBytes that `parts` have together."""
    raw = stored = referred = 0
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for part in parts:
        raw, stored, referred = raw + part.raw_bytes, stored + part.stored_bytes, referred + part.referred_bytes
        for total in part.codecs:
            known = sums[total.codec]
            known[0] += total.chunks
            known[1] += total.raw_bytes
            known[2] += total.stored_bytes
    codecs = tuple(
        CodecTotal(codec=codec, chunks=chunks, raw_bytes=of_raw, stored_bytes=of_stored)
        for codec, (chunks, of_raw, of_stored) in sorted(sums.items())
    )
    return {"raw_bytes": raw, "stored_bytes": stored, "referred_bytes": referred, "codecs": codecs}
