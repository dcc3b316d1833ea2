"""The daemon's priority: CPU niceness and I/O class, for all of its threads.

In Linux each thread has its own. New threads inherit them, and threads that run already (numpy starts some when it is imported)
are set one by one. If Linux schedules by session first (autogroup, sched(7)), niceness only counts within the session, so a
daemon with a session of its own also sets the niceness of the session.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from checkpointd.commands import install
from checkpointd.config import ServeConfig
from checkpointd.errors import UsageError

if TYPE_CHECKING:
    from psutil import Process

log = logging.getLogger("checkpointd")

BEST_EFFORT_LEVEL: Final = 7
"""The lowest level of the class; a process has the middle one by default."""


def apply(config: ServeConfig) -> None:
    """Give this process, and the threads that it starts from here on, the niceness and the I/O class of `config`.

    Changes only what `config` asks for. UsageError if psutil is missing or the system does not permit it.
    """
    if config.niceness == 0 and config.io_class == "none":
        return
    try:
        import psutil
    except ImportError as error:
        raise UsageError(
            f"niceness and io_class need psutil: {install('serve')}; or start the daemon under `nice` and `ionice`"
        ) from error
    classes = {"best-effort": (psutil.IOPRIO_CLASS_BE, BEST_EFFORT_LEVEL), "idle": (psutil.IOPRIO_CLASS_IDLE, 0)}

    def behave(thread: Process) -> None:
        if config.niceness:
            thread.nice(config.niceness)
        if config.io_class != "none":
            thread.ionice(*classes[config.io_class])

    try:
        _each_thread(behave)
    except psutil.AccessDenied as error:
        raise UsageError(
            f"the system does not permit niceness {config.niceness} and I/O class {config.io_class}: less niceness than the "
            "daemon was started with needs CAP_SYS_NICE, or systemd's Nice= and IOSchedulingClass="
        ) from error
    if config.niceness and os.getsid(0) == os.getpid():
        _nice_session(config.niceness)


def _nice_session(niceness: int) -> None:
    try:
        Path("/proc/self/autogroup").write_text(str(niceness))
    except FileNotFoundError:
        pass  # this kernel does not group by session
    except OSError as error:
        log.warning("niceness %d may count for little beside other sessions: their share cannot be set (%s)", niceness, error)


def _each_thread(behave: Callable[[Process], None]) -> None:
    """Call `behave` for this thread, so that new threads inherit its settings, then for all other threads."""
    import psutil

    own = psutil.Process()
    behave(own)
    for thread in own.threads():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since
            behave(psutil.Process(thread.id))
