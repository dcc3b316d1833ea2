"""What a mirror tells: one item for each checkpoint that was copied or left out, and for what was removed; and its report."""

from __future__ import annotations

from typing import Literal

import msgspec

from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport

Kind = Literal["mirrored", "left-out", "removed", "damaged", "unreadable", "blocked", "damaged-here", "healed"]
"""`left-out`: the rules of the mirror would remove it again. `removed`: it was removed at the origin while it was copied.
`damaged`: at the origin. `unreadable`: at the origin, or at the mirror when it was to be read back. `blocked`: the mirror has
what stands in its way. `damaged-here`: at the mirror. `healed`: it was damaged at the mirror, and is whole again.
"""

WORDS: dict[Kind, str] = {
    "mirrored": "mirrored",
    "left-out": "left out",
    "removed": "removed meanwhile",
    "damaged": "damaged",
    "unreadable": "unreadable",
    "blocked": "not possible",
    "damaged-here": "damaged at the mirror",
    "healed": "healed",
}
"""The kinds as people read them, after the tag."""


class CheckpointNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One checkpoint: what became of it at the mirror. Bytes are those of chunks objects."""

    kind: Kind
    tag: str
    attempt: str
    step: int
    copied_bytes: int = 0
    found_bytes: int = 0
    """Bytes of its chunks that were at the mirror already, and were not copied."""
    verified: bool = False
    """Whether all of it was read back from the mirror and found whole."""
    why: str = ""


def news_of(
    checkpoint: LoggedAttempt, kind: Kind, *, copied: int = 0, found: int = 0, verified: bool = False, why: str = ""
) -> CheckpointNews:
    return CheckpointNews(
        kind=kind,
        tag=checkpoint.tag,
        attempt=str(checkpoint.id),
        step=checkpoint.commit.step,
        copied_bytes=copied,
        found_bytes=found,
        verified=verified,
        why=why,
    )


class RemovalNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Checkpoints that the rules of the mirror removed there."""

    retired: tuple[str, ...]
    freed_bytes: int


News = CheckpointNews | RemovalNews


class MirrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run."""

    origin: str
    mirror: str
    checkpoints: tuple[CheckpointNews, ...]
    """In the order of their commits."""
    retired: tuple[str, ...]
    freed_bytes: int
    latest: str | None
    """The tag that `latest` names at the mirror."""

    def of(self, *kinds: Kind) -> list[CheckpointNews]:
        """The checkpoints of these kinds."""
        return [one for one in self.checkpoints if one.kind in kinds]


class MirrorProgress(msgspec.Struct, kw_only=True):
    """How far a mirror has come, for the status of a daemon. Times in seconds since 1970."""

    origin: str
    mirror: str
    state: Literal["beginning", "in step", "copying", "failing", "over"] = "beginning"
    """`beginning`: nothing was looked at yet, or no job has begun at the origin. `failing`: the last look failed, and another
    follows. `over`: it ended, and somebody must act.
    """
    tag: str = ""
    """The checkpoint that is being copied."""
    done_bytes: int = 0
    total_bytes: int = 0
    behind: int = 0
    """The checkpoints that are to be copied."""
    mirrored: int = 0
    """The checkpoints that were copied since the daemon began."""
    copied_bytes: int = 0
    left: dict[str, int] = {}
    """The checkpoints that were not copied since then, by kind."""
    newest_tag: str | None = None
    """The newest checkpoint at the mirror."""
    newest_step: int | None = None
    in_step_at: float | None = None
    """When the mirror last had all that it was to have."""
    problem: ErrorReport | None = None
