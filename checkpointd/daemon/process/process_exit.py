"""Notices the end of a client's process. Its socket need not show it, since forked children may hold that open."""

from __future__ import annotations

import asyncio
import errno
import os

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The errors of a system call for which no descriptor or memory is free."""
PAUSE_S = 0.2
"""The pause before the next try."""


async def death_of(pid: int) -> bool:
    """Return True when process `pid` has ended; False at once if it cannot be seen, as in another pid namespace."""
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
    """A pidfd of `pid`; waits while no descriptor is free."""
    while True:
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        await asyncio.sleep(PAUSE_S)
