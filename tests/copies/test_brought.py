"""A directory that somebody has brought from another root is none of this root's checkpoints."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.copies.jobs import Run


def test_a_tag_of_another_root_is_never_loaded_though_its_start_is_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of this root is not taken for an older one. The name of the tag can still be used, and what was brought stays."""
    other, own = Run(tmp_path / "other"), Run(tmp_path / "own")
    for step in (7, 8, 9):
        other.start((step, 900 + step))
    own.start((5, 5))
    brought = own.root / "global_step9"
    shutil.copytree(other.root / "global_step9", brought)
    kept = sorted(path.relative_to(brought) for path in brought.rglob("*"))
    for _ in range(3):
        own.start()
        assert own.loaded is not None
        assert (own.loaded.step, own.value) == (5, 5)
    own.start((9, 9))
    own.start()
    assert (own.loaded.step, own.value) == (9, 9)
    assert kept == [path for path in kept if (brought / path).exists()]
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert ["global_step9/00000003-0" in one and "no load takes them" in one for one in said] == [
        True
    ]  # by the first start alone
