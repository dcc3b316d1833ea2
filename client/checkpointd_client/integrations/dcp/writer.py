"""A DCP StorageWriter: DCP plans and gathers, our attempt writes, votes and commits.

    coordinator   prepare_global_plan   takes the start and tells every rank its attempt, in the plan that DCP scatters
    every rank    write_data            copies the items of its plan, persists them, and votes
    coordinator   finish                lets the attempt commit, and returns when it has committed

Invariants
  DCPWRITE-1  Nothing is committed before `finish`, which DCP calls only if no rank failed.
  DCPWRITE-2  A rank that fails votes no, and the attempt is aborted on all ranks at once. A rank that dies does not vote: the
      attempt is aborted at its deadline, by the coordinator's next save, at the end of the coordinator's process, or by the
      next start.
"""

from __future__ import annotations

import logging
import os
import secrets
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from checkpointd import arguments
from checkpointd.codec import Compression
from checkpointd.commit.retention import KEEPS_NONE, Retention, rules_of
from checkpointd.config import MIB, CommitConfig, PersistConfig, check_job
from checkpointd.errors import CheckpointdError, RootNotSharedError, StagingError, UsageError
from checkpointd.layout.keys import STEP_MAX, AttemptId, check_tag, default_tag
from checkpointd.layout.manifest import Branches
from checkpointd.phrases import listed
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Shard
from checkpointd_client.integrations.conversion.items import shard_of
from checkpointd_client.integrations.dcp.attempt import DcpAttempt
from checkpointd_client.integrations.dcp.session import DcpSession, session_of, taken_from
from checkpointd_client.integrations.dcp.tagged import Tagged, step_of
from checkpointd_client.ranks.startup import Begun, instead, root_fault

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Sent by a rank to the coordinator with its plan."""

    token: str
    """Identifies the rank."""
    tag: str


@dataclass(frozen=True, slots=True)
class PlanReply:
    """Sent by the coordinator to a rank with its plan."""

    info: AttemptInfo
    begun: Begun


class CheckpointdWriter(Tagged, StorageWriter):
    """Lets `dcp.save` and `dcp.async_save` write checkpoint `tag` below `root`, a directory that every rank sees.

    `tag`: None if `step` is given (the tag is then `global_step100`), or if `checkpoint_id` of dcp.save names the tag. `step`:
    None takes the last number in the tag, or 0. `overwrite`: False refuses a tag that is a checkpoint already; True saves it
    again, and the earlier checkpoint stays valid until the new one is committed. The other settings are those of Checkpointer.
    You can make a writer for each save, or use one for many saves, with no `step` and a different `checkpoint_id` each.

    dcp.save raises CheckpointException, whose `failures` hold the error of each rank: StateError for values that cannot be
    stored; the error of the rank that failed, or AbortedError, if the attempt was aborted; RootInUseError at the first save if
    another job is alive at the root; FencedError once another job has taken it over; RootNotSharedError; StoreError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        step: int | None = None,
        overwrite: bool = True,
        compression: Compression = "auto",
        commit_timeout_s: float = 600.0,
        chunk_bytes: int = 4 * MIB,
        budget_bytes: int = 256 * MIB,
        dedup: bool = True,
        retention: Retention | int | None = None,
        save_latest: bool = True,
        job: str | None = None,
        take_over: bool = False,
        afresh: bool = False,
    ) -> None:
        super().__init__()
        if step is not None:
            step = arguments.counted("step", step, most=STEP_MAX)
        arguments.seconds("commit_timeout_s", commit_timeout_s, most=arguments.TIMEOUT_S_MAX)
        arguments.flag("overwrite", overwrite)
        arguments.flag("save_latest", save_latest)
        arguments.path("root", root)
        self._root = os.fspath(root)
        self._tag = check_tag(tag) if tag is not None else default_tag(step) if step is not None else None
        self._step = step
        self._overwrite = overwrite
        self._persist = PersistConfig(compression=compression, chunk_bytes=chunk_bytes, budget_bytes=budget_bytes, dedup=dedup)
        # DCP's plans have detached tensors, so nobody knows which of them are trained.
        self._commit = CommitConfig(
            timeout_s=float(commit_timeout_s),  # a numpy.float64 cannot be stored
            poll_max_s=0.1,
            retention=rules_of(retention),
            on_no_progress="ignore",
            read_back=False,
        )
        self._save_latest = save_latest
        self._job, self._take_over = check_job(job), take_over
        self._afresh = afresh
        self._asked = PlanRequest("", "")
        self._held = SavePlan([])
        self._set_up: tuple[DcpSession, WriterState] | None = None
        self._run: DcpAttempt | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For async_save in another process, which opens the root anew."""
        known = self._afresh or taken_from(self._root) is not None  # the other process has loaded nothing
        return {**self.__dict__, "_afresh": known, "_set_up": None, "_run": None}

    # --- what DCP calls, in order ------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if self._run is not None:
            self._run.give_up("it was never finished: DCP reported a failure on some rank before")
        if checkpoint_id is None:
            return
        tag = check_tag(os.fspath(checkpoint_id))
        if self._run is not None and self._step is not None and tag != self._tag:
            raise UsageError(
                f"step={self._step} was given for {self._tag}, and would also be the step of {tag}: make a writer for each "
                "save, or leave step out; it is then the last number in each tag"
            )
        self._tag = tag

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False: a checkpoint is committed by all ranks together; leave it out")
        if self._tag is None:
            raise UsageError("which tag? Pass CheckpointdWriter(root, tag=...) or step=..., or checkpoint_id=... of dcp.save")
        session = session_of(self._root, self)
        if self._set_up is None or self._set_up[0] is not session:
            self._set_up = session, WriterState(store=session.store, persist=self._persist, commit=self._commit)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise UsageError("DefaultSavePlanner(enable_plan_caching=True) leaves out what this storage needs: use False")
        self._held = plan
        self._asked = PlanRequest(secrets.token_hex(8), self._tag or "")
        return replace(plan, storage_data=self._asked)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on the coordinator only. It is rank 0 of the attempt, even if it has another rank in the process group."""
        asked = [plan.storage_data for plan in plans]
        tags = {one.tag for one in asked}
        if len(tags) != 1:
            raise UsageError(f"the ranks save different tags: {', '.join(sorted(tags))}")
        session, state = self._ready()
        if not self._overwrite and session.holds(self._asked.tag):
            raise UsageError(f"Checkpoint already exists: {self._asked.tag} at {self._root}, and overwrite=False")
        here = asked.index(self._asked)
        beginner = Beginner(
            world_size=len(plans),
            job=self._job,
            take_over=self._take_over,
            commit_timeout_s=self._commit.timeout_s,
            instead=instead(self._root),
        )
        begun, attempt, n = session.next_attempt(self._asked.tag, beginner)
        # A process that has not loaded may not know of the checkpoints that were there before it, so they stay.
        taken = taken_from(self._root)
        known = self._afresh or taken is not None
        state.tidier.keeps_before = KEEPS_NONE if known else (session.first, 0)
        if not known:
            session.say_unknown()
        left = session.left_after(taken, (begun.number, n), self._commit.timeout_s)
        infos = (self._info(attempt, (i - here) % len(plans), len(plans), n, left) for i in range(len(plans)))
        return [replace(plan, storage_data=PlanReply(info, begun)) for plan, info in zip(plans, infos, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Returns when this rank's part is durable and it has voted; raises the error that prevented it."""
        told: PlanReply = plan.storage_data
        session, state = self._ready()
        if told.info.rank != COORDINATOR:
            fault = root_fault(session.writer, session.store, told.begun)
            if fault != "ok":
                raise RootNotSharedError(f"the ranks do not share {self._root}: {fault}. Give a path that all nodes mount")
        staged: Future[Shard] = Future()
        run = self._run = DcpAttempt(session, state, told.info, staged)
        try:
            shard, strange = shard_of(self._held, plan, planner)
        except BaseException as error:
            staged.set_exception(_as_ours(error, told.info))
            with suppress(CheckpointdError):  # it only repeats that `error` aborted the attempt
                run.wait_voted()
            raise
        self._warn(strange)
        staged.set_result(shard)
        del shard  # the attempt alone decides how long it lives
        run.wait_voted()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. DCP's metadata is not stored: a reader makes it from the indexes."""
        if self._run is None:
            raise UsageError("finish() before write_data()")
        self._run.commit()

    # --- parts -------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[DcpSession, WriterState]:
        if self._set_up is None:
            raise UsageError("set_up_storage_writer() comes first")
        return self._set_up

    def _info(self, attempt: AttemptId, rank: int, world_size: int, n: int, left: Branches) -> AttemptInfo:
        return AttemptInfo(
            tag=self._asked.tag,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            step=step_of(self._asked.tag) if self._step is None else self._step,
            n=n,
            save_latest=self._save_latest,
            left=left,
        )

    def _warn(self, strange: tuple[str, ...]) -> None:
        if strange:
            log.warning(
                "%s: %d objects are not plain values and are stored pickled; dcp.load refuses those that need code, "
                "unless it is given CheckpointdReader(..., weights_only=False): %s",
                self._tag,
                len(strange),
                listed(strange),
            )


def _as_ours(error: BaseException, info: AttemptInfo) -> CheckpointdError:
    if isinstance(error, CheckpointdError):
        return error
    told = StagingError(f"the snapshot of {info.tag} failed: {error!r}")
    told.__cause__ = error
    return told
