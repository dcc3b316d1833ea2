"""Checks the arguments of a Checkpointer that no other part checks. Its errors use the names that users write."""

from __future__ import annotations

import difflib
import os
import signal
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self, get_args

from torch.distributed import ProcessGroup

from checkpointd import arguments
from checkpointd.arguments import shown
from checkpointd.codec import Compression
from checkpointd.commit.decide import OnNoProgress
from checkpointd.commit.retention import Retention, rules_of
from checkpointd.config import (
    ABSENCE_S,
    MIB,
    PINNED_BYTES,
    CommitConfig,
    ExportConfig,
    LoadConfig,
    PersistConfig,
    SpoolConfig,
    check_job,
    spool_of,
)
from checkpointd.errors import UsageError
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from checkpointd_client.ranks.board import check_group
from checkpointd_client.ranks.preemption import PreemptSignals, graces_of
from checkpointd_client.restore.target_chooser import TargetChooser
from checkpointd_client.saver import WhenBusy
from checkpointd_client.saves.exports import check_export
from checkpointd_client.sidecar.client import OnSidecarLoss
from checkpointd_client.sidecar.own_daemon import AUTO
from checkpointd_client.staging.stager import StagingMode

OVERHEAD_MAX = 10.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a Checkpointer, which documents them. Raises UsageError for a bad value."""

    compression: Compression = "auto"
    staging: StagingMode = "lazy"
    device_checksums: bool = True
    when_busy: WhenBusy = "wait"
    commit_timeout_s: float = 600.0
    chunk_bytes: int = 4 * MIB
    budget_bytes: int = 256 * MIB
    pinned_bytes: int = PINNED_BYTES
    preempt_signals: PreemptSignals = None
    grace_s: float = 25.0
    sidecar: str | os.PathLike[str] | None = None
    sidecar_uid: int | None = None
    on_sidecar_loss: OnSidecarLoss = "inline"
    dedup: bool = True
    full_every: int | None = None
    retention: Retention | int | None = None
    afresh: bool = False
    create: bool = True
    on_no_progress: OnNoProgress = "warn"
    pickle_client_state: bool = False
    absence_s: float = ABSENCE_S
    job: str | None = None
    take_over: bool = False
    read_back: bool = True
    max_overhead: float | None = 0.03
    spool: str | os.PathLike[str] | SpoolConfig | None = None
    export: ExportConfig | None = None
    tensor_classes: Iterable[type] = ()
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.sidecar is not None:
            arguments.path("sidecar", self.sidecar)
        if self.sidecar_uid is not None and (type(self.sidecar_uid) is not int or self.sidecar_uid < 0):
            raise UsageError(f"sidecar_uid is {self.sidecar_uid!r}; it must be the number of a user, or None")
        if self.sidecar_uid is not None and self.sidecar == AUTO:
            raise UsageError("sidecar_uid is for a sidecar of another user; that of sidecar='auto' is your own")
        arguments.choice("staging", self.staging, get_args(StagingMode))
        arguments.choice("when_busy", self.when_busy, get_args(WhenBusy))
        arguments.choice("on_sidecar_loss", self.on_sidecar_loss, get_args(OnSidecarLoss))
        arguments.seconds("commit_timeout_s", self.commit_timeout_s, most=arguments.TIMEOUT_S_MAX)
        arguments.seconds("grace_s", self.grace_s, most=arguments.TIMEOUT_S_MAX, zero=True)
        arguments.seconds("absence_s", self.absence_s, most=arguments.TIMEOUT_S_MAX, zero=True)
        if self.max_overhead is not None:
            _check_overhead(self.max_overhead)
        elif self.when_busy == "space":
            raise UsageError("when_busy='space' spaces saves by max_overhead, which is None: give it, as in max_overhead=0.03")
        _ = self.graces
        for name in ("device_checksums", "pickle_client_state", "afresh", "create", "take_over", "read_back"):
            arguments.flag(name, getattr(self, name))
        _ = self.persist, self.commit, self.load, self.classes
        if self.spooling is not None and self.sidecar not in (None, AUTO):
            raise UsageError("with a sidecar, the spool is the sidecar's: start that one with a spool, or pass sidecar='auto'")
        if self.spooling is not None:
            object.__setattr__(self, "sidecar", AUTO)
        if self.process_group is not None:
            check_group(self.process_group)
        check_export(self.export, has_sidecar=self.sidecar not in (None, AUTO))
        check_job(self.job)

    @classmethod
    def of(cls, given: Mapping[str, Any], *, beside: Sequence[str] = ()) -> Self:
        """The options that the user of an integration has given, by name; `beside`: those that the integration itself takes.
        UsageError if there is no such option.
        """
        if given.get("process_group") is not None:
            raise UsageError("process_group: here all ranks of the job save. To save in some of them, make a Checkpointer")
        names = [*beside, *(field.name for field in fields(cls))]
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(names)}"
                raise UsageError(f"checkpointd has no option {name!r}: {hint}")
        if given.get("root") is not None and "root" in beside:
            arguments.path("root", given["root"])
        if given.get("synchronous") is not None and "synchronous" in beside:
            arguments.flag("synchronous", given["synchronous"])
        return cls(**{name: value for name, value in given.items() if name not in beside or name == "sidecar"})

    @property
    def graces(self) -> dict[signal.Signals, float]:
        """The grace period of each preemption signal, in seconds."""
        return graces_of(self.preempt_signals, self.grace_s)

    @property
    def persist(self) -> PersistConfig:
        """How shards are written."""
        return PersistConfig(
            compression=self.compression,
            chunk_bytes=self.chunk_bytes,
            budget_bytes=self.budget_bytes,
            dedup=self.dedup,
            full_every=self.full_every,
        )

    @property
    def commit(self) -> CommitConfig:
        """How saves are committed, and which checkpoints are removed afterwards."""
        return CommitConfig(
            timeout_s=float(self.commit_timeout_s),  # a numpy.float64 cannot be stored
            retention=rules_of(self.retention),
            on_no_progress=self.on_no_progress,
            read_back=self.read_back,
        )

    @cached_property
    def classes(self) -> TensorClasses:
        """The classes of tensors that may be stored and made."""
        return TensorClasses.of(self.tensor_classes)

    @property
    def spooling(self) -> SpoolConfig | None:
        """The spool of the sidecar that the ranks start."""
        return spool_of(self.spool)

    @property
    def load(self) -> LoadConfig:
        """How checkpoints are read."""
        return LoadConfig(retry_s=self.commit_timeout_s, absence_s=self.absence_s, pinned_bytes=self.pinned_bytes)

    @property
    def glance(self) -> LoadConfig:
        """How checkpoints are read while the other ranks wait in a meeting."""
        return LoadConfig(retry_s=self.commit_timeout_s / 2, absence_s=self.absence_s)


def _check_overhead(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= OVERHEAD_MAX:
        raise UsageError(
            f"max_overhead is {shown(value)}; it must be greater than 0 and at most {OVERHEAD_MAX:g}, as 0.03 for 3 % of the "
            "training time, or None to save at full speed"
        )


def check_load(state: object, **flags: object) -> None:
    """UsageError if load() cannot load into `state`, or use these flags."""
    for name, value in flags.items():
        arguments.flag(name, value)
    if not isinstance(state, MutableMapping | TargetChooser):
        advice = "a dict that can be changed" if isinstance(state, Mapping) else "{'model': model, ...}"
        raise UsageError(f"the state to load into must map names to objects, not be a {type_name(state)}: pass {advice}")
