"""What a checkpoint of torchtitan is loaded into: the model's tensors at the top, and the other parts below their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointd.errors import MismatchError
from checkpointd_client.loaded import Loaded
from checkpointd_client.restore.target_chooser import Described, LoadTargets

TRAIN_STATE = "train_state"


@dataclass(slots=True)
class TitanTargets:
    """Chooses between the model alone and all parts, once it is known what the checkpoint holds.

    `model`: the tensors of all model parts by name. `parts`: the other objects by name; None if only the model is asked for.
    As in torchtitan, step 0 is a seed, of which the model alone is loaded.
    """

    model: Mapping[str, Any]
    parts: Mapping[str, Any] | None
    _state: dict[str, Any] = field(default_factory=dict)
    _is_seed: bool = False

    def places(self, stored: Described) -> LoadTargets:
        """The tensors and objects to load into. An optimizer is a flat dict of its live tensors, which `finish` gives back."""
        parts = self.parts or {}
        self._is_seed = bool(parts) and _is_seed(stored, parts)
        if self._is_seed:
            parts = {}
        self._state = {**self.model, **{name: _target(part) for name, part in parts.items()}}
        return LoadTargets(dict(self._state))

    def finish(self, loaded: Loaded) -> dict[str, Any]:
        """Give the optimizer what was loaded for it, and return the model's tensors. MismatchError if the training cannot go on
        from what the checkpoint holds.
        """
        if self._is_seed and loaded.step:
            raise MismatchError(
                f"{loaded.tag} holds the model alone, as the last save with last_save_model_only does, so the run cannot go on "
                "from it. Load an earlier step (--checkpoint.load_step), or begin a new run from it: with another "
                "--checkpoint.folder, and this one as --checkpoint.initial_load_path"
            )
        if loaded.per_rank_left:
            raise MismatchError(
                f"{', '.join(loaded.per_rank_left[:3])}: each rank that saved {loaded.tag} had its own value, and the number "
                "of ranks has changed, so no value fits. Name the part in --checkpoint.exclude_from_loading"
            )
        for name, part in (self.parts or {}).items():
            if isinstance(part, torch.optim.Optimizer) and name in self._state:
                part.load_state_dict(self._state[name])
        return {name: self._state[name] for name in self.model}


def _is_seed(stored: Described, parts: Mapping[str, Any]) -> bool:
    """Whether the model alone is to be loaded: there is nothing else, or the training had not begun."""
    train_state = stored.get(TRAIN_STATE)
    has_begun = not isinstance(train_state, Mapping) or train_state.get("step") != 0
    return not has_begun or stored.keys().isdisjoint(parts)


def _target(part: Any) -> Any:
    return part.state_dict() if isinstance(part, torch.optim.Optimizer) else part
