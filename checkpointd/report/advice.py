"""Advice in words for each way in which an attempt can end."""

from __future__ import annotations

from collections.abc import Sequence

from checkpointd.commands import command
from checkpointd.errors import ERRORS, FencedError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.phrases import rank_runs
from checkpointd.report.holder import Holder

AFRESH = "The next save starts afresh; nothing needs to be removed by hand."

_BY_CODE = {
    "DeadlineError": "Look at the log of {who}: it did not call save() for this step and tag, or was stopped, stuck or killed "
    "before its vote.",
    "SkippedError": "{Who} was busy with earlier saves, or spaced them: save less often, or use when_busy='wait'.",
    "SupersededError": "Nothing: a newer save of {who} goes on. Mark a save that must stay with save(required=True).",
    "LostReferenceError": "Find out which person or program removes checkpoints at the root: {who} still referred to one.",
    "StoreFullError": "Free some space, or raise the quota, where {who} writes.",
    "UnreadableError": "Check the file system of the root on the machine of {who}: mounts, permissions, the kernel's log.",
    "StoreError": "Check the file system of the root on the machine of {who}: mounts, permissions, the kernel's log.",
    "RootGoneError": "Mount the file system of the root again on the machine of {who}; the next save goes on by itself.",
    "RootNotSharedError": "Mount the same file system at this root on every machine of the job.",
    "StateError": "Change the state that {who} passes to save(): the message names the part that cannot be stored.",
    "DeviceError": "Free device memory on {who}, or mend the device that the message names.",
    "StagingError": "See the log of {who} for the snapshot that failed.",
    "UnsafeObjectError": "Remove the object that the message names from the state of {who}, or make the Checkpointer with "
    "pickle_client_state=True if you trust the root.",
    "UsageError": "Change the call of {who} as the message says.",
    "ClosedError": "Make a new Checkpointer on {who}: this one was closed.",
    "MismatchError": "Make the state on {who} match the checkpoint: the message lists the differences.",
    "NotFoundError": "An object that {who} needs is gone. Find out which person or program removes files below the root.",
    "DamagedError": "Bring the object that the message names back from a copy, and find out which program changed it: "
    "checkpointd never changes an object.",
    "NoProgressError": "Save the model that you train: check the optimizer's parameters and the learning rate on {who}.",
    "SidecarError": "Look at the daemon's log on the machine of {who}, and check that its socket is there.",
    "AbortedError": "First repair the cause that the message names; {who} only followed.",
    "WireError": "Run the same release of checkpointd in the daemon and in the trainer of {who}.",
    "RootInUseError": "Another job uses this root: stop one of the two, or give each a root of its own.",
    "WaitTimeoutError": "{Who} waited too long; the message names the reason.",
}
_NO_CLASS = "Read the message, and the log of {who} around it."
FENCED = (
    "A newer start has begun at this root, so this save and all later ones of its job cannot commit. If that job had ended, "
    "nothing is to be done. If it still runs, stop one of the two jobs and start the other one again, or give each job its own "
    "root. Scripts that only read call open_checkpoint(root), which does not disturb a job."
)
_AFTER_END = "The job ended in the middle of this save, so the save was not whole."


def after_abort(error: ErrorReport | None, ranks: Sequence[int]) -> str:
    """Advice after an abort because of `error`, with `ranks` at fault."""
    if error is None:
        return AFRESH
    if error.phase == "recovery":
        return f"{_AFTER_END} {AFRESH}"
    if error.code == FencedError.__name__:
        return FENCED
    who = rank_runs(ranks) if ranks else "the ranks"
    return f"{_remedy(error.code, who)} {AFRESH}"


def for_root(error: ErrorReport) -> str:
    """Advice for a daemon that cannot read a root because of `error`."""
    return f"{_remedy(error.code, 'the daemon')} The daemon looks again by itself."


def _remedy(code: str, who: str) -> str:
    """The remedy for an error code, or for the nearest parent class that has one; `who` is at fault."""
    found = ERRORS.get(code)
    names = [one.__name__ for one in found.__mro__] if found is not None else []
    text = next((_BY_CODE[name] for name in names if name in _BY_CODE), _NO_CLASS)
    return text.format(who=who, Who=who[:1].upper() + who[1:])


def in_doubt(holder: Holder | None, start: int, root: str, *, would_commit: bool) -> str:
    """Advice for an undecided attempt of `start`; `holder` has the newest start."""
    fate = "keep it as a checkpoint" if would_commit else "abort it"
    recover = f"the next start of the job, or {command('recover', root)}, would {fate}"
    if holder is not None and (holder.start > start or holder.life == "ended"):
        return f"Its job has ended: {recover}."
    if holder is not None and holder.life == "running":
        return f"Wait: the save is in flight, and its job ({holder}) is alive and will decide it."
    who = f" ({holder})" if holder else ""
    return f"If its job{who} still runs, wait for it; if it has ended, {recover}."
