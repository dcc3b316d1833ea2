"""The store as the source of a load. (The other source is the sidecar's memory: `memory_source.py`.)"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch

from checkpointd.config import LoadConfig, Ranks
from checkpointd.errors import DamagedError, MismatchError, NotFoundError
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Index
from checkpointd.layout.joint_plan import JointPlan
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, checked_joint_plan, widened
from checkpointd.pipeline.read.load import read_boxes, read_tensors
from checkpointd.pipeline.read.plan import BoxRequest, BoxSink, Sink, parts_of, unheld
from checkpointd.pipeline.read.shared_reads import Sharing
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore
from checkpointd_client.capture.dtypes import DTYPES, empty
from checkpointd_client.ranks.reading_circle import RankSharing
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.content import RankContent, check_contexts, merged_content, own_content
from checkpointd_client.restore.plan import LoadOptions, Restoration, prepare
from checkpointd_client.restore.sinks import box_sink, sinks_for
from checkpointd_client.restore.target_chooser import TargetChooser
from checkpointd_client.restore.uploads import Uploads

T = TypeVar("T")
log = logging.getLogger("checkpointd")


async def joint_plan_of(store: Store, checkpoint: LoggedAttempt) -> JointPlan | None:
    """The joint plan of `checkpoint`; None if it has none, or if it is damaged: then a load reads all indexes."""
    if checkpoint.commit.plan is None:
        return None
    try:
        return await checked_joint_plan(store, checkpoint)
    except (DamagedError, NotFoundError) as error:
        log.error("%s: all indexes are read instead, as its joint plan cannot be used: %s", checkpoint.prefix, error)
        return None


class CandidateSource(Protocol):
    """One candidate as one rank sees it."""

    @property
    def tag(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> Literal["store", "memory", "spool"]: ...

    def content(self) -> RankContent:
        """The content for this rank."""
        ...

    def more(self) -> RankContent | None:
        """The content for this rank and the content that only other ranks saved; None if that is no more."""
        ...

    def has_elsewhere(self, places: Sequence[str], content: RankContent) -> bool:
        """Whether another rank saved something right below one of `places`, and this rank nothing."""
        ...

    def equal(self, one: str, two: str, content: RankContent) -> bool:
        """Whether these two tensors, of one dtype and shape, are the same bit for bit; the same answer on every rank."""
        ...

    def locate(self, targets: Sequence[Target], content: RankContent) -> None:
        """Find out where `targets` are without reading them. Raise an error if they are known not to be there, or
        MismatchError as `check_contexts` does.
        """
        ...

    def verify(self, targets: Sequence[Target], content: RankContent) -> None:
        """Raise an error if the stored bytes of `targets` are wrong. Reads all of them, and changes nothing."""
        ...

    def fill(self, targets: Sequence[Target], content: RankContent) -> None:
        """Read `targets` in and verify them. DamagedError if bytes are wrong, which then may be in the targets; UnreadableError
        if reading fails.
        """
        ...


def prepared(
    source: CandidateSource,
    state: MutableMapping[str, Any] | TargetChooser,
    content: RankContent,
    options: LoadOptions,
    *,
    part: Callable[[RankContent], RankContent] = lambda content: content,
    answers: HandedOutStates | None = None,
) -> tuple[RankContent, Restoration]:
    """Match the content that this rank saved, and if that is not enough, the content of all ranks. Raises as `prepare` does.

    `content`: that of this rank. `part` reduces the content of all ranks to the wanted part. `answers`: as for `prepare`.
    """
    kept = answers or HandedOutStates()

    def match(content: RankContent) -> Restoration:
        same = partial(source.equal, content=content)
        return uncollected(lambda: prepare(state, content, options, equal=same, answers=kept))

    try:
        restoration = match(content)
        if not restoration.missing and not source.has_elsewhere(restoration.stateless, content):
            return content, restoration
    except MismatchError:
        more = source.more()
        if more is None:
            raise
    else:
        more = source.more()
        if more is None:
            return content, restoration
    more = part(more)
    return more, match(more)


Prints = Mapping[Box, tuple[tuple[int, bytes], ...]]
"""The boxes of a stored tensor that have elements, each with the bytes and digests of its chunks."""


def same_prints(one: Prints, two: Prints) -> bool | None:
    """Whether two tensors have the same digests; None if they were cut into different chunks."""
    if {box: [raw for raw, _ in chunks] for box, chunks in one.items()} != {
        box: [raw for raw, _ in chunks] for box, chunks in two.items()
    }:
        return None
    return one == two


def scratch(fqns: Iterable[str], content: RankContent) -> list[Target]:
    """New memory for whole tensors."""
    entries = ((fqn, *content.entries[fqn]) for fqn in fqns)
    return [Target(fqn, empty(shape, DTYPES[dtype], torch.device("cpu"))) for fqn, dtype, shape in entries]


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one dtype hold the same bits."""
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def stands_below(places: Sequence[str], content: RankContent) -> bool:
    """Whether a tensor is stored right below one of `places`."""
    return bool(places) and not {fqn.rpartition(".")[0] for fqn in content.entries}.isdisjoint(places)


