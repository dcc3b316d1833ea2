"""One tree of errors: each class carries the exit code of the command line and whether a retry can help.

A message says what happened, to what, and what to do next. Exit codes are part of the interface: scripts branch on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class CheckpointdError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    ranks: tuple[int, ...] = ()
    """The ranks at fault, if all ranks gave up a save because of this error."""

    @property
    def code(self) -> str:
        """The class name: the stable identifier that votes, status and JSON output carry."""
        return type(self).__name__


class UsageError(CheckpointdError):
    """An argument or a call is invalid; nothing was started."""

    exit_code = 2


class ClosedError(UsageError):
    """The checkpointer was closed before the call."""


class StateError(UsageError):
    """The state holds an object that checkpointd cannot store safely or load into; the message names its FQN and type."""


class UnsafeObjectError(StateError):
    """A value in client_state was stored as a pickle. Loading it runs code, so it is loaded only on request."""


class MismatchError(CheckpointdError):
    """The checkpoint and the objects to load into disagree; every mismatch is listed and nothing was loaded."""

    exit_code = 3

    def __init__(self, message: str, mismatches: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.mismatches = mismatches


class WorldSizeError(MismatchError):
    """The number of ranks that saved the checkpoint differs from the number that loads it."""


class NotFoundError(CheckpointdError):
    """The tag, attempt or object that the caller named does not exist."""

    exit_code = 4


class DamagedError(CheckpointdError):
    """Stored bytes are proved wrong or gone; the message names the object, and the FQN and rank if they are known.

    If an object cannot be read now but may be whole, the error is an UnreadableError.
    """

    exit_code = 5

    def __init__(self, message: str, *, key: str = "", fqn: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.key, self.fqn, self.rank = key, fqn, rank


class CodecError(DamagedError):
    """A stored chunk does not decode: it is truncated or malformed, or its size is not the one in the index."""


class FormatError(DamagedError):
    """An object of this store has an unknown format version or does not follow the format."""


class StoreError(CheckpointdError):
    """The storage refused or failed; the message carries the system's own reason."""

    exit_code = 6
    retryable = True


class UnreadableError(StoreError):
    """The storage cannot be read now. This does not prove damage, and the same call may work later."""


class StoreFullError(StoreError):
    """The disk is full or the quota is used up. Free some space and save again."""


class LinkError(StoreError):
    """The root contains a symbolic link in place of a file or directory of the store; nothing behind the link was changed."""

    retryable = False


class RootNotSharedError(StoreError):
    """The ranks do not see the same root: every rank must mount the same file system at the path given."""

    retryable = False


class ConditionsIgnoredError(StoreError):
    """The server of this root ignores the conditions of requests, so two decisions on one save could win. Nothing was begun."""

    retryable = False


class RootGoneError(StoreError):
    """The root is no longer the directory in which this job began, for example after an unmount; nothing was written there.

    Once the directory is back, later saves work again by themselves.
    """


class PartlyLoadedError(CheckpointdError):
    """load() failed after it had begun to fill the objects: they hold a mixture of old and new values.

    Make new objects and load again, or start the processes again. Do not train with these objects or save them.
    """

    exit_code = 15


class DeviceError(CheckpointdError):
    """A device failed while a load copied to it, or had no memory left for the copies; the message names tensor and device."""

    exit_code = 17


class AbortedError(CheckpointdError):
    """All ranks gave up a save; the message says why and names the ranks. The next save starts anew.

    If one rank failed, all ranks raise an error of the class that it had, such as StoreFullError, and an AbortedError is the
    context of that error.
    """

    exit_code = 7
    retryable = True

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DeadlineError(AbortedError):
    """The deadline passed before every rank had voted, or before memory for a snapshot came free; the message says which."""


class NoProgressError(AbortedError):
    """No progress: the step moved on, but no tensor that requires grad had changed. Probably the wrong model is saved."""

    retryable = False


class SkippedError(AbortedError):
    """The save was skipped: earlier ones were in flight (`when_busy="skip"`), or it came too soon (`when_busy="space"`)."""

    exit_code = 8


class LostReferenceError(AbortedError):
    """A save in the spool refers to older chunks that the root has lost since, and its snapshot is gone."""


class SupersededError(AbortedError):
    """A newer save has committed, and this one was not uploaded any more (`spool_keep="newest"`)."""


class FencedError(CheckpointdError):
    """A newer start, of this job or of another one, has taken over this root."""

    exit_code = 9


class RootInUseError(CheckpointdError):
    """Another job is alive at this root. This job did not begin, and the other one goes on undisturbed."""

    exit_code = 16
    retryable = True


class StagingError(CheckpointdError):
    """The snapshot would have been torn, so it was thrown away."""

    exit_code = 10
    retryable = True


class WaitTimeoutError(CheckpointdError, TimeoutError):
    """`wait(timeout=...)` gave up; the save itself goes on."""

    exit_code = 11
    retryable = True


class ProtocolError(CheckpointdError):
    """The commit protocol does not allow this event in this phase: the store holds an object that no release writes."""

    exit_code = 12


class WireError(CheckpointdError):
    """The bytes on the sidecar's socket do not follow its protocol; the connection cannot be used any more."""

    exit_code = 14


class SidecarError(CheckpointdError):
    """The sidecar cannot be reached, refused the request, or went away before it answered.

    `seen` says what happened and `advice` what to do about it; the message joins both.
    """

    exit_code = 13
    retryable = True

    def __init__(self, seen: str, advice: str = "") -> None:
        super().__init__(f"{seen}: {advice}" if advice else seen)
        self.seen, self.advice = seen, advice


class SidecarFullError(SidecarError):
    """The sidecar has no room for another connection or for that many bytes; it goes on serving the others."""


def _below(kind: type[CheckpointdError]) -> Iterator[type[CheckpointdError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


ERRORS = {kind.__name__: kind for kind in _below(CheckpointdError)}
"""Every class of this file below CheckpointdError, by its name."""
