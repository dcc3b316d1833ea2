"""Charges: every byte that a client makes the daemon hold counts against its user's limit and the daemon's.

Invariants
  CHARGE-1  What is charged never exceeds an account's limit, nor that of the account above it.
  CHARGE-2  A charge is given back once, when what it is for is let go of.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpointd.errors import SidecarFullError
from checkpointd.phrases import byte_size

MIB = 1 << 20


@dataclass(eq=False, slots=True)
class Account:
    """Bytes held, and how many may be. `name`: whose they are, in words; `remedy`: what to do where they are too many."""

    limit: int
    name: str = "all users together"
    remedy: str = "raise memory_bytes_max (--memory-mib)"
    above: Account | None = None
    used: int = 0

    def take(self, nbytes: int) -> None:
        """Charge `nbytes` more. SidecarFullError where there is no room."""
        if self.used + nbytes > self.limit:
            used = byte_size(self.used) if self.used else "none"
            room = f"{self.name} may use {byte_size(self.limit)}, of which {used} is in use"
            raise SidecarFullError(f"no room for {byte_size(nbytes)} more: {room}: {self.remedy}")
        if self.above is not None:
            self.above.take(nbytes)
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes
        if self.above is not None:
            self.above.give_back(nbytes)


@dataclass(eq=False, slots=True)
class Charge:
    """What one thing costs an account, until it is released."""

    account: Account
    nbytes: int = 0

    @staticmethod
    def of(account: Account, nbytes: int) -> Charge:
        """A charge of `nbytes`. SidecarFullError where there is no room."""
        account.take(nbytes)
        return Charge(account, nbytes)

    def resize(self, nbytes: int) -> None:
        """It costs `nbytes` now. SidecarFullError where there is no room for more."""
        if nbytes > self.nbytes:
            self.account.take(nbytes - self.nbytes)
        else:
            self.account.give_back(self.nbytes - nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        """It is gone; a second time does nothing."""
        self.resize(0)
