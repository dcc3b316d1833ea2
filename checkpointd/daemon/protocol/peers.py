"""Checks the user at the other end of the sidecar's socket, before a byte of a snapshot goes there.

The kernel names the user (SO_PEERCRED): for a client, the user who called listen(). The directory is checked first. Only its
owner can put a socket into it, so a trusted user has made every socket there. The directories above need no check: whoever
replaces one of them can still only lead to a directory of a trusted user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Final

from checkpointd.errors import SidecarError

SUPERUSER: Final = 0
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel names it (SO_PEERCRED). The pid is 0 if this pid namespace cannot see it."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end of `connection`."""
    return Peer(*_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def trusted(sidecar_uid: int | None = None) -> frozenset[int]:
    """The users whose daemon may get this process's snapshots: its own user, the superuser, and `sidecar_uid`."""
    return frozenset({os.geteuid(), SUPERUSER} | (set() if sidecar_uid is None else {sidecar_uid}))


def connected(path: str, sidecar_uid: int | None = None) -> socket.socket:
    """A non-blocking connection to a daemon of a trusted user at `path`.

    OSError if no connection is possible now. SidecarError if another user serves the socket, or could replace it.
    """
    users = trusted(sidecar_uid)
    _check_place(path, users)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # A Unix socket connects at once, or not at all: EAGAIN means that the daemon's queue is full.
        connection.connect(path)
        _check_peer(peer_of(connection), path, users)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_place(path: str, users: frozenset[int]) -> None:
    """SidecarError if others than `users` may have made the socket at `path`. OSError of `stat`."""
    if fault := directory_fault(os.path.dirname(path) or ".", users):
        raise SidecarError(fault)
    with contextlib.suppress(FileNotFoundError):
        owner = os.stat(path).st_uid
        if owner not in users:
            raise SidecarError(f"the socket {path} belongs to {user_name(owner)}, and {_only(users)}", _advice(owner))


NAME_THE_USER: Final = "name that user if it is the sidecar's (sidecar_uid, --sidecar-uid)"
"""Advice for a client about a directory of another user."""


def directory_fault(directory: str, users: frozenset[int], instead: str = NAME_THE_USER) -> str:
    """Why others than `users` could put a socket into `directory`; empty if they cannot. Links in the path are followed.

    `instead`: what to do about a directory of another user, if it is meant to be that user's.
    """
    found = os.stat(directory)
    if found.st_uid not in users:
        return (
            f"the socket's directory {directory} belongs to {user_name(found.st_uid)}, who could put another socket there: "
            f"give the socket a directory of its own (`mkdir -m 0700`), or {instead}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        shared = found.st_mode & stat.S_ISVTX  # such as /tmp, whose mode must stay
        closing = "" if shared else f"`{shlex.join(['chmod', 'go-w', directory])}`, or "
        return (
            f"others may write in the socket's directory {directory} (mode {stat.S_IMODE(found.st_mode):04o}) and put a socket "
            f"of their own there: {closing}give the socket a directory of its own (`mkdir -m 0700`)"
        )
    return ""


def _check_peer(peer: Peer, path: str, users: frozenset[int]) -> None:
    """SidecarError if `peer`, who answers at `path`, is not one of `users`."""
    if peer.uid not in users:
        who = f"{user_name(peer.uid)} (process {peer.pid})" if peer.pid else user_name(peer.uid)
        raise SidecarError(f"{who} answers at {path}, and {_only(users)}", _advice(peer.uid))


def user_name(uid: int) -> str:
    """`user 1000 (alice)`, or without the name if there is none."""
    try:
        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"user {uid}"


def _only(users: frozenset[int]) -> str:
    return f"only {' and '.join(str(uid) for uid in sorted(users))} may serve this process"


def _advice(uid: int) -> str:
    return (
        f"nothing was sent. If that user's daemon is to have your snapshots, say so (sidecar_uid={uid}, --sidecar-uid {uid}), "
        f"and start it with --uid {os.geteuid()} for you"
    )
