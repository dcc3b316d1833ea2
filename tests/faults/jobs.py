"""Jobs of several ranks as real processes, for tests that kill, stop and starve them.

`Job`: ranks that do what the test tells them, one command at a time (`tests/faults/commanded_rank.py`). `Torchrun`: the
training of `tests/faults/predictable_training.py` under torchrun, which trains and saves until it is killed.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults.rank_forker import ForkedRank, RankForker

HERE = Path(__file__).parent
COMMANDED_RANK = HERE / "commanded_rank.py"
POLL_S = 0.002
NEVER_S = 600.0
"""A commit deadline that no test lives to see: what ends before it, ended for another reason."""
REST_S = 15.0
MIB = 1 << 20
NBYTES = MIB
"""State of one rank where its size does not matter."""


class RankError(Exception):
    """What a rank's call raised: the name of the error's class, and its message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True)
class End:
    """How a save ended on one rank."""

    phase: str
    code: str = ""
    message: str = ""
    ranks: Sequence[int] = ()
    cause: str = ""
    """The error that only this rank knows."""


@dataclass(frozen=True)
class Loaded:
    """What a rank loaded; `wrong` names the leaves that are not, bit for bit, what the step had."""

    tag: str
    step: int
    wrong: list[str]
    fell_back_from: list[str]
    source: str


