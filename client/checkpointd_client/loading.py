"""Loading: the ranks agree on one checkpoint, verify it, and only then touch the user's objects.

Invariants
  O1  No object of the user is touched before every rank has verified all that it will read, along the chain of digests.
  O2  All ranks load the same attempt, or none loads any.
  O3  Damage is never silent: with `fallback` it is logged as an error and an older checkpoint is tried; else it is raised.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from checkpointd.config import LoadConfig, Ranks
from checkpointd.errors import (
    ERRORS,
    CheckpointdError,
    DamagedError,
    MismatchError,
    NotFoundError,
    WorldSizeError,
)
from checkpointd.layout import tree
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import Index
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.load import entries_by_fqn, read_index, read_tensors
from checkpointd.store.base import Store
from checkpointd_client.ranks import Board
from checkpointd_client.restore import Restoration, prepare
from checkpointd_client.sinks import sink_for
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded. With `strict=False`, what was left: `missing` stood in the objects but not in the checkpoint,
    `unexpected` the other way round, `mismatched` in both but not alike.
    """

    tag: str
    step: int
    client_state: dict[str, object]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    fell_back_from: tuple[str, ...] = ()
    """Newer checkpoints that were damaged, in words."""


@dataclass(slots=True)
class Loader:
    """One load() call on one rank."""

    store: Store
    writer: Writer
    board: Board
    ranks: Ranks
    config: LoadConfig
    turn: int
    timeout_s: float
    state: MutableMapping[str, object]
    strict: bool
    _failures: list[str] = field(default_factory=list)

    def load(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        """Agree, verify, load. None where there is no checkpoint and no tag was asked for."""
        for number in range(1 << 30):
            candidate = self._candidate(number, tag)
            if candidate is None:
                self._check_nothing()
                return None
            restoration, index, problem = self._examine(candidate)
            verdict = self._agree(f"load/{self.turn}/{number}/verdict", problem, "calling load()")
            if verdict is None:
                assert restoration is not None
                assert index is not None
                return self._fill(candidate, index, restoration)
            self._failures.append(str(verdict))
            if not fallback or tag is not None or not isinstance(verdict, DamagedError):
                raise verdict
            log.error("%s cannot be loaded: %s. Trying the checkpoint before it", candidate.tag, verdict)
        raise AssertionError("unreachable")

    def _check_nothing(self) -> None:
        if self._failures:
            raise DamagedError(
                f"no whole checkpoint is left at {self.store.url}; every one is damaged: " + "; ".join(self._failures)
            )

    # --- agreeing on a candidate -----------------------------------------------------------------------------

    def _candidate(self, number: int, tag: str | None) -> Checkpoint | None:
        """The `number`th checkpoint to try, chosen by rank 0 and read by every rank; raises what choosing raised there."""
        key = f"load/{self.turn}/{number}/candidate"
        if self.ranks.rank == 0:
            self.board.post(key, json.dumps(self._choose(number, tag)))
        heard = json.loads(self.board.read(key, [0], self.timeout_s, "calling load()")[0])
        if "error" in heard:
            raise _error(heard["error"], heard["message"])
        if heard["tag"] is None:
            return None
        attempt = AttemptId.parse(heard["attempt"])
        assert attempt is not None
        outcome = self.writer.call(catalog.read_outcome(self.store, heard["tag"], attempt))
        return Checkpoint(heard["tag"], attempt, outcome)

    def _choose(self, number: int, tag: str | None) -> dict[str, str | None]:
        try:
            chosen = self.writer.call(self._chosen(number, tag))
            if chosen is not None and chosen.outcome.world_size != self.ranks.world_size:
                raise WorldSizeError(
                    f"{chosen.tag} was saved by {chosen.outcome.world_size} ranks and this job has {self.ranks.world_size}: "
                    f"start it with {chosen.outcome.world_size} ranks; this version cannot load across world sizes"
                )
        except CheckpointdError as error:
            return {"error": error.code, "message": str(error)}
        return {"tag": chosen.tag if chosen else None, "attempt": str(chosen.attempt) if chosen else None}

    async def _chosen(self, number: int, tag: str | None) -> Checkpoint | None:
        if tag is not None:
            return await catalog.find(self.store, tag)
        attempts = await catalog.scan(self.store)
        if number == 0:
            _warn_of_damaged_outcomes(attempts)
        found = [c for c in catalog.checkpoints_of(attempts) if c.outcome.save_latest]
        return found[number] if number < len(found) else None

    # --- looking before touching -----------------------------------------------------------------------------

    def _examine(self, candidate: Checkpoint) -> tuple[Restoration | None, Index | None, CheckpointdError | None]:
        """Everything that can be wrong with `candidate` on this rank, found without touching anything."""
        try:
            index = self.writer.call(read_index(self.store, candidate, self.ranks.rank))
            entries = {fqn: (entry.dtype, entry.shape) for fqn, entry in entries_by_fqn(index).items()}
            restoration = prepare(
                self.state, tree.decode(index.tree), entries, index.aliases, index.excluded, strict=self.strict
            )
            sinks = {target.fqn: None for target in restoration.targets}
            damage = self.writer.call(read_tensors(self.store, candidate.prefix, index, sinks, self.config))
            return restoration, index, damage[0] if damage else None
        except CheckpointdError as error:
            return None, None, error

    def _agree(self, key: str, problem: CheckpointdError | None, doing: str) -> CheckpointdError | None:
        """None where no rank has a problem; else this rank's own, or the first of the others'."""
        note = {"error": problem.code, "message": str(problem)} if problem else {}
        self.board.post(key, json.dumps(note))
        heard = self.board.read(key, None, self.timeout_s, doing)
        notes = {rank: json.loads(text) for rank, text in heard.items() if text != "{}"}
        if not notes:
            return None
        # A mismatch is the caller's to mend and ends the load on every rank: it goes before damage.
        worst = next((r for r, n in notes.items() if not issubclass(_kind(n["error"]), DamagedError)), min(notes))
        if problem is not None and problem.code == notes[worst]["error"]:
            return problem
        return _error(notes[worst]["error"], f"rank {worst}: {notes[worst]['message']}")

    # --- touching --------------------------------------------------------------------------------------------

    def _fill(self, candidate: Checkpoint, index: Index, restoration: Restoration) -> Loaded:
        problem: CheckpointdError | None = None
        client_state: dict[str, object] = {}
        entries = entries_by_fqn(index)
        try:
            sinks = {t.fqn: sink_for(t.tensor, entries[t.fqn].dtype) for t in restoration.targets}
            damage = self.writer.call(read_tensors(self.store, candidate.prefix, index, sinks, self.config))
            if damage:
                raise DamagedError(f"{damage[0]}; it was whole a moment ago, so the objects are now loaded in part: load again")
            client_state = restoration.finish()
        except CheckpointdError as error:
            problem = error
        verdict = self._agree(f"load/{self.turn}/filled", problem, "calling load()")
        if verdict is not None:
            raise verdict
        return Loaded(
            tag=candidate.tag,
            step=index.step,
            client_state=client_state,
            missing=restoration.missing,
            unexpected=restoration.unexpected,
            mismatched=restoration.mismatched,
            fell_back_from=tuple(self._failures),
        )


def _warn_of_damaged_outcomes(attempts: list[catalog.AttemptView]) -> None:
    for attempt in attempts:
        if attempt.state == "damaged":
            log.error("the outcome of %s cannot be read, so it is not loaded: %s", attempt.prefix, attempt.damage)


def _kind(code: str) -> type[CheckpointdError]:
    return ERRORS.get(code, CheckpointdError)


def _error(code: str, message: str) -> CheckpointdError:
    kind = _kind(code)
    return kind(message) if kind is not NotFoundError else NotFoundError(message)


__all__ = ["Loaded", "Loader", "MismatchError"]
