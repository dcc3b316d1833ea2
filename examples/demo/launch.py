"""Start a script under torchrun, find one rank's process, and kill it while it is writing a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from places import CHUNKS, UNFINISHED, Place

POLL_S = 0.002
"""How often the watcher of a sidecar looks."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # By default torchrun keeps one store over all restarts, and a restarted rank may then read the address of a process that is
    # dead (PyTorch issue 135712): init_process_group hangs or fails. This gives every restart a store of its own.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Job:
    """One torchrun job. Iterating over it yields what the ranks print, until the job ends. Use it with `with`.

    Args:
        script, arguments: what each rank runs.
        errors: file for stderr, where torchrun also writes.
        ranks: how many processes.
        restarts: how often torchrun starts all ranks again after one has died.
        seconds: after this time the job is killed, and iterating raises.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        *,
        errors: Path,
        ranks: int = 2,
        restarts: int = 0,
        seconds: float = 300.0,
    ) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "--max-restarts", str(restarts), str(script), *arguments]
        self.errors = errors
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | ENVIRONMENT
            )

        self.timer = threading.Timer(seconds, self.kill_all)
        self.timer.start()

    def __iter__(self) -> Iterator[str]:
        if self.process.stdout is None:
            raise RuntimeError("the job's output is not captured")
        for line in self.process.stdout:
            yield line.rstrip("\n")
        if self.process.wait() != 0:
            # The ranks' own words come first; torchrun's summary of them stands at the end.
            words = "\n".join(self.errors.read_text().splitlines()[:40])
            late = "" if self.timer.is_alive() else ", killed since it did not end in time"
            raise RuntimeError(f"torchrun ended with {self.process.returncode}{late}; {self.errors} begins:\n{words}")

    def running(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> dict[int, int]:
        """Rank -> process id, of the ranks that are alive."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            rank = _rank_of_child(folder, self.process.pid)
            if rank is not None:
                found[rank] = int(folder.name)
        return found

    def kill_all(self) -> None:
        """SIGKILL torchrun, so that it restarts nothing, and then every rank."""
        ranks = self.pids()
        self.process.kill()
        self.process.wait()
        for pid in ranks.values():
            _send(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.timer.cancel()
        if self.running():
            self.kill_all()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _rank_of_child(process: Path, parent: int) -> int | None:
    try:
        # The name in parentheses may hold anything: what follows it is "state ppid ...".
        ppid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        environment = (process / "environ").read_bytes().split(b"\0") if ppid == parent else []
    except (OSError, IndexError):
        return None  # it has ended meanwhile
    return next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What lay in the store when a rank had just been killed in the middle of writing `attempt`."""

    rank: int
    pid: int
    tag: str
    attempt: str
    latest: str
    written: int  # bytes of the rank's chunks that hold data
    expected: int  # bytes that they had in the checkpoint before
    present: tuple[str, ...]  # every object of the attempt, and every unfinished upload


def kill_during_save(job: Job, place: Place, tags: Sequence[str], *, rank: int, after: float) -> Strike | None:
    """SIGKILL `rank` when it has written so much of its shard, saving one of `tags`; None where every save was too quick.

    `after` is a part of what the rank's shard took in the checkpoint before.

    The rank is stopped first. If its vote is there by then, it goes on, and the next tag is tried. If a vote that was under way
    arrives after the kill, the kill does not count: torchrun restarts the job, and the next tag is tried.
    """
    for tag in tags:
        save = SaveInFlight(place, tag, rank)
        pid = save.wait_for(after, job)
        if pid is None:
            continue
        _send(pid, signal.SIGSTOP)
        if save.look() is None:
            _send(pid, signal.SIGCONT)
            continue
        _send(pid, signal.SIGKILL)
        strike = save.struck(pid)
        if strike is not None:
            return strike
    return None


def has_ballot(objects: Iterable[str]) -> bool:
    """Whether every rank has voted yes: the coordinator puts the ballot just before the commit."""
    return any(name.startswith("ballot-") for name in objects)


class SaveInFlight:
    """One rank's save of `tag` at `place`: begun when it has a chunks object, or its upload; over when it has voted."""

    def __init__(self, place: Place, tag: str, rank: int) -> None:
        self.place, self.tag, self.rank = place, tag, rank

    def look(self) -> tuple[str, Mapping[str, int]] | None:
        """The undecided attempt that the rank is writing, if it is, and the objects in it."""
        for attempt, objects in self.place.attempts(self.tag).items():
            ours = any(self.is_ours(name) for name in objects)
            if ours and f"{self.rank:05d}.vote" not in objects and not has_ballot(objects):
                return attempt, objects
        return None

    def wait_for(self, part: float, job: Job) -> int | None:
        """The rank's process id as soon as it has written this part of its shard; None where its save ended before."""
        seen = False
        while job.running():
            found = self.look()
            if found is not None:
                seen = True
                written = self.written(found[1])
                pid = job.pids().get(self.rank) if written >= part * self.expected() else None
                if pid is not None:
                    return pid
            elif seen or any(map(has_ballot, self.place.attempts(self.tag).values())):
                return None
            time.sleep(self.place.poll_s)
        return None

    def is_ours(self, name: str) -> bool:
        return name.startswith(f"{self.rank:05d}-") and name.removesuffix(UNFINISHED).endswith(CHUNKS)

    def written(self, objects: Mapping[str, int]) -> int:
        return sum(size for name, size in objects.items() if self.is_ours(name))

    def expected(self) -> int:
        """What the rank's chunks took in the checkpoint that `latest` names, in bytes; 0 where there is none."""
        latest = self.place.latest()
        attempts = self.place.attempts(latest).values() if latest else ()
        return max((self.written(objects) for objects in attempts if has_ballot(objects)), default=0)

    def struck(self, pid: int) -> Strike | None:
        """What the killed rank left of its attempt; None where it had voted."""
        found = self.look()
        if found is None:
            return None
        attempt, objects = found
        return Strike(
            rank=self.rank,
            pid=pid,
            tag=self.tag,
            attempt=attempt,
            latest=self.place.latest(),
            written=self.written(objects),
            expected=self.expected(),
            present=tuple(sorted(objects)),
        )
