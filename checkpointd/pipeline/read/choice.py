"""Chooses the checkpoint for a reader beside the job, and another one if that is removed or proves damaged meanwhile.

Invariants
  READER-1  A reader writes nothing: no start, no lock, no record, and it makes nothing durable. So a power cut may still lose a
      commit that a reader has seen, until its writer has reported it.
  READER-2  A checkpoint that was removed meanwhile never counts as damaged, and a damaged checkpoint is never passed over in
      silence. An object that cannot be read now is read again for `retry_s`; then the error is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from checkpointd.commands import command
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, UsageError
from checkpointd.layout.keys import LATEST, AttemptId, attempt_prefix, check_tag
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, read_view
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import candidates, known_state, meant
from checkpointd.pipeline.root.wholeness import check_whole
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

REMOVED_MAX = 8
"""A reader gives up after this many checkpoints were removed while it read them."""


@dataclass(slots=True)
class CheckpointFinder:
    """Finds the checkpoint that one reader reads at `store`. `tag`: a tag, `latest`, or None for the newest checkpoint. `step`:
    in place of a tag, the newest checkpoint of this step.

    A search for the newest passes over damaged checkpoints and lists them in `passed_over`. A tag is read, or the error is
    raised. `attempt`: the attempt to read, if the tag was saved several times.
    """

    store: Store
    tag: str | None
    step: int | None = field(default=None, kw_only=True)
    attempt: AttemptId | None = field(default=None, kw_only=True)
    config: LoadConfig = field(default_factory=LoadConfig, kw_only=True)
    passed_over: list[str] = field(default_factory=list)
    _damaged: set[str] = field(default_factory=set)
    patience: Patience | None = None
    """Of the newest reads."""
    _removed: int = 0

    def __post_init__(self) -> None:
        if self.tag is not None and self.tag != LATEST:
            self.tag = check_tag(self.tag)
        elif self.attempt is not None:
            raise UsageError(f"attempt {self.attempt} of which tag? Name it")

    async def begin(self) -> CheckpointView:
        """The checkpoint with the indexes of all its ranks. Raises NotFoundError, DamagedError or StoreError."""
        while True:
            checkpoint = await self._chosen()
            try:
                await check_whole(self.store, checkpoint, self._patience())
                return await read_view(self.patient(checkpoint), checkpoint, self.config)
            except (DamagedError, NotFoundError) as error:
                await self._leave(checkpoint, error)

    async def instead(self, checkpoint: LoggedAttempt, error: CheckpointdError) -> CheckpointView:
        """Another checkpoint, after reading `checkpoint` has failed with `error`. Raises as `begin` if there is none."""
        await self._leave(checkpoint, error)
        return await self.begin()

    async def verdict(self, checkpoint: LoggedAttempt, error: CheckpointdError) -> CheckpointdError:
        """Why `checkpoint` cannot be read: NotFoundError if it was removed since it was opened, else DamagedError."""
        try:
            await self.check_there(checkpoint)
        except NotFoundError as removed:
            return removed
        return error if isinstance(error, DamagedError) else DamagedError(str(error))

    def patient(self, checkpoint: LoggedAttempt, on_answer: Callable[[], None] = lambda: None) -> Store:
        """A store that reads objects of `checkpoint` again if they cannot be read now, unless the checkpoint was removed."""
        return PatientStore(self.store, self._patience(), on_answer, partial(self.check_there, checkpoint))

    async def check_there(self, checkpoint: LoggedAttempt, *, patiently: bool = False) -> None:
        """Raise NotFoundError if `checkpoint` was removed, by the log.

        `patiently`: look again if that cannot be read now. Without it, the caller does.
        """
        state = await (known_state(self.store, self._patience()) if patiently else root_view.state_of(self.store))
        found = state.attempts.get(checkpoint.prefix)
        if found is None or found.status != "checkpoint":
            raise NotFoundError(
                f"{checkpoint.prefix} was removed from {self.store.url} after it was opened here: open the newest, or another "
                "tag. Retention that keeps more checkpoints (keep_last) leaves a reader more time"
            )

    def _patience(self) -> Patience:
        self.patience = Patience(self.config.retry_s, self.config.absence_s)
        return self.patience

    async def _leave(self, checkpoint: LoggedAttempt, error: CheckpointdError) -> None:
        """Note why `checkpoint` is not read. Raises if the reader must not take another one."""
        why = await self.verdict(checkpoint, error)
        if isinstance(why, NotFoundError):
            self._removed += 1
            if self._removed >= REMOVED_MAX:
                raise why
            log.warning("%s was removed while it was being read; looking again", checkpoint.prefix)
            return
        if self.tag is not None or self.step is not None:
            raise why
        self._damaged.add(checkpoint.prefix)
        self._pass_over(f"{checkpoint.tag} cannot be read: {why}")

    async def _chosen(self) -> LoggedAttempt:
        state, root = await known_state(self.store, self._patience()), self.store.url
        if self.step is not None:
            return _of_step(state, self.step, root)
        if self.tag in (None, LATEST):
            await self._check_latest(state)
            return self._newest(state) if self.tag is None else meant(state, root)
        if self.attempt is None:
            return root_view.found_in(state, self.tag, root)
        prefix = attempt_prefix(self.tag, self.attempt)
        found = state.attempts.get(prefix)
        if found is None or found.status != "checkpoint":
            raise NotFoundError(f"{prefix} at {root} is not a checkpoint, or not one any more")
        return found

    async def _check_latest(self, state: LogState) -> None:
        """Log it if `latest` names a tag that the log does not have, also if it is read again."""
        with suppress(StoreError):
            named = await root_view.readable_latest(self.store)
            if named is not None and not _has(state, named) and not _has(await root_view.state_of(self.store), named):
                words = "%s at %s names %s, which the log does not have: an older copy of the log may lie there; %s tells"
                log.warning(words, LATEST, self.store.url, named, command("verify", self.store.url))

    def _newest(self, state: LogState) -> LoggedAttempt:
        chosen = next((c for c in candidates(state) if c.prefix not in self._damaged), None)
        if chosen is not None:
            return chosen
        if self.passed_over:
            raise DamagedError(
                f"no whole checkpoint is left at {self.store.url}; every one is damaged: {'; '.join(self.passed_over)}"
            )
        raise NotFoundError(f"there is no checkpoint at {self.store.url} yet: is this the root that the job was given?")

    def _pass_over(self, damage: str) -> None:
        if damage not in self.passed_over:
            log.error("%s. Trying the checkpoint before it", damage)
            self.passed_over.append(damage)


def _has(state: LogState, tag: str) -> bool:
    return any(one.tag == tag for one in state.attempts.values())


def _of_step(state: LogState, step: int, root: str) -> LoggedAttempt:
    known = root_view.checkpoints_of(state.attempts.values())
    found = next((c for c in known if c.commit.step == step), None)
    if found is None:
        steps = ", ".join(map(str, sorted({c.commit.step for c in known}))) or "none"
        raise NotFoundError(f"there is no checkpoint of step {step} at {root}; the steps there are: {steps}")
    return found
