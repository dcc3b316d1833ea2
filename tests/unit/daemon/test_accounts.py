"""Accounts: what is charged to a user counts for all, and neither exceeds its limit."""

from __future__ import annotations

import pytest

from checkpointd.daemon.accounts import Account, Charge
from checkpointd.errors import SidecarFullError


def test_what_a_user_takes_counts_for_all_and_what_does_not_fit_counts_nowhere() -> None:
    """CHARGE-1"""
    every = Account(100)
    one, other = Account(60, "user 1", "free some", every), Account(60, "user 2", "free some", every)
    one.take(60)
    with pytest.raises(SidecarFullError, match="no room for 1 B more: user 1 may use 60 B, of which 60 B is in use: free some"):
        one.take(1)
    with pytest.raises(SidecarFullError, match="all users together may use 100 B, of which 60 B is in use"):
        other.take(41)
    other.take(40)
    assert (every.used, one.used, other.used) == (100, 60, 40)
    one.give_back(60)
    assert (every.used, one.used) == (40, 0)


def test_what_does_not_fit_is_said_as_the_option_is_given() -> None:
    with pytest.raises(
        SidecarFullError,
        match=r"^no room for 15\.3 MiB more: user 0 may use 1\.0 MiB, of which none is in use: raise memory_bytes_max",
    ):
        Account(1 << 20, "user 0", "raise memory_bytes_max (--memory-mib)").take(16015360)


def test_a_charge_is_given_back_once() -> None:
    """CHARGE-2"""
    account = Account(100)
    charge = Charge.of(account, 40)
    charge.resize(90)
    with pytest.raises(SidecarFullError):
        charge.resize(101)
    assert account.used == 90
    charge.resize(10)
    assert account.used == 10
    charge.release()
    charge.release()
    assert account.used == 0
