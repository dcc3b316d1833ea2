"""The errors with which an attempt ends on one rank."""

from __future__ import annotations

from checkpointd.errors import AbortedError, CheckpointdError, FencedError, LinkError, RootGoneError, StoreError
from checkpointd.layout.manifest import NO_REASON, Outcome
from checkpointd.pipeline.shard import AttemptInfo


def error_of(info: AttemptInfo, outcome: Outcome) -> CheckpointdError:
    """The error to raise for an abort: of the reported class if that is an AbortedError or a FencedError, else AbortedError."""
    report = outcome.error or NO_REASON
    message = f"{info.tag} (attempt {info.attempt}) was not committed: {report.message}"
    error = report.error(message, ranks=outcome.ranks)
    return error if isinstance(error, AbortedError | FencedError) else AbortedError(message, ranks=tuple(outcome.ranks))


def is_out_of_reach(error: BaseException | None) -> bool:
    """Whether the root cannot be reached at all: it is gone, or a symbolic link stands in its path."""
    return isinstance(error, LinkError | RootGoneError)


def lost_error(info: AttemptInfo, own: BaseException | None, error: Exception) -> CheckpointdError:
    """The error of an attempt whose outcome could not be read or put because of `error`. `own`: this rank's earlier failure."""
    if own is error or is_out_of_reach(own):
        message = f"{info.prefix} failed: {own}"
    elif own is not None:
        audience = "" if info.world_size == 1 else " for the other ranks"
        message = f"{info.prefix} failed: {own}; the failure could not be stored{audience} ({error})"
    else:
        message = f"{info.prefix}: no outcome can be read or put ({error}); it is in doubt until the next start decides it"
    lost = (type(own) if isinstance(own, FencedError | LinkError | RootGoneError) else StoreError)(message)
    lost.__cause__ = own or error
    return lost
