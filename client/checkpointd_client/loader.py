"""Loading: the ranks agree on one checkpoint, and read it into the user's objects; each byte is read once, and verified there.

Invariants
  LOAD-1  No object of the user is touched before every rank has verified the indexes that it reads, along the chain of digests,
      and has found a place for each value. With `verify_first` all other bytes that it will read are verified by then as well.
  LOAD-2  All ranks load the same attempt, or no rank loads.
  LOAD-3  Damage is never silent. With `fallback` it is logged as an error, and an older checkpoint is tried. Otherwise it is
      raised.
  LOAD-4  An older checkpoint is tried only if damage to the newer one is proved. A failed read is repeated until the load's
      deadline; then the error is raised on every rank.
  LOAD-5  A checkpoint that was passed over gets a record of that, so only a user ever removes it. If the record cannot be put,
      this job removes no checkpoint of earlier starts: retention would count the damaged checkpoint as whole.
  LOAD-6  If a load ends with an error after it has begun to fill the objects, this is a PartlyLoadedError on every rank.
  LOAD-7  load() returns only when every byte in the objects was verified. If bytes prove damaged when they are in the objects
      already, an older checkpoint must fill all memory that was filled so far, on every rank.
  LOAD-8  Before every rank has verified all its bytes, a load changes nothing but the elements of tensors.
  LOAD-9  A checkpoint that was removed while it was loaded is not damaged: the next one is loaded in its place, or if it was
      named, the load fails with a NotFoundError.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from checkpointd.commands import at_tag, command
from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig, Ranks
from checkpointd.daemon.protocol.wire import InFlight, RetainedSnapshot
from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    MismatchError,
    NotFoundError,
    PartlyLoadedError,
    RootGoneError,
    SidecarError,
    StateError,
    StoreError,
    UnreadableError,
)
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.phrases import listed
from checkpointd.pipeline.outcome.outlived import VOTES_S, outlived
from checkpointd.pipeline.root import candidates as choices
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import check_whole
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.waits import Waiting
from checkpointd_client.capture import state_dicts
from checkpointd_client.capture.aliasing import MemoryRegion
from checkpointd_client.loaded import Loaded, say_loaded
from checkpointd_client.ranks.load_messages import CandidateChoice, Holding, Problem, SpooledOffer
from checkpointd_client.ranks.load_rounds import LoadRound
from checkpointd_client.ranks.reading_circle import RankSharing
from checkpointd_client.ranks.writer import ASKED, WriterThread
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.candidate import Candidate, Examined, Seen
from checkpointd_client.restore.memory_source import MemorySource, common, counts
from checkpointd_client.restore.plan import LoadOptions, Restoration, askable
from checkpointd_client.restore.spool_source import NodeSpoolView, SpoolFirst, in_every_spool, may_commit, spooled_source
from checkpointd_client.restore.store_source import CandidateSource, StoredSource, prepared
from checkpointd_client.restore.target_chooser import TargetChooser
from checkpointd_client.sidecar.client import SidecarClient

log = logging.getLogger("checkpointd")
T = TypeVar("T")
_AGAIN = "make them anew and load again, or start the job again"
_MEND = "mend what failed or leave it out of the state, then make the objects anew and load again"


_FLIGHT_POLL_S = 0.1
NOTE_S = 30.0
LOOK_S = 600.0
"""How long a look at the root may take without any failure: long enough for very many tags on a slow file system."""


@dataclass(slots=True)
class Loader:
    """One load() call on one rank."""

    store: Store
    writer: WriterThread
    ranks: Ranks
    config: LoadConfig
    load_round: LoadRound
    timeout_s: float
    state: MutableMapping[str, Any] | TargetChooser
    options: LoadOptions
    sidecar: SidecarClient | None = None
    surviving: tuple[str, ...] = ()
    """On rank 0: the surviving attempts of earlier starts."""
    is_recorded: bool = True
    """Whether every record of LOAD-5 could be put."""
    afresh: bool = False
    """Whether the job goes on without a checkpoint if none is whole."""
    near: NodeSpoolView | None = None
    """The spool of this node."""
    check_root: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Raises RootGoneError if the path no longer leads to the root of this job. None for a process that began no job."""
    _held: dict[tuple[str, str], RetainedSnapshot] = field(default_factory=dict)
    _offers: dict[int, Holding] = field(default_factory=dict)
    """On rank 0: what the nodes of all ranks hold."""
    _nearby: set[str] = field(default_factory=set)
    """On rank 0: the attempts that were tried with what the nodes have of them."""
    _failures: list[str] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _is_missing: bool = False
    """Whether something that a checkpoint needs is not there."""
    _looked: bool = False
    """Whether rank 0 has looked at the store, and logged the damage that it found there."""
    taken: Candidate | None = None
    """What was loaded."""
    _answers: HandedOutStates = field(default_factory=HandedOutStates)
    _touched: list[tuple[str, tuple[torch.Tensor, ...]]] = field(default_factory=list)
    """The checkpoints that this load has begun to read into the objects: tags, each with the memory that it fills."""

    def load(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        """Agree on a checkpoint, and load it. None if `tag` is None and there is no checkpoint."""
        began = time.monotonic()
        try:
            loaded = self._loaded(tag, fallback=fallback)
        except PartlyLoadedError:
            raise
        except CheckpointdError as error:
            if not self._touched:
                raise
            raise self._in_part(str(error)) from error  # LOAD-6
        if self.ranks.rank == COORDINATOR:
            say_loaded(loaded, self.store.url, time.monotonic() - began)
        return loaded

    def _loaded(self, tag: str | None, *, fallback: bool) -> Loaded | None:
        if tag is None:
            self._offer_held()
        for number in range(1 << 30):
            candidate = self._candidate(number, tag, fallback=fallback)
            if candidate is None:
                self._nothing()
                return None
            found, problem = self._examined(number, candidate)
            fit = None if found is None else found.restoration
            verdict, nowhere = self.load_round.judge(f"{number}/verdict", problem, fit, strict=self.options.strict)
            if verdict is None:
                assert found is not None
                if self.ranks.world_size > 1:
                    found.restoration.unexpected = nowhere
                verdict = self._fill(number, candidate, found)
                if verdict is None:
                    self.taken = candidate
                    return self._finish(found)
            if candidate.is_not_of_root and isinstance(verdict, SidecarError | StoreError):
                log.info("%s is loaded from the store: %s", candidate.tag, verdict)
                continue
            if candidate.is_not_of_root and isinstance(verdict, DamagedError):
                where = "memory" if candidate.in_memory else "the spool"
                log.error("%s cannot be loaded from %s: %s. Loading from the store", candidate.tag, where, verdict)
                continue  # the stored checkpoint may be whole
            if candidate.near and isinstance(verdict, SidecarError | DamagedError):
                log.error("%s cannot be read near: %s. Reading all of it at the root", candidate.tag, verdict)
                continue  # NEAR-2
            if isinstance(verdict, NotFoundError) and tag is None:
                log.warning("%s. Loading the newest checkpoint that is left", verdict)
                continue
            self._failures.append(str(verdict))
            if not fallback or tag is not None or not isinstance(verdict, DamagedError):
                raise verdict
            log.error("%s cannot be loaded: %s. Trying the checkpoint before it", candidate.tag, verdict)
            self._note_passed_over(candidate.prefix, str(verdict))
        raise AssertionError("unreachable")

    def _nothing(self) -> None:
        refused = None if isinstance(self.state, TargetChooser) else state_dicts.refused(self.state)
        # Even with nothing to load, all ranks meet: a rank that skips this load() would mistake the answer for its next one's.
        problem = self.load_round.agree("nothing", refused)
        if problem is not None:
            raise problem
        if self._failures:
            how = "give the job another root" if self._is_missing else "make the job's Checkpointer with afresh=True"
            left = f"no whole checkpoint is left at {self.store.url}; every one is damaged: {'; '.join(self._failures)}"
            error = DamagedError(f"{left}. To begin without one, {how}")
            if self._touched or not self.afresh:
                raise error
            log.error("%s. It was, so nothing is loaded", error)

    # --- agreeing on a candidate -----------------------------------------------------------------------------

    def _candidate(self, number: int, tag: str | None, *, fallback: bool) -> Candidate | None:
        """The next checkpoint to try, which rank 0 chooses. Raises on every rank the error that rank 0 met."""
        choice = self.load_round.chosen(f"{number}/candidate", lambda: self._choose(number, tag))
        self._is_missing |= choice.is_missing
        if choice.problem is not None:
            raise self.load_round.agree("nothing", None) or choice.problem.error()
        if choice.tag is None:
            return None
        attempt = AttemptId.parse(choice.attempt)
        assert attempt is not None
        return Candidate(
            choice.tag, attempt, choice.in_memory, choice.in_spool, choice.near, choice.share_reads, choice.commit, choice.nonce
        )

    def _choose(self, number: int, tag: str | None) -> CandidateChoice:
        try:
            held = self._held_by_all() if number == 0 and tag is None else None
            spooled = self._spooled_by_all() if tag is None else None
            if held is None and spooled is None and not self._looked:
                self._wait_for_flights()
            chosen = self.look(lambda patience: self._chosen(tag, patience))
            newest = (-1, -1) if chosen is None else chosen.commit.order
            if held is not None and held.order >= max(newest, (-1, -1) if spooled is None else spooled.order):
                return CandidateChoice(in_memory=True, tag=held.tag, attempt=held.attempt)
            if spooled is not None and spooled.order > newest:
                self._nearby.add(f"{spooled.tag}/{spooled.attempt}")
                return CandidateChoice(in_spool=True, tag=spooled.tag, attempt=spooled.attempt)
            self._at_own_root()
            self._looked = True
            near = chosen is not None and self._is_near(chosen)
            if chosen is not None:
                (self._nearby if near else self._tried).add(chosen.prefix)
        except CheckpointdError as error:
            return CandidateChoice(problem=Problem.of(self._root_gone() or error))
        if chosen is None:
            return CandidateChoice(is_missing=self._is_missing)
        return CandidateChoice(
            tag=chosen.tag,
            attempt=str(chosen.id),
            commit=chosen.commit,
            nonce=choices.nonce_of(self.store, chosen),
            near=near,
            share_reads=self.options.share_reads and self.ranks.world_size > 1,
        )

    async def _chosen(self, tag: str | None, patience: Patience) -> LoggedAttempt | None:
        state = await choices.known_state(self.store, patience)
        if tag is not None:
            return root_view.found_in(state, tag, self.store.url)
        # By name, not by position: new checkpoints may have come since the last look.
        return next((c for c in choices.candidates(state) if c.prefix not in self._tried), None)

    def _state(self) -> LogState:
        """The state of the root's log now."""
        return self.look(lambda patience: choices.known_state(self.store, patience))

    def look(self, work: Callable[[Patience], Coroutine[Any, Any, T]]) -> T:
        return call_patiently(self.writer, self.config, work, self._tries_again)

    def _tries_again(self) -> None:
        """Let the other ranks wait for this one. Runs on the writer's thread."""
        try:
            self.load_round.tries_again()
        except CheckpointdError as error:
            log.warning("the other ranks cannot be told that rank %d reads again: %s", self.ranks.rank, error)

    def _note_passed_over(self, prefix: str, why: str) -> None:
        """On rank 0, put the record of LOAD-5."""
        if self.ranks.rank == 0:
            self.is_recorded &= leave_record(self.writer, choices.note_passed_over(self.store, prefix, why), prefix)

    def _offer_held(self) -> None:
        """Tell rank 0 which snapshots this rank's sidecar retains."""
        held: tuple[RetainedSnapshot, ...] = ()
        if self.sidecar is not None:
            try:
                held = self.writer.call(self.sidecar.held(), self.timeout_s)
            except StoreError as error:
                log.warning("the sidecar did not list its snapshots: %s", error)
        self._held = {(one.tag, one.attempt): one for one in held}
        note = Holding(held=held)
        if self.near is not None:
            self.near.look()
            note = Holding(held=held, spooled=self.near.offers(self.ranks.rank), near=self.near.prefixes)
        self.load_round.offer("held", note)

    def _is_near(self, chosen: LoggedAttempt) -> bool:
        """Whether a node has a part of `chosen` in memory or in its spool, which was not tried yet."""
        notes = [note for note in self._offers.values() if chosen.prefix not in self._nearby]
        named = {prefix for note in notes for prefix in (*note.near, *(f"{one.tag}/{one.attempt}" for one in note.held))}
        return chosen.prefix in named

    def _spooled_by_all(self) -> SpooledOffer | None:
        """On rank 0: the newest undecided attempt that every rank has in the spool of its node, if it was not tried yet."""
        for offered in in_every_spool(self._offers, self.ranks):
            is_new = f"{offered.tag}/{offered.attempt}" not in self._nearby
            if is_new and may_commit(self._state(), offered):
                return offered
        return None

    def _held_by_all(self) -> RetainedSnapshot | None:
        """On rank 0: the newest snapshot that all sidecars retain, if it counts at this root."""
        self._offers = self.load_round.offers("held")
        held = common({rank: note.held for rank, note in self._offers.items()}, self.ranks)
        if held is None:
            return None
        return held if counts(self._state(), held) else None

    def _wait_for_flights(self) -> None:
        """Wait until the attempts that daemons still persist for an earlier start are decided: one may be the newest
        checkpoint.
        """
        # Half of the time-out, since the other ranks wait for rank 0's choice no longer than the time-out.
        most_s = self.timeout_s / 2
        until = time.monotonic() + most_s
        own = self._wait_for_own(self.sidecar, until) if self.sidecar is not None else ()
        others = [attempt for attempt in self.surviving if attempt not in own]
        left_s = max(0.0, until - time.monotonic())
        late = self.writer.call(outlived(self.store, others, left_s, spooled=self._spooled()), self.timeout_s) if others else ()
        if own or late:
            log.warning("still undecided: %s. Loading the newest committed checkpoint", listed(sorted({*own, *late})))

    def _spooled(self) -> Collection[str]:
        """The attempts that this node can still upload: nobody may decide them, although they may have no lease."""
        if self.near is None:
            return ()
        self.near.look()
        return {f"{one.tag}/{one.attempt}" for one in self.near.offers(COORDINATOR)}

    def _wait_for_own(self, sidecar: SidecarClient, until: float) -> tuple[str, ...]:
        """Wait in the same way for this node's daemon; returns the attempts (`<tag>/<attempt>`) that it has not ended.

        This waits while the daemon writes shards. After that it waits VOTES_S for the votes of other nodes: a node that died
        with its sidecar will never vote.
        """
        pause = threading.Event()
        flights: tuple[InFlight, ...] = ()
        waiting = Waiting(lambda: f"the sidecar at {sidecar.path} still works at {_named(flights)} of an earlier job")
        while time.monotonic() < until:
            flights = self.writer.call(sidecar.in_flight(), self.timeout_s)
            if not flights:
                break
            waiting.look()
            if all(flight.phase in (Phase.PREPARED, Phase.SPOOLED) for flight in flights):
                until = min(until, time.monotonic() + VOTES_S)
            pause.wait(_FLIGHT_POLL_S)
        return tuple(f"{flight.tag}/{flight.attempt}" for flight in flights)

    # --- looking before touching -----------------------------------------------------------------------------

    @property
    def _verifies_first(self) -> bool:
        # A job that may go on without a checkpoint needs objects that still have the values they began with.
        return self.options.verify_first or self.afresh

    def _examined(self, number: int, candidate: Candidate) -> tuple[Examined | None, CheckpointdError | None]:
        """Find the places of the tensors of `candidate` on this rank, or return the problem. Touches nothing.

        Problems of this rank are returned, not raised, because the other ranks wait for its verdict. This raises only if the
        other ranks do not answer.
        """
        seen, problem = self._tried_on(candidate, lambda: self._see(candidate))
        answers = self._answers
        if self.ranks.world_size > 1:
            own: Mapping[str, object] = seen.askable if seen is not None else {}
            answers = answers.of_all({fqn: own[fqn] for fqn in self.load_round.named_by_all(f"{number}/askable", own)})
        if seen is None:
            return None, problem
        return self._tried_on(candidate, lambda: self._examine(seen, answers))

    def _at_own_root(self) -> None:
        """Raise RootGoneError if the last look may have been at another directory than the root of this job."""
        if self.check_root is not None:
            self.writer.call(self.check_root(), LOOK_S)

    def _root_gone(self) -> RootGoneError | None:
        """The error if another directory in place of the root explains that objects are missing there."""
        try:
            self._at_own_root()
        except RootGoneError as error:
            return error
        except CheckpointdError:
            return None
        return None

    def _tried_on(self, candidate: Candidate, work: Callable[[], T]) -> tuple[T | None, CheckpointdError | None]:
        found, problem = self._worked(candidate, work)
        if isinstance(problem, StoreError | DamagedError):
            problem = self._root_gone() or self._removed(candidate) or problem
        return found, problem

    def _removed(self, candidate: Candidate) -> NotFoundError | None:
        """The error if somebody has removed the checkpoint meanwhile, which explains that objects are missing (LOAD-9)."""
        if candidate.is_not_of_root:
            return None
        try:
            one = self._state().attempts.get(candidate.prefix)
        except CheckpointdError:
            return None
        if one is not None and one.status == "checkpoint":
            return None
        why = "" if one is None or one.removal is None else f": {one.removal.reason}"
        return NotFoundError(f"{candidate.tag} was removed while it was loaded{why}")

    def _worked(self, candidate: Candidate, work: Callable[[], T]) -> tuple[T | None, CheckpointdError | None]:
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
        looks = command("verify", *at_tag(self.store.url, candidate.tag))
        nothing = "No" if self._touched else "Nothing was loaded, and no"
        return UnreadableError(
            f"{candidate.tag} cannot be read now on rank {self.ranks.rank}: {error}. {nothing} older "
            "checkpoint was taken instead, since this one may be whole. Mend the storage and load again; "
            f"{looks} shows what can be read. To load an older checkpoint nevertheless, name it: load(state, tag=...)"
        )

    def _see(self, candidate: Candidate) -> Seen:
        if self.ranks.rank == COORDINATOR and not candidate.is_not_of_root and not candidate.near:
            self.look(partial(self._check_whole, candidate))
        source = self._source(candidate)
        content = source.content()
        return Seen(source, content, uncollected(lambda: askable(self.state, content)))

    def _examine(self, seen: Seen, answers: HandedOutStates) -> Examined:
        source = seen.source
        content, restoration = prepared(source, self.state, seen.content, self.options, answers=answers)
        self._check_overwrites(source.tag, restoration)
        source.locate(restoration.targets, content)
        if self._verifies_first:
            source.verify(restoration.targets, content)
        return Examined(source, restoration, content)

    def _check_overwrites(self, tag: str, restoration: Restoration) -> None:
        """Raise MismatchError if `restoration` leaves memory alone that a damaged checkpoint has filled (LOAD-7)."""
        if not self._touched:
            return
        filled = set(map(MemoryRegion.of, restoration.live))
        for other, memory in self._touched:
            if not filled.issuperset(map(MemoryRegion.of, memory)):
                raise MismatchError(f"{tag} does not have all values that {other} had, which is damaged and was loaded in part")

    async def _check_whole(self, candidate: Candidate, patience: Patience) -> None:
        """Raise DamagedError if something is missing that any rank needs."""
        assert candidate.commit is not None
        try:
            await check_whole(self.store, LoggedAttempt.of(candidate.commit), patience)
        except DamagedError:
            self._is_missing = True
            raise

    def _source(self, candidate: Candidate) -> CandidateSource:
        if candidate.in_memory or (candidate.near and not candidate.share_reads and self._holds(candidate)):
            return self._held_source(candidate)
        if candidate.in_spool and self.near is not None:
            prefix, args = candidate.prefix, (self.config, self.timeout_s, self.ranks)
            return spooled_source(self.near, self.store, prefix, self.writer, *args)
        return self._stored_source(candidate)

    def _holds(self, candidate: Candidate) -> bool:
        """Whether this rank's sidecar retains the snapshot of `candidate`, which is at the root."""
        held = self._held.get((candidate.tag, str(candidate.attempt)))
        return held is not None and (held.world_size, held.nonce) == (self.ranks.world_size, candidate.nonce)

    def _held_source(self, candidate: Candidate) -> MemorySource:
        """Fetch the snapshot. Any problem with it counts as damage, so the ranks load from the store instead."""
        held = self._held.get((candidate.tag, str(candidate.attempt)))
        if held is None or self.sidecar is None:
            raise DamagedError(f"rank {self.ranks.rank} has no snapshot of {candidate.tag}", rank=self.ranks.rank)
        return MemorySource.fetched(
            self.sidecar,
            held,
            self.ranks.rank,
            lambda work: self.writer.call(work, self.timeout_s),
            pinned_bytes=self.config.pinned_bytes,
        )

    def _stored_source(self, candidate: Candidate) -> StoredSource:
        assert candidate.commit is not None
        checkpoint = LoggedAttempt.of(candidate.commit)
        sharing = RankSharing(self.load_round, f"reads/{checkpoint.prefix}") if candidate.share_reads else None
        near = self.near is not None and candidate.near and checkpoint.prefix in self.near.prefixes
        return StoredSource(
            SpoolFirst(self.store, self.near.store) if near and self.near is not None else self.store,
            self.writer,
            self.config,
            self.timeout_s,
            self.ranks,
            checkpoint,
            on_failure=self._tries_again,
            kind="spool" if near else "store",
            sharing=sharing,
        )

    # --- touching --------------------------------------------------------------------------------------------

    def _in_part(self, why: str, remedy: str = _AGAIN) -> PartlyLoadedError:
        return PartlyLoadedError(
            f"loading {self._touched[-1][0]} failed after it had begun to fill the objects, which now hold a mixture of old "
            f"and new values: {why}. On every rank, neither train with them nor save them: {remedy}"
        )

    def _fill(self, number: int, candidate: Candidate, found: Examined) -> CheckpointdError | None:
        """Read the tensors into their places. Returns the error if that failed on any rank."""
        self._touched.append((found.source.tag, found.restoration.live))
        _, problem = self._tried_on(candidate, lambda: found.source.fill(found.restoration.targets, found.content))
        return self.load_round.agree(f"{number}/filled", problem)

    def _finish(self, found: Examined) -> Loaded:
        """Change all that is no tensor, once every rank has verified its tensors (LOAD-8)."""
        problem: CheckpointdError | None = None
        client_state: dict[str, object] = {}
        restoration = found.restoration
        try:
            client_state = uncollected(restoration.finish)
        except Exception as error:  # any error: the other ranks wait for this one's verdict
            if not isinstance(error, CheckpointdError):
                log.exception("loading %s", found.source.tag)
            words = str(error) if isinstance(error, CheckpointdError) else repr(error)
            failed = f"{words} (rank {self.ranks.rank})"
            problem = self._in_part(failed, _MEND) if isinstance(error, StateError) else self._in_part(failed)
            problem.__cause__ = error
        verdict = self.load_round.agree("finished", problem, warning=restoration.left_out(found.source.tag))
        if verdict is not None:
            raise verdict
        if restoration.per_rank_left and self.ranks.rank == 0:  # logged once; the result of each rank has its own list
            left = ", ".join(restoration.per_rank_left)
            log.warning("%s was saved by another number of ranks, so each rank keeps its own %s", found.source.tag, left)
        return loaded_of(found.source, restoration, client_state, tuple(self._failures))


def loaded_of(
    source: CandidateSource, restoration: Restoration, client_state: dict[str, object], fell_back_from: tuple[str, ...]
) -> Loaded:
    """The result of a load that has filled the objects from `source`."""
    return Loaded(
        tag=source.tag,
        step=source.step,
        source=source.kind,
        client_state=client_state,
        missing=restoration.missing,
        unexpected=restoration.unexpected,
        mismatched=restoration.mismatched,
        per_rank_left=restoration.per_rank_left,
        fell_back_from=fell_back_from,
    )


def call_patiently(
    writer: WriterThread,
    config: LoadConfig,
    look: Callable[[Patience], Coroutine[Any, Any, T]],
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """Run `look` on the writer's thread, with the patience of `config` for failed reads.

    StoreError if the storage does not answer at all.
    """
    patience = Patience(config.retry_s, config.absence_s, on_failure)
    return writer.call(look(patience), LOOK_S + config.retry_s + config.absence_s, lambda: what_is_awaited(patience))


def what_is_awaited(patience: Patience | None) -> str:
    """For the log of a long wait: why reads fail, or that the storage does not answer."""
    failure = None if patience is None else patience.last_failure
    return ASKED if failure is None else f"reads fail, and are tried again: {failure}"


def leave_record(writer: WriterThread, put: Coroutine[Any, Any, None], what: str) -> bool:
    """Run `put`, and return whether it worked. Without the record, the job can still load a whole checkpoint."""
    try:
        writer.call(put, NOTE_S)
    except CheckpointdError as error:
        log.error(
            "%s: no record could be put that it was passed over, so this job removes nothing of earlier jobs: %s",
            what,
            error,
        )
        return False
    return True


def _named(flights: tuple[InFlight, ...]) -> str:
    return listed(sorted({flight.tag for flight in flights}))
