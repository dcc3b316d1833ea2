"""What to do next, in words, for each way in which an attempt can end."""

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
    "SkippedError": "{Who} was still busy with earlier saves: save less often, or use when_busy='wait'.",
    "StoreFullError": "Free some space, or raise the quota, where {who} writes.",
    "UnreadableError": "Check the file system of the root on the machine of {who}: mounts, permissions, the kernel's log.",
    "StoreError": "Check the file system of the root on the machine of {who}: mounts, permissions, the kernel's log.",
    "RootGoneError": "Mount the file system of the root again on the machine of {who}; the next save goes on by itself.",
    "RootNotSharedError": "Mount the same file system at this root on every machine of the job.",
    "StateError": "Change what is handed to save() on {who}: the message names the part that cannot be stored.",
    "StagingError": "See the log of {who} for the snapshot that failed.",
    "UnsafeObjectError": "Take the object that the message names out of what {who} saves, or make the Checkpointer with "
    "pickle_client_state=True where you trust the root.",
    "UsageError": "Change the call of {who} as the message says.",
    "ClosedError": "Make a new Checkpointer on {who}: this one was closed.",
    "MismatchError": "Make the state and the checkpoint alike on {who}: the message lists what differs.",
    "NotFoundError": "Look for who removes files below the root: an object that {who} needs is gone.",
    "DamagedError": "Bring the object that the message names back from a copy. Find out what changed it: checkpointd never "
    "does.",
    "NoProgressError": "Save the model that is trained: see the optimizer's parameters and the learning rate on {who}.",
    "SidecarError": "Look at the daemon's log on the machine of {who}, and see that its socket is there.",
    "AbortedError": "Mend what the message names first; {who} only followed.",
    "WireError": "Run the same release of checkpointd in the daemon and in the trainer of {who}.",
    "RootInUseError": "Another job uses this root: stop one of the two, or give each a root of its own.",
    "WaitTimeoutError": "Look at what {who} waits for; the message names it.",
}
_NO_CLASS = "Read the message, and the log of {who} around it."
UNREADABLE = (
    "Mend what the reason names. Until then nobody knows whether it is a checkpoint: load() reads it again until its deadline, "
    "and never takes an older one because of it."
)
FENCED = (
    "A newer job runs at this root, and every further save of this one fails, too. Stop one of the two and start the other one "
    "again, or give each a root of its own. Scripts that only read call open_checkpoint(root), which leaves a job alone."
)
_AFTER_END = "The job ended in the middle of this save, and there was nothing whole to keep."


def after_abort(error: ErrorReport | None, ranks: Sequence[int]) -> str:
    """What to do after an abort because of `error`, with `ranks` at fault."""
    if error is None:
        return AFRESH
    if error.phase == "recovery":
        return f"{_AFTER_END} {AFRESH}"
    if error.code == FencedError.__name__:
        return FENCED
    who = rank_runs(ranks) if ranks else "the ranks"
    return f"{_remedy(error.code, who)} {AFRESH}"


def for_root(error: ErrorReport) -> str:
    """What to do where a whole root cannot be looked at because of `error`."""
    return f"{_remedy(error.code, 'the daemon')} The daemon looks again by itself."


def _remedy(code: str, who: str) -> str:
    """The remedy of an error, or of the nearest class above it that has one; `who` is at fault."""
    found = ERRORS.get(code)
    names = [one.__name__ for one in found.__mro__] if found is not None else []
    text = next((_BY_CODE[name] for name in names if name in _BY_CODE), _NO_CLASS)
    return text.format(who=who, Who=who[:1].upper() + who[1:])


def in_doubt(holder: Holder | None, epoch: int, root: str, *, would_commit: bool) -> str:
    """What to do about an attempt of `epoch` without an outcome, when `holder` has the newest epoch."""
    fate = "keep it as a checkpoint" if would_commit else "abort it"
    recover = f"the next start of the job, or {command('recover', root)}, would {fate}"
    if holder is not None and (holder.epoch > epoch or holder.life == "ended"):
        return f"Its job has ended: {recover}."
    if holder is not None and holder.life == "running":
        return f"Wait: it is in flight, and its job ({holder}) lives and will decide it."
    who = f" ({holder})" if holder else ""
    return f"If its job{who} still runs, wait for it; if it has ended, {recover}."


def after_damage(key: str, root: str) -> str:
    return (
        f"No job loads it: loading falls back to the newest whole checkpoint ({command('verify', root)} tells which ones are "
        "whole). "
        f"Bring {key} back from a copy if there is one. Find out what changed the file: checkpointd never does."
    )
