"""DeepSpeed's files are found by their names, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd_client.integrations.deepspeed.offline.file_names import directory_of, tags_in


@pytest.mark.parametrize("tag", [None, "latest", "step5"])
def test_the_directory_that_is_named_or_the_newest(tmp_path: Path, tag: str | None) -> None:
    (tmp_path / "step5").mkdir()
    (tmp_path / "latest").write_text("step5")
    assert directory_of(str(tmp_path), tag) is None
    (tmp_path / "step5" / "mp_rank_00_model_states.pt").touch()
    assert directory_of(str(tmp_path), tag) == str(tmp_path / "step5")


@pytest.mark.parametrize("content", [None, b"", b"gone", b"\xff"], ids=["absent", "empty", "what is gone", "no text"])
def test_none_where_nothing_is_pointed_at(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    assert directory_of(str(tmp_path), None) is None


def test_a_directory_that_is_removed_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step5").mkdir()
    (tmp_path / "step5" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "gone").touch()
    monkeypatch.setattr(os.path, "isdir", lambda path: os.path.exists(path))
    listdir = os.listdir

    def removed(path: str) -> list[str]:
        if os.path.basename(path) == "gone":
            raise FileNotFoundError(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed)
    assert tags_in(str(tmp_path)) == ["step5"]


def test_it_is_imported_without_torch() -> None:
    name = directory_of.__module__
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
