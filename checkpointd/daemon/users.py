"""The users that a daemon serves, and whose rights it uses.

Invariants
  USER-1  The daemon reads and writes for a client of another user with that user's file-system ids and groups, and without any
      capability. So the kernel decides, and the daemon's own rights do not count.
  USER-2  Other users, and root, are served only if they were named. The daemon's own user and root may always ask for the
      status.
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
    """UsageError if no user was named and the daemon runs as root (USER-2)."""
    if os.geteuid() == 0:
        raise UsageError(
            "this daemon runs as root and no user was named: run it as the user that trains, or name the users with --uid, "
            "such as --uid 1000, and with --group a group that may open the socket; --uid 0 lets root's own jobs use it"
        )


def check_users(uids: Collection[int]) -> None:
    """Log whose rights the daemon will use to serve `uids`; UsageError if it cannot take them."""
    others = sorted(set(uids) - {os.geteuid()})
    missing = missing_capabilities() if others else ()
    if missing:
        raise UsageError(
            f"a daemon of user {os.geteuid()} cannot serve user {', '.join(map(str, others))}: without "
            f"{' and '.join(missing)} it cannot take other users' rights. Give it these, or run one daemon for each user"
        )
    if others:
        log.warning("serves user %s, with their rights at their roots", ", ".join(map(str, others)))
    if 0 in uids:
        log.warning("serves root: the daemon acts with root's rights at its roots for every process of root")


def warn_of_shut_out(path: str, uids: Collection[int]) -> None:
    """Warn about each of `uids` that cannot reach the socket at `path`, because of its mode or of a directory's above it."""
    for uid in sorted(set(uids) - {os.geteuid(), 0}):
        if place := _shut(path, _from_database(uid, -1)):
            found = os.stat(place)
            log.warning(
                "user %d cannot open the socket %s: %s has mode %04o and belongs to user %d, group %d; give --group, a group "
                "that this user is in, and let that group enter the directories above the socket",
                *(uid, path, place, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid),
            )


def _shut(path: str, user: User) -> str:
    """The file or directory, of `path` and those above, whose mode keeps `user` out; empty if none does."""
    for place in (*reversed(Path(path).resolve().parents), Path(path)):
        found = place.stat()
        needed = stat.S_IXOTH if stat.S_ISDIR(found.st_mode) else stat.S_IWOTH
        # The groups of a user outside the database are unknown, and the socket's group may be one of them.
        in_group = user.gid < 0 or found.st_gid in (user.gid, *user.groups)
        if not found.st_mode & needed << (6 if found.st_uid == user.uid else 3 if in_group else 0):
            return str(place)
    return ""


def may_ask(uid: int, status_uids: Collection[int]) -> bool:
    """Whether a user may ask for the status without being served: the daemon's own, root, and `status_uids`."""
    return uid in (os.geteuid(), 0) or uid in status_uids


def user_of(channel: Channel, peer: Peer) -> User | None:
    """The user of `peer`, at the other end of `channel`; None for the daemon's own user."""
    if peer.uid == os.geteuid():
        return None
    groups = channel.groups
    return User(peer.uid, peer.gid, groups_of(peer.uid, peer.gid) if groups is None else groups)


def may_look(owner: os.stat_result | None, uids: Collection[int]) -> bool:
    """Whether the daemon looks after a root that nobody has joined. A daemon of root does so only for named users (USER-2)."""
    return os.geteuid() != 0 or 0 in uids or (owner is not None and owner.st_uid in uids)


def looks_as(owner: os.stat_result | None, joined: Sequence[User | None], uids: Collection[int]) -> User | None:
    """The user with whose rights the daemon looks after a root; None: the daemon's own.

    It is the owner of the root if that user is served, so that other users who join decide nothing there. Otherwise it is the
    user who joined last, at the end of `joined`.
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
