"""One tree of errors: each class carries the exit code of the command line and whether a retry can help.

A message says what happened, to what, and what to do next. Exit codes are part of the interface: scripts branch on them.
"""

from __future__ import annotations

from typing import ClassVar


class CheckpointdError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

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
    """The state holds an object that cannot be stored safely, or loaded into; names the FQN and the type."""


class UnsafeObjectError(StateError):
    """A value in client_state was stored as a pickle. Loading it runs code, so it is loaded only on request."""


class MismatchError(CheckpointdError):
    """The checkpoint and the objects to load into disagree; every mismatch is listed and nothing was loaded."""

    exit_code = 3

    def __init__(self, message: str, mismatches: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.mismatches = mismatches


class WorldSizeError(MismatchError):
    """The checkpoint was saved by another number of ranks than the one that loads it."""


class NotFoundError(CheckpointdError):
    """A tag, an attempt or an object that was asked for by name does not exist."""

    exit_code = 4


class DamagedError(CheckpointdError):
    """Stored bytes are proved wrong or gone; names the object, and the FQN and rank if they are known.

    An object that merely cannot be read now is an UnreadableError.
    """

    exit_code = 5

    def __init__(self, message: str, *, key: str = "", fqn: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.key, self.fqn, self.rank = key, fqn, rank


class CodecError(DamagedError):
    """A stored chunk does not decode: truncated, malformed, or of another size than the index says."""


class FormatError(DamagedError):
    """An object of this store has an unknown format version or does not follow the format."""


class StoreError(CheckpointdError):
    """The storage refused or failed; the message carries the system's own reason."""

    exit_code = 6
    retryable = True


class UnreadableError(StoreError):
    """The storage cannot be read now. This does not prove damage, and the same call may work later."""


class StoreFullError(StoreError):
    """No space, or the quota is used up: free some and save again."""


class LinkError(StoreError):
    """The root contains a symbolic link in place of a file or directory of the store; nothing behind the link was changed."""

    retryable = False


class RootNotSharedError(StoreError):
    """The ranks do not see the same root: every rank must mount the same file system at the path given."""

    retryable = False


class RootGoneError(StoreError):
    """The root is no longer the directory in which this job began, such as after an unmount; nothing was written there.

    Later saves go on by themselves once that directory is back.
    """


class PartlyLoadedError(CheckpointdError):
    """load() failed after it had begun to fill the objects: they hold a mix of old and new values, on every rank.

    Make new objects and load again, or start the processes again. Do not train with these objects or save them.
    """

    exit_code = 15


class AbortedError(CheckpointdError):
    """All ranks gave up a save; says why and names the ranks. The next save starts anew."""

    exit_code = 7
    retryable = True

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DeadlineError(AbortedError):
    """The deadline passed before every rank had voted; names the missing ranks."""


class NoProgressError(AbortedError):
    """No progress: the step moved on, but no tensor that requires grad had changed. Probably the wrong model is saved."""

    retryable = False


class SkippedError(AbortedError):
    """The save was skipped because earlier ones were still in flight (`when_busy="skip"`)."""

    exit_code = 8


class FencedError(CheckpointdError):
    """A newer start, of this job or of another one, has taken over this root."""

    exit_code = 9


class RootInUseError(CheckpointdError):
    """Another job is alive at this root; nothing was begun, and that job goes on undisturbed."""

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

    `seen` says what happened, `advice` what to do about it; the message is both.
    """

    exit_code = 13
    retryable = True

    def __init__(self, seen: str, advice: str = "") -> None:
        super().__init__(f"{seen}: {advice}" if advice else seen)
        self.seen, self.advice = seen, advice


class SidecarFullError(SidecarError):
    """The sidecar has no room for one more connection, or for that many bytes; it goes on serving the others."""


ERRORS: dict[str, type[CheckpointdError]] = {
    cls.__name__: cls
    for cls in (
        UsageError,
        ClosedError,
        StateError,
        UnsafeObjectError,
        MismatchError,
        WorldSizeError,
        NotFoundError,
        DamagedError,
        CodecError,
        FormatError,
        StoreError,
        UnreadableError,
        WireError,
        SidecarError,
        SidecarFullError,
        StoreFullError,
        LinkError,
        RootNotSharedError,
        RootGoneError,
        PartlyLoadedError,
        AbortedError,
        DeadlineError,
        NoProgressError,
        SkippedError,
        FencedError,
        RootInUseError,
        StagingError,
        WaitTimeoutError,
        ProtocolError,
    )
}
