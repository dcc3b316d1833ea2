"""CheckpointdModelParallelStrategy: Lightning's ModelParallelStrategy (FSDP2, tensor parallelism), saved in the background.

Invariants
  SHARDED-1  Each rank saves its shards, all or none. A directory with the checkpoint's name appears at the commit. It is empty:
      the tensors lie in the root beside it. A checkpoint of N ranks loads on M.
  SHARDED-2  Before each save and each load all ranks meet, with a deadline. The message of rank 0 holds for all: the path, and
      the content of the checkpoint beside weights and optimizers.
  SHARDED-3  The rest of Lightning's checkpoint is kept as bytes of torch.save. torch.load reads it, with `weights_only=True`
      unless the caller says no.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from checkpointd.errors import ERRORS, CheckpointdError, NotFoundError, StateError, StoreError
from checkpointd.system_errors import in_words
from checkpointd_client.integrations.directories.opening import opened, said_of
from checkpointd_client.integrations.lightning.checkpoint_io import CheckpointdIO
from checkpointd_client.integrations.lightning.places import CheckpointPlace, local_path, place_to_load
from checkpointd_client.integrations.lightning.reading import is_sharded
from checkpointd_client.integrations.lightning.saves import TrainingSaves, step_of
from checkpointd_client.ranks.convening import convene
from checkpointd_client.restore.target_chooser import Described, LoadTargets
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.unpickling.archive import entries_of

_MODEL = "state_dict"
_REST = "rest"


class CheckpointdModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]  # Lightning has no types here
    """Lightning's ModelParallelStrategy that saves in the background: `Trainer(strategy=CheckpointdModelParallelStrategy())`.

    It takes Lightning's arguments, and `root` and `options`, which mean the same as for CheckpointdIO. With
    `save_distributed_checkpoint=False`, CheckpointdIO saves the gathered weights.
    """

    def __init__(
        self, *args: Any, root: str | os.PathLike[str] | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sharded = TrainingSaves(root, options or {})
        if not self._save_distributed_checkpoint:
            self.checkpoint_io = CheckpointdIO(root, **(options or {}))

    @property
    def saves(self) -> TrainingSaves:
        """The saves of the shards; with `save_distributed_checkpoint=False`, those of CheckpointdIO."""
        own = self._checkpoint_io
        return own.saves if isinstance(own, CheckpointdIO) and not self._save_distributed_checkpoint else self._sharded

    @property
    def handle(self) -> OwnHandle | None:
        """The handle of the last save on this rank."""
        return self.saves.pending.handle

    # --- saving ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the model. In shards, it refers to the weights: they are copied once, into the snapshot."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict of an optimizer, in the same way."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy this rank's shards and return; the directory `filepath` appears at the commit. Call it on every rank.

        Raises StateError for an object that cannot be saved, and DeadlineError if a rank does not call it in time. An error of
        the storage is in `handle` and the log. It is raised only if the call waits for the commit (LIGHTNING-2).
        """
        here = self._sharded.roots.place(filepath)
        if not self._save_distributed_checkpoint or storage_options is not None or here is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        state = {_MODEL: checkpoint.pop(_MODEL)}
        state |= {_optimizer(number): _named(one) for number, one in enumerate(checkpoint.pop("optimizer_states", []))}
        at, rest = self._agreed_to_save(here, checkpoint)
        place = CheckpointPlace(*at)
        client_state = {_REST: base64.b64decode(rest)}
        self._sharded.save(
            place,
            lambda core: core.save(step_of(checkpoint), state, tag=place.tag, client_state=client_state, shown_at=place.at),
        )

    def _agreed_to_save(self, place: CheckpointPlace, rest: dict[str, Any]) -> tuple[list[str], str]:
        """The place and the rest that rank 0 saves, on every rank. Raises rank 0's error on every rank."""
        own: dict[str, Any] = {}
        if self.global_rank == 0:
            try:
                own = {"at": [place.folder, place.at], "rest": base64.b64encode(_packed(rest)).decode()}
                os.makedirs(os.path.dirname(place.path), exist_ok=True)
            except CheckpointdError as error:
                own = {"error": error.code, "text": str(error)}
            except OSError as error:
                own = {"error": StoreError.__name__, "text": f"{place.path} cannot be saved: {in_words(error, 'file')}"}
        heard = json.loads(convene(json.dumps(own), "saving a checkpoint of Lightning's", self._sharded.roots.timeout_s)[0])
        if "error" in heard:
            raise ERRORS.get(heard["error"], CheckpointdError)(heard["text"])
        return heard["at"], heard["rest"]

    # --- loading -----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizers in place, on any number of ranks, and return the rest. Call it on every rank.

        Checkpoints that Lightning has saved are loaded by Lightning.
        """
        self.settle()
        roots, place = self._sharded.roots, place_to_load(checkpoint_path)
        own = None if place is None or not is_sharded(place) else [place.folder, place.at, said_of(place.root)]
        heard = convene(json.dumps(own), "loading a checkpoint of Lightning's", roots.timeout_s)
        found = json.loads(heard[0])
        if found is None:
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[no-any-return]
        place = CheckpointPlace(*found[:2])

        def begin() -> Any:
            return roots.core(place.folder)

        optimizers = {_optimizer(number): one for number, one in enumerate(self.optimizers)}
        targets = _Targets(self.model, optimizers, self.lightning_module.strict_loading)
        with opened(place.root, begin, found[2], roots.timeout_s, roots.options, saves=False) as root:
            loaded = root.load(targets, place.tag)
        if loaded is None:
            raise NotFoundError(f"no checkpoint was committed at {place.path}")
        targets.settle()
        rest = io.BytesIO(cast(bytes, loaded.client_state[_REST]))
        entries_of(rest)  # torch would decompress what a stranger has compressed
        rest.seek(0)
        found_rest: dict[str, Any] = torch.load(rest, map_location="cpu", weights_only=weights_only is not False)
        return found_rest

    # --- removing, ending --------------------------------------------------------------------------------------

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `filepath` once a newer one has committed. It has an effect on rank 0."""
        absolute = local_path(filepath)
        if not self._save_distributed_checkpoint or absolute is None:
            super().remove_checkpoint(filepath)
        elif self.global_rank == 0:
            self._sharded.remove(absolute)

    def settle(self) -> None:
        """Wait until no save is in flight and what was to be removed is gone, without raising the errors of saves."""
        self.saves.pending.settle()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight. Raises their first error, or WaitTimeoutError after `timeout` seconds."""
        self.saves.roots.wait(timeout)

    def teardown(self) -> None:
        """Wait for the saves in flight and end the background threads; then Lightning's own."""
        try:
            self.checkpoint_io.teardown()
            self._sharded.close()
        finally:
            super().teardown()


