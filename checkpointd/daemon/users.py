"""The users that a daemon serves, and the rights that it uses: those of the client's user, as the kernel knows them.

Invariants
  USER-1  What a client of another user asks for is read and written with that user's file-system ids and groups, and without
      any capability: the kernel decides what may be done, whatever the daemon may do itself.
  USER-2  Other users, and root, are served only where they were named.
      The daemon's own user and root may always ask for the status.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from checkpointd.daemon.protocol.channel import Channel
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.errors import UsageError
from checkpointd.store.posix.users import User, groups_of, missing_capabilities

log = logging.getLogger("checkpointd")


def check_unnamed() -> None:
    """UsageError where the daemon's own user, who is served where none was named, is root (USER-2)."""
    if os.geteuid() == 0:
        raise UsageError(
            "this daemon runs as root and no user was named: run it as the user that trains, or name the users with --uid, "
            "such as --uid 1000, and with --group a group that may open the socket; --uid 0 lets root's own jobs use it"
        )


def check_users(uids: Collection[int]) -> None:
    """Say what serving `uids` means where that is more than the daemon's own user; UsageError where it cannot be done."""
    others = sorted(set(uids) - {os.geteuid()})
    missing = missing_capabilities() if others else ()
    if missing:
        raise UsageError(
            f"a daemon of user {os.geteuid()} cannot serve user {', '.join(map(str, others))}: without "
            f"{' and '.join(missing)} it cannot take other users' rights. Give it these, or run one daemon for each user"
        )
    if others:
        log.warning("serves user %s: works at their roots with their rights", ", ".join(map(str, others)))
    if 0 in uids:
        log.warning("serves root: the daemon acts with root's rights at its roots for every process of root")


def warn_of_shut_out(path: str, uids: Collection[int]) -> None:
    """Warn of each of `uids` that the modes of the socket at `path`, or of a directory above it, keep out."""
    for uid in sorted(set(uids) - {os.geteuid(), 0}):
        if place := _shut(path, _from_database(uid, -1)):
            found = os.stat(place)
            log.warning(
                "user %d cannot open the socket %s: %s has mode %04o and belongs to user %d, group %d; give --group, a group "
                "that this user is in, and let that group enter the directories above the socket",
                *(uid, path, place, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid),
            )


def _shut(path: str, user: User) -> str:
    """What keeps `user` from the socket, by its mode alone: `path` or a directory above it; empty where nothing does."""
    for place in (*reversed(Path(path).resolve().parents), Path(path)):
        found = place.stat()
        needed = stat.S_IXOTH if stat.S_ISDIR(found.st_mode) else stat.S_IWOTH
        # The groups of a user who is not in the database are not known: the socket's may be one of them.
        in_group = user.gid < 0 or found.st_gid in (user.gid, *user.groups)
        if not found.st_mode & needed << (6 if found.st_uid == user.uid else 3 if in_group else 0):
            return str(place)
    return ""


def may_ask(uid: int, status_uids: Collection[int]) -> bool:
    """Whether a user that is not served may ask for the status: the daemon's own, root, and those in `status_uids`."""
    return uid in (os.geteuid(), 0) or uid in status_uids


def user_of(channel: Channel, peer: Peer) -> User | None:
    """The user of `peer`, at the other end of `channel`; None where that is the daemon's own."""
    if peer.uid == os.geteuid():
        return None
    groups = channel.groups
    return User(peer.uid, peer.gid, groups_of(peer.uid, peer.gid) if groups is None else groups)


def may_look(owner: os.stat_result | None, uids: Collection[int]) -> bool:
    """Whether a root that nobody has joined is looked after: root's own rights are used for nobody who was not
    named (USER-2).
    """
    return os.geteuid() != 0 or 0 in uids or (owner is not None and owner.st_uid in uids)


def looks_as(owner: os.stat_result | None, joined: Sequence[User | None], uids: Collection[int]) -> User | None:
    """With whose rights the daemon looks after a root: its owner's, if that user is served, so that nobody who joins another
    one's root has a say in it; else those of the user who joined it last, in `joined` the last one; else (None) its own.
    """
    if owner is None or owner.st_uid not in uids:
        if not joined and not may_look(owner, uids):
            raise UsageError("its owner is not served here, and nobody who is has joined it: name the owner with --uid")
        return joined[-1] if joined else None
    if owner.st_uid == os.geteuid():
        return None
    known = [user for user in joined if user is not None and user.uid == owner.st_uid]
    return known[-1] if known else _from_database(owner.st_uid, owner.st_gid)


def _from_database(uid: int, gid: int) -> User:
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        return User(uid, gid)
    return User(uid, gid, groups_of(uid, gid))
