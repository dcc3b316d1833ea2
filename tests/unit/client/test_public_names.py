"""What help() shows of the public classes is for users."""

from __future__ import annotations

import inspect

import checkpointd
import checkpointd_client
from checkpointd_client import Checkpointer, OpenCheckpoint, SaveHandle

HANDLE = {"bytes_done", "bytes_stored", "bytes_to_upload", "bytes_total", "bytes_uploaded", "done", "eta_s", "exception"}
HANDLE |= {"no_progress", "phase", "progress", "seconds", "speed_bps", "wait"}


def test_a_handle_shows_what_a_user_may_call() -> None:
    assert {name for name in dir(SaveHandle) if not name.startswith("_")} == HANDLE


def test_every_public_name_has_a_docstring_and_takes_no_type_of_the_inside() -> None:
    for owner in (Checkpointer, OpenCheckpoint, SaveHandle):
        for name, member in inspect.getmembers(owner):
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{owner.__name__}.{name}"
    assert not [f"{name}.of" for name in checkpointd_client.__all__ if hasattr(getattr(checkpointd_client, name), "of")]


def test_both_packages_say_their_version() -> None:
    assert checkpointd.__version__ == checkpointd_client.__version__
    assert "__version__" in checkpointd_client.__all__
