"""Notices the end of a client's process. Its socket need not show it, since forked children may hold that open."""

from __future__ import annotations

import asyncio
import errno
import os

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What a system call says that found no descriptor, or no memory, for what it should make."""
PAUSE_S = 0.2
"""Until the next try then."""


async def death_of(pid: int) -> bool:
    """Return when process `pid` is gone: True. False at once where it cannot be seen from here (another pid namespace)."""
    try:
        descriptor = await _opened(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    loop, dead = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, dead.set)
        await dead.wait()
        return True
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _opened(pid: int) -> int:
    """A pidfd of `pid`; waits while this process has no descriptor left for it."""
    while True:
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        await asyncio.sleep(PAUSE_S)
