"""Processes of one script that share one import of the slow modules."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path


def forked(folder: Path, count: int, run: Callable[[Path, int], None]) -> None:
    """`run(folder, number)` in `count` processes, which write to `rank-<number>.log`. When one fails, all end and so does this.

    Nothing but imports may have been done before: what has begun threads cannot be forked.
    """
    import torch._inductor.compile_fx  # noqa: F401  # DeepSpeed's first engine would

    sys.exit(not all_well(folder, count, run))


def all_well(folder: Path, count: int, run: Callable[[Path, int], None]) -> bool:
    """The same, with what is imported already, and whether all have ended well."""
    alone = threading.active_count()
    assert alone == 1, f"{alone} threads cannot be forked"
    gc.collect()
    gc.freeze()
    children = {_child(folder, number, run) for number in range(count)}
    failed = False
    while children:
        ended, status = os.wait()
        children.discard(ended)
        if status and not failed:
            failed = True
            for child in children:
                os.kill(child, signal.SIGKILL)  # they would wait for it
    return not failed


def run_forked(script: Path, folder: Path, *, limit_s: float) -> subprocess.CompletedProcess[str]:
    """A job of such processes on gloo, ended; what they wrote is in its `stderr`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s, check=False)
    done.stderr += forked_output(folder)
    return done


def join_job(folder: Path, number: int, count: int) -> None:
    """Make this process rank `number` of `count`, as torchrun and init_process_group() do."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=number, world_size=count)


def forked_output(folder: Path) -> str:
    """The end of what each process of `forked` wrote."""
    return "".join(path.read_text()[-6000:] for path in sorted(folder.glob("rank-*.log")))


def _child(folder: Path, number: int, run: Callable[[Path, int], None]) -> int:
    child = os.fork()
    if child:
        return child
    log = os.open(folder / f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        run(folder, number)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads of groups that are gone need not be waited for
