"""Tests whether torch's learning-rate schedulers and gradient scalers can load the stored state of another one.

Their load_state_dict() takes any dict, so a scheduler of another class would continue with a wrong learning rate, or fail once
the model is filled. Their state_dict() only reads attributes, so it can be called before a load.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LRScheduler

from checkpointd.layout import tree
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.restore.stored import Stored

_WITHIN = "_schedulers"
"""The key under which a scheduler that consists of others keeps their states."""
_NOT_ALWAYS = frozenset({"verbose", "default_min_lr", "use_beta1", "base_momentums", "max_momentums"})
"""Keys that torch's schedulers have only in some versions, or only with some arguments (`cycle_momentum`)."""


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
