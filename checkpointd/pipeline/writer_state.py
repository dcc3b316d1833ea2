"""The state that the attempts of one rank share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.outcome.after_commit import Turns
from checkpointd.pipeline.outcome.outlived import outlived
from checkpointd.pipeline.outcome.publish import PlanCheck
from checkpointd.pipeline.read.readback import BackgroundReadBack
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.pipeline.write.dedup import Bases
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.base import Store


@dataclass(slots=True, kw_only=True)
class WriterState:
    """The state that one rank's attempts share: settings, measured rates, checked plans, the base for references."""

    store: Store
    persist: PersistConfig = field(default_factory=PersistConfig)
    commit: CommitConfig = field(default_factory=CommitConfig)
    rates: Rates = field(default_factory=Rates)
    sight: Sight = field(default_factory=Sight)
    outlast_s: float = 0.0
    """How long a rank without a spool waits after its vote, since other ranks may still upload from theirs."""
    waiting: Callable[[], Collection[str]] = tuple
    """Gives the undecided attempts of which the coordinator's shard waits in this process's spool."""
    log: RootLog = field(init=False)
    plans: PlanCheck = field(init=False)
    bases: Bases = field(init=False)
    tidier: Tidier = field(init=False)
    showing: Turns = field(init=False)
    reader: BackgroundReadBack = field(init=False)
    own_root: OwnRoot = field(init=False)

    def __post_init__(self) -> None:
        self.log = RootLog.of(self.store)
        self.own_root = OwnRoot(self.store)
        self.log.belongs_to(self.own_root.is_begun)
        self.tidier = Tidier(self.store, self.commit, self.own_root.check, self._decide_older)
        self.showing = Turns(self.store)
        self.plans = PlanCheck(self.store)
        self.bases = Bases(self.store)
        self.reader = BackgroundReadBack(self.store, self.bases.forget)

    async def _decide_older(self, prefixes: Collection[str], timeout_s: float, check: Callable[[], Awaitable[None]]) -> None:
        await outlived(self.store, prefixes, timeout_s, self.sight, hurried=False, spooled=self.waiting(), check=check)

    def take_reader(self, reader: BackgroundReadBack) -> None:
        """Use the reader of an earlier writer of this rank."""
        reader.store, reader.on_damage = self.store, self.bases.forget
        self.reader = reader
