"""Tests the sidecar's socket: who may reach it, who answers, and whether both sides speak the same protocol."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import partial

from checkpointd import __version__
from checkpointd.commands import MAY_NOT_OPEN, start_sidecar
from checkpointd.config import SOCKET_PATH_BYTES_MAX
from checkpointd.daemon.protocol.peers import Peer, directory_fault, trusted, user_name
from checkpointd.daemon.query import TIMEOUT_S, StatusClient
from checkpointd.daemon.status.model import DaemonStatus
from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.errors import SidecarError
from checkpointd.phrases import byte_size
from checkpointd.system_errors import explained, in_words

_finding = partial(Finding, "sidecar")


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """The daemon's status, the protocol that both sides speak, and the answering process as the kernel reports it."""

    peer: Peer
    protocol: int
    status: DaemonStatus


# --- the socket as a file ----------------------------------------------------------------------------------------


def socket_directory(path: str, sidecar_uid: int | None) -> Finding:
    """Whether another user could put a socket of their own at `path`."""
    directory = os.path.dirname(path) or "."
    try:
        found = os.stat(directory)
        fault = directory_fault(directory, trusted(sidecar_uid))
    except OSError as error:
        return _finding("socket-directory", "fail", f"{directory}: {in_words(error, 'socket')}", start_sidecar(path))
    seen = f"{directory} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to {user_name(found.st_uid)}"
    if fault:
        return _finding("socket-directory", "fail", seen, fault)
    return _finding("socket-directory", "ok", seen)


def socket_rights(path: str) -> Finding:
    """Whether `path` is a socket, and who may open it."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        seen = f"the path has {len(os.fsencode(path))} bytes"
        return _finding("socket-rights", "fail", seen, f"Linux takes up to {SOCKET_PATH_BYTES_MAX}: use a shorter path")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return _finding("socket-rights", "fail", f"there is no {path}", start_sidecar(path))
    except OSError as error:
        reason, advice = explained(error, "socket")
        return _finding("socket-rights", "fail", f"{path}: {reason}", f"let this user enter the directory; {advice}")
    if not stat.S_ISSOCK(found.st_mode):
        return _finding("socket-rights", "fail", f"{path} is not a socket", "remove it, or give the daemon's own path")
    mode = stat.S_IMODE(found.st_mode)
    seen = f"{path} has mode {mode:04o} and belongs to user {found.st_uid}"
    if not os.access(path, os.W_OK, effective_ids=True):
        return _finding("socket-rights", "fail", seen, MAY_NOT_OPEN)
    if mode & 0o002:
        advice = f"every user may connect, although the daemon then checks who it is: chmod o-rwx {path}"
        return _finding("socket-rights", "warn", seen, advice)
    return _finding("socket-rights", "ok", seen)


# --- the daemon behind it ----------------------------------------------------------------------------------------


def ask(path: str, sidecar_uid: int | None = None, timeout_s: float = TIMEOUT_S) -> DaemonAnswer | Finding:
    """The status of the daemon at `path`, asked as any status client does. A finding if no trusted daemon answers."""
    try:
        with StatusClient(path, timeout_s=timeout_s, sidecar_uid=sidecar_uid) as client:
            status = client.status()
            return DaemonAnswer(client.peer, client.protocol, status)
    except SidecarError as error:
        return _finding("daemon", "fail", error.seen, error.advice)


def daemon(answer: DaemonAnswer) -> Finding:
    """Whether the daemon that answered takes more ranks."""
    status = answer.status
    connections = f"{status.clients} of {status.clients_max} connections for ranks taken"
    seen = f"process {status.pid} answered; {connections}, {len(status.roots)} roots in use"
    if status.leaving:
        advice = "it was told to stop and finishes what is in flight: start it again when it has gone"
        return _finding("daemon", "warn", f"{seen}; it is leaving", advice)
    if status.clients >= status.clients_max:
        return _finding("daemon", "warn", seen, "it takes no more ranks: raise --clients")
    return _finding("daemon", "ok", seen)


def daemon_user(answer: DaemonAnswer, owner: int) -> Finding:
    """Whether the answering process runs as the `owner` of the socket (SO_PEERCRED)."""
    if answer.peer.uid != owner:
        seen = f"the socket belongs to user {owner}, and user {answer.peer.uid} answers"
        return _finding("daemon-user", "warn", seen, "make sure that this is the daemon that you started")
    if answer.peer.pid == 0:
        return _finding("daemon-user", "ok", f"user {answer.peer.uid} answers, from another pid namespace")
    return _finding("daemon-user", "ok", f"user {answer.peer.uid} answers, who owns the socket")


def daemon_version(answer: DaemonAnswer, own: str = __version__) -> Finding:
    """Whether the daemon and this installation are of the same release."""
    theirs, protocol = answer.status.release, answer.protocol
    if theirs != own:
        seen = f"the daemon is checkpointd {theirs}, this is {own}; both speak protocol {protocol}"
        return _finding("daemon-version", "note", seen, "it works; upgrade the older one when you can")
    return _finding("daemon-version", "ok", f"checkpointd {own}, protocol {protocol}")


def daemon_memory(answer: DaemonAnswer, state: StateSize | None) -> Finding:
    """Whether the daemon may map two snapshots of this node's part of the state."""
    memory = answer.status.memory
    seen = f"the daemon maps up to {byte_size(memory.mapped_max)} of snapshots, and maps {byte_size(memory.mapped)} now"
    if state is None:
        return _finding("daemon-memory", "ok", seen)
    needed = 2 * state.node_bytes
    if needed > memory.mapped_max:
        advice = "its trainers will persist by themselves: raise --memory-mib, or say --nodes if the state spans several"
        return _finding("daemon-memory", "warn", f"{seen}; two snapshots take {byte_size(needed)}", advice)
    if state.node_bytes > memory.held_max:
        advice = "a restart loads from the store: raise --held-mib"
        return _finding("daemon-memory", "note", f"{seen}; it holds {byte_size(memory.held_max)} for restarts", advice)
    return _finding("daemon-memory", "ok", seen)


def here(path: str, state: StateSize | None, sidecar_uid: int | None = None) -> list[Finding]:
    """All checks of the socket at `path`."""
    found = [socket_directory(path, sidecar_uid), socket_rights(path)]
    if found[-1].level == "fail":
        return found
    answer = ask(path, sidecar_uid)
    if isinstance(answer, Finding):
        return [*found, answer]
    owner = os.lstat(path).st_uid
    return [*found, daemon(answer), daemon_user(answer, owner), daemon_version(answer), daemon_memory(answer, state)]
