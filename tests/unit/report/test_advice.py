"""What to do next: each error has its own remedy."""

from __future__ import annotations

import pytest

from checkpointd.errors import ERRORS
from checkpointd.layout.manifest import ErrorReport
from checkpointd.report.advice import AFRESH, after_abort, for_root

GENERAL = after_abort(ErrorReport(code="CheckpointdError", message="?", phase="persisting"), (3,))


@pytest.mark.parametrize("code", ERRORS)
def test_no_error_is_sent_to_the_log_in_general(code: str) -> None:
    """But for those that are defects of ours, or are none of a save."""
    advice = after_abort(ErrorReport(code=code, message="?", phase="persisting"), (3,))
    assert advice.endswith(AFRESH) or code == "FencedError"
    assert advice != GENERAL or code in ("ProtocolError", "PartlyLoadedError")
    assert "{" not in advice


def test_the_rank_at_fault_is_named() -> None:
    full = ErrorReport(code="StoreFullError", message="?", phase="persisting")
    assert after_abort(full, (3,)) == f"Free some space, or raise the quota, where rank 3 writes. {AFRESH}"


def test_a_class_without_a_remedy_has_that_of_its_parent() -> None:
    codec, damaged = (ErrorReport(code=code, message="?", phase="persisting") for code in ("CodecError", "DamagedError"))
    assert after_abort(codec, (0,)) == after_abort(damaged, (0,))


def test_a_root_that_cannot_be_looked_at() -> None:
    told = for_root(ErrorReport(code="StoreError", message="Stale file handle"))
    assert told == (
        "Check the file system of the root on the machine of the daemon: mounts, permissions, the kernel's log. "
        "The daemon looks again by itself."
    )
