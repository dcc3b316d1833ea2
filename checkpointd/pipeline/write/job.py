"""The writer's job of persisting one shard, which all stages of `persist` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from checkpointd.config import PersistConfig
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.meter import SaveMeter
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd.pipeline.workers import Stopped
from checkpointd.pipeline.write.dedup import Base
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.base import Store


async def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistJob:
    """One call of `persist`."""

    store: Store
    info: AttemptInfo
    shard: Shard
    config: PersistConfig
    rates: Rates
    progress: ShardProgress
    stopped: Callable[[], bool]
    base: Base | None = None
    """The checkpoint before: to compare with, for references, and for deltas, as `config` says. None if there is none."""
    before_vote: Callable[[], Awaitable[None]] = _nothing
    """Awaited just before the vote is put. If it raises, this rank does not vote yes."""
    on_stored: Callable[[Index], None] = lambda _: None
    """Called with the durable index before the vote. If it raises, this rank does not vote yes. The index comes without its
    tree, which may be large and would stay in memory while the attempt waits.
    """

    @property
    def spent(self) -> SaveMeter:
        return self.progress.spent

    @property
    def makes_deltas(self) -> bool:
        """Whether chunks of this shard may be deltas, or refer to some (DELTA-4 in `encode.py`)."""
        every = self.config.full_every
        return every is not None and self.base is not None and self.base.since_full + 1 < every

    def check_stop(self) -> None:
        """Raise Stopped if the attempt was decided meanwhile."""
        if self.stopped():
            raise Stopped

    def in_small_writes(self) -> PersistJob:
        """This job, with writes no larger than the store passes on at once, so that progress is as fine."""
        piece_bytes = self.store.capabilities.piece_bytes
        if piece_bytes is None or piece_bytes >= self.config.block_bytes:
            return self
        return replace(self, config=replace(self.config, block_bytes=piece_bytes))

    def in_full(self) -> PersistJob:
        """This job without references and deltas: it writes every chunk in full."""
        return replace(self, config=replace(self.config, dedup=False, full_every=None))
