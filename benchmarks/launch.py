"""Start the ranks of one trial as fresh processes, watch their memory, collect their reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol

from torch._C._distributed_c10d import TCPStore  # torch.distributed passes it on, but untyped

from benchmarks import processes
from benchmarks.measures import LoadTimes, RankReport, Trial, TwoLoads, rank_report
from benchmarks.rank import Job

_SAMPLE_S = 0.02
_TREE_EVERY = 5  # samples between two looks for new child processes
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for every trial of a run of the benchmark."""

    directory: Path
    target_bytes: int
    warm_saves: int
    gate_s: float
    quiet_s: float
    timeout_s: float


def run_trial(setting: Setting, *, system: str, ranks: int, run: int, order: int, seed: int) -> Trial:
    """One system once, on `ranks` ranks; an error becomes the trial's `error`, never an exception."""
    root = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=setting.directory))
    reports: list[RankReport] = []
    peaks: dict[str, int] = {}
    error, start, others = "", time.monotonic(), others_seconds()
    try:
        reports, peaks = _run_ranks(setting, root, system, ranks, seed)
    except RuntimeError as failure:
        error = str(failure)
    other_cores = (others_seconds() - others) / (time.monotonic() - start)
    shutil.rmtree(root, ignore_errors=True)
    os.sync()  # the freed blocks are discarded now, and not during the next trial
    return Trial(
        system=system,
        ranks=ranks,
        run=run,
        order=order,
        other_cores=max(0.0, other_cores),
        reports=reports,
        save_peak_bytes=peaks.get("save", 0),
        load_peak_bytes=peaks.get("load", 0),
        load_private_bytes=peaks.get("load, private", 0),
        error=error,
    )


def others_seconds() -> float:
    return processes.busy_seconds() - processes.own_seconds()


def _run_ranks(setting: Setting, root: Path, system: str, ranks: int, seed: int) -> tuple[list[RankReport], dict[str, int]]:
    """The reports of all ranks, and the most memory of all together by phase."""
    (root / "data").mkdir()
    run = partial(_run_phase, setting, root, system, ranks, seed)
    saved, peaks = run("save")
    dropped, dropped_peaks = run("load dropped")
    cached, _ = run("load cached")
    base = sum(one["base_private_bytes"] for one in dropped)
    loads = [_loads(TwoLoads(**one), TwoLoads(**other)) for one, other in zip(dropped, cached, strict=True)]
    reports = [
        rank_report({**report, "load": asdict(load), "load_base_bytes": one["base_bytes"]})
        for report, load, one in zip(saved, loads, dropped, strict=True)
    ]
    private = max(0, dropped_peaks.get("load, private", 0) - base)
    return reports, {"save": peaks.get("save", 0), "load": dropped_peaks.get("load", 0), "load, private": private}


def _loads(dropped: TwoLoads, cached: TwoLoads) -> LoadTimes:
    """The loads of one rank, by the two processes that loaded."""
    return LoadTimes(
        cold_s=cached.later_s,
        cached_s=dropped.later_s,
        first_s=cached.first_s,
        first_cold_s=dropped.first_s,
        plain_s=cached.plain_s,
        first_plain_s=dropped.plain_s,
        resident=max(dropped.resident, cached.resident),
        wrong=sorted({*dropped.wrong, *cached.wrong}),
    )


def _run_phase(
    setting: Setting, root: Path, system: str, ranks: int, seed: int, phase: Literal["save", "load dropped", "load cached"]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    # As torchrun does it: the store lives outside the ranks, and the system picks its port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [
        Job(
            system=system,
            root=str(root / "data"),
            result=str(root / f"report{rank}.json"),
            rank=rank,
            ranks=ranks,
            target_bytes=setting.target_bytes,
            warm_saves=setting.warm_saves,
            gate_s=setting.gate_s,
            quiet_s=setting.quiet_s,
            seed=seed,
            phase=phase,
            digests=str(root / f"digests{rank}.json"),
        )
        for rank in range(ranks)
    ]
    with Ranks(jobs, root, store.port) as running:
        peaks = running.watch(setting.timeout_s)
    return [json.loads(Path(job.result).read_text()) for job in jobs], peaks


class RankJob(Protocol):
    """What a module tells its ranks: a dataclass called `Job`, beside a function `main` that takes it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rank(self) -> int:
        """Rank 0 says on stdout which phase it is in."""


class Ranks:
    """The processes of one trial; leaving the context ends those that still run."""

    def __init__(self, jobs: Sequence[RankJob], root: Path, port: int) -> None:
        self._logs = [root / f"log{job.rank}.txt" for job in jobs]
        self._started = [_start(job, log, port) for job, log in zip(jobs, self._logs, strict=True)]
        self._phase = "build"
        stdout = self._started[0].stdout
        assert stdout is not None
        threading.Thread(target=self._follow, args=(stdout,), daemon=True).start()

    def _follow(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("phase "):
                self._phase = line.split()[1]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            for pid in processes.tree(process.pid) if process.poll() is None else []:
                _kill(pid)
            process.wait()

    def watch(self, timeout_s: float) -> dict[str, int]:
        """Largest memory of all ranks and their children in each phase, until all have ended.

        Raises RuntimeError with the end of a rank's log where one fails, or none ends in time.
        """
        peaks: dict[str, int] = defaultdict(int)
        end, count = time.monotonic() + timeout_s, 0
        trees: list[list[int]] = []
        while any(process.poll() is None for process in self._started):
            if count % _TREE_EVERY == 0:
                trees = [processes.tree(process.pid) for process in self._started]
            phase = self._phase
            peaks[phase] = max(peaks[phase], sum(processes.memory(tree) for tree in trees))
            private = f"{phase}, private"
            peaks[private] = max(peaks[private], sum(processes.private(tree) for tree in trees))
            self._raise_if_failed()
            if time.monotonic() > end:
                raise RuntimeError(f"not done after {timeout_s:.0f} s: {self._last_words(0)}")
            count += 1
            time.sleep(_SAMPLE_S)
        self._raise_if_failed()
        return dict(peaks)

    def _raise_if_failed(self) -> None:
        for rank, process in enumerate(self._started):
            if process.poll():
                raise RuntimeError(f"rank {rank} ended with {process.returncode}: {self._last_words(rank)}")

    def _last_words(self, rank: int) -> str:
        lines = self._logs[rank].read_text(errors="replace").strip().splitlines()
        errors = [line.strip() for line in lines if re.match(r"\S*(Error|Exception)\b.*:", line.strip())]
        return " | ".join((errors or lines)[-3:]) or "(it wrote nothing)"


def _start(job: RankJob, log: Path, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, str(_WORKER), type(job).__module__, json.dumps(asdict(job))],
            env=environment,
            stdout=subprocess.PIPE if job.rank == 0 else subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
