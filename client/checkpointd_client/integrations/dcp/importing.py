"""A DCP directory as a checkpoint. Its tensors come in parts that fit into memory, each written by a rank of its own.

A checkpoint of N parts is one that N ranks saved, the first of which had all the names and values and leads the commit. Whoever
loads it does so on any number of ranks, as ever.

Invariants
  I1  Beside what `budget_bytes` allows, one part is in memory at a time.
  I2  Nothing is committed unless every part is durable; an error removes what was written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpointd.config import MIB, CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError, DamagedError, StagingError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, boxes_of_range
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.keys import AttemptId, check_tag, is_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.chunks import Persist
from checkpointd.pipeline.export.sizes import byte_count
from checkpointd.pipeline.report.holder import newest_holder
from checkpointd.pipeline.save import persist
from checkpointd.pipeline.shard import AttemptInfo, Progress, Shard
from checkpointd.store.base import Store
from checkpointd_client.export import run_on_store
from checkpointd_client.integrations.dcp import metadata_file
from checkpointd_client.integrations.dcp.items import Piece, described, image_of, laid_out
from checkpointd_client.integrations.dcp.marks import Marks, root_node
from checkpointd_client.integrations.dcp.metadata_file import Described, Place, SourceTensor
from checkpointd_client.integrations.dcp.naming import step_of
from checkpointd_client.integrations.dcp.objects import NotPlain, node_of
from checkpointd_client.integrations.dcp.source import Directory
from checkpointd_client.lifetime import claim_root
from checkpointd_client.start import begin

MEMORY_BYTES = 512 * MIB
MEMORY_BYTES_MIN = 64 * MIB


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What was imported. `parts`: the ranks that the checkpoint says it was saved by; `pickled`: values that are not plain."""

    root: str
    tag: str
    step: int
    source: str
    tensors: int
    values: int
    bytes: int
    parts: int
    pickled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a tensor, and the box of the source that it lies in."""

    piece: Piece
    frame: Box
    place: Place


def import_dcp(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    step: int | None = None,
    save_latest: bool = True,
    force: bool = False,
    memory: int | str = MEMORY_BYTES,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> Imported:
    """Make checkpoint `tag` below `root` of the DCP directory `source`, which is only read.

    `tag`: None takes the directory's name. `step`: None takes the last number in the tag, 0 without one. About `memory` bytes
    are held at once, whatever the size of the tensors. `force`: also where the tag exists, or it cannot be told whether a job
    runs at the root, which would be fenced. `on_progress` is told bytes written and their total.

    Raises NotFoundError, FormatError where the directory is damaged or its metadata names anything but DCP's own classes,
    UsageError, StoreError.
    """
    held = byte_count(memory, "memory")
    if held < MEMORY_BYTES_MIN:
        raise UsageError(f"memory is {held} bytes; at least {MEMORY_BYTES_MIN} are needed")
    path = Path(source).absolute()
    tag = _tag_of(path) if tag is None else check_tag(tag)
    found = metadata_file.read(path)
    claim_root(root)()  # the epoch of an import would fence a Checkpointer of this process
    job = _Job(found, path, tag, step_of(tag) if step is None else step, save_latest, held, on_progress)
    return run_on_store(root, lambda store: job.run(store, force=force))


def _tag_of(path: Path) -> str:
    if not is_tag(path.name):
        raise UsageError(f"{path.name!r} cannot be a tag: name one")
    return path.name


@dataclass(frozen=True, slots=True)
class _Job:
    found: Described
    path: Path
    tag: str
    step: int
    save_latest: bool
    memory: int
    on_progress: Callable[[int, int], None]

    async def run(self, store: Store, *, force: bool) -> Imported:
        await _check_free(store, self.tag, force=force)
        shares = list(_shares(self.found.tensors, self.memory // 2)) or [[]]
        with Directory(self.path) as directory:
            root, pickled = _tree(self.found, directory)
            commit = CommitConfig(on_stale="ignore")
            begun = await begin(store, len(shares), commit)
            config = PersistConfig(dedup=False, budget_bytes=max(32 * MIB, self.memory // 4))
            attempt = _Import(self, store, config, commit, AttemptId(begun.number, 0), directory, shares, tree.encode(root))
            await attempt.run()
        return Imported(
            root=store.url,
            tag=self.tag,
            step=self.step,
            source=str(self.path),
            tensors=len(self.found.tensors),
            values=len(self.found.objects),
            bytes=attempt.total,
            parts=len(shares),
            pickled=pickled,
        )


class _Import:
    """The attempt: all parts but the first, each persisted and voted for, then the first, which commits."""

    def __init__(
        self,
        job: _Job,
        store: Store,
        config: PersistConfig,
        commit: CommitConfig,
        attempt: AttemptId,
        directory: Directory,
        shares: Sequence[Sequence[_Part]],
        root: bytes,
    ) -> None:
        self.total = sum(part.piece.nbytes for share in shares for part in share)
        self._job, self._attempt, self._directory, self._shares = job, attempt, directory, shares
        self._state = WriterState(store=store, persist=config, commit=commit)
        self._root, self._bare = root, tree.encode(root_node(tree.Dict("dict", ()), Marks()))
        self._done = 0

    async def run(self) -> None:
        try:
            for rank in range(1, len(self._shares)):
                await self._persist(rank)
            first = await self._shard(0)
        except BaseException as error:
            await self._lead(_failed(error))
            raise
        await self._lead(first)

    async def _persist(self, rank: int) -> None:
        state, progress = self._state, Progress()
        progress.on_change = lambda: self._tell(progress)
        shard = await self._shard(rank)
        await persist(
            Persist(
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
        """Rank 0's part of the attempt; where there is none, for the error that prevented one, the abort, which tidies up."""
        loop, progress = asyncio.get_running_loop(), Progress()
        progress.on_change = lambda: self._tell(progress)
        staged: asyncio.Future[Shard] = loop.create_future()
        if isinstance(first, Shard):
            staged.set_result(first)
        else:
            staged.set_exception(first)
        deadline = loop.time() + self._state.commit.timeout_s
        attempt = Attempt(self._state, self._info(0), deadline=deadline, progress=progress)
        await attempt.run(staged)
        if attempt.error is not None and isinstance(first, Shard):
            raise attempt.error

    def _tell(self, progress: Progress) -> None:
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
        )

    async def _shard(self, rank: int) -> Shard:
        """The part of `rank`, read."""
        return await asyncio.get_running_loop().run_in_executor(None, self._filled, rank)

    def _filled(self, rank: int) -> Shard:
        share = self._shares[rank]
        named = [] if rank else self._named({part.piece.fqn for part in share})
        tensors, nbytes = laid_out([*(part.piece for part in share), *named])
        image = image_of(nbytes)
        for part, tensor in zip(share, tensors, strict=False):
            if not tensor.nbytes:
                continue
            target = image[tensor.offset : tensor.offset + tensor.nbytes]
            self._directory.copy(tensor.fqn, tensor.dtype, part.frame, part.place, part.piece.box, target)
        return Shard(image=image, tensors=tensors, tree=self._bare if rank else self._root)

    def _named(self, here: set[str]) -> list[Piece]:
        """Empty boxes of what other ranks write, since rank 0 has the names of all. A tensor without dimensions has none."""
        others = (t for t in self._job.found.tensors if t.fqn not in here and t.shape)
        return [Piece(t.fqn, t.dtype, t.shape, Box((0,) * len(t.shape), (0,) * len(t.shape))) for t in others]


