"""An engine that stands in for DeepSpeed's, for tests that need no second process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FILE = "mp_rank_00_model_states.pt"


def saved_by_deepspeed(root: Path, tag: str, step: int) -> None:
    """What DeepSpeed leaves that saves by itself."""
    (root / tag).mkdir(parents=True, exist_ok=True)
    torch.save({"global_steps": step, "module": {"weight": torch.full((9,), float(step))}}, root / tag / FILE)
    (root / "latest").write_text(tag)


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

    def load_checkpoint(self, load_dir: str, tag: str | None, *_: Any) -> tuple[str, str | None]:
        latest = Path(load_dir, "latest")
        names = tag is None and not self.universal and latest.exists()
        return load_dir, latest.read_text().strip() if names else tag

    def _optimizer_has_ckpt_event_prologue(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return self.universal

    def destroy(self) -> None: ...

    def _copy_recovery_script(self, _: str) -> None: ...
