"""Errors as votes and outcomes report them, and as a rank raises them again."""

from __future__ import annotations

from checkpointd.errors import ERRORS, AbortedError, CheckpointdError, FencedError, StagingError
from checkpointd.layout.manifest import ErrorReport, Outcome
from checkpointd.pipeline.shard import AttemptInfo


def code_of(error: BaseException) -> str:
    """The code under which `error` is reported."""
    return error.code if isinstance(error, CheckpointdError) else StagingError.__name__


def error_of(info: AttemptInfo, outcome: Outcome) -> CheckpointdError:
    """What an abort is raised as: the class that was reported where it is one of an abort, with the ranks to blame."""
    report = outcome.error or ErrorReport(code="AbortedError", message="no reason was recorded")
    kind = ERRORS.get(report.code, AbortedError)
    message = f"{info.tag} (attempt {info.attempt}) was not committed: {report.message}"
    if issubclass(kind, AbortedError):
        return kind(message, ranks=tuple(outcome.ranks))
    if issubclass(kind, FencedError):
        return kind(message)
    return AbortedError(message, ranks=tuple(outcome.ranks))
