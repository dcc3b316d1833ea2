"""Checkpoints for tests, written by the real pipelines with all ranks in one loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from checkpointd.codec import Compression
from checkpointd.commit.branches import base_in
from checkpointd.commit.decide import OnNoProgress
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig, PersistConfig
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Alias, Scope
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import AnnounceRecord, LoggedAttempt
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.layout.regions import slices
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.gc.collect import remove, sweep
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.outcome.recover import Recovery, decided_now, make_again, recover
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import TENSOR_ALIGNMENT, AttemptInfo, Bytes, Shard, ShardProgress, ShardTensor, finite
from checkpointd.pipeline.write.dedup import Bases
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.pipeline.write.vote import vote_no
from checkpointd.store.base import Store

Arrays = Mapping[str, NDArray[np.generic]]
Values = Mapping[str, tree.Node]

DEADLINE_S = 60.0
NO_VALUES: Values = MappingProxyType({})


def rank_arrays(rank: int) -> Arrays:
    """A small state that differs from rank to rank: floats, integers, flags, a 0-d and an empty tensor."""
    random = np.random.default_rng(rank)
    return {
        "model.weight": random.normal(size=(64, 48)).astype(np.float32),
        "model.half": random.normal(size=(33,)).astype(np.float16),
        "optimizer.steps": np.arange(rank, rank + 7, dtype=np.int64),
        "optimizer.flags": random.random(5) < 0.5,
        "optimizer.step": np.array(10 + rank, dtype=np.int64),
        "model.empty": np.zeros((0, 4), dtype=np.float32),
    }


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One box of a tensor as a rank stores it. `array` holds the box; `dtype` is torch's name, since numpy lacks some."""

    fqn: str
    array: NDArray[Any]
    shape: tuple[int, ...]
    box: Box
    dtype: str
    scope: Scope = "rank"

    @staticmethod
    def own(fqn: str, array: NDArray[Any], dtype: str = "") -> Piece:
        """A tensor that is the rank's own."""
        return Piece(fqn=fqn, array=array, shape=array.shape, box=whole(array.shape), dtype=dtype or array.dtype.name)

    @staticmethod
    def part(fqn: str, tensor: NDArray[Any], box: Box, dtype: str = "") -> Piece:
        """The `box` of a global tensor."""
        cut = tensor[slices(whole(tensor.shape), box)]
        return Piece(fqn=fqn, array=cut, shape=tensor.shape, box=box, dtype=dtype or tensor.dtype.name, scope="global")


