"""Whole commands that messages suggest, ready to be pasted into a shell."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """`checkpointd WORDS...` in backquotes, with words quoted for a shell if necessary."""
    return f"`{shlex.join(['checkpointd', *words])}`"


def at_tag(root: str, tag: str) -> tuple[str, ...]:
    """The arguments ROOT and TAG of a command, for `command`. If `tag` looks like an option, one path names both."""
    return (f"{root}/{tag}",) if tag.startswith("-") else (root, tag)


MAY_NOT_OPEN = (
    "be the user, or in the group, that the daemon serves; its owner lets a group in with --group, and another user with --uid"
)
"""Advice for a user who may not open a daemon's socket."""


def start_sidecar(socket: str) -> str:
    """Advice for starting a daemon that listens at `socket`."""
    return f"start it: {command('serve', '--socket', socket, '--root', 'DIR')}, DIR being where the jobs' roots lie"
