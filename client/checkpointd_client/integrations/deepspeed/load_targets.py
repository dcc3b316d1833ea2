"""The load targets in an engine for a stored state, at any ZeRO stage and number of ranks.

Invariants
  ENGINELOAD-1  Choosing places does not change the engine. The load fills the engine's own memory, and `settle` sets the rest.
  ENGINELOAD-2  Masters are filled from stored masters, in full precision; if none are stored, from the parameters.
  ENGINELOAD-3  `settle` comes after every rank has filled everything: only there do ranks wait for each other.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkpointd_client.integrations.deepspeed import engine_state
from checkpointd_client.integrations.deepspeed.engine_state import (
    ENGINE,
    MASTER,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    STEP,
    stored_name,
)
from checkpointd_client.integrations.deepspeed.offline.zero_map import latest
from checkpointd_client.integrations.deepspeed.optimizer_process import keeps_moments
from checkpointd_client.integrations.deepspeed.zero_optimizer import (
    Bundle,
    base_optimizer,
    bundles_of,
    data_parallel,
    names_of,
    parameter_held,
)
from checkpointd_client.restore.target_chooser import Described, LoadTargets, StoredTensor
from checkpointd_client.sharding.flat_range import LocalShardTensor, MultiTarget, same

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The parts of a checkpoint to load, as in the arguments of DeepSpeed's load_checkpoint."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False

    @property
    def masters(self) -> bool:
        """Whether masters and the optimizer's state are loaded; otherwise masters are made from the parameters."""
        return self.optimizer and not self.module_only


@dataclass(slots=True)
class _BundleState:
    """The new state of the base optimizer for one bundle."""

    elements: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """By key: the flat tensor that the ranges of the bundle are filled into."""
    whole: set[Hashable] = field(default_factory=set)
    """Keys with one stored value for each parameter, and one value for the whole bundle."""


