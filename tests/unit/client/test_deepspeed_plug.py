"""A Plug on an engine that stands in for DeepSpeed's: what needs no second rank."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install checkpointd[deepspeed]")

from checkpointd.errors import AbortedError
from checkpointd_client.integrations.deepspeed import plug as plugs
from checkpointd_client.integrations.deepspeed.engine import mount_fault, write_whole
from checkpointd_client.integrations.deepspeed.plug import Plug

FILE = "mp_rank_00_model_states.pt"


class Engine:
    """Saves one file, and says what it loads."""

    global_steps, global_rank, world_size = 1, 0, 1
    optimizer: Any = None

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.checkpoint_engine: Any = None
        self.universal = False

    def save_checkpoint(self, save_dir: str, tag: str, *_: Any) -> None:
        self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        self.checkpoint_engine.save({"module": self.module.state_dict()}, os.path.join(save_dir, tag, FILE))

    def load_checkpoint(self, load_dir: str, tag: str | None) -> tuple[str, str | None]:
        return load_dir, tag

    def load_universal_checkpoint(self) -> bool:
        return self.universal

    def destroy(self) -> None: ...

    def _copy_recovery_script(self, _: str) -> None: ...


@pytest.fixture
def plug() -> Iterator[Plug]:
    made = Plug(Engine(), {})
    made.connect()
    yield made
    made.close()


def test_a_universal_checkpoint_is_found_by_deepspeed(plug: Plug, tmp_path: Path) -> None:
    plug.save_checkpoint(str(tmp_path))
    assert plug.load_checkpoint(str(tmp_path))[1] == "global_step1"
    plug.engine.universal = True
    assert plug.load_checkpoint(str(tmp_path))[1] is None, "which is then what latest_universal names"


def test_a_directory_on_another_file_system_is_refused_at_once(
    plug: Plug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount_fault(str(tmp_path), str(tmp_path)) is None
    assert "another file system" in str(mount_fault(str(tmp_path), "/proc"))
    monkeypatch.setattr(plugs, "mount_fault", lambda *_: "it lies elsewhere")
    plug.save_checkpoint(str(tmp_path))
    assert plug.handle is not None
    with pytest.raises(AbortedError, match="it lies elsewhere"):
        plug.handle.wait(60)


def test_frozen_parameters_may_change_right_after_the_call(plug: Plug, tmp_path: Path) -> None:
    """Such as an average of weights: no step of an optimizer changes it, so none can be waited for."""
    model = plug.engine.module = torch.nn.Linear(3000, 3000)
    model.weight.requires_grad = False
    for tag in "abc":
        model.weight.data.fill_(1)  # by .data, which no version counter sees
        plug.save_checkpoint(str(tmp_path), tag=tag)
        model.weight.data.fill_(2)
        plug.wait(60)
        assert torch.load(tmp_path / tag / FILE)["module"]["weight"].eq(1).all()


def test_a_detached_engine_has_its_own_methods_whatever_the_last_save_did(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise AbortedError("the last save failed")

    with monkeypatch.context() as patch:
        patch.setattr(plug, "close", failed)
        with pytest.raises(AbortedError):
            plug.detach()
    assert plug.engine.save_checkpoint.__func__ is Engine.save_checkpoint
    assert plug.engine.checkpoint_engine is None


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_others_may_read_what_the_umask_lets_them(plug: Plug, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        plug.save_checkpoint(str(tmp_path), tag="a")
        plug.wait(60)
        write_whole(torch.ones(2), str(tmp_path / "weights.bin"))
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "latest", tmp_path / "weights.bin")
    }
    file = (tmp_path / "a" / FILE).stat()
    assert stat.S_IMODE(file.st_mode) == (0o444 if file.st_nlink > 1 else 0o666) & ~umask  # an object's second name, or a clone
    assert set(modes.values()) == {0o666 & ~umask, 0o777 & ~umask}
    assert modes[tmp_path / "a"] == 0o777 & ~umask


@pytest.mark.parametrize("universal", [False, True])
def test_what_an_engine_has_loaded_from_is_taken_up(plug: Plug, tmp_path: Path, universal: bool) -> None:
    """Retention then counts what earlier jobs left there."""
    plug.save_checkpoint(str(tmp_path))
    plug.close()
    plug.save_checkpoint(str(tmp_path))
    [checkpointer] = plug._checkpointers.values()
    assert checkpointer._saver._state.tidier.keeps_before == 2
    plug.engine.universal = universal
    plug.load_checkpoint(str(tmp_path))
    plug.save_checkpoint(str(tmp_path))
    assert checkpointer._saver._state.tidier.keeps_before == 0


def test_a_directory_that_somebody_removed_is_said_to_be_removed(
    plug: Plug, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in "ab":
        plug.save_checkpoint(str(tmp_path), tag=tag)
        plug.wait(60)
    shutil.rmtree(tmp_path / "b")
    assert plug.load_checkpoint(str(tmp_path))[1] == "a"
    assert "b/00000001-0 in " in caplog.text
    assert "was removed" in caplog.text
    assert "damaged" not in caplog.text
