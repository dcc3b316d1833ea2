"""The sidecar's socket: who may reach it, who answers there, and whether both sides understand each other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from checkpointd import __version__
from checkpointd.commands import start_sidecar
from checkpointd.daemon import wire
from checkpointd.daemon.channel import Peer
from checkpointd.daemon.status import DaemonStatus
from checkpointd.doctor.finding import Finding, Level, StateSize, amount
from checkpointd.errors import SidecarError, WireError

M = TypeVar("M", bound=wire.Message)
PATH_BYTES_MAX: Final = 107
ANSWER_S: Final = 5.0
"""For each step of the conversation."""
_PEER: Final = struct.Struct("3i")
_NOT_ALLOWED: Final = "start the daemon with --uid and --group for this user"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the daemon at a socket said, and who it is by the kernel's word."""

    peer: Peer
    welcome: wire.Welcome
    status: DaemonStatus


def _finding(check: str, level: Level, seen: str, fix: str = "") -> Finding:
    return Finding(topic="sidecar", check=check, level=level, seen=seen, fix=fix)


# --- the socket as a file ----------------------------------------------------------------------------------------


def socket_directory(path: str) -> Finding:
    """Who else could put another socket at `path`."""
    directory = os.path.dirname(path) or "."
    try:
        found = os.stat(directory)
    except OSError as error:
        return _finding("socket-directory", "fail", f"{directory}: {error.strerror}", start_sidecar(path))
    mode = stat.S_IMODE(found.st_mode)
    seen = f"{directory} has mode {mode:04o} and belongs to user {found.st_uid}"
    if found.st_uid not in (0, os.geteuid()):
        return _finding("socket-directory", "warn", seen, "its owner can put another socket there: use a directory of your own")
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return _finding("socket-directory", "fail", seen, f"others can put another socket there: chmod 0700 {directory}")
    if mode & 0o022:
        return _finding("socket-directory", "warn", seen, "anybody can take the name while no daemon runs: use a 0700 one")
    return _finding("socket-directory", "ok", seen)


