"""Checkpointer: what a training script holds. `core.py` does the work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

from torch.distributed import ProcessGroup

from checkpointd.codec import Compression
from checkpointd.commit.decide import OnNoProgress
from checkpointd.commit.retention import Retention
from checkpointd.config import ABSENCE_S, MIB, PINNED_BYTES, ExportConfig, SpoolConfig
from checkpointd.errors import CheckpointdError
from checkpointd_client.core import Core
from checkpointd_client.loaded import Loaded
from checkpointd_client.ranks.preemption import PreemptSignals
from checkpointd_client.saver import WhenBusy
from checkpointd_client.saves.handle import SaveHandle
from checkpointd_client.saves.status import CheckpointInfo, Status, info_of
from checkpointd_client.settings import Options
from checkpointd_client.sidecar.client import OnSidecarLoss
from checkpointd_client.staging.stager import StagingMode


class Checkpointer:
    """Saves and loads the state of one training job below `root`. Make it on every rank, after init_process_group.

    Sizes are in bytes, times in seconds.

    `root`: a directory that every rank sees.
    `compression`: "auto", "none", "zstd" or "planes".
    `staging`: "lazy" copies the state beside the next forward and backward pass, "eager" inside save().
    `device_checksums`: at save(), each device computes checksums of its tensors, and the snapshot is checked against them.
    `when_busy`: what saves do that come too fast. "wait": a third one waits while two are in flight. "skip": it is skipped.
    "space": a save is skipped if it comes so soon after the last one that saves would take over `max_overhead` of the time.
    `commit_timeout_s`: how long the ranks wait for each other before they give a save up.
    `chunk_bytes`: the most raw bytes in a chunk. `budget_bytes`: host memory for each save in flight, beside its snapshot.
    `pinned_bytes`: the most host memory that a load to devices pins, until it ends; 0 pins none, and each copy is waited for.
    `preempt_signals`: for `preempted`. One signal, several, or a mapping to the seconds that are left after each.
    `grace_s`: the seconds that are left after a signal, unless `preempt_signals` is a mapping.
    `sidecar`: "auto" starts a process on each node that persists the snapshots and outlives this one, or uses the one that an
    earlier start has left. Or the socket of this node's `checkpointd serve`.
    `sidecar_uid`: the user that the sidecar runs as, if not you. Only you, root and that user get snapshots.
    `on_sidecar_loss`: while no sidecar takes saves, "inline" persists them here, and "raise" fails them. In both cases, a save
    that a sidecar has in its hands when it is lost fails, unless its spool has it.
    `dedup`: do not write unchanged data again; a checkpoint then refers to objects of older ones, which stay while needed.
    `full_every`: store only one in so many checkpoints in full, and those between as differences from it, which is smaller.
    They need its objects, which stay; if one of those is damaged, so are they. None: store every checkpoint in full.
    `retention`: which checkpoints stay, applied after each commit. A number keeps that many, None keeps all.
    `afresh`: this job may begin without a checkpoint, and remove those of earlier starts. Otherwise they all stay until load(),
    which raises if every one is damaged.
    `create`: make the root if no job has saved there yet. False raises NotFoundError instead, as for a mistyped path.
    `on_no_progress`: if the step moved on but no tensor that requires grad changed: "warn", "abort" the save, or "ignore" it.
    `pickle_client_state`: pickle values in client_state that are not plain; their code runs at the load. Else they are refused.
    `absence_s`: how long load() looks for a file that must be there before it counts as lost.
    `job`: the job's name. A start with the same name takes the root over. None: from CHECKPOINTD_JOB, torchrun or Slurm.
    `take_over`: begin even if another job is alive at the root; every save of that job then fails with FencedError.
    `read_back`: read new checkpoints back while no save is in flight. Else only before an older one is removed, if none was.
    `max_overhead`: how much longer steps may take while a save is in flight, as a part of a step. Saves then work slower, as
    long as each ends before the next one and before its deadline, and nobody waits for it. None: always at full speed.
    `spool`: a directory on this node's own disk, or a SpoolConfig. Snapshots become durable there first, and go to the root
    from there. It is that of the sidecar, which is "auto" then. If you start the sidecar yourself, give it the spool instead.
    `export`: a rule by which rank 0 exports checkpoints after their commits, for Hugging Face's libraries. close() waits until
    what is due is exported, unless the job was preempted. With a sidecar, give it the rule instead; nothing waits for it then.
    `tensor_classes`: your own subclasses of torch.Tensor with `__tensor_flatten__` and `__tensor_unflatten__`, and the classes
    in what these return beside the inner tensors. Only such classes, and some of torchao and bitsandbytes, are stored and made.
    `process_group`: the ranks that save and load together, if not all ranks of the job do. Make it on these only. They
    must have all replicas and shards of what they save, as of a DDP module. Everywhere, ranks are then those of the group.

    Raises UsageError (bad arguments, a root that is a file, a second Checkpointer at the root in this process), RootInUseError
    (another job is alive at the root), NotFoundError (with create=False), RootNotSharedError, DeadlineError (ranks that did not
    come), StoreError, SidecarError (the sidecar refuses this rank; or it refuses the start or is not there, and
    `on_sidecar_loss` is not "inline").
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        compression: Compression = "auto",
        staging: StagingMode = "lazy",
        device_checksums: bool = True,
        when_busy: WhenBusy = "wait",
        commit_timeout_s: float = 600.0,
        chunk_bytes: int = 4 * MIB,
        budget_bytes: int = 256 * MIB,
        pinned_bytes: int = PINNED_BYTES,
        preempt_signals: PreemptSignals = None,
        grace_s: float = 25.0,
        sidecar: str | os.PathLike[str] | None = None,
        sidecar_uid: int | None = None,
        on_sidecar_loss: OnSidecarLoss = "inline",
        dedup: bool = True,
        full_every: int | None = None,
        retention: Retention | int | None = None,
        afresh: bool = False,
        create: bool = True,
        on_no_progress: OnNoProgress = "warn",
        pickle_client_state: bool = False,
        absence_s: float = ABSENCE_S,
        job: str | None = None,
        take_over: bool = False,
        read_back: bool = True,
        max_overhead: float | None = 0.03,
        spool: str | os.PathLike[str] | SpoolConfig | None = None,
        export: ExportConfig | None = None,
        tensor_classes: Iterable[type] = (),
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._core = Core(
            root,
            Options(
                compression=compression,
                staging=staging,
                device_checksums=device_checksums,
                when_busy=when_busy,
                commit_timeout_s=commit_timeout_s,
                chunk_bytes=chunk_bytes,
                budget_bytes=budget_bytes,
                pinned_bytes=pinned_bytes,
                preempt_signals=preempt_signals,
                grace_s=grace_s,
                sidecar=sidecar,
                sidecar_uid=sidecar_uid,
                on_sidecar_loss=on_sidecar_loss,
                dedup=dedup,
                full_every=full_every,
                retention=retention,
                afresh=afresh,
                create=create,
                on_no_progress=on_no_progress,
                pickle_client_state=pickle_client_state,
                absence_s=absence_s,
                job=job,
                take_over=take_over,
                read_back=read_back,
                max_overhead=max_overhead,
                spool=spool,
                export=export,
                tensor_classes=tensor_classes,
                process_group=process_group,
            ),
        )

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        metrics: Mapping[str, float] | None = None,
        required: bool = False,
    ) -> SaveHandle:
        """Snapshot `state` and return; it is persisted and committed in the background. Call it on every rank.

        `state` maps names to modules, optimizers, schedulers, anything with state_dict and load_state_dict, and nested dicts
        and lists of tensors and plain values. `metrics` are kept with the checkpoint, for `Retention(best=...)` to choose by;
        those of rank 0 count. `required`: do not skip it, whatever `when_busy` says, as for the last save of a run. A save
        after a preemption signal is never skipped. Raises UsageError for a bad tag, step or metric, StateError for an object
        that cannot be stored (all ranks then abort the save at once), ClosedError after close().
        """
        return self._core.save(
            step,
            state,
            tag=tag,
            client_state=client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            metrics=metrics,
            required=required,
        )

    def prepare(self, state: Mapping[str, object]) -> None:
        """Allocate the memory for the first save of `state` in the background, with room for what the optimizers make at
        their first step. Without this, the first save takes several times as long as a later one.

        Call it on every rank, once the objects are made. It is not needed after load(), and does nothing after the first save.
        Raises StateError for an object that cannot be stored, ClosedError after close().
        """
        self._core.prepare(state)

    def load(
        self,
        state: MutableMapping[str, Any],
        tag: str | None = None,
        *,
        strict: bool = True,
        fallback: bool = True,
        cast: bool = False,
        verify_first: bool = False,
        share_reads: bool = False,
    ) -> Loaded | None:
        """Load the newest checkpoint, or `tag`, into the objects of `state`, in place; None if there is no checkpoint. The tag
        "latest" means the newest, too.

        Call it on every rank. The number of ranks and the sharding may differ from the save's. Per-rank state that was not
        equal on all ranks is then left alone and listed in `Loaded.per_rank_left`. `cast`: convert between floating dtypes.

        If the newest checkpoint is damaged, the log says so and all ranks load the newest whole one; `fallback=False` or a
        named `tag` raises an error instead. Bytes are read straight into the tensors and verified there. If they are damaged
        and no older checkpoint can be loaded over them, the error is a PartlyLoadedError: make the objects anew before you go
        on. `verify_first`: read and verify everything first, and again to load it. Damage then leaves the objects as they are,
        and is a DamagedError. `afresh=True` does the same. `share_reads`: ranks that need the same bytes, such as those of
        DDP, read each of them once and send it to each other over gloo, for storage that is slower than the network.

        Raises MismatchError listing every difference (`strict=False` loads what fits and lists the rest, and raises if nothing
        fits), StateError for the state_dict() of an optimizer or scheduler in place of the object, NotFoundError for a named
        tag, DeadlineError naming ranks that did not take part, UnreadableError if the storage could not be read until
        `commit_timeout_s` had passed, PartlyLoadedError if it failed after it had begun to fill the objects: the storage or a
        device failed, bytes were damaged, or a load_state_dict() or a hook of yours raised. All else is found before.
        """
        return self._core.load(
            state, tag, strict=strict, fallback=fallback, cast=cast, verify_first=verify_first, share_reads=share_reads
        )

    def latest(self) -> str | None:
        """The tag of the newest checkpoint, which a load would try first, or None."""
        return self._core.latest()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, which a load would try first, or None."""
        return self._core.latest_step()

    def delete(self, tag: str, *, force: bool = False) -> None:
        """Remove the checkpoint `tag`. Objects that newer checkpoints refer to stay until those are removed, too.

        Call it on one rank, or on all. `force`: also the newest checkpoint, which a restart would load. Raises UsageError for
        that one without `force`, NotFoundError if there is no such checkpoint, StoreError.
        """
        self._core.delete(tag, force=force)

    def status(self) -> Status:
        """This rank's saves in flight and the last ones; cheap, touches no storage."""
        return self._core.status()

    def preempted(self, step: int) -> bool:
        """Whether a signal has come and all ranks should now save `step` and leave. All ranks get the same answer, if each asks
        equally often about each step, in evaluation and warm-up as well. Always False without `preempt_signals`.
        """
        return self._core.preempted(step)

    @property
    def preempting(self) -> bool:
        """Whether a signal has come to any rank. You may ask anywhere, such as in an evaluation on rank 0 alone. If it is True,
        leave that part without saving, and ask `preempted` next.
        """
        return self._core.preempting

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save of this rank is in flight. Raises the first error of these saves, or WaitTimeoutError."""
        self._core.wait(timeout)

    def fence(self) -> None:
        """Wait until the snapshots in flight are copied. Call it before you change parameters outside an optimizer step.

        On a GPU the current stream waits for the copies, not the host.
        """
        self._core.fence()

    def close(self) -> None:
        """Wait for the saves in flight, then release everything. A second call does nothing.

        Raises the error of the last save that was not skipped, if it failed and nobody has looked at its handle. After a
        preemption signal it waits only until that signal's grace period ends.
        """
        self._core.close()

    def list(self) -> list[CheckpointInfo]:
        """All checkpoints in the store, newest first. Raises UnreadableError if failed reads hide which one is the newest."""
        return [info_of(checkpoint) for checkpoint in self._core.checkpoints()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._core.close(ends_well=kind is None)
        except CheckpointdError:
            if kind is None:
                raise

    def __repr__(self) -> str:
        if not hasattr(self, "_core"):
            return "Checkpointer(could not be made)"
        now, closed = self.status(), ", closed" if self._core.closed else ""
        return (
            f"Checkpointer({now.root!r}, rank={now.rank}, world_size={now.world_size}, start={now.start}, "
            f"latest={now.latest!r}, in_flight={now.in_flight}{closed})"
        )


def core_of(checkpointer: Checkpointer) -> Core:
    """The Core of a Checkpointer, for integrations."""
    return checkpointer._core
