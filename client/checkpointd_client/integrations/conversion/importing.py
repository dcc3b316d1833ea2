"""Imports another program's checkpoint, part by part. Each part fits into memory and is written like a rank's shard.

The result looks like a checkpoint that N ranks saved, one for each part. Rank 0 has all names and values and leads the commit.
Like any other checkpoint, it can be loaded on any number of ranks.

Invariants
  IMPORT-1  Apart from the buffers that `budget_bytes` allows, one part is in memory at a time.
  IMPORT-2  Nothing is committed unless every part is durable; after an error the written objects are removed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from checkpointd import arguments
from checkpointd.bucket_urls import directory_of
from checkpointd.config import MIB, CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError, StagingError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, boxes_of_range
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import Alias
from checkpointd.layout.keys import STEP_MAX, AttemptId
from checkpointd.other_formats import recognised
from checkpointd.pipeline.announcement import Announcement
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.shard import AttemptInfo, Bytes, Shard, ShardProgress
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.store.base import Store
from checkpointd_client.export.consolidate import run_on_store
from checkpointd_client.integrations.conversion.items import DcpBox, empty_box, laid_out
from checkpointd_client.integrations.conversion.metadata_file import DcpFileRange, SourceTensor
from checkpointd_client.integrations.conversion.side_data import SideData, root_node
from checkpointd_client.lifetime import claim_root
from checkpointd_client.ranks.startup import begin

MEMORY_BYTES = 512 * MIB
MEMORY_BYTES_MIN = 64 * MIB
_INSTEAD = "An import takes a start, so every save of that job would fail: import into a root of its own, or end that job first"


class ElementReader(Protocol):
    """Reads the elements of the other program's tensors."""

    def copy(self, fqn: str, dtype: str, frame: Box, place: DcpFileRange, part: Box, target: Bytes) -> None:
        """Copy `part` into `target`, row-major. `part` lies inside `frame` and is contiguous there; `place` holds `frame`."""
        ...