def socket_rights(path: str) -> Finding:
    """What lies at `path`, and who may open it."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        seen = f"the path has {len(os.fsencode(path))} bytes"
        return _finding("socket-rights", "fail", seen, f"Linux takes up to {PATH_BYTES_MAX}: use a shorter path")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return _finding("socket-rights", "fail", f"there is no {path}", start_sidecar(path))
    except OSError as error:
        return _finding("socket-rights", "fail", f"{path}: {error.strerror}", "let this user enter the directory")
    if not stat.S_ISSOCK(found.st_mode):
        return _finding("socket-rights", "fail", f"{path} is no socket", "remove it, or give the daemon's own path")
    mode = stat.S_IMODE(found.st_mode)
    seen = f"{path} has mode {mode:04o} and belongs to user {found.st_uid}"
    if not os.access(path, os.W_OK, effective_ids=True):
        return _finding("socket-rights", "fail", seen, _NOT_ALLOWED)
    if mode & 0o002:
        advice = f"the daemon still checks who it is, but nobody else need get so far: chmod o-rwx {path}"
        return _finding("socket-rights", "warn", seen, advice)
    return _finding("socket-rights", "ok", seen)


# --- the daemon behind it ----------------------------------------------------------------------------------------


def asked(path: str, timeout_s: float = ANSWER_S) -> Answer | Finding:
    """Ask the daemon at `path` how things stand; a finding where it does not say."""
    try:
        return _ask(path, timeout_s)
    except TimeoutError:
        seen = f"nobody answered within {timeout_s:g} s"
        advice = "the daemon hangs: look at its log, then restart it; what it was given is taken over by the trainers"
        return _finding("daemon", "fail", seen, advice)
    except (WireError, SidecarError) as error:
        return _finding("daemon", "fail", str(error), "upgrade the older of the two, or give a checkpointd socket")
    except OSError as error:
        return _finding(
            "daemon", "fail", f"nobody can be reached at {path}: {error.strerror or error}", _unreachable(error, path)
        )


def _ask(path: str, timeout_s: float) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        peer = Peer(*_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))
        messages = _messages(connection)
        # A daemon that turns this user away says so before it has heard anything, and may be gone by now: read all the same.
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release=__version__, role="status")))
            connection.sendall(wire.encode(wire.Query()))
        welcome = _expected(next(messages, None), wire.Welcome)
        return Answer(peer, welcome, _status(_expected(next(messages, None), wire.Report)))


def _messages(connection: socket.socket) -> Iterator[wire.Message]:
    """What comes, until the other side closes."""
    decoder = wire.Decoder(wire.FRAME_BYTES_MAX)
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            yield from (message for message, _ in decoder.feed(data))


def _expected(message: wire.Message | None, kind: type[M]) -> M:
    if message is None:
        raise SidecarError("the daemon closed the connection without a word")
    if isinstance(message, wire.Refused):
        raise SidecarError(f"the daemon refused: {message.error.message}")
    if not isinstance(message, kind):
        raise WireError(f"the daemon answered with a {type(message).__name__} where a {kind.__name__} was due")
    return message


def _status(report: wire.Report) -> DaemonStatus:
    try:
        return msgspec.json.decode(report.status, type=DaemonStatus)
    except msgspec.DecodeError as error:
        raise WireError(f"the daemon's status cannot be read: {error}") from error


def _unreachable(error: OSError, path: str) -> str:
    match error.errno:
        case errno.ECONNREFUSED:
            return f"the daemon that listened there has died; {start_sidecar(path)}"
        case errno.EAGAIN:
            return "too many connections wait: the daemon hangs, or is starting"
        case errno.EACCES | errno.EPERM:
            return _NOT_ALLOWED
        case _:
            return start_sidecar(path)


def daemon(answer: Answer) -> Finding:
    """Who answered, and since when."""
    status = answer.status
    seen = f"process {status.pid} answered; {status.clients} of {status.clients_max} clients, {len(status.roots)} roots in use"
    if status.leaving:
        advice = "it was told to stop and finishes what is in flight: start it again when it has gone"
        return _finding("daemon", "warn", f"{seen}; it is leaving", advice)
    if status.clients >= status.clients_max:
        return _finding("daemon", "warn", seen, "it takes no more clients: raise --clients")
    return _finding("daemon", "ok", seen)


def daemon_user(answer: Answer, owner: int) -> Finding:
    """Whether the process that answers runs as the `owner` of the socket, by SO_PEERCRED."""
    if answer.peer.uid != owner:
        seen = f"the socket belongs to user {owner}, and user {answer.peer.uid} answers"
        return _finding("daemon-user", "warn", seen, "make sure that this is the daemon that you started")
    if answer.peer.pid == 0:
        return _finding("daemon-user", "ok", f"user {answer.peer.uid} answers, from another pid namespace")
    return _finding("daemon-user", "ok", f"user {answer.peer.uid} answers, who owns the socket")


def daemon_version(answer: Answer, own: str = __version__) -> Finding:
    """Release and protocol of the daemon beside this installation's."""
    theirs, protocol = answer.welcome.release, answer.welcome.protocol
    if theirs != own:
        seen = f"the daemon is checkpointd {theirs}, this is {own}; both speak protocol {protocol}"
        return _finding("daemon-version", "note", seen, "it works; upgrade the older one when you can")
    return _finding("daemon-version", "ok", f"checkpointd {own}, protocol {protocol}")


def daemon_memory(answer: Answer, state: StateSize | None) -> Finding:
    """What the daemon maps at most, against two slots of what this node saves."""
    memory = answer.status.memory
    seen = f"the daemon maps up to {amount(memory.mapped_max)} of snapshots, and maps {amount(memory.mapped)} now"
    if state is None:
        return _finding("daemon-memory", "ok", seen)
    needed = 2 * state.node_bytes
    if needed > memory.mapped_max:
        advice = "its trainers will persist by themselves: raise --memory-mib, or say --nodes if the state spans several"
        return _finding("daemon-memory", "warn", f"{seen}; two snapshots take {amount(needed)}", advice)
    if state.node_bytes > memory.held_max:
        advice = "a restart loads from the store: raise --held-mib"
        return _finding("daemon-memory", "note", f"{seen}; it holds {amount(memory.held_max)} for restarts", advice)
    return _finding("daemon-memory", "ok", seen)


def here(path: str, state: StateSize | None) -> list[Finding]:
    """All checks of the socket at `path`."""
    found = [socket_directory(path), socket_rights(path)]
    if found[-1].level == "fail":
        return found
    answer = asked(path)
    if isinstance(answer, Finding):
        return [*found, answer]
    owner = os.lstat(path).st_uid
    return [*found, daemon(answer), daemon_user(answer, owner), daemon_version(answer), daemon_memory(answer, state)]
