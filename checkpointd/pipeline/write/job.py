"""The writer's job of persisting one shard: what all stages of `persist` share."""

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
    """The checkpoint before, to which unchanged chunks may refer where `config.dedup` says so; None: there is none."""
    before_vote: Callable[[], Awaitable[None]] = _nothing
    """Awaited just before the vote is put; may raise, too."""
    on_stored: Callable[[Index], None] = lambda _: None
    """Called with the index once it is durable, before the vote; may raise what then keeps this rank from voting yes. It comes
    without its tree, which may be large, while the attempt may wait for long.
    """

    @property
    def spent(self) -> SaveMeter:
        return self.progress.spent

    def check_stop(self) -> None:
        """Stopped where the attempt has been decided meanwhile."""
        if self.stopped():
            raise Stopped

    def in_small_writes(self) -> PersistJob:
        """This job, with writes no larger than its store lets through at once: progress is then known as finely."""
        piece_bytes = self.store.capabilities.piece_bytes
        if piece_bytes is None or piece_bytes >= self.config.block_bytes:
            return self
        return replace(self, config=replace(self.config, block_bytes=piece_bytes))

    def in_full(self) -> PersistJob:
        """This job, which writes every chunk and refers to none."""
        return replace(self, config=replace(self.config, dedup=False))
