"""Another user of the machine, for tests of access; these tests need root."""

from __future__ import annotations

import os
import socket
from typing import Final

STRANGER: Final = 54321


def listen_as(uid: int, bound: socket.socket) -> None:
    """Call listen() as `uid`: that is whom the kernel names to those who connect."""
    own = os.geteuid()
    os.seteuid(uid)
    try:
        bound.listen()
    finally:
        os.seteuid(own)
