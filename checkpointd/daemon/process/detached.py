"""Starts `checkpointd serve` so that it has nothing of the process that starts it.

    python -m checkpointd.daemon.process.detached ARGUMENT...    # standard error: the daemon's log

It prints the daemon's process id and ends, so the daemon is no child of whoever called it: a launcher that ends all children of
a rank leaves it alone. It has no terminal, no ignored or blocked signal, and every core that this machine or container has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    if daemon := os.fork():
        os.write(1, f"{daemon}\n".encode())
        return
    os.dup2(2, 1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # the C library keeps some for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.execv(sys.executable, [sys.executable, "-m", "checkpointd", "serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
