"""What DCP calls a `checkpoint_id`: here it is the tag of a checkpoint at a root."""

from __future__ import annotations

import os


class Tagged:
    """The part of DCP's interface that reader and writer share."""

    _tag: str | None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003  # DCP's interface
        """DCP asks which storage may take a `checkpoint_id` on its own: none of ours, since a tag says no root."""
        return False

    @property
    def checkpoint_id(self) -> str | None:
        """The tag."""
        return self._tag