class _Targets:
    """The model and the optimizers as targets of a load."""

    def __init__(self, model: Any, optimizers: dict[str, Any], strict: bool) -> None:
        self._model, self._strict = model, strict
        self._optimizers = optimizers
        self._states: dict[str, Any] = {}

    def places(self, stored: Described) -> LoadTargets:
        """The state dicts, whose tensors are the model's and the optimizers' own."""
        own = get_model_state_dict(self._model)
        known: Any = stored.get(_MODEL, {})
        faults = [f"the checkpoint has no {_MODEL}[{name!r}]" for name in own if name not in known]
        faults += [f"the model has no {_MODEL}[{name!r}]" for name in known if name not in own]
        absent = [name for name in self._optimizers if name not in stored]
        self._states = {_MODEL: {name: value for name, value in own.items() if name in known}}
        self._states |= {
            name: _named(get_optimizer_state_dict(self._model, one)) for name, one in self._optimizers.items() if name in stored
        }
        told = faults if self._strict else []
        if absent:
            told.append(f"the checkpoint has weights only, and no {absent[0]}: it cannot continue a training")
        return LoadTargets(dict(self._states), told)

    def settle(self) -> None:
        """Let the model and the optimizers take what was loaded."""
        self._model.load_state_dict(self._states[_MODEL], strict=self._strict)
        for name, one in self._optimizers.items():
            found = self._states[name]
            set_optimizer_state_dict(
                self._model, one, optim_state_dict={"state": found["of_parameters"], "param_groups": found["groups"]}
            )


def _optimizer(number: int) -> str:
    return f"optimizer_{number}"


def _named(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with other names for its two parts. A save refuses the state_dict() of an optimizer, since a
    load would not fill the optimizer; here, `settle` does.
    """
    return {"of_parameters": state["state"], "groups": state["param_groups"]}


def _packed(rest: dict[str, Any]) -> bytes:
    """The bytes of torch.save. StateError if it cannot be pickled, or holds shards, of which rank 0 has only its own."""
    for key, value in rest.items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise StateError(
                f"{key!r} of the checkpoint holds a DTensor, and only weights and optimizers are saved in shards: "
                "call full_tensor() in the callback or hook that adds it"
            )
    packed = io.BytesIO()
    try:
        torch.save(rest, packed)
    except Exception as error:  # a __reduce__ may raise anything
        raise StateError(f"the checkpoint cannot be saved as torch.save saves it: {error}") from error
    return packed.getvalue()
