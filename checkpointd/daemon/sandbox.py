"""The sandbox: before the daemon listens, it gives up the right to start programs and to use files that it does not need.

seccomp(2) forbids system calls that the daemon never makes, for every thread. Landlock forbids files outside the roots, the
sockets' directories and the libraries, for this thread and the threads that it starts later. So the daemon starts no thread
before; even numpy, which starts some, is imported later.

A Landlock rule belongs to a directory, not to a path. A file system that is mounted there later is a different directory, to
which only rules for directories above apply. So that a root can be unmounted and mounted again, its rule is for the directory
above the topmost mount point in its path. If that is `/`, which would allow everything, "auto" leaves Landlock off and logs it.

Somebody can still rename a directory with a rule, or remove it and make it again, and no process can extend its own rules. So
the daemon checks its rules (`Rule.lost`) and exits if one no longer holds; its supervisor starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import checkpointd
from checkpointd.bucket_urls import is_bucket_url
from checkpointd.config import ServeConfig, credential_places
from checkpointd.daemon.served_roots import promptly
from checkpointd.errors import UsageError

log = logging.getLogger("checkpointd")

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS: Final = 38

# --- seccomp -----------------------------------------------------------------------------------------------------

FORBIDDEN: Final[dict[str, tuple[int, int]]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "acct": (163, 89),
    "personality": (135, 92),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""System calls that end with EPERM: their numbers on x86_64 and on aarch64."""
_MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH of each machine, and which column of FORBIDDEN is for it."""
_X32: Final = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_SECCOMP_SET_MODE_FILTER, _TSYNC = 1, 1
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter(machine: str) -> bytes:
    """The BPF program. It refuses the calls of FORBIDDEN and those of other architectures, and allows all others."""
    architecture, column = _MACHINES[machine]
    numbers = [known[column] for known in FORBIDDEN.values()]
    last = len(numbers) + 1  # from the first comparison of a number to the refusal
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, last, 0, _X32),
        *((_EQUAL, last - 1 - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def forbid_system_calls() -> str:
    """Refuse the calls of FORBIDDEN in every thread from here on. Returns the reason if that fails, else an empty string."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return f"seccomp is not known for {machine}"
    instructions = _filter(machine)
    program = _Program(len(instructions) // 8, instructions)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.syscall(_SECCOMP[machine], _SECCOMP_SET_MODE_FILTER, _TSYNC, ctypes.byref(program)) != 0:
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


# --- Landlock ----------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_READ: Final = 1 << 2 | 1 << 3  # files and directories
_READ_FILE: Final = 1 << 2
_SPECIAL: Final = 1 << 0 | 1 << 6 | 1 << 11  # to run a program, to make a device
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights over files each version of Landlock has; later versions have as many as the fifth."""
LANDLOCK_LEAST: Final = 2
LANDLOCK_TOO_OLD: Final = "Landlock 1 forbids links between directories; Linux 5.19 has 2"


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 if it has none."""
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def confine(writable: Iterable[str], readable: Iterable[str]) -> str:
    """Allow this thread and its children only files below these paths. Returns the reason if that fails, or empty."""
    version = landlock_version()
    if not version:
        return "this kernel has no Landlock, or a filter of system calls keeps it away"
    if version < LANDLOCK_LEAST:
        return LANDLOCK_TOO_OLD
    known = (1 << _RIGHTS.get(version, 16)) - 1
    rules = ctypes.create_string_buffer(struct.pack("=Q", known), 8)
    ruleset = _LIBC.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in writable:
            _allow(ruleset, path, known & ~_SPECIAL)
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _LIBC.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            return f"Landlock: {os.strerror(ctypes.get_errno())}"
    except OSError as error:
        return f"Landlock: {error}"
    finally:
        os.close(ruleset)
    return ""


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # this process could not use it anyway
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        if _LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(descriptor)


# --- what the daemon needs -----------------------------------------------------------------------------------------

_SYSTEM: Final = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev", "/var/lib/sss")


def _readable(roots: Iterable[str] = ()) -> Iterator[str]:
    """The system's libraries and tables and the interpreter's, because many modules are imported only when needed. If `roots`
    are in buckets, also the places of credentials.
    """
    yield from _SYSTEM
    if any(map(is_bucket_url, roots)):
        yield from credential_places()
    yield from (sys.prefix, sys.base_prefix, str(Path(checkpointd.__file__).parents[1]))
    yield from (path for path in sys.path if path and path != _started_in())


def _started_in() -> str | None:
    """The directory in which `python -m` was called. Python adds it to `sys.path`, although it may be a home or `/`."""
    with contextlib.suppress(OSError):
        return os.getcwd() if sys.path and sys.path[0] == os.getcwd() else None
    return None


def remount_safe(root: str) -> str:
    """The directory whose rule still holds for `root` after its file system was mounted again."""
    top = path = os.path.realpath(root)
    while path != "/":
        if os.path.ismount(path):
            top = path
        path = os.path.dirname(path)
    return os.path.dirname(top)


@dataclass(frozen=True, slots=True)
class Rule:
    """A directory of the daemon, and the directory at or above it that has the Landlock rule."""

    directory: str
    ruled: str
    identity: tuple[int, int]
    """Device and inode of `ruled`."""

    @staticmethod
    def of(directory: str, ruled: str) -> Rule:
        found = os.stat(ruled)
        return Rule(directory, ruled, (found.st_dev, found.st_ino))

    def lost(self) -> bool:
        """Whether the rule no longer holds for the directory at this path. May hang with the file system."""
        try:
            found = os.stat(self.ruled)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # the file system fails, but the directory may still be there
        return (found.st_dev, found.st_ino) != self.identity or _refused(self.directory)


def _refused(directory: str) -> bool:
    """Whether the kernel refuses to list `directory`, although its mode, which access(2) checks, allows it."""
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except PermissionError:
        return os.access(directory, os.R_OK, effective_ids=True)
    except OSError:
        return False
    return False


def socket_directories(config: ServeConfig) -> list[str]:
    """The directories of the daemon's sockets."""
    paths = [config.socket, *([config.http] if config.http and "/" in config.http else [])]
    return [os.path.dirname(path) or "." for path in paths]


def other_places(config: ServeConfig) -> list[str]:
    """The directories that the daemon mirrors or exports, and the places to which it does, or the nearest above one that is not
    there yet.
    """
    places = [place for place in _others(config) if "://" not in place]
    return [promptly(partial(_nearest, place), place) or place for place in places]


def _others(config: ServeConfig) -> list[str]:
    """The paths and URLs of all mirrors and exports."""
    pairs = [(one.origin, one.mirror) for one in config.mirrors] + [(one.root, one.to) for one in config.exports]
    return [place for pair in pairs for place in pair]


def _nearest(path: str) -> str:
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def apply(config: ServeConfig) -> list[Rule]:
    """Enter the sandbox as `config.sandbox` says, and log the result. The sockets' directories must exist.

    Returns the rules for files; none if files are not confined. UsageError if "require" asks for more than this kernel has.
    """
    if config.sandbox == "off":
        return []
    rules, fault = _files(config)
    faults = [fault for fault in (fault, _calls()) if fault]
    if faults and config.sandbox == "require":
        raise UsageError(f'sandbox is "require", and this machine does not support it: {"; ".join(faults)}; take "auto"')
    for fault in faults:
        log.warning("the sandbox is incomplete: %s", fault)
    return [rule for rule in rules if not rule.lost()]


def _calls() -> str:
    fault = forbid_system_calls()
    if not fault:
        log.info("sandbox: no program can be started")
    return fault


def _files(config: ServeConfig) -> tuple[list[Rule], str]:
    """The rules, or the reason why there are none."""
    places = {directory: directory for directory in socket_directories(config)}
    if config.spool is not None:
        places[config.spool] = os.path.realpath(config.spool)
    rule_for: Callable[[str], str] = remount_safe if config.sandbox == "auto" else os.path.realpath
    for root in (root for root in config.roots if not is_bucket_url(root)):
        ruled = promptly(partial(rule_for, root), root)
        if ruled is None:
            return [], f"files are not confined, since {root} does not answer; start the daemon again when it does"
        places[root] = ruled
        if config.sandbox == "auto" and ruled == "/":
            return [], (
                f"files are not confined, since {root} could not be mounted again then; if you do not need that, "
                "`--sandbox require` confines them"
            )
    for place in other_places(config):
        ruled = promptly(partial(rule_for, place), place)
        if ruled is None or (config.sandbox == "auto" and ruled == "/"):
            return [], f"files are not confined, since {place}, which is mirrored or exported, could not be mounted again then"
        places[place] = ruled
    allowed = sorted(set(places.values()))
    # A missing directory gets no rule and cannot be served; the check of the roots reports it.
    rules = [Rule.of(directory, above) for directory, above in places.items() if os.path.isdir(above)]
    beside = [one.files for one in config.exports if one.files is not None]
    if fault := confine(allowed, [*_readable((*config.roots, *_others(config))), *beside]):
        return [], fault
    log.info("sandbox: files can be changed only below %s", ", ".join(allowed))
    return rules, ""
