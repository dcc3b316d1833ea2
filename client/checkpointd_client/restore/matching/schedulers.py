"""Tests whether torch's learning-rate schedulers and gradient scalers can load the stored state of another one, and gives the
schedulers of an optimizer with other param groups what they need for these.

Their load_state_dict() takes any dict, so a scheduler of another class would continue with a wrong learning rate, or fail once
the model is filled. Their state_dict() only reads attributes, so it can be called before a load.

Invariants
  SCHEDULERS-1  A value that a scheduler keeps for each param group goes to the group here that gets the settings of the group
      for which it was stored. A group of which nothing is stored keeps its own value.
  SCHEDULERS-2  A scheduler that another one keeps as an attribute, as a warm-up does, is loaded itself, and stays that object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from checkpointd.layout import tree
from checkpointd_client.capture import objects
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.restore import building
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching.context import Context, Groups, StepOrder
from checkpointd_client.restore.stored import Stored

_WITHIN = "_schedulers"
"""The key under which a scheduler that consists of others keeps their states."""
_NOT_ALWAYS = frozenset({"verbose", "default_min_lr", "use_beta1", "base_momentums", "max_momentums"})
"""Keys that torch's schedulers have only in some versions, or only with some arguments (`cycle_momentum`)."""


_OF_GROUPS = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "base_values", "last_lrs"}
)
"""Keys under which schedulers of torch and timm keep a value for each param group."""


def optimizer_of(live: object) -> torch.optim.Optimizer | None:
    """The optimizer whose learning rates `live` sets; None if it is not a scheduler."""
    found = getattr(live, "optimizer", None)
    return found if isinstance(found, torch.optim.Optimizer) else None


def regrouped(match: Context, live: object, node: tree.Node, fqn: str) -> Build | None:
    """The stored state of a scheduler, for the param groups that its optimizer has now; None, with a note, if it has none."""
    optimizer = optimizer_of(live)
    groups = None if optimizer is None else match.groups.get(id(optimizer))
    if optimizer is None or groups is None:
        return _as_stored(match, live, node, fqn)
    now = len(optimizer.param_groups)
    if groups.of is None and groups.stored != now:
        were = f"it was saved for {groups.stored} param groups, and its optimizer, which does not fit either, has {now} now"
        match.mismatched.append(f"{fqn}: {were}")
        return None
    return _Regrouping(match, groups, now, fqn).of(live, node)


def _as_stored(match: Context, live: object, node: tree.Node, fqn: str) -> Build:
    """The stored state of a scheduler, as it is."""
    kept = (
        {key: one for key, one in vars(live).items() if isinstance(one, LRScheduler)} if isinstance(live, LRScheduler) else {}
    )
    if not kept or not isinstance(node, tree.Dict):
        return match.fresh(node)
    parts = {
        key: _kept(match, kept[str(key)], child, f"{fqn}.{key}") if str(key) in kept else match.fresh(child)
        for key, child in match.stored.children(node)
    }
    return match.dict_of(node, parts)


def _kept(match: Context, live: LRScheduler, node: tree.Node, fqn: str) -> Build:
    """The scheduler itself, which is loaded from `node` (SCHEDULERS-2)."""
    build = regrouped(match, live, node, fqn)
    if build is not None:
        match.do(StepOrder.OTHERS, build, objects.loading(live, fqn, live.load_state_dict))
    return building.given(live)


@dataclass(frozen=True, slots=True)
class _Regrouping:
    """Makes the state of schedulers for the param groups that their optimizer has `now`."""

    match: Context
    groups: Groups
    now: int
    fqn: str

    def of(self, live: object, node: tree.Node) -> Build:
        if not isinstance(node, tree.Dict) or self.groups.are_as_stored:
            return _as_stored(self.match, live, node, self.fqn)
        own = vars(live)
        if isinstance(live, LRScheduler) and _is_torchs(type(live).state_dict):
            own = {**live.state_dict(), _WITHIN: getattr(live, _WITHIN, None)}
        return self.match.dict_of(
            node,
            {key: self._value(str(key), own.get(str(key)), child, live) for key, child in self.match.stored.children(node)},
        )

    def _value(self, key: str, live: object, node: tree.Node, holder: object) -> Build:
        if isinstance(live, LRScheduler):
            return _kept(self.match, live, node, f"{self.fqn}.{key}")
        if not isinstance(node, tree.Sequence) or not isinstance(live, list | tuple):
            return self.match.fresh(node)
        if key == _WITHIN and len(live) == len(node.items):
            within = [self.of(one, child) for one, child in zip(live, node.items, strict=True)]
            return building.sequence_of(node, within, known=type(live))
        is_of_groups = key in _OF_GROUPS or self.now != self.groups.stored
        if not is_of_groups and len(node.items) == self.now and _differ(node) and not _is_torchs(type(holder)):
            self.match.mismatched.append(
                f"{self.fqn}: its optimizer has the param groups in another order than when it was saved, and {key!r} may hold "
                "a value for each of them: put the groups in that order again, or leave this object out of the state"
            )
        if self.groups.of is None or not is_of_groups or (len(node.items), len(live)) != (self.groups.stored, self.now):
            return self.match.fresh(node)
        parts = [
            building.given(live[i]) if j is None else self.match.fresh(node.items[j]) for i, j in enumerate(self.groups.of)
        ]
        return building.sequence_of(node, parts, known=type(live))


def _differ(node: tree.Sequence) -> bool:
    """Whether the items of a list are not all alike, as far as can be seen without their tensors."""
    return any(item != node.items[0] for item in node.items)


def misfit(live: object, node: tree.Node, stored: Stored, fqn: str) -> str | None:
    """Why the object cannot load the stored state; None if it can, and if it is neither of these classes of torch."""
    if isinstance(live, torch.amp.GradScaler) and isinstance(node, tree.Dict):
        is_wrong = live.is_enabled() and not node.items  # a disabled scaler has no state, and loads any
        return f"{fqn}: it was saved while it was disabled, and is enabled now" if is_wrong else None
    why = _difference(live, node, stored) if isinstance(live, LRScheduler) else None
    return None if why is None else f"{fqn}: the stored state is of another class than {type_name(live)}: {why}"


def _difference(live: LRScheduler, node: tree.Node, stored: Stored) -> str | None:
    if not _is_torchs(type(live).state_dict):
        return None
    parts = dict(stored.children(node))
    was, now = _public(parts), _public(live.state_dict())
    extra, absent = sorted(was - now), sorted(now - was)
    # A user's class may set more attributes later. Torch's own classes set all of them at once.
    if (extra or absent) if _is_torchs(type(live)) else (extra and absent):
        return f"{', '.join(extra) or 'nothing more'} is stored, and {', '.join(absent) or 'nothing more'} is there now"
    within, ours = parts.get(_WITHIN), getattr(live, _WITHIN, None)
    if not isinstance(ours, list | tuple):
        return None
    items = tree.elements(within)
    if len(items) != len(ours):
        return f"it holds {len(items)} schedulers, and the one here {len(ours)}"
    found = ((i, _difference(one, child, stored)) for i, (one, child) in enumerate(zip(ours, items, strict=True)))
    return next((f"at {_WITHIN}.{i}, {why}" for i, why in found if why is not None), None)


def _is_torchs(what: object) -> bool:
    """Whether a class or method is defined in torch."""
    return str(getattr(what, "__module__", "")).startswith("torch.")


def _public(keys: Iterable[object]) -> set[str]:
    return {str(key) for key in keys if not str(key).startswith("_")} - _NOT_ALWAYS
