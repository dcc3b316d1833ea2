"""What a client that means harm can make a sidecar hold, and how long a neighbour then waits.

`python benchmarks/sidecar_bounds.py`: each attack runs against a daemon of its own, in a process of its own, with a limit of
LIMIT_MIB, while a well-behaved neighbour sends a ping every 20 ms. The daemon's resident memory is read meanwhile. `--write`
makes the page SIDECAR_BOUNDS.md anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import mmap
import multiprocessing
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "client")]

from benchmarks import document, report  # noqa: E402  # needs the path
from checkpointd.daemon.protocol import wire  # noqa: E402
from checkpointd.daemon.protocol.decoder import Decoder  # noqa: E402
from checkpointd.daemon.protocol.parts import contents_parts, layout_parts  # noqa: E402
from checkpointd.layout.boxes import Box  # noqa: E402
from checkpointd.layout.log_records import BeginRecord  # noqa: E402
from checkpointd.pipeline.identity import writer  # noqa: E402
from checkpointd.pipeline.root.log import RootLog  # noqa: E402
from checkpointd.pipeline.root_id import made_id  # noqa: E402
from checkpointd.store.posix.store import PosixStore  # noqa: E402
from checkpointd.store.writers import new_writer  # noqa: E402

MIB = 1 << 20
LIMIT_MIB, SLACK_MIB = 64, 128
PAGE = mmap.PAGESIZE
CONNECTIONS = 60
PING_S = 0.02
NONCE = "0" * 32


class Raw:
    """A client that says what it likes."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self._decoder = Decoder(wire.FRAME_BYTES_MAX)
        self.say(wire.Hello(protocols=wire.PROTOCOLS, release="bench"))
        self.until(wire.Welcome)

    def say(self, message: wire.Message, descriptor: int | None = None) -> None:
        data = wire.encode(message, 0 if descriptor is None else 1)
        if descriptor is None:
            self.socket.sendall(data)
        else:
            sent = socket.send_fds(self.socket, [data], [descriptor])
            self.socket.sendall(data[sent:])

    def until(self, *kinds: type) -> wire.Message:
        """The next message of one of `kinds`; ConnectionError where the daemon hangs up before."""
        while True:
            found = self._decoder.take()
            if found is not None:
                if isinstance(found[0], kinds):
                    return found[0]
                continue
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon has hung up")
            self._decoder.put(data)

    def join(self, root: str, rank: int = 0, world_size: int = 64) -> None:
        self.say(wire.Join(root=root, rank=rank, world_size=world_size))
        self.until(wire.Joined, wire.Refused)

    def begin(self) -> None:
        asked = wire.Begin(
            start=1, nonce=NONCE, compression="none", chunk_bytes=4 * MIB, budget_bytes=64 * MIB, commit_timeout_s=600.0
        )
        self.say(asked)

    def slot(self, nbytes: int, filled: bool) -> None:
        descriptor = os.memfd_create("bench", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes + PAGE)
        for at in range(0, nbytes + PAGE if filled else 0, MIB):
            os.pwrite(descriptor, bytes(min(MIB, nbytes + PAGE - at)), at)
        fcntl.fcntl(descriptor, 1033, 2 | 4 | 16)
        self.say(wire.Slot(slot=0, nbytes=nbytes + PAGE), descriptor)
        os.close(descriptor)
        tensor = wire.WireTensor("w", "uint8", (nbytes,), Box((0,), (nbytes,)), "rank", 0)
        self.say(wire.Layout(layout=0, nbytes=nbytes, tensors=(tensor,)))

    def save(self, number: int, *, tree: bytes = b"\x80") -> None:
        saved = wire.Save(save=number, tag=f"t{number}", attempt="00000001-0", step=1, n=number, save_latest=True, left_s=600.0)
        self.say(saved)
        for part in contents_parts(number, (), (), tree):
            self.say(part)
        self.say(wire.Announced(save=number, slot=0, layout=0, mark=1))

    def drained(self) -> None:
        """Read what is there, so that the daemon does not leave this client."""
        while select.select([self.socket], [], [], 0)[0]:
            if not self.socket.recv(1 << 16):
                raise ConnectionError("the daemon has hung up")


