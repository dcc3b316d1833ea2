"""Reads the files that load_checkpoint will need while it verifies them, and keeps them until DeepSpeed asks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from checkpointd_client.integrations.deepspeed.checkpoint_engine import unpickled
from checkpointd_client.restore.verified import VerifiedFile

_PARAMETERS = (
    *("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
    "custom_load_fn",
)
"""The parameters of DeepSpeed's load_checkpoint after load_dir and tag."""


class FileReads:
    """The files that one rank reads in one load: a Taker for `Checkpointer.damage`. DeepSpeed itself reads the files that it
    does not take, such as a pipeline's layers of other ranks.
    """

    def __init__(self, engine: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        given = {**dict(zip(_PARAMETERS, arguments, strict=False)), **options}
        self._rank = int(engine.global_rank)
        self._model = f"mp_rank_{getattr(engine, 'checkpoint_mp_rank', 0):02d}_model_states.pt"
        self._optimizer = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        self.others: Sequence[int] = () if self._rank == 0 else (0,)
        self.contents: dict[str, Any] = {}
        """The contents by file name."""

    def wants(self, rank: int, name: str) -> bool:
        """Each rank loads the files that it saved itself, and the model's states, which may be one file of rank 0."""
        if rank != self._rank:
            return rank == 0 and name == self._model
        return bool(self._optimizer) or not name.endswith("_optim_states.pt")

    def take(self, file: VerifiedFile) -> None:
        """Keep the content of a whole file. If it cannot be unpickled, DeepSpeed tries again and raises the error."""
        try:
            content = unpickled(file)
        except Exception:
            return
        if not file.damage and file.error is None:
            self.contents[file.file.name] = content

    def by_path(self, directory: str) -> dict[str, Any]:
        """The contents by the paths under which DeepSpeed asks for them."""
        return {os.path.join(os.path.abspath(directory), name): content for name, content in self.contents.items()}
