"""Strangers at the sidecar's socket: a process of another user gets no byte of a snapshot, and training goes on."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.daemon.protocol import wire
from checkpointd.errors import SidecarError
from checkpointd_client import Checkpointer
from checkpointd_client.query import AsyncStatusClient, StatusClient
from checkpointd_client.staging.arena import Slot
from tests.unit.client.scripted_sidecar import ScriptedSidecar
from tests.unit.other_user import STRANGER

SEAL_FUTURE_WRITE = 16
SECRET = {"secret": torch.full((64, 48), 1234.5)}


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(tmp_path) as sidecar:
        yield sidecar


def _saved(root: Path) -> torch.Tensor:
    found = {"secret": torch.zeros(64, 48)}
    with Checkpointer(root) as ckpt:
        assert ckpt.load(found) is not None
    return found["secret"]


@pytest.mark.root
@pytest.mark.parametrize("way", ["answers", "owns the socket", "owns the directory", "may write in the directory"])
def test_a_stranger_gets_nothing_and_training_goes_on(
    sidecar: ScriptedSidecar, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    match way:
        case "answers":
            sidecar.listen_as(STRANGER)
        case "owns the socket":
            os.chown(sidecar.path, STRANGER, STRANGER)
        case "owns the directory":
            os.chown(tmp_path, STRANGER, STRANGER)
        case _:
            tmp_path.chmod(0o1777)
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        ckpt.save(1, SECRET).wait(60)
        assert not ckpt.status().sidecar_connected
    assert sidecar.heard() == []
    assert bool((_saved(tmp_path / "root") == 1234.5).all())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("this process persists its saves itself" in text for text in warnings)
    everybody = f"others may write in the socket's directory {tmp_path}"
    named = everybody if way == "may write in the directory" else f"user {STRANGER}"
    assert any(named in text for text in warnings)


@pytest.mark.root
def test_those_who_insist_on_a_sidecar_do_not_start_with_a_stranger(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    sidecar.listen_as(STRANGER)
    with pytest.raises(SidecarError, match=f"user {STRANGER} .*answers at {sidecar.path}.*sidecar_uid={STRANGER}"):
        Checkpointer(tmp_path / "root", sidecar=sidecar.path, on_sidecar_loss="raise")


@pytest.mark.root
def test_a_sidecar_of_another_user_is_taken_where_it_is_named(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    sidecar.listen_as(STRANGER)
    os.chown(tmp_path, STRANGER, STRANGER)
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path, sidecar_uid=STRANGER) as ckpt:
        assert ckpt.status().sidecar_connected
        assert sidecar.expect(wire.Join).rank == 0


@pytest.mark.root
async def test_no_status_is_taken_from_a_stranger(sidecar: ScriptedSidecar) -> None:
    sidecar.listen_as(STRANGER)
    with pytest.raises(SidecarError, match=f"user {STRANGER}"), StatusClient(sidecar.path) as client:
        client.status()
    with pytest.raises(SidecarError, match=f"user {STRANGER}"):
        async with AsyncStatusClient(sidecar.path) as asynchronous:
            await asynchronous.status()
    assert sidecar.heard() == []


# --- what a descriptor lets its holder do ---------------------------------------------------------------------------

HOLDER = """
import errno, fcntl, mmap, os, socket, sys
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
line = socket.socket(fileno=0)
_, [slot], _, _ = socket.recv_fds(line, 1, 1)
size = os.fstat(slot).st_size
def tried(what, call):
    try:
        call()
        print(what, "done")
    except OSError as error:
        print(what, errno.errorcode[error.errno])
print("read", mmap.mmap(slot, size, mmap.MAP_SHARED, mmap.PROT_READ)[:6])
tried("write", lambda: os.pwrite(slot, b"666.00", 0))
tried("map", lambda: mmap.mmap(slot, size))
tried("open", lambda: os.open(f"/proc/self/fd/{{slot}}", os.O_RDWR))
tried("chmod", lambda: os.fchmod(slot, 0o777))
tried("seal", lambda: fcntl.fcntl(slot, 1033, 8))
"""


@pytest.mark.root
def test_another_user_who_holds_a_slot_can_only_read_it() -> None:
    slot = Slot(4096)
    slot.buffer[:6] = list(b"secret")
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-S", "-c", HOLDER.format(uid=STRANGER)]
    with ours, theirs:
        child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True)
        socket.send_fds(ours, [b"x"], [slot.fd])
        said, _ = child.communicate()
    assert said.splitlines() == ["read b'secret'", "write EBADF", "map EACCES", "open EACCES", "chmod EPERM", "seal EPERM"]
    assert bytes(slot.buffer[:6]) == b"secret"
    slot.release()


def test_nobody_but_the_trainers_own_mapping_writes_a_slot() -> None:
    """Not even the same user, who may open the memory anew; each snapshot is still written over the one before."""
    slot = Slot(4096)
    again = os.open(f"/proc/self/fd/{slot.fd}", os.O_RDWR) if os.geteuid() == 0 else slot.fd
    try:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE
        assert fcntl.fcntl(slot.fd, fcntl.F_GET_SEALS) & seals == seals
        with pytest.raises(PermissionError):
            mmap.mmap(again, slot.nbytes)
        for value in (1, 2):
            slot.begin()
            slot.buffer[:] = value
            slot.complete()
            assert os.pread(slot.fd, 1, 0) == bytes([value])
    finally:
        if again != slot.fd:
            os.close(again)
        slot.release()
