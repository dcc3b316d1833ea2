"""File system calls with the rights of another user, so that the kernel decides what that user may do.

The raw system calls change the rights of one thread; glibc's wrappers would change all threads. Code on such a thread must not
import modules, because that user may not be able to read the interpreter's files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_SETFSUID, _SETFSGID, _SETGROUPS, _CAPSET = (151, 152, 159, 91) if platform.machine() == "aarch64" else (122, 123, 116, 126)
_FACCESSAT2: Final = 439
"""The same number on every architecture. glibc's access() may check the real user instead of the file-system ids."""
_AT_EACCESS, _AT_SYMLINK_NOFOLLOW, _AT_FDCWD = 0x200, 0x100, -100
_CAPABILITY_VERSION_3: Final = 0x20080522
_SAME: Final = -1
"""setfsuid(2) with an invalid id changes nothing and returns the current id."""
_CAPABILITIES: Final = {"CAP_SETGID": 6, "CAP_SETUID": 7}

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class User:
    """A user as the kernel knows it: ids and supplementary groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def groups_of(uid: int, gid: int) -> tuple[int, ...]:
    """The supplementary groups of a user in the user database; none if the user is not in it."""
    with suppress(KeyError):
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    return ()


def become(user: User) -> None:
    """Give this thread the rights of `user` for file system calls, for good, and take all capabilities from it."""
    groups = (ctypes.c_uint32 * len(user.groups))(*user.groups)
    _call(_SETGROUPS, ctypes.c_size_t(len(groups)), groups)
    for number, wanted in ((_SETFSGID, user.gid), (_SETFSUID, user.uid)):
        _call(number, ctypes.c_uint32(wanted))
        if _call(number, ctypes.c_uint32(_SAME & 0xFFFFFFFF)) != wanted:
            raise OSError(errno.EPERM, f"this process may not take the rights of user {user.uid}, group {user.gid}")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call(_CAPSET, header, (ctypes.c_uint32 * 6)())


def may_write(directory: int | None, name: str, user: User | None) -> bool:
    """Whether this thread, with the rights of `user`, may create files in the directory `name`; OSError if that is unknown."""
    at = _AT_FDCWD if directory is None else directory
    flags = ctypes.c_int(_AT_EACCESS | _AT_SYMLINK_NOFOLLOW)
    try:
        _call(_FACCESSAT2, ctypes.c_int(at), ctypes.c_char_p(os.fsencode(name)), ctypes.c_int(os.W_OK | os.X_OK), flags)
    except OSError as error:
        if error.errno == errno.EACCES:
            return False
        if error.errno not in {errno.ENOSYS, errno.EPERM}:  # Linux before 5.8, and seccomp filters that do not know the call
            raise
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return _mode_lets_write(found, User(os.geteuid(), os.getegid(), tuple(os.getgroups())) if user is None else user)
    return True


def _mode_lets_write(found: os.stat_result, user: User) -> bool:
    if user.uid == found.st_uid:
        wanted = stat.S_IWUSR | stat.S_IXUSR
    elif found.st_gid in (user.gid, *user.groups):
        wanted = stat.S_IWGRP | stat.S_IXGRP
    else:
        wanted = stat.S_IWOTH | stat.S_IXOTH
    return user.uid == 0 or found.st_mode & wanted == wanted


def missing_capabilities() -> Sequence[str]:
    """The capabilities that this process needs to take the rights of other users, and does not have."""
    with open("/proc/self/status", encoding="utf-8") as status:
        (effective,) = (int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def _call(number: int, *arguments: object) -> int:
    answer: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer
