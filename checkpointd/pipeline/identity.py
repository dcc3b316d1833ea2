"""Who writes: host, process and wall-clock time, for people to read. No decision is taken from them."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime

from checkpointd.layout.manifest import Writer


def writer() -> Writer:
    """This process, now."""
    return Writer(host=socket.gethostname(), pid=os.getpid(), time=datetime.now(UTC).isoformat(timespec="milliseconds"))