def wants(targets: Iterable[Target], content: RankContent, fill: Uploads | None) -> list[BoxRequest]:
    """The boxes to read, with sinks that use the uploads of `fill`; without it, to verify."""

    def sink(target: Target, box: Box, view: torch.Tensor) -> BoxSink | None:
        return None if fill is None else box_sink(view, box, target.fqn, content.entries[target.fqn][0], fill)

    return [content.request(target.fqn, box, sink(target, box, view)) for target in targets for box, view in target.boxes()]


@dataclass(slots=True)
class StoredSource:
    """A checkpoint in the store, with as many of its indexes as this rank needs.

    A failed read is tried again for up to `config.retry_s`: once for everything before the filling, and once for the filling.
    `on_failure` is called on the writer's thread at the first failure.
    """

    store: Store
    writer: WriterThread
    config: LoadConfig
    timeout_s: float
    ranks: Ranks
    checkpoint: LoggedAttempt
    on_failure: Callable[[], None] = lambda: None
    on_absence: Callable[[], Awaitable[None]] | None = None
    """Called when an object is not there. If it raises, the read ends with that error."""
    kind: Literal["store", "memory", "spool"] = "store"
    sharing: RankSharing | None = None
    """Set if ranks that read the same share the reading when they fill."""
    known: CheckpointView | None = None
    """All its indexes, if they were read before."""
    _index: Index | None = None
    """This rank's index, if it shares no tensor with other ranks."""
    _plan: JointPlan | None = None
    """Tells which indexes this rank needs, so that it need not read all."""
    _world: CheckpointView = field(init=False)
    """The indexes that this rank needs."""
    _patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self._patience = self._new_patience()
        if self.known is not None:
            self._world = self.known
            return
        self._world = CheckpointView(self.checkpoint, {})
        if not self._same_world:
            self._read_plan()
            return
        rank = self.ranks.rank
        self._widen([rank])
        if all(entry.scope == "rank" for entry in self._world.indexes[rank].tensors):
            self._index = self._world.indexes[rank]
        elif not self._world.is_whole:
            self._read_plan()

    def _read_plan(self) -> None:
        """Read the joint plan, or all indexes if there is none."""
        self._plan = self._read(lambda store: joint_plan_of(store, self.checkpoint))
        if self._plan is None:
            self._whole_world()

    @property
    def tag(self) -> str:
        return self.checkpoint.tag

    @property
    def step(self) -> int:
        return self.checkpoint.commit.step

    @property
    def _same_world(self) -> bool:
        return self.checkpoint.commit.world_size == self.ranks.world_size

    def content(self) -> RankContent:
        if self._same_world:
            return uncollected(lambda: own_content(self._world, self.ranks.rank, self._plan))
        return self._merged(keep=None, alone=self.ranks.world_size == 1)

    def more(self) -> RankContent | None:
        if not self._same_world or self.ranks.world_size == 1:
            return None
        self._index = None  # layers of another rank may have moved here
        return self._merged(keep=self.ranks.rank, alone=False)

    def _merged(self, *, keep: int | None, alone: bool) -> RankContent:
        """The content of all ranks, from the index of one of each set of twins."""
        if self._plan is None:
            self._whole_world()
        else:
            self._widen(self._plan.twins)
        return uncollected(lambda: merged_content(self._world, keep=keep, alone=alone, plan=self._plan))

    def _whole_world(self) -> CheckpointView:
        """The view with the indexes of all ranks."""
        self._widen(range(self.checkpoint.commit.world_size))
        return self._world

    def _widen(self, ranks: Iterable[int]) -> None:
        """Read the indexes of `ranks` that were not read before."""
        if missing := set(ranks) - self._world.indexes.keys():
            self._world = self._read(lambda store: widened(store, self._world, missing, self.config))

    def _widen_for(self, found: list[BoxRequest]) -> None:
        """Read the indexes of the ranks that stored parts of `found`. Of tensors that the plan does not name, nobody did."""
        if (plan := self._plan) is not None:
            named = [want for want in unheld(self._world, found) if want.fqn in plan.tensors]
            self._widen({rank for want in named for rank in plan.ranks_of(want.fqn, want.box)})

    def has_elsewhere(self, places: Sequence[str], content: RankContent) -> bool:
        return stands_below(places, content)

    def equal(self, one: str, two: str, content: RankContent) -> bool:
        if not {one, two} <= content.owners.keys():
            self._whole_world()  # ranks that compared only the parts that they know might decide differently
        known = same_prints(self._prints(one, content), self._prints(two, content))
        if known is not None:
            return known
        both = scratch((one, two), content)
        damage = self._fill(both, content)
        if damage:
            raise damage[0]
        return same_bits(both[0].tensor, both[1].tensor)

    def _prints(self, fqn: str, content: RankContent) -> Prints:
        rank, stored = content.owners.get(fqn), content.stored_as.get(fqn, fqn)
        entries = [p.entry for p in self._world.tensors[fqn].parts] if rank is None else [self._world.own(rank)[stored]]
        return {entry.box: tuple((c.raw, c.digest) for c in entry.chunks) for entry in entries if entry.box.numel()}

    def locate(self, targets: Sequence[Target], content: RankContent) -> None:
        """Read the indexes of the ranks that stored `targets`. What these do not name, `verify` and `fill` do."""
        found = wants(targets, content, None)
        if self._plan is not None:
            self._widen_for(found)
        uncollected(lambda: check_contexts(content, found, self._givers))

    def _givers(self, want: BoxRequest) -> list[tuple[int, bytes]]:
        return [(part.rank, self._world.indexes[part.rank].tree) for part in parts_of(self._world, want)]

    def verify(self, targets: Sequence[Target], content: RankContent) -> None:
        damage = self._read_targets(targets, content, None)
        if damage:
            raise damage[0]

    def fill(self, targets: Sequence[Target], content: RankContent) -> None:
        self._patience = self._new_patience()
        try:
            damage = self._fill(targets, content, self.sharing)
        finally:
            if self.sharing is not None:
                self.sharing.decline()  # if this rank has failed before it could join, the others must not wait for it
        if damage:
            raise damage[0]

    def _fill(self, targets: Sequence[Target], content: RankContent, sharing: Sharing | None = None) -> list[DamagedError]:
        with Uploads(self.config.pinned_bytes) as uploads:
            return self._read_targets(targets, content, uploads, sharing)

    def _new_patience(self) -> Patience:
        return Patience(self.config.retry_s, self.config.absence_s, self.on_failure)

    def _read(self, read: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Run `read` on the store. It times out only if the store does not answer at all, not even with errors."""
        return self.writer.call_with_progress_timeout(
            lambda on_bytes: read(PatientStore(self.store, self._patience, lambda: on_bytes(1), self.on_absence)),
            self.timeout_s,
        )

    def _read_targets(
        self, targets: Sequence[Target], content: RankContent, fill: Uploads | None, sharing: Sharing | None = None
    ) -> list[DamagedError]:
        index = self._index
        if index is not None and all(_is_plain(target, content) for target in targets):
            return self._read_whole(index, targets, content, fill, sharing)
        found = wants(targets, content, fill)
        self._widen_for(found)
        return self._read(lambda store: read_boxes(store, self._world, found, self.config, sharing=sharing))

    def _read_whole(
        self,
        index: Index,
        targets: Sequence[Target],
        content: RankContent,
        fill: Uploads | None,
        sharing: Sharing | None,
    ) -> list[DamagedError]:
        """Read whole tensors of this rank: the bytes of the chunks go straight to the tensors' memory."""
        sinks: Mapping[str, Sink | None] = dict.fromkeys(target.fqn for target in targets)
        if fill is not None:
            sinks = uncollected(lambda: sinks_for(targets, content.entries, fill))
        return self._read(lambda store: read_tensors(store, self.checkpoint.prefix, index, sinks, self.config, sharing=sharing))


def _is_plain(target: Target, content: RankContent) -> bool:
    return target.held is None and target.tensor.dtype == DTYPES[content.entries[target.fqn][0]]
