"""A lone file is read from its object, and verified: READFILE-1 to READFILE-3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.errors import DamagedError
from checkpointd_client.core import Core
from checkpointd_client.integrations.lightning.places import CheckpointPlace
from checkpointd_client.integrations.lightning.reading import stored_content
from checkpointd_client.integrations.lightning.showing import show_commits
from checkpointd_client.restore.verified import VerifiedFile
from checkpointd_client.settings import Options


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path / ".checkpointd", Options())
    yield made
    made.close()


def save(core: Core, value: float) -> None:
    content = {"state_dict": {"weight": torch.full((100_000,), value)}, "epoch": 3}
    core.save_files(1, {"last.ckpt": content}, tag="last.ckpt").wait(60)


def read(tmp_path: Path) -> tuple[bool, Any]:
    def load(file: VerifiedFile) -> Any:
        return torch.load(file, weights_only=True)  # type: ignore[arg-type]

    return stored_content(CheckpointPlace(str(tmp_path), "last.ckpt"), load, 20.0)


def test_the_newest_commit_is_read_also_before_it_is_shown(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(core, 1.0)
    with monkeypatch.context() as patch:

        async def shows_nothing(*_: object, **__: object) -> None:
            return None

        patch.setattr("checkpointd.pipeline.outcome.after_commit.show", shows_nothing)
        save(core, 2.0)
    assert torch.load(tmp_path / "last.ckpt")["state_dict"]["weight"][0] == 1
    is_ours, content = read(tmp_path)
    assert is_ours
    assert content["epoch"] == 3
    assert content["state_dict"]["weight"].eq(2).all()
    show_commits(str(tmp_path))
    assert torch.load(tmp_path / "last.ckpt")["state_dict"]["weight"][0] == 2


def test_damage_is_an_error_that_names_the_path_and_the_way_on(core: Core, tmp_path: Path) -> None:
    save(core, 1.0)
    (stored,) = (path for path in (tmp_path / ".checkpointd" / "last.ckpt").rglob("*") if path.stat().st_size > 300_000)
    stored.chmod(0o600)
    with open(stored, "r+b") as file:
        file.seek(200_000)
        file.write(b"\xff\xff")
    with pytest.raises(DamagedError, match=r"last\.ckpt is damaged: .* ckpt_path"):
        read(tmp_path)


def test_the_error_of_whoever_loads_a_whole_file_is_raised(core: Core, tmp_path: Path) -> None:
    save(core, 1.0)

    def load(_: VerifiedFile) -> Any:
        raise ValueError("not mine")

    with pytest.raises(ValueError, match="not mine"):
        stored_content(CheckpointPlace(str(tmp_path), "last.ckpt"), load, 20.0)


def test_a_file_that_somebody_else_wrote_since_is_theirs(core: Core, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(core, 1.0)
    (tmp_path / "last.ckpt").unlink()
    torch.save({"mine": 1}, tmp_path / "last.ckpt")
    assert read(tmp_path) == (False, None)
    assert "unverified" in caplog.text
    assert stored_content(CheckpointPlace(str(tmp_path), "other.ckpt"), lambda _: None, 20.0) == (False, None)