def partial_frames(path: str, root: str, seconds: float) -> None:
    """Every connection sends all of a message but its end."""
    clients = []
    for rank in range(CONNECTIONS):
        client = Raw(path)
        client.join(root, rank)
        client.socket.sendall(wire.HEAD.pack(wire.MAGIC, 0, 0, wire.FRAME_BYTES_MAX) + bytes(wire.FRAME_BYTES_MAX - 1))
        clients.append(client)
    time.sleep(seconds)


def trees(path: str, root: str, seconds: float) -> None:
    """Large trees are announced on ever new connections, which are closed while the process lives."""
    until = time.monotonic() + seconds
    for rank in range(1, CONNECTIONS):
        with contextlib.suppress(ConnectionError):
            client = Raw(path)
            client.join(root, rank)
            client.begin()
            client.slot(PAGE, filled=True)
            for number in range(4):
                client.save(number, tree=bytes(8 * MIB))
                client.drained()
            client.socket.close()
        if time.monotonic() > until:
            return
    time.sleep(max(0.0, until - time.monotonic()))


def layouts(path: str, root: str, seconds: float) -> None:
    """Every connection sends the largest layouts without a pause."""
    tensors = tuple(wire.WireTensor(f"layer.{i}", "uint8", (0,) * 4, Box((0,) * 4, (0,) * 4), "rank", 0) for i in range(20_000))
    data = b"".join(map(wire.encode, layout_parts(1, PAGE, tensors)))
    clients = [Raw(path) for _ in range(CONNECTIONS)]
    for rank, client in enumerate(clients):
        client.join(root, rank)
        client.socket.setblocking(False)
    left, until = {client: memoryview(data) for client in clients}, time.monotonic() + seconds
    while time.monotonic() < until:
        for client in select.select([], [c.socket for c in clients], [], 0.1)[1]:
            owner = next(c for c in clients if c.socket is client)
            with contextlib.suppress(BlockingIOError):
                left[owner] = left[owner][client.send(left[owner]) :] or memoryview(data)


def dimensions(path: str, root: str, seconds: float) -> None:
    """Layouts of tensors with 900 dimensions."""
    until, number = time.monotonic() + seconds, 0
    client = Raw(path)
    client.join(root)
    shape, offsets, sizes = [1 << 40] * 900, [1 << 33] * 900, [0, *[1 << 34] * 899]
    parts = [[f"t{i}", "uint8", shape, [offsets, sizes], "rank", 0] for i in range(2)]
    while time.monotonic() < until:
        number += 1
        for part in range(400):
            body = msgspec.msgpack.encode(
                {"type": "layout", "layout": number, "nbytes": PAGE, "more": part < 399, "tensors": _named(parts, part)}
            )
            client.socket.sendall(wire.HEAD.pack(wire.MAGIC, 0, 0, len(body)) + body)
            client.drained()


def _named(parts: list[list[object]], part: int) -> list[list[object]]:
    return [[f"{tensor[0]}.{part}", *tensor[1:]] for tensor in parts]


def sparse(path: str, root: str, seconds: float) -> None:
    """A slot whose pages were never written: a read of them would allocate them here."""
    client = Raw(path)
    client.join(root, 0, 1)
    client.begin()
    client.slot(48 * MIB, filled=False)
    client.save(1)
    client.say(wire.Staged(save=1))
    time.sleep(seconds)


def dead_trainers(path: str, root: str, seconds: float) -> None:
    """Trainers hand over 40 MiB each, one after another, and die; rank 0 never comes."""
    until = time.monotonic() + seconds
    for rank in range(1, 9):
        client = Raw(path)
        client.join(f"{root}", rank)
        client.begin()
        with contextlib.suppress(ConnectionError):
            client.slot(40 * MIB, filled=True)
            client.save(rank)
            if rank % 2:
                client.say(wire.Staged(save=rank))
            client.say(wire.Ping())
            client.until(wire.Pong)
            time.sleep(seconds / 10)
        client.socket.close()
    time.sleep(max(0.0, until - time.monotonic()))


def pings(path: str, _root: str, seconds: float) -> None:
    """Every connection pings without a pause, and reads the answers."""
    clients = [Raw(path) for _ in range(CONNECTIONS)]
    data = wire.encode(wire.Ping()) * 50
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for client in clients:
            with contextlib.suppress(OSError):
                client.socket.setblocking(False)
                client.socket.send(data)
                client.drained()