@dataclass(frozen=True, slots=True)
class _ImportedBox:
    """A piece of a tensor, and the box of the source that contains it."""

    piece: DcpBox
    frame: Box
    place: DcpFileRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportJob:
    """The tensors and values to import. `root` is the tree with all names and values; `memory` in bytes.

    `given`: the directory that the user named. `source`: the directory with the files, which is that one or lies in it.
    """

    given: str
    source: str
    tensors: Sequence[SourceTensor]
    aliases: tuple[Alias, ...] = ()
    root: tree.Node
    reader: ElementReader
    tag: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    save_latest: bool
    memory: int
    on_progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        arguments.whole("step", self.step, least=0, most=STEP_MAX)

    def check_only_reads(self, root: str) -> None:
        """UsageError if an import to `root` would write into what it reads."""
        place, given, source = map(os.path.realpath, (root, self.given, self.source))
        if place == given or os.path.commonpath([place, source]) == source:
            raise UsageError(f"the root {root} is in {self.given}, which an import only reads: give a root outside")

    async def run(self, store: Store) -> tuple[int, int]:
        """Write and commit; returns the bytes of tensors and the number of parts. RootInUseError if a job is alive there."""
        shares = list(_shares(self.tensors, self.memory // 2)) or [[]]
        commit = CommitConfig(on_no_progress="ignore", read_back=False)
        beginner = Beginner(world_size=len(shares), commit_timeout_s=commit.timeout_s, instead=_INSTEAD)
        started = await begin(store, beginner)
        config = PersistConfig(dedup=False, budget_bytes=max(32 * MIB, self.memory // 4))
        attempt = _Import(self, store, config, commit, AttemptId(started.begun.number, 0), shares)
        try:
            await attempt.run()
        finally:
            await started.lease.release()
        return attempt.total, len(shares)


class _Import:
    """The attempt: all parts but the first, each persisted and voted for, then the first, which commits."""

    def __init__(
        self,
        job: ImportJob,
        store: Store,
        config: PersistConfig,
        commit: CommitConfig,
        attempt: AttemptId,
        shares: Sequence[Sequence[_ImportedBox]],
    ) -> None:
        self.total = sum(part.piece.nbytes for share in shares for part in share)
        self._job, self._attempt, self._shares = job, attempt, shares
        self._state = WriterState(store=store, persist=config, commit=commit)
        self._root, self._bare = tree.encode(job.root), tree.encode(root_node(tree.Dict("dict", ()), SideData()))
        self._done = 0

    async def run(self) -> None:
        try:
            check_root = partial(self._state.own_root.check, self._attempt.start)
            await Announcement(self._info(0), self._state.log, self._state.commit, check_root).make()
            for rank in range(1, len(self._shares)):
                await self._persist(rank)
            first = await self._shard(0)
        except BaseException as error:
            await self._lead(_failed(error))
            raise
        await self._lead(first)

    async def _persist(self, rank: int) -> None:
        state, progress = self._state, ShardProgress()
        progress.on_change = lambda: self._tell(progress)
        shard = await self._shard(rank)
        await persist(
            PersistJob(
                store=state.store,
                info=self._info(rank),
                shard=shard,
                config=state.persist,
                rates=state.rates,
                progress=progress,
                stopped=lambda: False,
            )
        )
        self._done += shard.nbytes

    async def _lead(self, first: Shard | CheckpointdError) -> None:
        """Rank 0's part of the attempt. If `first` is an error, the attempt is aborted, which removes its objects."""
        loop, progress = asyncio.get_running_loop(), ShardProgress()
        progress.on_change = lambda: self._tell(progress)
        staged: asyncio.Future[Shard] = loop.create_future()
        if isinstance(first, Shard):
            staged.set_result(first)
        else:
            staged.set_exception(first)
        deadline = loop.time() + self._state.commit.timeout_s
        attempt = Attempt(self._state, self._info(0), deadline=deadline, progress=progress)
        await attempt.run(staged)
        await self._state.tidier.rest()
        if attempt.error is not None and isinstance(first, Shard):
            raise attempt.error

    def _tell(self, progress: ShardProgress) -> None:
        self._job.on_progress(self._done + progress.raw_done, self.total)

    def _info(self, rank: int) -> AttemptInfo:
        job = self._job
        return AttemptInfo(
            tag=job.tag,
            attempt=self._attempt,
            rank=rank,
            world_size=len(self._shares),
            step=job.step,
            n=0,
            save_latest=job.save_latest,
            metrics=tuple(job.metrics.items()),
        )

    async def _shard(self, rank: int) -> Shard:
        """Read the part of `rank`."""
        return await asyncio.get_running_loop().run_in_executor(None, self._filled, rank)

    def _filled(self, rank: int) -> Shard:
        share = self._shares[rank]
        named = [] if rank else self._named({part.piece.fqn for part in share})
        tensors, buffer = laid_out([*(part.piece for part in share), *named])
        for part, tensor in zip(share, tensors, strict=False):
            if not tensor.nbytes:
                continue
            target = buffer[tensor.offset : tensor.offset + tensor.nbytes]
            self._job.reader.copy(tensor.fqn, tensor.dtype, part.frame, part.place, part.piece.box, target)
        if rank:
            return Shard(buffer=buffer, tensors=tensors, tree=self._bare)
        return Shard(buffer=buffer, tensors=tensors, aliases=self._job.aliases, tree=self._root)

    def _named(self, here: set[str]) -> list[DcpBox]:
        """Empty boxes of the tensors that other ranks write, since rank 0 names all. A tensor without dimensions has none."""
        return [empty_box(t.fqn, t.dtype, t.shape) for t in self._job.tensors if t.fqn not in here and t.shape]


def import_at(root: str | os.PathLike[str], job: ImportJob, *, force: bool) -> tuple[str, int, int]:
    """Run `job` at `root`; the URL of the root, the bytes of the tensors, and the number of parts.

    UsageError if the tag exists and `force` is not set or if the root is in the source, RootInUseError if a job is alive there.
    """
    arguments.path("root", root)
    claim_root(root)()  # the start of an import would fence a Checkpointer of this process

    async def act(store: Store) -> tuple[str, int, int]:
        if directory_of(store.url) is not None:
            job.check_only_reads(store.url)
        if not force and job.tag in await root_view.tags(store):
            raise UsageError(f"{store.url} has a {job.tag} already: give another tag, or force")
        return store.url, *await job.run(store)

    return run_on_store(root, act)


def refuse_other(source: str | os.PathLike[str], root: str | os.PathLike[str]) -> None:
    """UsageError with the right command if `source` is a checkpoint of another format than the one that is imported."""
    if (found := recognised(source, os.fspath(root))) is not None:
        raise UsageError(found)


def _failed(error: BaseException) -> CheckpointdError:
    return error if isinstance(error, CheckpointdError) else StagingError(f"the import failed: {error!r}")


def _shares(tensors: Sequence[SourceTensor], nbytes_max: int) -> Iterator[list[_ImportedBox]]:
    """All pieces in the order in which they lie in the files, in lists of at most `nbytes_max` bytes."""
    share: list[_ImportedBox] = []
    size = 0
    for part in _parts(tensors, nbytes_max):
        if share and size + part.piece.nbytes > nbytes_max:
            yield share
            share, size = [], 0
        share.append(part)
        size += part.piece.nbytes
    if share:
        yield share


def _parts(tensors: Sequence[SourceTensor], nbytes_max: int) -> Iterator[_ImportedBox]:
    chunks = [(place, box, tensor) for tensor in tensors for box, place in tensor.chunks]
    for tensor in tensors:
        if not tensor.chunks and tensor.shape:  # no elements, and nothing to read
            yield _ImportedBox(
                DcpBox(tensor.fqn, tensor.dtype, tensor.shape, Box((0,) * len(tensor.shape), tensor.shape)), *_NOWHERE
            )
    for place, frame, tensor in sorted(chunks, key=lambda found: (found[0].file, found[0].offset)):
        for box in _cut(frame, max(1, nbytes_max // ITEM_BYTES[tensor.dtype])):
            yield _ImportedBox(DcpBox(tensor.fqn, tensor.dtype, tensor.shape, box), frame, place)


_NOWHERE = (Box((), ()), DcpFileRange("", 0, 0))


def _cut(frame: Box, count_max: int) -> Iterator[Box]:
    """`frame` in boxes of at most `count_max` elements, each contiguous in `frame`."""
    count = frame.numel()
    row = count // frame.sizes[0] if frame.sizes else 1
    step = count_max - count_max % row if count_max > row else count_max
    for start in range(0, count, step):
        for box in boxes_of_range(frame.sizes, start, min(start + step, count)):
            yield Box(tuple(a + b for a, b in zip(frame.offsets, box.offsets, strict=True)), box.sizes)
