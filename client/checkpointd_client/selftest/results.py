"""How checks of a device say what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from checkpointd.doctor.finding import Finding
from checkpointd_client import devices

REPORT = "please report it in an issue, with this report"

finding = partial(Finding, "device")


def ok_if_provoked(check: str, provoked: bool, what: str, seen: str) -> Finding:
    """ok with `seen` if `what` could be provoked. If the device was too fast for it, a note: the check proves nothing."""
    if provoked:
        return finding(check, "ok", seen)
    return finding(check, "note", f"could not be provoked here, so this check proves nothing: {what}")


def ok_if_same(check: str, different: list[str], what: str) -> Finding:
    """`what` was loaded with the same bytes, unless some tensors are `different`."""
    if different:
        return finding(
            check, "fail", f"other bytes after a load: {', '.join(different)}", f"do not trust such checkpoints: {REPORT}"
        )
    return finding(check, "ok", f"the same bytes after a load: {what}")


def each_made(check: str, make: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of `make`. An error that ends it becomes a finding, too: of the device, its driver or the file system."""
    try:
        yield from make()
    except Exception as error:
        yield finding(check, "fail", f"{type(error).__name__}: {devices.told(error)}", f"if it happens again: {REPORT}")
