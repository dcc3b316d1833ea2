"""Loading: the ranks agree on one checkpoint, verify it, and only then touch the user's objects.

Invariants
  LOAD-1  No object of the user is touched before every rank has verified all that it will read, along the chain of digests.
  LOAD-2  All ranks load the same attempt, or none loads any.
  LOAD-3  Damage is never silent: with `fallback` it is logged as an error and an older checkpoint is tried; else it is raised.
  LOAD-4  An older checkpoint is tried only where damage to the newer one is proved. What cannot be read is read again until the
      load's deadline, and is then raised on every rank.
  LOAD-5  A checkpoint that was passed over gets a record that it was, so that nobody but a user ever removes it. A job
      that cannot leave it removes nothing that was there before: its rules would count that checkpoint as a whole one.
  LOAD-6  An error after LOAD-1 is a PartlyLoadedError on every rank, whatever it was on the one that had it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from checkpointd.commands import command
from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig, Ranks
from checkpointd.daemon.protocol.wire import InFlight, RetainedSnapshot
from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    MismatchError,
    NotFoundError,
    PartlyLoadedError,
    SidecarError,
    StoreError,
    UnreadableError,
)
from checkpointd.layout.keys import AttemptId, attempt_prefix
from checkpointd.pipeline.outcome.recover import VOTES_S, outlived
from checkpointd.pipeline.root import candidates as choices
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.waits import Waiting
from checkpointd_client.capture import state_dicts
from checkpointd_client.ranks.load_messages import CandidateChoice, Holding, Problem
from checkpointd_client.ranks.load_rounds import LoadRound
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.memory_source import MemorySource, common, counts
from checkpointd_client.restore.plan import LoadOptions, Restoration, askable
from checkpointd_client.restore.store_source import CandidateSource, StoredSource, prepared
from checkpointd_client.restore.target_chooser import TargetChooser
from checkpointd_client.sidecar.client import SidecarClient

log = logging.getLogger("checkpointd")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded. With `strict=False`, what was left as it is, which one rank's log says as well, its first ten lines.

    `missing`: FQNs of what the objects have and the checkpoint has not. `unexpected`: FQNs the other way round, of what no rank
    has a place for.
    `mismatched`: what both have in another shape, dtype or kind, each in words that begin with its FQN.
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
class Seen:
    """What a candidate holds for this rank, and the objects that it may want to ask for their state (`restore.askable`)."""

    source: CandidateSource
    content: RankContent
    askable: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Examined:
    """A candidate that is whole on this rank, and where its tensors will go."""

    source: CandidateSource
    restoration: Restoration
    content: RankContent


_FLIGHT_POLL_S = 0.1
NOTE_S = 30.0
LOOK_S = 600.0
"""How long a look at the root may take that meets no failure: one with very many tags, on a slow file system."""


@dataclass(slots=True)
class Loader:
    """One load() call on one rank."""

    store: Store
    writer: WriterThread
    ranks: Ranks
    config: LoadConfig
    turn: LoadRound
    timeout_s: float
    state: MutableMapping[str, Any] | TargetChooser
    options: LoadOptions
    sidecar: SidecarClient | None = None
    surviving: tuple[str, ...] = ()
    """On rank 0: attempts of earlier incarnations that a daemon worked at when this one began."""
    is_recorded: bool = True
    """Whether every record of LOAD-5 could be left."""
    afresh: bool = False
    """Whether the job goes on without a checkpoint where none is whole."""
    _held: dict[tuple[str, str], RetainedSnapshot] = field(default_factory=dict)
    _failures: list[str] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _looked: bool = False
    """Whether rank 0 has looked at the store, and said what is damaged there."""
    _skipped: list[tuple[str, str]] = field(default_factory=list)
    """On rank 0: attempts that are damaged so that they are no candidates, and why."""
    _answers: HandedOutStates = field(default_factory=HandedOutStates)

    def load(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        """Agree, verify, load. None where there is no checkpoint and no tag was asked for."""
        if tag is None:
            self._offer_held()
        for number in range(1 << 30):
            candidate = self._candidate(number, tag, fallback=fallback)
            if candidate is None:
                self._nothing()
                return None
            found, problem = self._examined(number, candidate)
            fit = None if found is None else found.restoration
            verdict, nowhere = self.turn.judge(f"{number}/verdict", problem, fit, strict=self.options.strict)
            if verdict is None:
                assert found is not None
                if self.ranks.world_size > 1:
                    found.restoration.unexpected = nowhere
                return self._fill(found)
            if candidate.in_memory and isinstance(verdict, SidecarError | StoreError):
                log.info("%s is loaded from the store: %s", candidate.tag, verdict)
                continue
            if candidate.in_memory and isinstance(verdict, DamagedError):
                log.error("%s cannot be loaded from memory: %s. Loading from the store", candidate.tag, verdict)
                continue  # what the store has is not damaged by that
            self._failures.append(str(verdict))
            if not fallback or tag is not None or not isinstance(verdict, DamagedError):
                raise verdict
            log.error("%s cannot be loaded: %s. Trying the checkpoint before it", candidate.tag, verdict)
            self._note_passed_over(attempt_prefix(candidate.tag, candidate.attempt), str(verdict))
        raise AssertionError("unreachable")

    def _nothing(self) -> None:
        # A rank that misses this load() would take the answer for its next one.
        absent = self.turn.agree("nothing", None if isinstance(self.state, TargetChooser) else state_dicts.refused(self.state))
        if absent is not None:
            raise absent
        if self._failures:
            error = DamagedError(
                f"no whole checkpoint is left at {self.store.url}; every one is damaged: {'; '.join(self._failures)}. To begin "
                "without one, make the job's Checkpointer with afresh=True"
            )
            if not self.afresh:
                raise error
            log.error("%s. It was, so nothing is loaded", error)

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
        while self._skipped:
            self._note_passed_over(*self._skipped.pop())
        if choice.tag is None:
            return None
        attempt = AttemptId.parse(choice.attempt)
        assert attempt is not None
        return Candidate(choice.tag, attempt, choice.in_memory)

    def _choose(self, number: int, tag: str | None) -> CandidateChoice:
        try:
            held = self._held_by_all() if number == 0 and tag is None else None
            if held is None and not self._looked:
                self._wait_for_flights()
            chosen, passed_over = self._look(lambda patience: self._chosen(tag, patience))
            if held is not None and (chosen is None or held.order >= chosen.outcome.order):
                return CandidateChoice(in_memory=True, tag=held.tag, attempt=held.attempt)
            self._looked = True
            if chosen is not None:
                self._tried.add(chosen.prefix)
        except CheckpointdError as error:
            return CandidateChoice(problem=Problem.of(error))
        damage = tuple(map(Problem.of, passed_over))
        if chosen is None:
            return CandidateChoice(passed_over=damage)
        return CandidateChoice(tag=chosen.tag, attempt=str(chosen.attempt), passed_over=damage)

    async def _chosen(self, tag: str | None, patience: Patience) -> tuple[Checkpoint | None, tuple[DamagedError, ...]]:
        if tag is not None:
            return await choices.find(self.store, tag, patience), ()
        found = await choices.candidates(self.store, patience)
        # By name, not by position: the list may have grown since the last look.
        chosen = next((c for c in found.checkpoints if c.prefix not in self._tried), None)
        if self._looked:
            return chosen, ()
        for damage in found.other:
            log.error("%s. What is loaded does not need it", damage)
        self._skipped = [(passed.prefix, str(passed.error)) for passed in found.passed_over if passed.prefix is not None]
        return chosen, tuple(passed.error for passed in found.passed_over)

    def _look(self, work: Callable[[Patience], Coroutine[Any, Any, T]]) -> T:
        return call_patiently(self.writer, self.config, work, self._tries_again)

    def _tries_again(self) -> None:
        """Let the other ranks wait for this one. On the writer's thread."""
        try:
            self.turn.tries_again()
        except CheckpointdError as error:
            log.warning("the other ranks cannot be told that rank %d reads again: %s", self.ranks.rank, error)

    def _note_passed_over(self, prefix: str, why: str) -> None:
        """On rank 0: leave the record (LOAD-5)."""
        if self.ranks.rank == 0:
            self.is_recorded &= leave_record(self.writer, choices.note_passed_over(self.store, prefix, why), prefix)

    def _offer_held(self) -> None:
        """Tell rank 0 what this rank's sidecar holds; nothing where there is none."""
        held: tuple[RetainedSnapshot, ...] = ()
        if self.sidecar is not None:
            try:
                held = self.writer.call(self.sidecar.held(), self.timeout_s)
            except StoreError as error:
                log.warning("the sidecar does not say what it holds: %s", error)
        self._held = {(one.tag, one.attempt): one for one in held}
        self.turn.offer("held", Holding(held=held))

    def _held_by_all(self) -> RetainedSnapshot | None:
        """On rank 0: the newest snapshot that all sidecars hold, if it counts at this root."""
        held = common({rank: note.held for rank, note in self.turn.offers("held").items()}, self.ranks)
        if held is None:
            return None
        return held if self._look(lambda patience: counts(PatientStore(self.store, patience), held)) else None

    def _wait_for_flights(self) -> None:
        """Until what daemons still persist of an earlier incarnation is decided: it may be the newest checkpoint."""
        # Half of the time-out: the other ranks wait that long for what rank 0 chooses.
        until = time.monotonic() + self.timeout_s / 2
        own = self._wait_for_own(self.sidecar, until) if self.sidecar is not None else ()
        others = [attempt for attempt in self.surviving if attempt not in own]
        left_s = max(0.0, until - time.monotonic())
        late = self.writer.call(outlived(self.store, others, left_s), self.timeout_s) if others else ()
        if own or late:
            log.warning("%s are still undecided after all; loading what is committed", ", ".join(sorted({*own, *late})))

    def _wait_for_own(self, sidecar: SidecarClient, until: float) -> tuple[str, ...]:
        """The same of this node's daemon; the attempts (`<tag>/<attempt>`) that it has not ended.

        As long as this node's shards are being written; then the votes of other nodes have VOTES_S to come, since a node that
        died with its sidecar will never vote.
        """
        pause = threading.Event()
        flights: tuple[InFlight, ...] = ()
        waiting = Waiting(lambda: f"the sidecar at {sidecar.path} still works at {_named(flights)} of the job before")
        while time.monotonic() < until:
            flights = self.writer.call(sidecar.in_flight(), self.timeout_s)
            if not flights:
                break
            waiting.look()
            if all(flight.phase == Phase.PREPARED for flight in flights):
                until = min(until, time.monotonic() + VOTES_S)
            pause.wait(_FLIGHT_POLL_S)
        return tuple(f"{flight.tag}/{flight.attempt}" for flight in flights)

    # --- looking before touching -----------------------------------------------------------------------------

    def _examined(self, number: int, candidate: Candidate) -> tuple[Examined | None, CheckpointdError | None]:
        """What is needed to load `candidate`, or everything that can be wrong with it on this rank. Touches nothing.

        Whatever goes wrong is returned, never raised: the other ranks wait for this one's word. What is raised is that they do
        not answer.
        """
        seen, problem = self._tried_on(candidate, lambda: self._see(candidate))
        answers = self._answers
        if self.ranks.world_size > 1:
            own: Mapping[str, object] = seen.askable if seen is not None else {}
            answers = answers.of_all({fqn: own[fqn] for fqn in self.turn.named_by_all(f"{number}/askable", own)})
        if seen is None:
            return None, problem
        return self._tried_on(candidate, lambda: self._examine(seen, answers))

    def _tried_on(self, candidate: Candidate, work: Callable[[], T]) -> tuple[T | None, CheckpointdError | None]:
        try:
            return work(), None
        except StoreError as error:
            return None, self._unreadable(candidate, error)
        except NotFoundError as error:
            return None, DamagedError(str(error), rank=self.ranks.rank)
        except CheckpointdError as error:
            return None, error
        except Exception as error:
            log.exception("examining %s", candidate.tag)
            return None, CheckpointdError(f"{candidate.tag} cannot be loaded on rank {self.ranks.rank}: {error!r}")

    def _unreadable(self, candidate: Candidate, error: StoreError) -> UnreadableError:
        looks = command("verify", self.store.url, candidate.tag)
        return UnreadableError(
            f"{candidate.tag} cannot be read now on rank {self.ranks.rank}: {error}. Nothing was loaded, and no older "
            "checkpoint was taken instead, since this one may be whole. Mend the storage and load again; "
            f"{looks} shows what can be read. To go back all the same, name an older checkpoint: "
            "load(state, tag=...)"
        )

    def _see(self, candidate: Candidate) -> Seen:
        source = self._held_source(candidate) if candidate.in_memory else self._stored_source(candidate)
        content = source.content()
        return Seen(source, content, askable(self.state, content))

    def _examine(self, seen: Seen, answers: HandedOutStates) -> Examined:
        source = seen.source
        content, restoration = prepared(source, self.state, seen.content, self.options, answers=answers)
        source.verify(restoration.targets, content)
        return Examined(source, restoration, content)

    def _held_source(self, candidate: Candidate) -> MemorySource:
        """Fetch the snapshot. Whatever is wrong with it is damage: an older checkpoint may be whole."""
        held = self._held.get((candidate.tag, str(candidate.attempt)))
        if held is None or self.sidecar is None:
            raise DamagedError(f"rank {self.ranks.rank} holds no snapshot of {candidate.tag}", rank=self.ranks.rank)
        return MemorySource.fetched(self.sidecar, held, self.ranks.rank, lambda work: self.writer.call(work, self.timeout_s))

    def _stored_source(self, candidate: Candidate) -> StoredSource:
        # Rank 0 has just read it: a rank that does not see it lags behind, and nothing is lost.
        store = PatientStore(self.store, Patience(self.config.retry_s, None, self._tries_again))
        read = catalog.read_outcome(store, candidate.tag, candidate.attempt)
        outcome = self.writer.call(read, self.timeout_s + self.config.retry_s)
        checkpoint = Checkpoint(candidate.tag, candidate.attempt, outcome)
        return StoredSource(
            self.store, self.writer, self.config, self.timeout_s, self.ranks, checkpoint, on_failure=self._tries_again
        )

    # --- touching --------------------------------------------------------------------------------------------

    def _in_part(self, found: Examined, why: str) -> PartlyLoadedError:
        return PartlyLoadedError(
            f"loading {found.source.tag} failed after it had begun to fill the objects, which now hold a mix of old and new "
            f"values: {why}. On every rank, neither train with them nor save them: make them anew and load again, or start the "
            "job again"
        )

    def _fill(self, found: Examined) -> Loaded:
        problem: CheckpointdError | None = None
        client_state: dict[str, object] = {}
        restoration = found.restoration
        try:
            found.source.fill(restoration.targets, found.content)
            client_state = restoration.finish()
        except CheckpointdError as error:
            problem = self._in_part(found, f"{error} (rank {self.ranks.rank})")
            problem.__cause__ = error
        except Exception as error:  # the other ranks wait for this one's word, whatever it is
            log.exception("loading %s", found.source.tag)
            problem = self._in_part(found, f"{error!r} (rank {self.ranks.rank})")
            problem.__cause__ = error
        try:
            verdict = self.turn.agree("filled", problem, warning=restoration.left_out(found.source.tag))
        except CheckpointdError as error:  # a rank is gone, and what it has loaded with it
            verdict = error
        if verdict is not None:
            raise verdict if isinstance(verdict, PartlyLoadedError) else self._in_part(found, str(verdict)) from verdict
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


def call_patiently(
    writer: WriterThread,
    config: LoadConfig,
    look: Callable[[Patience], Coroutine[Any, Any, T]],
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """What `look` finds, on the writer's thread, with the patience that `config` gives to what cannot be read.

    StoreError where the storage does not answer at all.
    """
    patience = Patience(config.retry_s, config.absence_s, on_failure)
    return writer.call(look(patience), LOOK_S + config.retry_s + config.absence_s)


def leave_record(writer: WriterThread, put: Coroutine[Any, Any, None], what: str) -> bool:
    """Run `put`; whether it worked. That a record cannot be left must not keep the job from what is whole."""
    try:
        writer.call(put, NOTE_S)
    except CheckpointdError as error:
        log.error(
            "%s: the record that it was passed over cannot be left, so this job removes nothing that earlier ones left: %s",
            what,
            error,
        )
        return False
    return True


def _named(flights: tuple[InFlight, ...]) -> str:
    return ", ".join(sorted({flight.tag for flight in flights}))


__all__ = ["Loaded", "Loader", "MismatchError", "call_patiently", "leave_record"]
