"""One rank of a job that obeys commands: a command a line on standard input, an answer a line on standard output.

`tests/faults/jobs.py` is the other end. A command is the name of a method of `Rank` below and its arguments, as JSON; an answer
is what the method returned, or the error that it raised.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from checkpointd import waits
from checkpointd.errors import AbortedError, CheckpointdError
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.gc import tidying
from checkpointd.pipeline.root import leases
from checkpointd.store.posix import osfile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd_client import Checkpointer, SaveHandle
from checkpointd_client.ranks import startup
from checkpointd_client.sidecar import own_daemon
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.stager import Stager
from tests.faults.failing_reads import FOR_EVER, FailingReads, Fault, read_impatiently
from tests.faults.predictable_training import Journal, Training, save_endlessly

leases.RENEWALS = 30  # who watches a lease sees a renewal within a second, and takes no pause of a rank for its end
DIRECT_BYTES_MIN = osfile.DIRECT_BYTES_MIN
TRAINING_TIMEOUT = timedelta(seconds=100)


class Records(logging.Handler):
    """Keeps what is logged, as (level, message)."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelname, record.getMessage()))
        print(record.getMessage(), file=sys.stderr, flush=True)  # for who cannot ask, since this rank waits


class Rank:
    """This process; its public methods are the commands."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._rank = int(os.environ["RANK"])
        self._checkpointer: Checkpointer | None = None
        self._handles: dict[str, SaveHandle] = {}
        self._training = Training(seed=0, rank=self._rank, nbytes=4096)
        self._failing_reads = FailingReads()

    @property
    def _ckpt(self) -> Checkpointer:
        assert self._checkpointer is not None, "no root is open"
        return self._checkpointer

    def open(self, root: str, seed: int, nbytes: int, direct: bool = True, **options: Any) -> None:
        """Begin a training of its own with a Checkpointer at `root`; without `direct`, all writes go through the page cache."""
        osfile.DIRECT_BYTES_MIN = DIRECT_BYTES_MIN if direct else sys.maxsize  # type: ignore[misc]  # as where it is refused
        self._training = Training(seed=seed, rank=self._rank, nbytes=nbytes)
        self._handles = {}
        self._records.kept.clear()
        self._failing_reads.faults.clear()
        read_impatiently(setattr, None)
        self._checkpointer = Checkpointer(root, **options)

    def save(self, step: int, **options: Any) -> str:
        """Train `step` and save it; returns the attempt's name as soon as save() does. Nothing is waited for."""
        self._training.advance(step)
        handle = self._ckpt.save(step, self._training.state, client_state=self._training.client_state, **options)
        self._handles[handle.tag] = handle
        return handle.attempt

    def save_unsafe(self, step: int) -> None:
        """Save a state that cannot be stored; raises."""
        tag = f"global_step{step}"
        try:
            self._ckpt.save(step, {**self._training.state, "socket": sys.stdin})
        finally:
            status = next(s for s in self._ckpt.status().attempts if s.tag == tag)
            assert status.step == step

    def end(self, step: int, until: str = "committed") -> dict[str, object]:
        """How the save of `step` ended; waits for that. A cause is an error that only this rank knows."""
        handle = self._handles[f"global_step{step}"]
        try:
            handle.wait(until=until)  # type: ignore[arg-type]  # the tests name a phase
        except CheckpointdError as error:
            why = error.__context__.__context__ if isinstance(error.__context__, AbortedError) else error.__context__
            cause = str(why) if why else ""
            return {"phase": handle.phase, "code": error.code, "message": str(error), "ranks": error.ranks, "cause": cause}
        return {"phase": handle.phase}

    def load(self, **options: Any) -> dict[str, object] | None:
        """Load into objects that hold something else; says which leaves are wrong afterwards."""
        target = Training(seed=self._training.seed, rank=self._rank, nbytes=self._training.nbytes)
        target.advance(999_999)
        loaded = self._ckpt.load(target.state, **options)
        if loaded is None:
            return None
        client_state = loaded.client_state == {"seed": target.seed, "step": loaded.step}
        wrong = target.wrong(loaded.step) + ([] if client_state else ["client_state"])
        return {
            "tag": loaded.tag,
            "step": loaded.step,
            "wrong": wrong,
            "fell_back_from": loaded.fell_back_from,
            "source": loaded.source,
        }

    def saves_that_waited(self) -> int:
        """How many of the saves since open() waited for a slot."""
        return sum(handle.timings.waited_s > 0 for handle in self._handles.values())

    def slots_held(self) -> int:
        """How many slots snapshots have."""
        return len(self._ckpt._core._arena._holds)

    def fail_reads(self, like: str, number: int, works: int = 0) -> None:
        """After `works` more of them, and until mend_reads(), reads of what has `like` in its path raise `number`."""
        self._fault(Fault(like, number, works, fails=FOR_EVER))

    def reads_of_chunks(self) -> int:
        """How many reads of its chunks a load of this rank takes, which every rank must join."""
        count = self._fault(Fault(rf"{self._rank:05d}-\d\.chunks$", 0, fails=0))
        self.load()
        return count.seen

    def mend_reads(self) -> None:
        self._failing_reads.faults.clear()

    def _fault(self, fault: Fault) -> Fault:
        self._failing_reads.install(setattr)
        self._failing_reads.faults[:] = [fault]
        return fault

    def hold_staging(self) -> None:
        """From now on nobody copies in the background: a snapshot stays unfinished."""
        setattr(Stager, "_hand_over", lambda *_: None)  # noqa: B010  # a mutation, which mypy need not understand

    def scribble_over_snapshots(self) -> None:
        """Change every byte of the slots, behind the sidecar's back."""
        for slot in gc.get_objects():
            if isinstance(slot, Slot):
                slot.buffer[:] = 255 - slot.buffer

    def forget_to_sync_files(self) -> None:
        """From now on fsync of a file does nothing; that of a directory goes on."""
        setattr(osfile.OsFile, "_sync", lambda _: None)  # noqa: B010  # a mutation, which mypy need not understand
        setattr(OsDisk, "sync_file", _no_sync)  # noqa: B010

    def save_endlessly(self, journal: str, after: int) -> None:
        """Train and save every step after `after`; the end of every save is noted in `journal`. Does not return."""
        save_endlessly(self._ckpt, self._training, Journal(Path(journal)), after=after, every=1)

    def train_until_preempted(self, steps: int) -> int | None:
        """Train with the other ranks until the job is told to stop, save then; the step, or None after `steps` steps."""
        for step in range(steps):
            self._training.advance(step)
            dist.barrier()
            if self._ckpt.preempted(step):
                self.save(step)
                return step
        return None

    def expire(self, step: int) -> None:
        """Let the deadline of the save of `step` pass now."""
        for attempt in gc.get_objects():
            if isinstance(attempt, Attempt) and attempt.info.step == step:
                attempt._deadline = 0.0

    def be_impatient(self, start_s: float = startup.START_TIMEOUT_S, report_s: float = waits.FIRST_REPORT_S) -> None:
        """From now on wait so long for the ranks to make their Checkpointers, and say so in the log after so long."""
        startup.START_TIMEOUT_S = start_s
        waits.FIRST_REPORT_S = report_s

    def look_for_room(self, seconds: float = tidying.FULL_S) -> None:
        """From now on wait so long for space on a full disk."""
        tidying.FULL_S = seconds

    def load_impatiently(self, seconds: float) -> None:
        """From now on wait so long for the other ranks in load()."""
        self._ckpt._core._load_rounds.timeout_s = seconds

    def read_impatiently(self, seconds: float) -> None:
        """From now on try for so long to read what cannot be read; all else may take its time."""
        read_impatiently(setattr, seconds)

    def start_daemons_again_at_once(self) -> None:
        """From now on, no pause is needed before a daemon that died is started again."""
        own_daemon._AGAIN_S = 0.0

    def start_daemons_with(self, executable: str) -> None:
        """From now on, start them with another Python."""
        sys.executable = executable

    def trouble(self) -> str:
        """What the status says about the sidecar."""
        return self._ckpt.status().sidecar_trouble

    def logs(self) -> list[tuple[str, str]]:
        """What was logged since open(), from INFO on."""
        return list(self._records.kept)

    def close(self) -> None:
        """Close the Checkpointer, if there is one."""
        ckpt, self._checkpointer = self._checkpointer, None
        if ckpt is not None:
            ckpt.close()

    def leave(self) -> None:
        """End the process as a script ends, with nothing closed."""
        sys.exit(0)


async def _no_sync(disk: OsDisk, path: str) -> None:
    pass


def obey(rank: object, commands: TextIO, answers: TextIO) -> None:
    """Until there are no more commands."""
    for line in commands:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(rank, name)(**arguments)}
        except Exception as error:  # it is the test's, whatever it is
            code = error.code if isinstance(error, CheckpointdError) else type(error).__name__
            answer = {"error": code, "message": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def serve(make: Callable[[Records], object]) -> None:
    """Be a rank whose commands are the methods of what `make` returns."""
    # What torch prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    records = Records()
    logging.getLogger("checkpointd").addHandler(records)
    logging.getLogger("checkpointd").setLevel(logging.INFO)
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=TRAINING_TIMEOUT)
    answers.write(json.dumps({"value": os.getpid()}) + "\n")
    answers.flush()
    obey(make(records), sys.stdin, answers)
    os._exit(0)  # the test is over, or dead: what is in flight is nobody's any more


if __name__ == "__main__":
    serve(Rank)
