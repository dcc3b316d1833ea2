"""The sidecar finishes a save whose trainers are dead, and gives a restart its snapshot back from memory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from checkpointd_client.query import StatusClient
from launch import POLL_S, Job
from places import Place

RANKS = 2
BANDWIDTH_MIB = 64
"""What the sidecar is held to, so that the trainers can be killed well before it is done."""
SETTLED_S = 60.0
NEVER = 1 << 30
"""More steps than any run has."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One restart: from where it loaded, how long load() took on rank 0, and when the first step was trained, in seconds."""

    source: str
    tag: str
    load_s: float
    first_step_s: float
    log: Path
    first: int
    last: int

    def differing(self, reference: Path) -> list[int]:
        """The steps whose losses are not, bit for bit, those of the undisturbed run."""
        steps = range(self.first, self.last + 1)
        return [step for step in steps for rank in range(RANKS) if _loss(self.log, rank, step) != _loss(reference, rank, step)]


def _loss(folder: Path, rank: int, step: int) -> str | None:
    lines = (folder / f"losses-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return next((entry["loss"] for entry in map(json.loads, lines) if entry["step"] == step), None)


class SecondAct:
    """Three jobs at one root and one sidecar: killed after a save, restarted from memory, restarted from the store."""

    def __init__(self, folder: Path, place: Place, job: Callable[..., Job], console: Console, *, save_every: int) -> None:
        self.folder, self.place, self.job, self.console = folder, place, job, console
        self.socket = folder / "run" / "socket"
        self.every = save_every
        self.tag = f"global_step{2 * save_every - 1}"

    def run(self) -> list[Recovery]:
        """The restart from memory and the one from the store."""
        self.folder.mkdir()
        with self.sidecar():
            killed = self.train_and_kill_all()
            memory = self.restart("memory", since=killed)
            self.wait_for_commit(killed)
            # That restart has ended well, so the sidecar has let its snapshot go: this one has the store alone.
            store = self.restart("store", since=time.monotonic())
        return [memory, store]

    @contextmanager
    def sidecar(self) -> Iterator[None]:
        """`checkpointd serve`, as a service manager would run it; its first line says where its status page is."""
        command = [Path(sys.executable).with_name("checkpointd"), "serve", "--socket", self.socket, "--root", self.place.served]
        command += ["--uid", str(os.geteuid())]  # root has to be named
        options = ["--http", "127.0.0.1:0", "--bandwidth-mib", str(BANDWIDTH_MIB)]
        self.console.print(f"$ {shlex.join(['checkpointd', *map(str, command[1:]), *options])}", soft_wrap=True)
        with (self.folder / "sidecar.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                raise RuntimeError(f"the sidecar did not start: {(self.folder / 'sidecar.log').read_text()}")
            self.console.print(f"  {line} (while this act lasts)", soft_wrap=True)
            yield
        finally:
            process.terminate()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def train_and_kill_all(self) -> float:
        """Train until both snapshots of the second save are the sidecar's, then SIGKILL everything; when that was."""
        with self._training("killed", until=NEVER, save_every=self.every) as job:
            lines = iter(job)
            for line in lines:
                self.console.print(f"  {line}")
                if line.startswith(f"step {2 * self.every - 2:4d}"):
                    break
            self._wait_until_staged()
            job.kill_all()
            killed = time.monotonic()
        self.console.print(
            f"  [bold red]SIGKILL[/] torchrun and all ranks: {self.tag} is in the sidecar's hands, and not committed yet "
            f"(`latest` says {self._latest()})."
        )
        return killed

    def _wait_until_staged(self) -> None:
        until = time.monotonic() + SETTLED_S
        with StatusClient(self.socket) as client:
            while time.monotonic() < until:
                saves = [save for root in client.status().roots for save in root.in_flight if save.tag == self.tag]
                if len([save for save in saves if save.staged_at is not None]) == RANKS:
                    return
                time.sleep(POLL_S)
        raise RuntimeError(f"the sidecar did not get {self.tag} of all ranks: {(self.folder / 'sidecar.log').read_text()}")

    def restart(self, source: str, *, since: float) -> Recovery:
        """Start the job again and let it train three steps, without a save; the seconds count from `since`."""
        load_s = first_step_s = 0.0
        first = 2 * self.every
        with self._training(source, until=first + 3, save_every=NEVER) as job:
            for line in job:
                self.console.print(f"  {line}")
                if line.startswith("resumed from"):
                    words = line.split()  # resumed from TAG (SOURCE) in SECONDS s ...
                    tag, found, load_s = words[2], words[3].strip("()"), float(words[5])
                elif line.startswith("step") and not first_step_s:
                    first_step_s = time.monotonic() - since
        return Recovery(
            source=found,
            tag=tag,
            load_s=load_s,
            first_step_s=first_step_s,
            log=self.folder / source,
            first=first,
            last=first + 2,
        )

    def _training(self, name: str, *, until: int, save_every: int) -> Job:
        saving = ["--save-every", str(save_every), "--root", self.place.root, "--sidecar", str(self.socket)]
        return self.job(self.folder / name, *saving, "--until", str(until), "--print-every", "1")

    def wait_for_commit(self, killed: float) -> None:
        """Until `latest` names the save whose trainers are dead."""
        until = time.monotonic() + SETTLED_S
        while self._latest() != self.tag:
            if time.monotonic() > until:
                raise RuntimeError(f"{self.tag} was not committed: {(self.folder / 'sidecar.log').read_text()}")
            time.sleep(self.place.poll_s)
        self.console.print(
            f"  {self.tag} is committed: `latest` names it, {time.monotonic() - killed:.1f} s after the kill at most."
        )

    def _latest(self) -> str:
        return self.place.latest() or "nothing"
