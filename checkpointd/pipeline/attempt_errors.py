"""The errors with which an attempt ends on one rank."""

from __future__ import annotations

from checkpointd.errors import AbortedError, CheckpointdError, LinkError, RootGoneError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import NO_REASON, ErrorReport
from checkpointd.pipeline.shard import AttemptInfo


def error_of(info: AttemptInfo, outcome: LoggedAttempt, own: BaseException | None) -> CheckpointdError:
    """The error to raise for an abort, of the class that the failed rank had; `own`, this rank's failure, is in its context."""
    report = outcome.abort.error if outcome.abort is not None else NO_REASON
    message = f"{info.tag} (attempt {info.attempt}) was not committed: {report.message}"
    error = report.error(message, ranks=outcome.abort.ranks if outcome.abort is not None else (), unknown=AbortedError)
    (error.__context__ or error).__context__, error.__suppress_context__ = own, True
    return error


def is_out_of_reach(error: BaseException | None) -> bool:
    """Whether the root cannot be reached at all: it is gone, or a symbolic link stands in its path."""
    return isinstance(error, LinkError | RootGoneError)


def lost_error(info: AttemptInfo, own: BaseException | None, error: Exception) -> CheckpointdError:
    """The error of an attempt whose outcome could not be read or put because of `error`. `own`: this rank's earlier failure."""
    if str(own) == str(error) or is_out_of_reach(own):  # a newer start is found again by whoever tries to store a no
        message = f"{info.prefix} failed: {own}"
    elif own is not None:
        audience = "" if info.world_size == 1 else " for the other ranks"
        message = f"{info.prefix} failed: {own}; the failure could not be stored{audience} ({error})"
    else:
        message = f"{info.prefix}: no outcome can be read or put ({error}); it is in doubt until the next start decides it"
    lost = ErrorReport.of(own or error).error(message)
    lost.__context__, lost.__suppress_context__ = own or error, True
    return lost
