"""The checkpoint view: the tensors of a checkpoint, put together from the indexes of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, FormatError
from checkpointd.layout.indexes import Index, TensorEntry
from checkpointd.layout.joint_plan import JointPlan, decode_joint_plan, joint_plan_ref
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import LISTING_BYTES_MAX
from checkpointd.pipeline.read.index import entries_by_fqn, read_index
from checkpointd.pipeline.root.ballots import joint_plan_key
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a global tensor as one rank stored it."""

    rank: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor that the ranks hold together; `parts` are its boxes by rank, with empty ones.

    A box that several ranks stored is listed once, for the first of them, since a commit means that their bytes are equal.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredBox, ...]


@dataclass(frozen=True)
class CheckpointView:
    """The indexes of a checkpoint by rank: of all ranks, or of those from which a load needs something."""

    checkpoint: LoggedAttempt
    indexes: Mapping[int, Index]

    @property
    def is_whole(self) -> bool:
        """Whether it has the indexes of all ranks."""
        return len(self.indexes) == self.checkpoint.commit.world_size

    @cached_property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """The tensors of scope global by FQN. Raises FormatError if ranks give one different dtypes or shapes."""
        return global_tensors(self.indexes)

    def own(self, rank: int) -> Mapping[str, TensorEntry]:
        """The tensors of scope rank that `rank` stored, by FQN. Raises FormatError if one is not stored whole."""
        if rank not in self._own:
            index = self.indexes[rank]
            kept = tuple(entry for entry in index.tensors if entry.scope == "rank")
            self._own[rank] = entries_by_fqn(msgspec.structs.replace(index, tensors=kept))
        return self._own[rank]

    @cached_property
    def _own(self) -> dict[int, dict[str, TensorEntry]]:
        return {}


async def read_view(store: Store, checkpoint: LoggedAttempt, config: LoadConfig) -> CheckpointView:
    """Read the indexes of all ranks, `config.reads` at once, and verify each along the chain of digests.

    Raises DamagedError if one does not agree with its digest, or if ranks disagree on a tensor.
    """
    return await widened(store, CheckpointView(checkpoint, {}), range(checkpoint.commit.world_size), config)


async def widened(store: Store, view: CheckpointView, ranks: Iterable[int], config: LoadConfig) -> CheckpointView:
    """`view` with the indexes of `ranks`, too. Reads those that it lacks, as `read_view` does."""
    found = dict(view.indexes)

    async def read(rank: int) -> None:
        found[rank] = await read_index(store, view.checkpoint, rank)

    await run_workers([partial(read, rank) for rank in sorted(set(ranks) - found.keys())], config.reads)
    world = CheckpointView(view.checkpoint, dict(sorted(found.items())))
    _ = world.tensors
    return world


def global_tensors(indexes: Mapping[int, Index]) -> dict[str, GlobalTensor]:
    """The tensors of scope global of `indexes`, by FQN. Raises FormatError if ranks give one different dtypes or shapes."""
    parts: dict[str, list[StoredBox]] = {}
    for rank, index in indexes.items():
        for entry in index.tensors:
            if entry.scope == "global":
                parts.setdefault(entry.fqn, []).append(StoredBox(rank, entry))
    return {fqn: _tensor(fqn, found) for fqn, found in parts.items()}


def _tensor(fqn: str, parts: list[StoredBox]) -> GlobalTensor:
    first = parts[0].entry
    for part in parts:
        entry = part.entry
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise FormatError(
                f"{fqn} is {first.dtype}{list(first.shape)} on rank {parts[0].rank} "
                f"and {entry.dtype}{list(entry.shape)} on rank {part.rank}",
                fqn=fqn,
                rank=part.rank,
            )
    once: dict[object, StoredBox] = {}
    for number, part in enumerate(parts):
        once.setdefault(part.entry.box if part.entry.chunks else number, part)
    return GlobalTensor(fqn, first.dtype, first.shape, tuple(once.values()))


async def checked_joint_plan(store: Store, checkpoint: LoggedAttempt) -> JointPlan:
    """The joint plan that the commit of `checkpoint` names. Raises DamagedError or NotFoundError if it is not there whole."""
    key = joint_plan_key(checkpoint.commit)
    data = await store.get(key, size_max=LISTING_BYTES_MAX)
    if joint_plan_ref(data) != checkpoint.commit.plan:
        raise DamagedError(f"{key} is damaged: its bytes are not those that the commit names", key=key)
    plan = decode_joint_plan(data, key)
    if plan.world_size != checkpoint.commit.world_size:
        raise DamagedError(f"{key} is of {plan.world_size} ranks, not {checkpoint.commit.world_size}", key=key)
    return plan
