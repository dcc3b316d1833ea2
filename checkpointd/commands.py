"""Commands that messages suggest: whole, ready to be pasted into a shell."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """`checkpointd WORDS...` in backquotes, each word quoted for a shell where it needs that."""
    return f"`{shlex.join(['checkpointd', *words])}`"


MAY_NOT_OPEN = (
    "be the user, or in the group, that the daemon serves; its owner lets a group in with --group, and another user with --uid"
)
"""What to do if the permission for a daemon's socket is missing."""


def start_sidecar(socket: str) -> str:
    """How to start the daemon that should listen at `socket`, in words."""
    return f"start it: {command('serve', '--socket', socket, '--root', 'DIR')}, DIR being where the jobs' roots lie"