ATTACKS: dict[str, Callable[[str, str, float], None]] = {
    "messages that do not end": partial_frames,
    "trees of 8 MiB": trees,
    "layouts without a pause": layouts,
    "tensors of 900 dimensions": dimensions,
    "a slot with holes": sparse,
    "trainers that die": dead_trainers,
    "pings without a pause": pings,
}


@dataclass(slots=True)
class Seen:
    """RSS in MiB, pings in ms."""

    attack: str
    before: float = 0.0
    peak: float = 0.0
    after: float = 0.0
    quiet: list[float] = field(default_factory=list)
    pings: list[float] = field(default_factory=list)


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[tuple[str, int]]:
    """Its socket and its process id."""
    path = str(folder / "run" / "socket")
    command = [sys.executable, "-m", "checkpointd", "serve", "--socket", path, "--root", str(folder)]
    options = ["--uid", str(os.getuid()), "--memory-mib", str(LIMIT_MIB), "--held-mib", "0", "--grace", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, cwd=HERE.parent)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready at "), (folder / "log").read_text()
        yield path, process.pid
    finally:
        process.kill()
        process.wait()


async def put_start(root: str) -> None:
    """Begin the start that the attackers name; without it the daemon takes no save."""
    async with PosixStore(root) as store:
        begin = BeginRecord(start=1, nonce=NONCE, world_size=64, process=new_writer(), writer=writer())
        await made_id(store)
        assert await RootLog.of(store).add(begin) == ""


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB


def trial(name: str, seconds: float, base: str | None) -> Seen:
    seen = Seen(name)
    with tempfile.TemporaryDirectory(prefix="checkpointd-bounds-", dir=base) as folder, daemon(Path(folder)) as (path, pid):
        asyncio.run(put_start(f"{folder}/job"))
        neighbour, over = Raw(path), threading.Event()
        neighbour.join(f"{folder}/neighbour", 0, 1)

        def ping_on(times: list[float], seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                began = time.monotonic()
                neighbour.say(wire.Ping())
                neighbour.until(wire.Pong)
                times.append((time.monotonic() - began) * 1e3)
                seen.peak = max(seen.peak, rss_mib(pid))
                over.wait(PING_S)

        ping_on(seen.quiet, 1.0)
        seen.before = rss_mib(pid)
        attacker = multiprocessing.get_context("fork").Process(target=ATTACKS[name], args=(path, f"{folder}/job", seconds))
        attacker.start()
        ping_on(seen.pings, seconds + 1.0)
        attacker.kill()
        attacker.join()
        ping_on([], 2.0)
        seen.after = rss_mib(pid)
    return seen


def page(options: argparse.Namespace, found: list[Seen]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(Path(options.dir or tempfile.gettempdir())).items())
    rows = [
        [
            seen.attack,
            f"{seen.before:.0f}",
            f"{seen.peak:.0f}",
            f"{seen.after:.0f}",
            f"{statistics.median(seen.quiet):.1f} / {max(seen.quiet):.0f}",
            f"{statistics.median(seen.pings):.1f} / {max(seen.pings):.0f}",
        ]
        for seen in found
    ]
    head = ["attack", "RSS before, MiB", "peak", "after", "ping before, ms: median / max", "ping meanwhile"]
    return f"""# The sidecar's bounds

This page shows how much memory a hostile client can make a sidecar hold, and how long other clients then wait.
`python benchmarks/sidecar_bounds.py --seconds {options.seconds:g} --write` writes it; do not edit it by hand.

Machine: {facts}; load average at the end {os.getloadavg()[1]:.0f}.

One client does its worst for {options.seconds:g} s, on up to {CONNECTIONS} connections, against a daemon started with
`--memory-mib {LIMIT_MIB}`. Its resident memory must stay below that limit plus {SLACK_MIB} MiB, which is
{LIMIT_MIB + SLACK_MIB} MiB. Meanwhile another client sends a ping every {PING_S * 1e3:.0f} ms. All share the machine's cores
with other work.

{report.table(head, rows)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--only", choices=ATTACKS, action="append")
    parser.add_argument("--dir", help="where the daemons' roots lie")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = [trial(name, options.seconds, options.dir) for name in options.only or ATTACKS]
    text = page(options, found)
    print(text)
    if options.write:
        (HERE / "SIDECAR_BOUNDS.md").write_text(text)
    return 0 if all(seen.peak < LIMIT_MIB + SLACK_MIB for seen in found) else 1


if __name__ == "__main__":
    sys.exit(main())
