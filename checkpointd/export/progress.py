"""How far the exports of a root have come, for the status of a daemon."""

from __future__ import annotations

from typing import Literal

import msgspec

from checkpointd.layout.manifest import ErrorReport

LeftReason = Literal["removed", "damaged", "blocked"]
"""Why a checkpoint was not exported. `removed`: it was removed at the root before its export had ended. `blocked`: it cannot be
exported by the rule, or something else is in its place."""


class ExportProgress(msgspec.Struct, kw_only=True):
    """Times in seconds since 1970."""

    root: str
    to: str
    state: Literal["beginning", "up to date", "exporting", "waiting", "failing", "over"] = "beginning"
    """`beginning`: the root was not read yet, or no job has begun there. `waiting`: `holder` exports there. `failing`:
    something could not be exported; see `problem`. `over`: the rule cannot work, and a user must correct it.
    """
    tag: str = ""
    """The checkpoint that is being exported."""
    done_bytes: int = 0
    total_bytes: int = 0
    due: int = 0
    """The checkpoints that are to be exported."""
    exported: int = 0
    """The checkpoints that this process has exported since it began."""
    exported_bytes: int = 0
    """The bytes of their tensors."""
    left: dict[str, int] = {}
    """The checkpoints that were not exported since then, by LeftReason."""
    newest_tag: str | None = None
    """The newest export at the place."""
    newest_step: int | None = None
    last_s: float | None = None
    """How long the last export of this process took."""
    up_to_date_at: float | None = None
    """When the place last had every export that was due."""
    holder: str = ""
    """The process that exports to the place, if it is another one."""
    problem: ErrorReport | None = None
