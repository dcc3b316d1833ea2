"""Directories that the libraries fill."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from checkpointd_client.integrations.huggingface.filling import Filled, Filling, current


@pytest.mark.parametrize(
    ("error", "is_its_own"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (TypeError("Object of type Path is not JSON serializable"), False),
    ],
)
def test_what_the_storage_refuses_fails_the_save_alone(tmp_path: Path, error: Exception, is_its_own: bool) -> None:
    filling = Filling(
        str(tmp_path / "checkpoint-1"), Filled("00000001-0", str(tmp_path / "elsewhere" / "checkpoint-1")), lambda *_: None
    )

    def fill() -> None:
        with filling.active():
            assert current() is filling
            with filling.keeping():
                raise error

    if is_its_own:
        fill()
        assert str(error) in str(filling.filled.fault)
    else:
        with pytest.raises(type(error)):
            fill()
        assert not (tmp_path / "elsewhere").exists(), "what was filled goes with whoever filled it"
    assert current() is None
