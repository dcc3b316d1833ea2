"""Asks a module what it takes, by a trial of its load_state_dict() on tensors without memory.

A module may rename, resize, convert or leave out what it loads: by the `_version` of a part, by a hook, or by a method of its
own. Only the module knows. So it is asked if it has such hooks or methods, or if the stored tensors have other names, shapes or
versions than those here: before anything is called a mismatch, and before any of its tensors changes.

Invariants
  MODULETRIAL-1  After a trial the module has the tensors, attributes and hooks that it had before. Their values are those from
      before, as far as they are tensors in the state_dict() or containers of Python, also nested ones.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from checkpointd_client.capture import objects
from checkpointd_client.capture.optimizer_layout import like_without_memory
from checkpointd_client.capture.tensors import PLAIN_TENSORS
from checkpointd_client.sharding.dtensor import is_dtensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the module said of the keys that it was offered. `missing` are keys of its own, `unexpected` are offered ones.

    `as_they_are`: the keys of tensors here that get the values that were offered under the same key, and nothing else.
    `renamed`: by offered key, the key of the tensor here that gets its values as they are, if that is another one.
    `converted`: by key of a tensor here, the dtypes of what it gets and of itself, if they differ.
    """

    missing: frozenset[str]
    unexpected: frozenset[str]
    as_they_are: frozenset[str]
    renamed: Mapping[str, str]
    converted: Mapping[str, tuple[torch.dtype, torch.dtype]]


def ask(module: nn.Module, live: Mapping[str, Any], offered: Mapping[str, Any], versions: object) -> Verdict | str:
    """What the module says of `offered`, or why it cannot load it. `live`: its state_dict(). `versions`: the `_metadata`."""
    verdict = _ask(module, live, offered, versions)
    if not isinstance(verdict, str):
        return verdict
    # Its hooks may look at numbers. Then nobody knows what they do with the stored ones.
    zeros = {key: _zeros(one) for key, one in offered.items()}
    found = _ask(module, live, zeros, versions)
    return verdict if isinstance(found, str) else replace(found, as_they_are=frozenset())


def _zeros(offered: Any) -> Any:
    """A tensor of zeros in place of one without memory; they share the memory of one number."""
    if not isinstance(offered, torch.Tensor) or not offered.is_meta or is_dtensor(offered):
        return offered
    return torch.zeros((), dtype=offered.dtype).expand(offered.shape)


def _ask(module: nn.Module, live: Mapping[str, Any], offered: Mapping[str, Any], versions: object) -> Verdict | str:
    given = OrderedDict(offered)
    setattr(given, objects.METADATA, versions)
    copies = _Copies()
    options = {"strict": False} if objects.takes(module.load_state_dict, "strict") else {}
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule, which cannot be asked what it loads"
    with _apart(module) as stand_ins:
        try:
            with torch.device("meta"), copies, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that what is copied here has no memory
                told = module.load_state_dict(given, **options)
        except Exception as error:  # the user's code may raise anything, and torch raises for wrong shapes
            return f"{type(error).__name__}: {error}"
        keys = {id(stand_ins.get(id(value), value)): key for key, value in live.items()}
    names = {id(value): key for key, value in offered.items()}
    found = [(keys[id(to)], names.get(id(source)), to, source) for to, source in copies.made if id(to) in keys]
    whole = next((key for key, name, to, source in found if name is None and is_dtensor(to) and not is_dtensor(source)), None)
    if whole is not None:
        return f"it would copy a whole tensor to the shards of {whole}"
    # A load_state_dict() of the user's own may return nothing: then only what was copied is known to have been taken.
    got, given_as_it_is = {key for key, _, _, _ in found}, {name for _, name, _, _ in found}
    as_they_are, others = {key for key, name, _, _ in found if key == name}, {key for key, name, _, _ in found if key != name}
    return Verdict(
        frozenset(getattr(told, "missing_keys", live.keys() - got)),
        frozenset(getattr(told, "unexpected_keys", offered.keys() - given_as_it_is)),
        frozenset(as_they_are - others),
        {name: key for key, name, _, _ in found if name is not None and name != key},
        {key: (source.dtype, to.dtype) for key, _, to, source in found if source.dtype != to.dtype},
    )


def own_ways(module: nn.Module) -> frozenset[str]:
    """The paths of the parts of `module` with a load hook or a method that may change what they load."""
    found = {path for path, part in module.named_modules() if _has_own_way(part)}
    return frozenset(found | ({""} if type(module).load_state_dict is not nn.Module.load_state_dict else set()))


def _has_own_way(part: nn.Module) -> bool:
    if type(part)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return True
    hooks = (getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values())
    # Those of FSDP and of checkpoint_wrapper prepare the module, and change no value.
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks)


@dataclass(slots=True)
class _Made:
    """Stand-ins for tensors, by the id() of each."""

    known: dict[int, Any] = field(default_factory=dict)

    def of(self, live: Any) -> Any:
        """A tensor like `live` without memory; `live` itself if it is None or of a class that may not allow one."""
        if id(live) not in self.known:
            self.known[id(live)] = _stand_in(live)
        return self.known[id(live)]


def _stand_in(live: Any) -> Any:
    if is_lazy(live):
        cls: Any = type(live)
        return cls(device="meta", dtype=live.dtype, requires_grad=live.requires_grad)
    if type(live) not in PLAIN_TENSORS and not is_dtensor(live):
        return live
    made = like_without_memory(live.detach())
    if isinstance(live, nn.Parameter):
        made = nn.Parameter(made, requires_grad=live.requires_grad)
    vars(made).update(vars(live))
    return made


class _Copies(TorchFunctionMode):
    """Notes which tensor is copied to which."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self.made.append((args[0], args[1]))
            if args[1].is_meta and (not args[0].is_meta or is_dtensor(args[0]) != is_dtensor(args[1])):
                return args[0]  # to what the module keeps elsewhere, or to shards: there is nothing to copy
        return func(*args, **(kwargs or {}))


@contextmanager
def _apart(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    """The module with stand-ins for its tensors, which are given by the id() of each. At the end all is put back."""
    made, saved = _Made(), [_Attributes.of(vars(part)) for part in module.modules()]
    try:
        for kept in saved:
            for tensors in (kept.inside["_parameters"], kept.inside["_buffers"]):
                tensors.update({name: made.of(one) for name, one in tensors.items()})
        yield made.known
    finally:
        for kept in saved:
            kept.put_back()


_CONTAINERS = (dict, OrderedDict, defaultdict, set, list, deque)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The attributes of an object as they were, with the content of those that are containers."""

    inside: dict[str, Any]
    was: dict[str, Any]
    contents: list[tuple[Any, list[Any]]]

    @classmethod
    def of(cls, inside: dict[str, Any]) -> _Attributes:
        found: dict[int, tuple[Any, list[Any]]] = {}
        left = list(inside.values())
        while left:
            value = left.pop()
            if type(value) in _CONTAINERS and id(value) not in found:
                content = list(value.items() if isinstance(value, dict) else value)
                found[id(value)] = value, content
                left += value.values() if isinstance(value, dict) else content
        return cls(inside, dict(inside), list(found.values()))

    def put_back(self) -> None:
        self.inside.clear()
        self.inside.update(self.was)
        for value, content in self.contents:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
