"""Wrappers around modules, and the names that tensors have without them.

Invariants
  WRAPPERS-1  A module in wrappers, at any depth and in any order, gives its tensors the names that they have without them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and what torch.compile returns, in any order."""
    while True:
        inner = inner_name(module)
        if inner is None:
            return module
        module = getattr(module, inner)


def inner_name(module: nn.Module) -> str | None:
    """The attribute under which one of these wrappers keeps the user's module; None if `module` is not such a wrapper."""
    return step_of(module) if isinstance(module, _imported(_BARE)) else None


def step_of(module: nn.Module) -> str | None:
    """What any wrapper adds to the names of the tensors inside it; None if `module` is not a wrapper."""
    return next((step for cls, step in _STEPS.items() if isinstance(module, _imported([cls]))), None)


def classes() -> tuple[type[nn.Module], ...]:
    """The classes of wrappers. It imports nothing: if there is a module of such a class, the class is imported."""
    return _imported(_STEPS)


_Class = tuple[str, str]
"""The module and the name of a class of torch."""
_BARE: dict[_Class, str] = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
}
_STEPS: dict[_Class, str] = {
    **_BARE,
    # These have hooks or buffers of their own, so they are not taken off.
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch.optim.swa_utils", "AveragedModel"): "module",
}
_HIDDEN = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What wrappers take out of the keys of state_dict() themselves, but not out of the paths of modules."""


def _imported(wanted: Iterable[_Class]) -> tuple[type[nn.Module], ...]:
    found = (getattr(sys.modules.get(place), name, None) for place, name in wanted)
    return tuple(cls for cls in found if cls is not None)


class Names:
    """The names in a module without what wrappers add, for paths of its parts and for keys of its state_dict()."""

    def __init__(self, module: nn.Module, keys: Iterable[str]) -> None:
        """`keys`: all paths and keys to clean. If none looks like one of a wrapper, the module is not walked."""
        self._wrappers: dict[str, list[str]] = {}
        """By clean path, what the wrappers there add, from the outermost one to the innermost."""
        self._raw: dict[str, str] = {}
        """By clean path, what keys of state_dict() have in its place."""
        if not any("_orig_mod" in key or "module" in key for key in keys):
            return
        clean, raw, steps, known = dict[str, str](), dict[str, str](), dict[str, str | None](), classes()
        for path, part in module.named_modules(remove_duplicate=False):
            above, _, step = path.rpartition(".")
            is_added = not path or steps.get(above) == step
            around, shown = clean.get(above, above), raw.get(above, above)
            clean[path] = around if is_added else _join(around, step)
            raw[path] = shown if not path or (is_added and step in _HIDDEN) else _join(shown, step)
            self._raw[clean[path]] = raw[path]
            steps[path] = added = step_of(part) if isinstance(part, known) else None
            if added is not None:
                self._wrappers.setdefault(clean[path], []).append(added)

    def clean(self, path: str) -> str:
        """`path` without the wrappers that it passes through."""
        if not self._wrappers:
            return path
        found, wrappers, passed = "", self._wrappers.get("", []), 0
        for step in path.split("."):
            ahead = _ahead(step, wrappers[passed:])
            if ahead:
                passed += ahead
            else:
                found = _join(found, step)
                wrappers, passed = self._wrappers.get(found, []), 0
        return found

    def raw(self, name: str) -> str:
        """The key in state_dict() of what has the clean name `name`, which need not exist."""
        if not self._wrappers:
            return name
        path, rest = name, list[str]()
        while path and path not in self._raw:
            path, _, step = path.rpartition(".")
            rest.insert(0, step)
        return ".".join([*filter(None, [self._raw[path]]), *rest])


def _ahead(step: str, wrappers: list[str]) -> int:
    """How many of `wrappers` a path passes with `step`, which may leave out hidden ones; 0 if it passes none."""
    for i, added in enumerate(wrappers):
        if added == step:
            return i + 1
        if added not in _HIDDEN:
            break
    return 0


def _join(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step
