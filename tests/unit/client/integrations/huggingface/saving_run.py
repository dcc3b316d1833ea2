"""A directory in which checkpoints come and go, with no storage behind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from checkpointd.pipeline.shard import ShardProgress
from checkpointd_client.integrations.huggingface.rotating import Limit, Saves
from checkpointd_client.saves.handle import OwnHandle, Phase


class Run:
    """A directory to which a Trainer saves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saves, self._age = folder, Saves(), 0

    def whole(self, number: int, *, name: str = "checkpoint-{}") -> Path:
        """A checkpoint that is there, younger than those before."""
        path = self.folder / name.format(number)
        (path / "engine").mkdir(parents=True)
        self._age += 1
        for file in ("trainer_state.json", "engine/mp_rank_00_model_states.pt"):
            (path / file).touch()
            os.utime(path / file, (self._age, self._age))
        return path

    def ask(
        self, keep: int, *, best: int | None = None, names: str = r"checkpoint-\d+", engines: str | None = "*/*_states.pt"
    ) -> None:
        """What the Trainer asks for when it saves."""
        better = None if best is None else str(self.folder / f"checkpoint-{best}")
        limit = Limit(keep, names, "trainer_state.json", str(self.folder / "hidden"), better, engines)
        self.saves.limit(str(self.folder), limit)

    def save(self, number: int) -> Callable[[Phase], None]:
        """Begin a save; what it gives ends it."""
        directory = self.folder / f"checkpoint-{number}"
        handle = OwnHandle(f"global_step{number}", "00000001-0", number, ShardProgress())
        self.saves.add(str(directory), handle)

        def end(phase: Phase) -> None:
            if phase is Phase.COMMITTED and not directory.exists():
                self.whole(number)
            handle.advance(phase)

        return end

    def settled(self) -> list[str]:
        self.saves.settle()
        return sorted(path.name for path in self.folder.iterdir() if path.name != "hidden")
