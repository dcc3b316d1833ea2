"""Whole commands that messages suggest, ready to be pasted into a shell."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """`checkpointd WORDS...` in backquotes, with words quoted for a shell if necessary."""
    return f"`{shlex.join(['checkpointd', *words])}`"


def at_tag(root: str, tag: str) -> tuple[str, ...]:
    """The arguments ROOT and TAG of a command, for `command`. If `tag` looks like an option, one path names both."""
    return (f"{root}/{tag}",) if tag.startswith("-") else (root, tag)


def install(extra: str) -> str:
    """Advice for installing what `extra` brings. checkpointd is on no package index until its first release, and whoever takes
    its name there first would run code on every machine that trusts the name.
    """
    return f"pip install '.[{extra}]' in a clone of checkpointd, or pip install 'FILE.whl[{extra}]' with its wheel file"


MAY_NOT_OPEN = (
    "be the user, or in the group, that the daemon serves; its owner lets a group in with --group, and another user with --uid"
)
"""Advice for a user who may not open a daemon's socket."""


def start_sidecar(socket: str) -> str:
    """Advice for starting a daemon that listens at `socket`."""
    return f"start it: {command('serve', '--socket', socket, '--root', 'DIR')}, DIR being where the jobs' roots lie"
