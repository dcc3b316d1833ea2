"""The writer's job of persisting one shard, which all stages of `persist` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from checkpointd.config import PersistConfig
from checkpointd.layout.manifest import Index
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
    """The checkpoint before, to compare with, and for references if `config.dedup` is set. None if there is none."""
    before_vote: Callable[[], Awaitable[None]] = _nothing
    """Awaited just before the vote is put. If it raises, this rank does not vote yes."""
    on_stored: Callable[[Index], None] = lambda _: None
    """Called with the durable index before the vote. If it raises, this rank does not vote yes. The index comes without its
    tree, which may be large and would stay in memory while the attempt waits.
    """

    @property
    def spent(self) -> SaveMeter:
        return self.progress.spent

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
        """This job without references: it writes every chunk."""
        return replace(self, config=replace(self.config, dedup=False))
