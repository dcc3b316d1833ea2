"""`show_commits` raises nothing, whatever lies in the directory; that it shows is in test_reading.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd_client.integrations.lightning.showing import show_commits


def test_a_directory_without_a_root_is_left_as_it_is(tmp_path: Path) -> None:
    show_commits(str(tmp_path))
    show_commits(str(tmp_path / "not there"))
    show_commits("s3://bucket/runs")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".checkpointd").mkdir()
    (tmp_path / ".checkpointd" / ".checkpointd").write_bytes(b"")
    show_commits(str(tmp_path))
    assert "stays so for now" in caplog.text
