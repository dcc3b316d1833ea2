"""Charges: the memory that a client makes the daemon use counts against its user's limit and the daemon's.

Invariants
  CHARGE-1  The charges of an account never exceed its limit, nor the limit of the account above it.
  CHARGE-2  A charge is given back once, when its memory is released.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpointd.errors import SidecarFullError
from checkpointd.phrases import byte_size

MIB = 1 << 20


@dataclass(eq=False, slots=True)
class Account:
    """Bytes in use, and their limit. `name`: the owner, in words; `remedy`: what to do if the limit is too small."""

    limit: int
    name: str = "all users together"
    remedy: str = "raise memory_bytes_max (--memory-mib)"
    above: Account | None = None
    used: int = 0

    def take(self, nbytes: int) -> None:
        """Charge `nbytes` more. SidecarFullError if there is no room."""
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
    """The bytes that one thing costs an account, until they are released."""

    account: Account
    nbytes: int = 0

    @staticmethod
    def of(account: Account, nbytes: int) -> Charge:
        """A charge of `nbytes`. SidecarFullError if there is no room."""
        account.take(nbytes)
        return Charge(account, nbytes)

    def resize(self, nbytes: int) -> None:
        """Change the charge to `nbytes`. SidecarFullError if there is no room for more."""
        if nbytes > self.nbytes:
            self.account.take(nbytes - self.nbytes)
        else:
            self.account.give_back(self.nbytes - nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the charge back; a second call does nothing."""
        self.resize(0)