def _failed(error: BaseException) -> CheckpointdError:
    return error if isinstance(error, CheckpointdError) else StagingError(f"the import failed: {error!r}")


async def _check_free(store: Store, tag: str, *, force: bool) -> None:
    """UsageError where the tag exists, or a job runs at the root: the epoch of an import would fence it."""
    if not force and tag in await catalog.tags(store):
        raise UsageError(f"{store.url} has a {tag} already: give another tag, or force")
    try:
        holder = await newest_holder(store)
    except DamagedError as error:
        if not force:
            raise UsageError(f"who runs this root cannot be read ({error}): see that no job does, then force") from error
        return
    if holder is None or holder.life == "ended" or holder.pid == os.getpid():
        return
    if holder.life == "running" or (holder.is_job and not force):
        sure = "still lives" if holder.life == "running" else "cannot be checked from here"
        raise UsageError(
            f"{holder} has run epoch {holder.epoch} here since {holder.since} and {sure}: an import would fence it, and every "
            "save of it would fail; import into a root of its own, or end it first"
            + ("" if holder.life == "running" else ", then force")
        )


def _shares(tensors: Sequence[SourceTensor], nbytes_max: int) -> Iterator[list[_Part]]:
    """All pieces in the order in which they lie in the files, as many at a time as have at most `nbytes_max` bytes."""
    share: list[_Part] = []
    size = 0
    for part in _parts(tensors, nbytes_max):
        if share and size + part.piece.nbytes > nbytes_max:
            yield share
            share, size = [], 0
        share.append(part)
        size += part.piece.nbytes
    if share:
        yield share


def _parts(tensors: Sequence[SourceTensor], nbytes_max: int) -> Iterator[_Part]:
    chunks = [(place, box, tensor) for tensor in tensors for box, place in tensor.chunks]
    for tensor in tensors:
        if not tensor.chunks and tensor.shape:  # no elements, and nothing to read
            yield _Part(Piece(tensor.fqn, tensor.dtype, tensor.shape, Box((0,) * len(tensor.shape), tensor.shape)), *_NOWHERE)
    for place, frame, tensor in sorted(chunks, key=lambda found: (found[0].file, found[0].offset)):
        for box in _cut(frame, max(1, nbytes_max // ITEM_BYTES[tensor.dtype])):
            yield _Part(Piece(tensor.fqn, tensor.dtype, tensor.shape, box), frame, place)


_NOWHERE = (Box((), ()), Place("", 0, 0))


def _cut(frame: Box, count_max: int) -> Iterator[Box]:
    """`frame` in boxes of at most `count_max` elements, each a row of the elements of `frame`."""
    count = frame.numel()
    row = count // frame.sizes[0] if frame.sizes else 1
    step = count_max - count_max % row if count_max > row else count_max
    for start in range(0, count, step):
        for box in boxes_of_range(frame.sizes, start, min(start + step, count)):
            yield Box(tuple(a + b for a, b in zip(frame.offsets, box.offsets, strict=True)), box.sizes)


def _tree(found: Described, directory: Directory) -> tuple[tree.Node, tuple[str, ...]]:
    """The tree with all names and values, and the names of those that are no plain ones."""
    nodes: dict[str, tree.Node] = {tensor.fqn: tree.Tensor(tensor.fqn) for tensor in found.tensors}
    objects: dict[str, bytes] = {}
    for name, place in found.objects.items():
        data = directory.object(name, place)
        try:
            nodes[name] = node_of(data, name)
        except NotPlain:
            objects[name] = data
    return described(nodes, objects, found.paths), tuple(objects)
