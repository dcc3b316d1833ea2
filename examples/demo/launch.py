"""Start a script under torchrun, find one rank's process, and kill it while it is writing a checkpoint."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_S = 0.002
"""How often the watchers look: short against a save, and cheap against training."""

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
            _kill(pid)

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


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
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
    present: tuple[str, ...]  # every object of the attempt


def kill_during_save(job: Job, root: Path, tags: Sequence[str], *, rank: int, after: float) -> Strike | None:
    """SIGKILL `rank` when it has written so much of its shard, saving one of `tags`; None where every save was too quick.

    `after` is a part of what the rank's shard took in the checkpoint before.

    A kill that came too late (the rank's vote is there) does not count: torchrun restarts the job, and the next tag is tried.
    """
    for tag in tags:
        save = SaveInFlight(root, tag, rank)
        pid = save.wait_for(after, job)
        if pid is None:
            continue
        _kill(pid)
        strike = save.struck(pid)
        if strike is not None:
            return strike
    return None


class SaveInFlight:
    """One rank's save of `tag` below `root`: begun when it has a chunks object, over when it has voted."""

    def __init__(self, root: Path, tag: str, rank: int) -> None:
        self.root, self.tag, self.rank = root, tag, rank

    def attempt(self) -> Path | None:
        """The folder of the undecided attempt that the rank is writing, if it is."""
        for chunks in (self.root / self.tag).glob(f"*/{self.rank:05d}-*.chunks"):
            attempt = chunks.parent
            if not (attempt / f"{self.rank:05d}.vote").exists() and not (attempt / "outcome").exists():
                return attempt
        return None

    def wait_for(self, part: float, job: Job) -> int | None:
        """The rank's process id as soon as it has written this part of its shard; None where its save ended before."""
        seen = False
        while job.running():
            attempt = self.attempt()
            if attempt is not None:
                seen = True
                written = self.written(attempt)
                pid = job.pids().get(self.rank) if written > part * self.expected() else None
                if pid is not None:
                    return pid
            elif seen or any((self.root / self.tag).glob("*/outcome")):
                return None
            time.sleep(POLL_S)
        return None

    def written(self, attempt: Path) -> int:
        return sum(data_bytes(path) for path in self.chunks(attempt))

    def expected(self) -> int:
        """What the rank's chunks took in the checkpoint that `latest` names, in bytes; 0 where there is none."""
        latest = self.latest()
        sizes = [sum(map(data_bytes, self.chunks(attempt.parent))) for attempt in (self.root / latest).glob("*/outcome")]
        return max(sizes, default=0) if latest else 0

    def latest(self) -> str:
        """The tag that `latest` names; empty where there is none."""
        path = self.root / "latest"
        return path.read_text().strip() if path.exists() else ""

    def chunks(self, attempt: Path) -> list[Path]:
        return list(attempt.glob(f"{self.rank:05d}-*.chunks"))

    def struck(self, pid: int) -> Strike | None:
        """What the killed rank left of its attempt; None where it had voted."""
        attempt = self.attempt()
        if attempt is None:
            return None
        return Strike(
            rank=self.rank,
            pid=pid,
            tag=self.tag,
            attempt=attempt.name,
            latest=self.latest(),
            written=self.written(attempt),
            expected=self.expected(),
            present=tuple(sorted(path.name for path in attempt.iterdir())),
        )


def data_bytes(path: Path) -> int:
    """Bytes of a file that have been written: space that is only reserved is a hole to SEEK_DATA. 0 where there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # its writer dropped it meanwhile
        return 0
    try:
        return sum(end - begin for begin, end in _data_segments(descriptor))
    finally:
        os.close(descriptor)


def _data_segments(descriptor: int) -> Iterator[tuple[int, int]]:
    end = 0
    while True:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but holes up to the end
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end
