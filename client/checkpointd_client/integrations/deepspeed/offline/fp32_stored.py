"""The fp32 weights of a checkpoint in checkpointd's own format, in the form of DeepSpeed's functions."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

import torch

from checkpointd.errors import NotFoundError
from checkpointd.layout import tree
from checkpointd.layout.keys import LATEST
from checkpointd_client.export.state_dict import StateDict
from checkpointd_client.integrations.deepspeed.offline.lazy import Lazy, as_fp32
from checkpointd_client.reader import open_checkpoint
from checkpointd_client.restore.content import merged_content
from checkpointd_client.restore.stored import Stored, by_name, tensors_by_name

_MODEL, _MASTER, _ENGINE = "model", "master", "deepspeed"


@dataclass(frozen=True, slots=True)
class StoredLazy:
    """A stored tensor, read and verified when it is asked for."""

    state: StateDict
    fqn: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.state.shape(self.fqn))

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtype(self.fqn)

    def contiguous(self) -> torch.Tensor:
        """The tensor, read now."""
        return self.state[self.fqn].contiguous()

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Elements from `start` on into `target`, which they fill."""
        target.copy_(self.contiguous().view(-1)[start : start + target.numel()])


def stored_state_dict(
    root: str | os.PathLike[str], tag: str | None, *, exclude_frozen_parameters: bool
) -> OrderedDict[str, Lazy]:
    """Buffers, frozen parameters, then what is trained, from its masters where there are any, and last names that are tied.

    NotFoundError where the checkpoint has no model.
    """
    state = open_checkpoint(root, tag or LATEST).tensors(rank=0)
    content = merged_content(state.world, keep=0, alone=True)
    parts = by_name(Stored(content.root, content.entries, content.aliases).state)
    model, masters = tensors_by_name(parts.get(_MODEL)), tensors_by_name(parts.get(_MASTER))
    if not model:
        raise NotFoundError(f"{state.tag} at {root} holds no tensors below {_MODEL!r}, where an engine has its parameters")
    aliases = {alias.fqn: alias.owner for alias in content.aliases}
    owners = {name: aliases.get(node.fqn, node.fqn) for name, node in model.items()}
    trained = [name for name in _trained(parts.get("optimizer")) if name in model]
    trained = trained or [name for name, node in model.items() if node.requires_grad and owners[name] == node.fqn]
    told = _told(parts.get(_ENGINE), "buffers")
    buffers = [name for name in model if name in told]
    stepped = {owners[name] for name in trained}
    first = {owner: name for name, owner in reversed(owners.items())}
    frozen = [n for n in model if n not in told and owners[n] not in stepped and first[owners[n]] == n]
    made: dict[str, Lazy] = {}
    found: OrderedDict[str, Lazy] = OrderedDict()
    for name in buffers:
        found[name] = made.setdefault(owners[name], as_fp32(StoredLazy(state, model[name].fqn)))
    for name in () if exclude_frozen_parameters else frozen:
        found[name] = made[owners[name]] = StoredLazy(state, model[name].fqn)
    for name in trained:
        found[name] = made[owners[name]] = as_fp32(StoredLazy(state, masters.get(name, model[name]).fqn))
    tied = {name: made[owner] for name, owner in owners.items() if name not in found and owner in made}
    found.update(tied)
    return found


def _told(engine: tree.Node, key: str) -> frozenset[str]:
    """Names that the engine told of itself."""
    return frozenset(map(str, tree.elements(by_name(engine).get(key))))


def _trained(optimizer: tree.Node) -> list[str]:
    """The names of the parameters that the optimizer steps, in its order."""
    groups = tree.elements(by_name(optimizer).get("param_groups"))
    return [str(name).removeprefix(f"{_MODEL}.") for group in groups for name in tree.elements(by_name(group).get("params"))]
