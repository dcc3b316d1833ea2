"""A raw client in a process of its own, to be killed: python client_child.py SOCKET ROOT [staged] [marked] [forking].

Saves global_step1 as rank 0 of 1 in start 1 and prints "ready". The snapshot is said to be whole with `staged`; with `marked`
its mark alone says so.
With `forking`, a child of its own holds the connection open for as long as standard input stays open.
"""

from __future__ import annotations

import os
import socket
import sys

from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol import wire
from tests.builders import make_shard, rank_arrays
from tests.unit.daemon.conftest import N1, slot_bytes, slot_of


def main(path: str, root: str, *how: str) -> None:
    shard = make_shard(rank_arrays(0))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release="child")))
    assert connection.recv(1 << 16), "the daemon hung up"
    begin = wire.Begin(start=1, nonce=N1, compression="none", chunk_bytes=4096, budget_bytes=64 << 20, commit_timeout_s=60.0)
    save = wire.Save(save=1, tag="global_step1", attempt="00000001-0", step=1, n=1, save_latest=True, left_s=60.0)
    said: list[wire.Message] = [wire.Join(root=root, rank=0, world_size=1), begin, save]
    for message in said:
        connection.sendall(wire.encode(message))
    slot = wire.Slot(slot=0, nbytes=slot_bytes(shard))
    descriptor = slot_of(shard, mark=7 if "marked" in how else 6)
    socket.send_fds(connection, [wire.encode(slot, 1)], [descriptor])
    layout = wire.Layout(layout=0, nbytes=len(shard.buffer), tensors=wire_tensors(shard.tensors))
    contents = wire.Contents(save=1, tree=shard.tree)
    announced = wire.Announced(save=1, slot=0, layout=0, mark=7)
    connection.sendall(wire.encode(layout) + wire.encode(contents) + wire.encode(announced))
    if "forking" in how and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    if "staged" in how:
        connection.sendall(wire.encode(wire.Staged(save=1)))
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
