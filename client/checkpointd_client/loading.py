"""Loading: the ranks agree on one checkpoint, verify it, and only then touch the user's objects.

Invariants
  O1  No object of the user is touched before every rank has verified all that it will read, along the chain of digests.
  O2  All ranks load the same attempt, or none loads any.
  O3  Damage is never silent: with `fallback` it is logged as an error and an older checkpoint is tried; else it is raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig, Ranks
from checkpointd.daemon.wire import Held, InFlight
from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    MismatchError,
    NotFoundError,
    SidecarError,
    StoreError,
)
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline import catalog
from checkpointd.pipeline.candidates import candidates
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.store.base import Store
from checkpointd_client.choosing import Chooser
from checkpointd_client.content import Content
from checkpointd_client.held import HeldSource, belongs, common
from checkpointd_client.notes import Choice, Holding, Problem
from checkpointd_client.restore import Restoration, prepare
from checkpointd_client.sidecar import Sidecar
from checkpointd_client.sources import Source, StoredSource
from checkpointd_client.turns import Turn
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
    source: Literal["store", "memory"] = "store"
    """memory: from the snapshot that the sidecar held."""
    per_rank_left: tuple[str, ...] = ()
    """Loaded with another number of ranks than saved it: what those had different values of, and which was left as it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The attempt that the ranks try next, at the root or `in_memory`."""

    tag: str
    attempt: AttemptId
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Examined:
    """A candidate that is whole on this rank, and where its tensors will go."""

    source: Source
    restoration: Restoration
    content: Content


READ_TRIES = 2
FLIGHT_S = 15.0
_FLIGHT_POLL_S = 0.1


@dataclass(slots=True)
class Loader:
    """One load() call on one rank."""

    store: Store
    writer: Writer
    ranks: Ranks
    config: LoadConfig
    turn: Turn
    timeout_s: float
    state: MutableMapping[str, Any] | Chooser
    strict: bool
    cast: bool = False
    unpickle: bool = False
    sidecar: Sidecar | None = None
    _held: dict[tuple[str, str], Held] = field(default_factory=dict)
    _failures: list[str] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _looked: bool = False
    """Whether rank 0 has looked at the store, and said what is damaged there."""

    def load(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        """Agree, verify, load. None where there is no checkpoint and no tag was asked for."""
        if tag is None:
            self._offer_held()
        for number in range(1 << 30):
            candidate = self._candidate(number, tag, fallback=fallback)
            if candidate is None:
                self._nothing()
                return None
            found, problem = self._examined(candidate)
            verdict = self.turn.agree(f"{number}/verdict", problem, () if found is None else found.restoration.homeless)
            if verdict is None:
                assert found is not None
                return self._fill(found)
            if candidate.in_memory and isinstance(verdict, SidecarError):
                log.info("%s is loaded from the store: %s", candidate.tag, verdict)
                continue
            if candidate.in_memory and isinstance(verdict, DamagedError):
                log.error("%s cannot be loaded from memory: %s. Loading from the store", candidate.tag, verdict)
                continue  # what the store has is not damaged by that
            self._failures.append(str(verdict))
            if not fallback or tag is not None or not isinstance(verdict, DamagedError):
                raise verdict
            log.error("%s cannot be loaded: %s. Trying the checkpoint before it", candidate.tag, verdict)
        raise AssertionError("unreachable")

    def _nothing(self) -> None:
        absent = self.turn.agree("nothing", None)  # a rank that misses this load() would take the answer for its next one
        if absent is not None:
            raise absent
        if self._failures:
            raise DamagedError(
                f"no whole checkpoint is left at {self.store.url}; every one is damaged: " + "; ".join(self._failures)
            )

    # --- agreeing on a candidate -----------------------------------------------------------------------------

    def _candidate(self, number: int, tag: str | None, *, fallback: bool) -> Candidate | None:
        """The `number`th checkpoint to try, chosen by rank 0 and read by every rank; raises what choosing raised there."""
        choice = self.turn.chosen(f"{number}/candidate", lambda: self._choose(number, tag))
        if choice.problem is not None:
            raise self.turn.agree("nothing", None) or choice.problem.error()
        for damage in choice.passed_over:
            if not fallback:
                raise self.turn.agree("nothing", None) or damage.error()
            log.error("%s. Trying the checkpoint before it", damage.message)
            self._failures.append(damage.message)
        if choice.tag is None:
            return None
        attempt = AttemptId.parse(choice.attempt)
        assert attempt is not None
        return Candidate(choice.tag, attempt, choice.in_memory)

    def _choose(self, number: int, tag: str | None) -> Choice:
        try:
            held = self._held_by_all() if number == 0 and tag is None else None
            if held is None and not self._looked and self.sidecar is not None:
                self._wait_for_flights(self.sidecar)
            chosen, passed_over = self.writer.call(self._chosen(tag), self.timeout_s)
            if held is not None and (chosen is None or held.order >= chosen.outcome.order):
                return Choice(in_memory=True, tag=held.tag, attempt=held.attempt)
            self._looked = True
            if chosen is not None:
                self._tried.add(chosen.prefix)
        except CheckpointdError as error:
            return Choice(problem=Problem.of(error))
        damage = tuple(map(Problem.of, passed_over))
        if chosen is None:
            return Choice(passed_over=damage)
        return Choice(tag=chosen.tag, attempt=str(chosen.attempt), passed_over=damage)

    async def _chosen(self, tag: str | None) -> tuple[Checkpoint | None, tuple[DamagedError, ...]]:
        if tag is not None:
            return await catalog.find(self.store, tag), ()
        found = await candidates(self.store)
        # By name, not by position: the list may have grown since the last look.
        chosen = next((c for c in found.checkpoints if c.prefix not in self._tried), None)
        if self._looked:
            return chosen, ()
        for damage in found.other:
            log.error("%s. What is loaded does not need it", damage)
        return chosen, found.passed_over

    def _offer_held(self) -> None:
        """Tell rank 0 what this rank's sidecar holds; nothing where there is none."""
        held: tuple[Held, ...] = ()
        if self.sidecar is not None:
            try:
                held = self.writer.call(self.sidecar.held(), self.timeout_s)
            except StoreError as error:
                log.warning("the sidecar does not say what it holds: %s", error)
        self._held = {(one.tag, one.attempt): one for one in held}
        self.turn.offer("held", Holding(held=held))

    def _held_by_all(self) -> Held | None:
        """On rank 0: the newest snapshot that all sidecars hold, of this very root."""
        held = common({rank: note.held for rank, note in self.turn.offers("held").items()}, self.ranks)
        if held is None or not self.writer.call(belongs(self.store, held), self.timeout_s):
            return None
        return held

    def _wait_for_flights(self, sidecar: Sidecar) -> None:
        """Until what the sidecar still persists of an earlier incarnation is decided: it may be the newest checkpoint.

        As long as this node's shards are being written; then the votes of other nodes have FLIGHT_S to come, since a node that
        died with its sidecar will never vote.
        """
        # Half of the time-out: the other ranks wait that long for what rank 0 chooses.
        until, pause = time.monotonic() + self.timeout_s / 2, threading.Event()
        flights: tuple[InFlight, ...] = ()
        while time.monotonic() < until:
            flights = self.writer.call(sidecar.in_flight(), self.timeout_s)
            if not flights:
                return
            if all(flight.phase == Phase.PREPARED for flight in flights):
                until = min(until, time.monotonic() + FLIGHT_S)
            pause.wait(_FLIGHT_POLL_S)
        log.warning("%s are still undecided after all; loading what is committed", ", ".join(sorted({f.tag for f in flights})))

    # --- looking before touching -----------------------------------------------------------------------------

    def _examined(self, candidate: Candidate) -> tuple[Examined | None, CheckpointdError | None]:
        """What is needed to load `candidate`, or everything that can be wrong with it on this rank. Touches nothing.

        Whatever goes wrong is returned, never raised: the other ranks wait for this one's word.
        """
        problem: CheckpointdError | None = None
        for look in range(READ_TRIES):
            try:
                return self._examine(candidate), None
            except StoreError as error:
                log.warning("reading %s: %s", candidate.tag, error)
                # What cannot be read twice is as lost as what was overwritten: an older checkpoint may be whole.
                problem = DamagedError(
                    f"{candidate.tag} cannot be read on rank {self.ranks.rank}: {error}", rank=self.ranks.rank
                )
                threading.Event().wait(look)
            except NotFoundError as error:
                return None, DamagedError(str(error), rank=self.ranks.rank)
            except CheckpointdError as error:
                return None, error
            except Exception as error:
                log.exception("examining %s", candidate.tag)
                return None, CheckpointdError(f"{candidate.tag} cannot be loaded on rank {self.ranks.rank}: {error!r}")
        return None, problem

    def _examine(self, candidate: Candidate) -> Examined:
        source = self._held_source(candidate) if candidate.in_memory else self._stored_source(candidate)
        content, restoration = self._prepared(source)
        source.verify(restoration.targets, content)
        return Examined(source, restoration, content)

    def _prepared(self, source: Source) -> tuple[Content, Restoration]:
        """Where everything goes: what this rank had, and where that is not enough, what other ranks had."""
        content = source.content()
        try:
            restoration = prepare(self.state, content, strict=self.strict, cast=self.cast, unpickle=self.unpickle)
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
        return more, prepare(self.state, more, strict=self.strict, cast=self.cast, unpickle=self.unpickle)

    def _held_source(self, candidate: Candidate) -> HeldSource:
        """Fetch the snapshot. Whatever is wrong with it is damage: an older checkpoint may be whole."""
        held = self._held.get((candidate.tag, str(candidate.attempt)))
        if held is None or self.sidecar is None:
            raise DamagedError(f"rank {self.ranks.rank} holds no snapshot of {candidate.tag}", rank=self.ranks.rank)
        return HeldSource.fetched(self.sidecar, held, self.ranks.rank, lambda work: self.writer.call(work, self.timeout_s))

    def _stored_source(self, candidate: Candidate) -> StoredSource:
        outcome = self.writer.call(catalog.read_outcome(self.store, candidate.tag, candidate.attempt), self.timeout_s)
        checkpoint = Checkpoint(candidate.tag, candidate.attempt, outcome)
        return StoredSource(self.store, self.writer, self.config, self.timeout_s, self.ranks, checkpoint)

    # --- touching --------------------------------------------------------------------------------------------

    def _fill(self, found: Examined) -> Loaded:
        problem: CheckpointdError | None = None
        client_state: dict[str, object] = {}
        restoration = found.restoration
        try:
            found.source.fill(restoration.targets, found.content)
            client_state = restoration.finish()
        except CheckpointdError as error:
            problem = error
        except Exception as error:  # the other ranks wait for this one's word, whatever it is
            log.exception("loading %s", found.source.tag)
            problem = CheckpointdError(f"{found.source.tag} was loaded in part on rank {self.ranks.rank}: {error!r}")
        verdict = self.turn.agree("filled", problem)
        if verdict is not None:
            raise verdict
        if restoration.per_rank_left and self.ranks.rank == 0:  # once; every rank's own list is in what it gets
            left = ", ".join(restoration.per_rank_left)
            log.warning(
                "%s was saved by another number of ranks, and each had its own %s: left as it was", found.source.tag, left
            )
        return Loaded(
            tag=found.source.tag,
            step=found.source.step,
            source=found.source.kind,
            client_state=client_state,
            missing=restoration.missing,
            unexpected=restoration.unexpected,
            mismatched=restoration.mismatched,
            per_rank_left=restoration.per_rank_left,
            fell_back_from=tuple(self._failures),
        )


__all__ = ["Loaded", "Loader", "MismatchError"]
