"""The fp32 weights of a checkpoint in checkpointd's own format, in the form of DeepSpeed's functions."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from checkpointd.errors import NotFoundError
from checkpointd.export.selection import whole_view
from checkpointd.layout import tree
from checkpointd.layout.boxes import boxes_of_range
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd_client.export.state_dict import StateDict
from checkpointd_client.integrations.deepspeed.offline.lazy_tensor import LazyTensor, as_fp32
from checkpointd_client.reader import open_checkpoint
from checkpointd_client.restore.content import merged_content
from checkpointd_client.restore.sinks import host_sink
from checkpointd_client.restore.stored import Stored, by_name, tensors_by_name

_MODEL, _MASTER, _ENGINE = "model", "master", "deepspeed"


@dataclass(frozen=True, slots=True)
class StoredLazyTensor:
    """A stored tensor, read and verified on demand."""

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
        """Fill `target` with the elements from `start` on. Only these are read, unless this is a part of a larger tensor."""
        wants = part_requests(self.state, self.fqn, start, target)
        if wants is None:
            target.copy_(self.contiguous().view(-1)[start : start + target.numel()])
        else:
            self.state.read(wants)


def part_requests(state: StateDict, fqn: str, start: int, target: torch.Tensor) -> list[BoxRequest] | None:
    """The requests that fill the flat tensor `target`, in host memory, with the elements of a tensor from `start` on, in the
    dtype of `target`.

    None if the tensor is only a part of a larger stored tensor.
    """
    tensor = state.exported(fqn)
    if tensor.view != whole_view(tensor.source.shape):
        return None
    wants, at, source = [], 0, tensor.source
    for box in boxes_of_range(source.shape, start, start + target.numel()):
        part = target[at : at + box.numel()].view(box.sizes)
        wants.append(BoxRequest(source.fqn, box, host_sink(part, box, source.dtype), source.rank))
        at += box.numel()
    return wants


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """An engine's state in a checkpoint of checkpointd's own format. `parts`: the parts of the state by name; `owners`: the FQN
    that each tensor of the model is stored under.
    """

    state: StateDict
    parts: Mapping[str, tree.Node]
    client_state: tree.Node
    model: Mapping[str, tree.Tensor]
    masters: Mapping[str, tree.Tensor]
    owners: Mapping[str, str]

    @staticmethod
    def opened(root: str | os.PathLike[str], tag: str | None) -> StoredEngine:
        """Open checkpoint `tag` (default: latest) at `root`."""
        state = open_checkpoint(root, tag or LATEST).tensors(rank=0)
        content = merged_content(state.world, keep=0, alone=True)
        stored = Stored(content.root, content.entries, content.aliases)
        parts = by_name(stored.state)
        model, aliases = tensors_by_name(parts.get(_MODEL)), {alias.fqn: alias.owner for alias in content.aliases}
        owners = {name: aliases.get(node.fqn, node.fqn) for name, node in model.items()}
        return StoredEngine(state, parts, stored.client_state, model, tensors_by_name(parts.get(_MASTER)), owners)

    def first_names(self) -> dict[str, str]:
        """For each name in the model, the first of the names that are tied to it."""
        first = {owner: name for name, owner in reversed(list(self.owners.items()))}
        return {name: first[owner] for name, owner in self.owners.items()}


def stored_state_dict(
    root: str | os.PathLike[str], tag: str | None, *, exclude_frozen_parameters: bool
) -> OrderedDict[str, LazyTensor]:
    """Buffers, frozen parameters, then trained parameters (from their masters, if stored), and last tied names.

    NotFoundError if the checkpoint has no model.
    """
    engine = StoredEngine.opened(root, tag)
    state, parts, model, masters, owners = engine.state, engine.parts, engine.model, engine.masters, engine.owners
    if not model:
        raise NotFoundError(f"{state.tag} at {root} holds no tensors below {_MODEL!r}, where an engine has its parameters")
    trained = [name for name in _trained(parts.get("optimizer")) if name in model]
    trained = trained or [name for name, node in model.items() if node.requires_grad and owners[name] == node.fqn]
    told = frozenset(map(str, tree.elements(by_name(parts.get(_ENGINE)).get("buffers"))))
    buffers = [name for name in model if name in told]
    stepped = {owners[name] for name in trained}
    first = engine.first_names()
    frozen = [n for n in model if n not in told and owners[n] not in stepped and first[n] == n]
    made: dict[str, LazyTensor] = {}
    found: OrderedDict[str, LazyTensor] = OrderedDict()
    for name in buffers:
        found[name] = made.setdefault(owners[name], as_fp32(StoredLazyTensor(state, model[name].fqn)))
    for name in () if exclude_frozen_parameters else frozen:
        found[name] = made[owners[name]] = StoredLazyTensor(state, model[name].fqn)
    for name in trained:
        found[name] = made[owners[name]] = as_fp32(StoredLazyTensor(state, masters.get(name, model[name]).fqn))
    tied = {name: made[owner] for name, owner in owners.items() if name not in found and owner in made}
    found.update(tied)
    return found


def _trained(optimizer: tree.Node) -> list[str]:
    """The names of the parameters that the optimizer steps, in its order."""
    groups = tree.elements(by_name(optimizer).get("param_groups"))
    return [str(name).removeprefix(f"{_MODEL}.") for group in groups for name in tree.elements(by_name(group).get("params"))]
