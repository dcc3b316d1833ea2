"""Loading: the ranks agree on one checkpoint, verify it, and only then touch the user's objects.

Invariants
  O1  No object of the user is touched before every rank has verified all that it will read, along the chain of digests.
  O2  All ranks load the same attempt, or none loads any.
  O3  Damage is never silent: with `fallback` it is logged as an error and an older checkpoint is tried; else it is raised.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from checkpointd.config import LoadConfig, Ranks
from checkpointd.errors import CheckpointdError, DamagedError, MismatchError, WorldSizeError
from checkpointd.layout import tree
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import Index
from checkpointd.pipeline import catalog
from checkpointd.pipeline.candidates import candidates
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.load import entries_by_fqn, read_index, read_tensors
from checkpointd.store.base import Store
from checkpointd_client import notes
from checkpointd_client.notes import Choice, Problem, Verdict
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
    state: MutableMapping[str, Any]
    strict: bool
    _failures: list[str] = field(default_factory=list)

    def load(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        """Agree, verify, load. None where there is no checkpoint and no tag was asked for."""
        for number in range(1 << 30):
            candidate = self._candidate(number, tag, fallback=fallback)
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

    def _candidate(self, number: int, tag: str | None, *, fallback: bool) -> Checkpoint | None:
        """The `number`th checkpoint to try, chosen by rank 0 and read by every rank; raises what choosing raised there."""
        key = f"load/{self.turn}/{number}/candidate"
        if self.ranks.rank == 0:
            self.board.post(key, notes.written(self._choose(number, tag)))
        choice = notes.read(self.board.read(key, [0], self.timeout_s, "calling load()")[0], Choice)
        if choice.problem is not None:
            raise choice.problem.error()
        for damage in choice.passed_over:
            if not fallback:
                raise damage.error()
            log.error("%s. Trying the checkpoint before it", damage.message)
            self._failures.append(damage.message)
        if choice.tag is None:
            return None
        attempt = AttemptId.parse(choice.attempt)
        assert attempt is not None
        outcome = self.writer.call(catalog.read_outcome(self.store, choice.tag, attempt))
        return Checkpoint(choice.tag, attempt, outcome)

    def _choose(self, number: int, tag: str | None) -> Choice:
        try:
            chosen, passed_over = self.writer.call(self._chosen(number, tag))
            if chosen is not None and chosen.outcome.world_size != self.ranks.world_size:
                raise WorldSizeError(
                    f"{chosen.tag} was saved by {chosen.outcome.world_size} ranks and this job has {self.ranks.world_size}: "
                    f"start it with {chosen.outcome.world_size} ranks; this version cannot load across world sizes"
                )
        except CheckpointdError as error:
            return Choice(problem=Problem.of(error))
        damage = tuple(map(Problem.of, passed_over))
        if chosen is None:
            return Choice(passed_over=damage)
        return Choice(tag=chosen.tag, attempt=str(chosen.attempt), passed_over=damage)

    async def _chosen(self, number: int, tag: str | None) -> tuple[Checkpoint | None, tuple[DamagedError, ...]]:
        if tag is not None:
            return await catalog.find(self.store, tag), ()
        found = await candidates(self.store)
        chosen = found.checkpoints[number] if number < len(found.checkpoints) else None
        if number > 0:
            return chosen, ()
        for damage in found.other:
            log.error("%s. What is loaded does not need it", damage)
        return chosen, found.passed_over

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
        self.board.post(key, notes.written(Verdict(problem=Problem.of(problem) if problem else None)))
        heard = self.board.read(key, None, self.timeout_s, doing)
        verdicts = {rank: notes.read(text, Verdict).problem for rank, text in sorted(heard.items())}
        problems = {rank: found for rank, found in verdicts.items() if found is not None}
        if not problems:
            return None
        # A mismatch is the caller's to mend and ends the load on every rank: it goes before damage.
        worst = next((r for r, p in problems.items() if not issubclass(p.kind, DamagedError)), min(problems))
        if problem is not None and problem.code == problems[worst].code:
            return problem
        return problems[worst].error(f"rank {worst}: ")

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


__all__ = ["Loaded", "Loader", "MismatchError"]