class Rank:
    """One rank's process: forked by `rank_forker`, or begun anew where there is none, with `prefix` before its command line."""

    def __init__(
        self,
        rank: int,
        environment: dict[str, str],
        stderr: Path,
        prefix: Sequence[str] = (),
        rank_forker: RankForker | None = None,
    ) -> None:
        self.rank, self._stderr = rank, stderr
        self.process: subprocess.Popen[str] | ForkedRank
        environment = {**environment, "RANK": str(rank)}
        with stderr.open("wb") as errors:
            if rank_forker is not None:
                self.process = ForkedRank(rank_forker.socket, environment, errors)
            else:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, str(COMMANDED_RANK)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._pid: int | None = None
        self._due = 0

    @property
    def pid(self) -> int:
        """Its process id. Not the child's, which may be strace; the rank says it as soon as it is ready."""
        if self._pid is None:
            self._pid = int(self._next(None)["value"])
        return self._pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Give a command; its answer comes in turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()
        self._due += 1

    def answer(self, limit_s: float | None = None) -> Any:
        """What the last command returned; RankError where it raised. Answers before it that nobody asked for are dropped.

        queue.Empty where it does not come within `limit_s` seconds.
        """
        assert self.pid
        answer: dict[str, Any] = {}
        while self._due:
            answer = self._next(limit_s)
            self._due -= 1
        if "error" in answer:
            raise RankError(answer["error"], answer["message"])
        return answer["value"]

    def do(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def end(self, step: int) -> End:
        """How the save of `step` ended."""
        return End(**self.do("end", step=step))

    def logged(self, level: str) -> str:
        """What was logged at `level` since open(), a message a line."""
        return "\n".join(message for at, message in self.do("logs") if at == level)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        if self._pid is not None:
            kill(self._pid)
        else:
            self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """What it wrote to standard error."""
        return self._stderr.read_text()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, limit_s: float | None) -> dict[str, Any]:
        line = self._lines.get(timeout=limit_s)
        if not line:
            raise RuntimeError(f"rank {self.rank} has ended with {self.process.wait()}:\n{self.said()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(kw_only=True)
class Job:
    """A job of `world_size` ranks, started at once and ready when first told something.

    `prefixes`: rank -> what goes before its command line, strace and its options. `rank_forker`: what forks the other ranks;
    without one, they are those of `commanded_rank.py`.
    """

    folder: Path
    world_size: int = 2
    seed: int = 1
    nbytes: int = NBYTES
    prefixes: dict[int, list[str]] = field(default_factory=dict)
    rank_forker: RankForker | None = None
    ranks: list[Rank] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        environment, rank_forker = rank_environment(self.world_size), self.rank_forker or commanded_rank_forker()
        for rank in range(self.world_size):
            prefix, stderr = self.prefixes.get(rank), self.folder / f"rank-{rank}.stderr"
            self.ranks.append(Rank(rank, environment, stderr, prefix or (), rank_forker if prefix is None else None))

    def all(self, command: str, **arguments: Any) -> list[Any]:
        """Tell every rank, then hear every rank."""
        self.tell(command, **arguments)
        return [rank.answer() for rank in self.ranks]

    def tell(self, command: str, **arguments: Any) -> None:
        for rank in self.ranks:
            rank.tell(command, **arguments)

    def open(self, root: Path, **options: Any) -> None:
        """Make every rank's Checkpointer at `root`."""
        self.tell_open(root, **options)
        for rank in self.ranks:
            rank.answer()

    def tell_open(self, root: Path, *, commit_timeout_s: float = NEVER_S, **options: Any) -> None:
        """The same, not waited for."""
        self.tell("open", **{**self.opening(root), "commit_timeout_s": commit_timeout_s, **options})

    def opening(self, root: Path) -> dict[str, Any]:
        """What every rank is told to open `root`."""
        return {"root": str(root), "seed": self.seed, "nbytes": self.nbytes}

    def ends(self, step: int) -> list[End]:
        """How the save of `step` ended on every rank."""
        return [End(**end) for end in self.all("end", step=step)]

    def save(self, step: int) -> list[End]:
        """Save on every rank and wait for the end."""
        self.all("save", step=step)
        return self.ends(step)

    def must_commit(self, step: int) -> None:
        ends = self.save(step)
        assert [end.phase for end in ends] == ["committed"] * self.world_size, ends

    def load(self, **options: Any) -> list[Loaded | None]:
        return [None if found is None else Loaded(**found) for found in self.all("load", **options)]

    def must_load(self, step: int, **options: Any) -> None:
        """Load on every rank: it must be that of `step`, every bit of it."""
        for loaded in self.load(**options):
            assert loaded is not None
            assert (loaded.step, loaded.wrong) == (step, [])

    def errors_of(self, command: str, **arguments: Any) -> list[RankError]:
        """The error of a command that every rank must fail at."""
        self.tell(command, **arguments)
        return [_error_of(rank) for rank in self.ranks]

    def rest(self) -> bool:
        """Close what is open, so that another test can use this job; False where that is not to be had."""
        try:
            self.tell("close")
            for rank in self.ranks:
                with suppress(RankError):
                    rank.answer(REST_S)
        except (queue.Empty, OSError, RuntimeError):
            return False
        return True

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@functools.cache
def commanded_rank_forker() -> RankForker:
    """What forks the ranks of `commanded_rank.py` in this process of tests; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="rank-forker-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return RankForker(folder, "tests.faults.commanded_rank")


def _error_of(rank: Rank) -> RankError:
    try:
        value = rank.answer()
    except RankError as error:
        return error
    raise AssertionError(f"rank {rank.rank} did not fail: {value}")


def rank_environment(world_size: int) -> dict[str, str]:
    """What a launcher sets for each rank, beside RANK; rank 0 is the host of torch.distributed's store."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], object], what: str, *, limit_s: float = 60.0) -> None:
    """Look until something is true; AssertionError saying `what` did not happen."""
    never, until = threading.Event(), time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, f"{what}: not within {limit_s:g} s"
        never.wait(POLL_S)


# --- under torchrun ---


class Torchrun:
    """The endless training under torchrun, which starts all ranks again when one dies. What they see they note in `folder`."""

    def __init__(self, folder: Path, arguments: Sequence[str], *, world_size: int = 2, restarts: int = 1000) -> None:
        self._stderr = folder / "torchrun.stderr"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        torchrun += ["--max-restarts", str(restarts), "--monitor-interval", "0.05"]
        environment = {k: v for k, v in rank_environment(world_size).items() if not k.startswith(("MASTER", "WORLD"))}
        # By default one store serves all restarts, and a rank may read the address of a dead one (PyTorch issue 135712).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self._stderr.open("a") as errors:
            self.process = subprocess.Popen(
                [*torchrun, str(HERE / "predictable_training.py"), "--journal", str(folder), *arguments],
                stdout=errors,
                stderr=errors,
                env=environment,
            )

    def check_running(self) -> None:
        assert self.process.poll() is None, f"torchrun has ended with {self.process.returncode}:\n{self._stderr.read_text()}"

    def kill_all(self) -> None:
        """SIGKILL to torchrun and all ranks. Stopped first, it starts nothing again in between."""
        os.kill(self.process.pid, signal.SIGSTOP)
        for pid in [*children_of(self.process.pid), self.process.pid]:
            kill(pid)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def kill(pid: int) -> None:
    """SIGKILL, where the process is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def children_of(parent: int) -> Iterator[int]:
    """The processes that `parent` has started and that are alive."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name in parentheses may hold anything: what follows it is "state ppid ...".
            ppid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ppid == parent:
            yield int(folder.name)