class EngineTargets:
    """A TargetChooser for an engine. Once the load has returned, call `settle` on every rank."""

    def __init__(self, engine: Any, what: LoadRequest) -> None:
        self.engine, self.what = engine, what
        self._bundles = bundles_of(engine)
        self._copies = data_parallel(engine)
        self._begin({})

    def _begin(self, stored: Described) -> None:
        self._stored = stored
        self._places = LoadTargets({})
        self._fresh: dict[int, _BundleState] = {}
        self._entries: dict[Hashable, Any] = {}
        self._of_no_parameter: list[Hashable] = []
        self._extra: dict[str, str] = {}

    def places(self, stored: Described) -> LoadTargets:
        """The targets for the state `stored` (ENGINELOAD-1)."""
        self._begin(stored)
        self._check_versions()
        self._module(_dict(stored, MODEL), _dict(stored, MASTER))
        if self.what.masters and self._bundles:
            self._optimizer(stored)
        if not self.what.module_only:
            wanted = {SCHEDULER: self.what.scheduler and self.engine.lr_scheduler is not None, ENGINE: True}
            self._places.state.update({key: None for key, want in wanted.items() if want and key in stored})
        return self._places

    # --- parameters ----------------------------------------------------------------------------------------------

    def _check_versions(self) -> None:
        """Note the parts of the module that would have to convert what another version of them has stored."""
        was = _dict(_dict(self._stored, ENGINE), "versions")
        now = engine_state.versions_of(self.engine) if was else {}
        self._places.faults += [
            f"{MODEL}.{path}: its version was {was[path]} when it was saved, and is {version} now; the module converts it "
            "only in the layout deepspeed"
            for path, version in now.items()
            if path in was and was[path] != version
        ]

    def _module(self, stored: Mapping[str, Any], masters: Mapping[str, Any]) -> None:
        model: dict[str, Any] = {}
        targets: dict[str, dict[str, list[LocalShardTensor]]] = {MODEL: defaultdict(list), MASTER: defaultdict(list)}
        own = self._masters_by_name()
        names, met = names_of(self.engine), set()
        for key, name, value in engine_state.module_entries(self.engine):
            if id(value) in met and isinstance(value, torch.Tensor):
                continue  # another name of a tensor that is filled already
            met.add(id(value))
            stored_as = next((n for n in (name, names.get(id(value), name)) if n in stored), None)
            if stored_as is None:
                self._note_missing(name, value)
            elif isinstance(value, nn.Parameter):
                held = parameter_held(self.engine, value, self._copies)
                source = self._source(held.tensor, stored[stored_as], stored_as in masters)
                targets[source][stored_as].append(held)
                for master in own.get(names[id(value)], ()):
                    targets[MASTER if stored_as in masters else MODEL][stored_as].append(master)
            elif isinstance(value, torch.Tensor):
                targets[MODEL][name].append(same(value.detach(), self._copies))
            else:
                model[name], self._extra[name] = None, key
        self._note_unexpected(stored)
        model.update({name: _several(places) for name, places in targets[MODEL].items()})
        self._places.state[MODEL] = model
        if targets[MASTER]:
            self._places.state[MASTER] = {name: _several(places) for name, places in targets[MASTER].items()}

    def _masters_by_name(self) -> dict[str, list[LocalShardTensor]]:
        """The masters to fill, by name, without those that are the module's own parameters."""
        found: dict[str, list[LocalShardTensor]] = defaultdict(list)
        own = {id(parameter) for parameter in self.engine.module.parameters()}
        for bundle in self._bundles if self.what.masters else ():
            if id(bundle.tensor) not in own:
                for one in bundle.ranges:
                    found[one.name].append(bundle.held(one, bundle.tensor))
        return found

    def _source(self, live: torch.Tensor, stored: Any, has_master: bool) -> str:
        """Whether a parameter is filled from the stored parameter or master: from that with its dtype, else from the more
        precise one (ENGINELOAD-2).
        """
        alike = isinstance(stored, StoredTensor) and f"torch.{stored.dtype}" == str(live.dtype)
        return MASTER if has_master and self.what.masters and not alike else MODEL

    def _note_missing(self, name: str, value: Any) -> None:
        if self.what.strict:
            frozen = name in _dict(self._stored, ENGINE).get("left_out", ())
            why = ", which was saved with exclude_frozen_parameters=True: pass load_module_strict=False" if frozen else ""
            self._places.faults.append(f"{MODEL}.{name}: missing from the checkpoint{why}")

    def _note_unexpected(self, stored: Mapping[str, Any]) -> None:
        live = {name for _, name, _ in engine_state.module_entries(self.engine)} if self.what.strict else stored.keys()
        self._places.faults += [
            f"{MODEL}.{name}: in the checkpoint, and nowhere in the module" for name in stored if name not in live
        ]

    # --- the optimizer -------------------------------------------------------------------------------------------

    def _optimizer(self, stored: Described) -> None:
        parts = _dict(stored, OPTIMIZER)
        if not isinstance(parts.get("state"), Mapping) or not isinstance(parts.get("param_groups"), list):
            self._places.faults.append(
                f"{OPTIMIZER}: no optimizer's state is stored; load_optimizer_states=False loads the parameters alone"
            )
            return
        stored_state = parts["state"]
        if keeps_moments(self.engine.optimizer):
            if stored_state:
                log.warning(
                    "the moments in the checkpoint are not loaded: DeepSpeed cannot hand them to the optimizer's process"
                )
            stored_state = {}
        for number, bundle in enumerate(self._bundles):
            self._fresh[number] = self._fill(bundle, stored_state)
        self._group_numbers(parts["param_groups"])
        named = {name for group in parts["param_groups"] for name in group["params"]}
        self._of_no_parameter = [key for key in stored_state if key not in named]
        self._entries.update(dict.fromkeys(self._of_no_parameter))
        self._places.state[OPTIMIZER] = {"state": self._entries, "param_groups": None}

    def _fill(self, bundle: Bundle, stored: Mapping[str, Any]) -> _BundleState:
        """Choose places for the stored optimizer state of a bundle's parameters."""
        fresh = _BundleState()
        entries = [stored.get(stored_name(one.name), {}) for one in bundle.ranges]
        for key in {key: None for entry in entries for key in entry}:
            kinds = [
                _kind(key, entry[key], one.shape) for one, entry in zip(bundle.ranges, entries, strict=True) if key in entry
            ]
            # A parameter of one element may have a single value of the same shape.
            if all(kind == "elements" for kind in kinds):
                fresh.elements[key] = self._memory(bundle, key, complete=len(kinds) == len(entries))
            elif len(bundle.ranges) == 1 or "other" not in kinds:
                fresh.whole.add(key)
            else:
                self._places.faults.append(
                    f"{OPTIMIZER}.state: {key} is stored in another shape than its parameters' and cannot be cut for this stage"
                )
        for one, entry in zip(bundle.ranges, entries, strict=True):
            wanted = {key: bundle.held(one, fresh.elements[key]) if key in fresh.elements else None for key in entry}
            if wanted:
                self._entries[stored_name(one.name)] = wanted
        return fresh

    def _memory(self, bundle: Bundle, key: Hashable, *, complete: bool) -> torch.Tensor:
        """The memory for one entry of the optimizer state: the existing one, if all of it will be filled."""
        live = base_optimizer(self.engine).state.get(bundle.tensor, {}).get(key)
        fits = isinstance(live, torch.Tensor) and live.shape == bundle.tensor.shape and live.is_contiguous()
        if fits and complete:
            return live  # type: ignore[no-any-return]  # a tensor, as checked above
        # Padding, and elements that are not stored, are zero, as in a new optimizer.
        return torch.zeros_like(bundle.tensor, requires_grad=False)

    def _group_numbers(self, stored: list[Any]) -> None:
        """Find the stored group whose settings each live group gets."""
        group_of = {name: j for j, group in enumerate(stored) for name in group["params"]}
        self._groups: list[int | None] = []
        for i in range(len(base_optimizer(self.engine).param_groups)):
            names = [stored_name(one.name) for bundle in self._bundles if bundle.group == i for one in bundle.ranges]
            found = {group_of[name] for name in names if name in group_of}
            if len(found) > 1:
                self._places.faults.append(
                    f"{OPTIMIZER}.param_groups.{i}: its parameters are those of the stored groups {sorted(found)}"
                )
            self._groups.append(found.pop() if found else None)

    # --- once everything is filled ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Set the values that are not tensors of the engine, and its second copies of tensors (ENGINELOAD-3)."""
        state, engine = self._places.state, self.engine
        if self._extra:
            loaded = {key: state[MODEL][name] for name, key in self._extra.items()}
            engine.module.load_state_dict(loaded, strict=False)
        if self.what.masters and self._bundles:
            self._settle_optimizer(state[OPTIMIZER])
        elif hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        if SCHEDULER in state:
            engine.lr_scheduler.load_state_dict(state[SCHEDULER])
        if ENGINE in state:
            engine_state.restore_engine(engine, state[ENGINE], _dict(self._stored, MODEL))
        self._refresh()

    def _settle_optimizer(self, stored: Mapping[str, Any]) -> None:
        base = base_optimizer(self.engine)
        for number, bundle in enumerate(self._bundles):
            fresh = self._fresh[number]
            entries = [self._entries.get(stored_name(one.name), {}) for one in bundle.ranges]
            kept = {key: latest([entry[key] for entry in entries if key in entry], key) for key in fresh.whole}
            before = base.state.pop(bundle.tensor, {})
            if fresh.elements or kept:
                base.state[bundle.tensor] = {**fresh.elements, **{k: _as(before.get(k), v) for k, v in kept.items()}}
        base.state.update({key: stored["state"][key] for key in self._of_no_parameter if key in stored["state"]})
        for group, j in zip(base.param_groups, self._groups, strict=True):
            settings = {} if j is None else stored["param_groups"][j]
            group.update({key: value for key, value in settings.items() if key != "params"})

    def _refresh(self) -> None:
        """Let DeepSpeed update its references to tensors that were replaced."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "_hp_optimizer_states_linked"):
            optimizer._link_all_hp_params()
            optimizer._hp_optimizer_states_linked = False
            if any(bundle.tensor in optimizer.optimizer.state for bundle in self._bundles):
                optimizer._lazy_init_hp_params_optimizer_state()
        persistent = getattr(optimizer, "persistent_parameters", [])
        if persistent:
            persistent[0].partition(persistent)
        if self.engine._optimizer_has_ckpt_event_epilogue():
            optimizer.checkpoint_event_epilogue()


def _dict(stored: Mapping[Any, Any], key: str) -> Mapping[str, Any]:
    found = stored.get(key)
    return found if isinstance(found, Mapping) else {}


def _several(places: list[LocalShardTensor]) -> LocalShardTensor | MultiTarget:
    return places[0] if len(places) == 1 else MultiTarget(tuple(places))


def _kind(key: Hashable, stored: Any, shape: tuple[int, ...]) -> str:
    """The kind of a stored entry of one parameter: one value per element, one value, or a tensor of another shape."""
    if not isinstance(stored, StoredTensor) or key == STEP:
        return "value"
    if stored.shape == shape:
        return "elements"
    return "value" if math.prod(stored.shape) == 1 else "other"


def _as(before: Any, value: Any) -> Any:
    """`value` in the form of `before`: DeepSpeed's optimizers count steps in plain numbers, torch's in tensors."""
    if isinstance(before, int | float) and isinstance(value, torch.Tensor):
        return type(before)(value.item())
    if isinstance(before, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(before, value)
    return value