def make_shard(
    arrays: Arrays,
    values: Values = NO_VALUES,
    *,
    aliases: tuple[Alias, ...] = (),
    excluded: tuple[str, ...] = (),
    pieces: Sequence[Piece] = (),
) -> Shard:
    """`arrays`, the rank's own, and `pieces` as a snapshot: row-major at 64-byte offsets of a page-aligned buffer."""
    offset, tensors, parts = 0, [], []
    for piece in [*(Piece.own(fqn, array) for fqn, array in arrays.items()), *pieces]:
        flat, item = np.ascontiguousarray(piece.array).reshape(-1).view(np.uint8), piece.array.itemsize
        tensors.append(ShardTensor(piece.fqn, piece.dtype, piece.shape, piece.box, piece.scope, offset, flat.nbytes, item))
        parts.append((offset, flat))
        offset += -(-flat.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    buffer = page_buffer(page_up(offset))
    for at, flat in parts:
        buffer[at : at + flat.nbytes] = flat
    leaves = {fqn: tree.Tensor(fqn) for fqn in (*(t.fqn for t in tensors), *(alias.fqn for alias in aliases))}
    beside = ((name, node) for name, node in values.items() if name != "client_state")
    state = values["state"] if "state" in values else tree.Dict("dict", (*leaves.items(), *beside))
    root = tree.Dict("dict", (("state", state), ("client_state", values.get("client_state"))))
    return Shard(buffer=buffer, tensors=tuple(tensors), aliases=aliases, excluded=excluded, tree=tree.encode(root))


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save of all ranks at a store. `failing` ranks raise while staging, `absent` ones never call save(). `inline` ones say
    that their trainers persisted their parts, and why.

    `run_all` settles the races: failing ranks raise, and the deadline for absent ones passes, once the others have voted.
    """

    store: Store
    tag: str = "global_step1"
    step: int = 1
    world_size: int = 2
    start: int
    k: int = 0
    n: int = 0
    save_latest: bool = True
    shard_of: Callable[[int], Shard]
    compression: Compression = "none"
    chunk_bytes: int = 4096
    dedup: bool = False
    full_every: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)
    on_no_progress: OnNoProgress = "warn"
    timeout_s: float = DEADLINE_S
    failing: Mapping[int, Exception] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    inline: Mapping[int, Inline] = field(default_factory=dict)

    @property
    def persist(self) -> PersistConfig:
        budget = max(1 << 20, 2 * 8192 + 4 * self.chunk_bytes)
        return PersistConfig(
            compression=self.compression,
            chunk_bytes=self.chunk_bytes,
            block_bytes=8192,
            budget_bytes=budget,
            dedup=self.dedup,
            full_every=self.full_every,
        )

    def info(self, rank: int) -> AttemptInfo:
        return AttemptInfo(
            tag=self.tag,
            attempt=AttemptId(self.start, self.k),
            rank=rank,
            world_size=self.world_size,
            step=self.step,
            n=self.n,
            save_latest=self.save_latest,
            metrics=finite(self.metrics),
            inline=self.inline.get(rank),
        )

    async def run(self, rank: int) -> Attempt:
        """The whole attempt of one rank, racing whatever others the caller runs."""
        attempt = self._attempt(rank)
        await attempt.run(self._staged(rank))
        return attempt

    async def run_all(self) -> list[Attempt]:
        """The attempts of all present ranks, to their ends."""
        present = [rank for rank in range(self.world_size) if rank not in self.absent]
        voted, waited_for = asyncio.Event(), set(present) - set(self.failing)

        def on_phase(rank: int, phase: Phase) -> None:
            if phase is Phase.PREPARED or phase in FINAL:
                waited_for.discard(rank)
            if not waited_for:
                voted.set()

        if not waited_for:
            voted.set()
        attempts = {rank: self._attempt(rank, partial(on_phase, rank)) for rank in present}
        works = [attempt.run(self._staged(rank, voted)) for rank, attempt in attempts.items()]
        await asyncio.gather(self._expire(list(attempts.values()), voted), *works)
        for attempt in attempts.values():
            await attempt._state.tidier.rest()
        return list(attempts.values())

    def _attempt(self, rank: int, on_phase: Callable[[Phase], None] = lambda _: None) -> Attempt:
        commit = CommitConfig(
            timeout_s=self.timeout_s,
            poll_min_s=0.001,
            poll_max_s=0.01,
            retention=self.retention,
            on_no_progress=self.on_no_progress,
            read_back=False,
        )
        state = WriterState(store=self.store, persist=self.persist, commit=commit)
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        return Attempt(state, self.info(rank), deadline=deadline, on_phase=on_phase)

    async def _staged(self, rank: int, voted: asyncio.Event | None = None) -> Shard:
        if rank not in self.failing:
            return self.shard_of(rank)
        if voted is not None:
            await voted.wait()
        raise self.failing[rank]

    async def _expire(self, attempts: list[Attempt], voted: asyncio.Event) -> None:
        if self.absent:
            await voted.wait()
            for attempt in attempts:
                attempt._deadline = asyncio.get_running_loop().time()

    async def announce(self) -> None:
        """Announce the attempt, as its coordinator does first of all."""
        log = RootLog.of(self.store)
        base = base_in(await log.look()) if self.dedup or self.full_every else ""
        refused = await log.add(AnnounceRecord(attempt=self.info(0).prefix, n=self.n, step=self.step, base=base))
        assert not refused, refused

    async def vote(self, rank: int) -> None:
        """Persist and vote, and nothing after that: what a rank leaves that dies then."""
        await self.announce()
        if rank in self.failing:
            error = self.failing[rank]
            report = ErrorReport(code=type(error).__name__, message=str(error), phase="staging")
            await vote_no(self.store, self.info(rank), report)
            return
        job = PersistJob(
            store=self.store,
            info=self.info(rank),
            shard=self.shard_of(rank),
            config=self.persist,
            rates=Rates(),
            progress=ShardProgress(),
            stopped=lambda: False,
            base=await Bases(self.store).newest(self.info(rank)),
        )
        await persist(job)


async def begin_start(store: Store, world_size: int = 2) -> int:
    """Take the next start, as rank 0 of a starting job does."""
    return (await starts.take(store, world_size)).start


async def restart(store: Store, *spared: str, world_size: int = 2) -> Recovery:
    """What the next start of the job does, which spares these attempts (`<tag>/<attempt>`)."""
    log = RootLog.of(store)
    before = await log.look(settles=True)
    if log.fault:
        before = await make_again(store, before, ())
    decided = await decided_now(store, before, spared)
    begun = msgspec.structs.replace(starts.new(store, before.start + 1, world_size), spared=spared)
    assert await starts.begin(store, begun, decided=decided) is not None
    return await recover(store, before)


async def delete_checkpoint(store: Store, *tags: str) -> None:
    """What a person's deletion of these tags does."""
    assert await remove(store, {"the test": [(await root_view.find(store, tag)).prefix for tag in tags]}) == ""
    await sweep(store)
    await move_latest(RootLog.of(store))


async def collect(store: Store, rules: Retention) -> list[str]:
    """What `gc` does. Returns the tags that are checkpoints no more."""
    before = await root_view.checkpoints(store)
    await retire(store, await attempts_at(store), rules)
    after = {one.prefix for one in await root_view.checkpoints(store)}
    return [one.tag for one in reversed(before) if one.prefix not in after]


async def plan_save(
    store: Store,
    *,
    tag: str = "global_step1",
    step: int | None = None,
    world_size: int = 2,
    start: int | None = None,
    tensors: Callable[[int], Arrays] = rank_arrays,
    pieces: Callable[[int], Sequence[Piece]] = lambda _: (),
    values: Values = NO_VALUES,
    aliases: tuple[Alias, ...] = (),
    excluded: tuple[str, ...] = (),
    **others: object,
) -> Save:
    """A Save in `start` (the newest by default, begun where there is none); `step` is read from a tag like global_step5."""
    current = start or await starts.newest(store) or await begin_start(store, world_size)
    while await starts.newest(store) < current:
        await begin_start(store, world_size)
    digits = tag.removeprefix("global_step")
    step = step if step is not None else int(digits) if digits.isdecimal() else 0
    save = Save(
        store=store,
        tag=tag,
        step=step,
        world_size=world_size,
        start=current,
        n=step,
        shard_of=lambda rank: make_shard(tensors(rank), values, aliases=aliases, excluded=excluded, pieces=pieces(rank)),
    )
    return replace(save, **others)  # type: ignore[arg-type]  # the fields of Save, named by the test


async def save_checkpoint(store: Store, **options: object) -> list[Attempt]:
    """Save on all ranks at once; every present rank's finished attempt. Options: those of `plan_save` and fields of Save."""
    save = await plan_save(store, **options)  # type: ignore[arg-type]  # named by the test
    return await save.run_all()


async def leave_in_doubt(store: Store, *, voting: tuple[int, ...] = (0, 1), **options: object) -> Save:
    """An announcement, votes of the ranks `voting`, one after another, and no decision: what a killed job leaves."""
    save = await plan_save(store, **options)  # type: ignore[arg-type]  # named by the test
    await save.announce()
    for rank in voting:
        await save.vote(rank)
    return save


async def load_arrays(store: Store, tag: str, rank: int) -> dict[str, bytes]:
    """Every tensor of one rank as its raw bytes, read and verified by the real loader."""
    checkpoint = await root_view.find(store, tag)
    index = await read_index(store, checkpoint, rank)
    found = {t.fqn: bytearray(sum(c.raw for c in t.chunks)) for t in index.tensors}

    def sink(fqn: str) -> Callable[[int, Bytes], None]:
        def take(start: int, raw: Bytes) -> None:
            found[fqn][start : start + raw.nbytes] = raw.tobytes()

        return take

    damage = await read_tensors(store, checkpoint.prefix, index, {fqn: sink(fqn) for fqn in found}, LoadConfig())
    if damage:
        raise damage[0]
    return {fqn: bytes(data) for fqn, data in found.items()}


def phases(attempts: list[Attempt]) -> list[Phase]:
    return [attempt.phase for attempt in attempts]


def objects(folder: Path, suffix: str) -> list[Path]:
    """The files below `folder` whose names end in `suffix`, sorted."""
    return sorted(folder.rglob(f"*{suffix}"))


def break_file(path: Path, fault: str) -> None:
    """Damage one object: `flip` a bit of a byte in its first half, `truncate` it to half its size, or `remove` it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.unlink()
    if fault != "remove":
        path.write_bytes(data if fault == "flip" else data[: len(data) // 2])


class HeldPersist:
    """Holds every persist until `go` is set, so that a test can look at saves in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        persist = attempt_module.persist

        async def held(job: PersistJob) -> object:
            while not self.go.is_set():
                await asyncio.sleep(0.005)
            return await persist(job)

        monkeypatch.setattr(attempt_module, "persist", held)


async def attempts_at(store: Store, tag: str = "") -> list[LoggedAttempt]:
    """The attempts in the log of `store`, or those of `tag`, oldest first."""
    state = await root_view.state_of(store)
    return root_view.attempts_of(state, tag) if tag else [*state.attempts.values()]
