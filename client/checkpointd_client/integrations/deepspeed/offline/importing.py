"""Imports a checkpoint of DeepSpeed's: parameters, masters and the optimizer's state by name, from any stage.

The state has the form of `layout="checkpointd"` (`engine_state.py`): engines of any stage and number of ranks can load it, and
so can jobs without DeepSpeed, as `{"model": model, "optimizer": optimizer}`.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from checkpointd import arguments
from checkpointd.errors import DamagedError, NotFoundError, StateError
from checkpointd.export.consolidate import memory_of
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import Alias
from checkpointd.layout.keys import LATEST, check_tag
from checkpointd.layout.strides import contiguous_stride
from checkpointd.pipeline.shard import Bytes
from checkpointd_client.capture.dtypes import DTYPES, NAMES
from checkpointd_client.capture.scalars import encode, key_node, key_text
from checkpointd_client.integrations.conversion.importing import (
    MEMORY_BYTES,
    MEMORY_BYTES_MIN,
    ImportJob,
    import_at,
    refuse_other,
)
from checkpointd_client.integrations.conversion.metadata_file import DcpFileRange, SourceTensor
from checkpointd_client.integrations.deepspeed.offline.file_names import is_zero_checkpoint, tags_in
from checkpointd_client.integrations.deepspeed.offline.lazy_tensor import ConvertedTensor, LazyTensor
from checkpointd_client.integrations.deepspeed.offline.zero_files import ZeroFiles, checked, open_files, tag_directory
from checkpointd_client.integrations.deepspeed.offline.zero_map import ZeroMap, map_files, mapped_tensor
from checkpointd_client.unpickling.records import Record

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_OWN = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
    | {"lr_scheduler", "sparse_tensor_module_names", *_COUNTERS, "dp_world_size", "mp_world_size", "ds_config", "ds_version"}
    | {"checkpoint_parallel_dimensions", "data_sampler", "random_ltd"}
)
"""DeepSpeed's own keys in a file of the model; all other keys there are the user's client state."""
_LEFT = ("data_sampler", "random_ltd")
_WRAPPERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
_DICTS: dict[type, Literal["dict", "OrderedDict", "Counter"]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, Literal["list", "tuple", "set", "frozenset", "Size"]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "Size",
}


class ImportedDeepSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an import. `parts`: how many ranks the checkpoint records; `left_out`: values that cannot be stored."""

    root: str
    tag: str
    step: int
    source: str
    stage: int
    ranks: int
    tensors: int
    values: int
    bytes: int
    parts: int
    left_out: tuple[str, ...]


def import_deepspeed(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    step: int | None = None,
    save_latest: bool = True,
    force: bool = False,
    leave_out: bool = False,
    memory: int | str = MEMORY_BYTES,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> ImportedDeepSpeed:
    """Make a checkpoint below `root` from checkpoint `tag` of ZeRO 1, 2 or 3 in `source`, which is only read.

    `source` is the save_dir of save_checkpoint, or the directory of a tag in it; `tag`: None takes the tag in `latest`. `step`:
    None takes DeepSpeed's count of steps. Values that cannot be stored safely, such as objects of other classes in the client
    state, raise an error; with `leave_out` they are left out. About `memory` bytes are held at once. DeepSpeed need not be
    installed.

    Raises NotFoundError, UsageError with the right command if `source` is of another format, DamagedError with the file,
    StateError with the value that cannot be stored, StoreError.
    """
    arguments.path("source", source)
    held = memory_of(memory, MEMORY_BYTES_MIN)
    try:
        directory = _directory(source, tag)
        files = open_files(directory)
    except NotFoundError:
        place = os.path.abspath(source)
        is_deepspeeds = is_zero_checkpoint(place) or (tags_in(place) and os.path.lexists(os.path.join(place, LATEST)))
        if tag is None and not is_deepspeeds:
            refuse_other(source, root)
        raise
    name = check_tag(os.path.basename(directory))
    state = _State(files, map_files(files), leave_out=leave_out)
    content = state.root()
    steps = checked(files.model.content.get("global_steps", 0), int, files.model.path, "global_steps")
    job = ImportJob(
        given=os.path.abspath(source),
        source=directory,
        tensors=[_source(fqn, tensor, number) for number, (fqn, tensor) in enumerate(state.tensors.items())],
        aliases=tuple(state.aliases),
        root=content,
        reader=_Elements(state.tensors),
        tag=name,
        step=steps if step is None else step,
        save_latest=save_latest,
        memory=held,
        on_progress=on_progress,
    )
    url, nbytes, parts = import_at(root, job, force=force)
    return ImportedDeepSpeed(
        root=url,
        tag=name,
        step=job.step,
        source=directory,
        stage=files.stage,
        ranks=files.ranks,
        tensors=len(state.tensors),
        values=state.values,
        bytes=nbytes,
        parts=parts,
        left_out=tuple(state.left_out),
    )


def _directory(source: str | os.PathLike[str], tag: str | None) -> str:
    path = os.path.abspath(os.fspath(source))
    if tag is None and is_zero_checkpoint(path):
        return path
    return os.path.abspath(tag_directory(path, tag))


def _source(fqn: str, tensor: LazyTensor, number: int) -> SourceTensor:
    shape, dtype = tuple(tensor.shape), NAMES[tensor.dtype]
    count = tensor.shape.numel()
    chunks = ((whole(shape), DcpFileRange("", number, count * ITEM_BYTES[dtype])),) if count else ()
    return SourceTensor(fqn, dtype, shape, chunks)


@dataclass(frozen=True, slots=True)
class _Elements:
    tensors: Mapping[str, LazyTensor]

    def copy(self, fqn: str, dtype: str, frame: Box, place: DcpFileRange, part: Box, target: Bytes) -> None:
        """Copy the elements of `part` into `target`."""
        start = sum(a * b for a, b in zip(part.offsets, contiguous_stride(frame.sizes), strict=True))
        self.tensors[fqn].copy(start, torch.from_numpy(target).view(DTYPES[dtype]))


@dataclass(frozen=True, slots=True)
class _StateLeaf:
    """A tensor in the state. `trained`: whether it requires gradients."""

    tensor: LazyTensor
    trained: bool = False


@dataclass
class _State:
    """Makes the state tree. `tensors`: by FQN; `aliases`: tied names; `left_out`: values that are not in the tree."""

    files: ZeroFiles
    zero: ZeroMap
    leave_out: bool
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    values: int = 0
    _met: dict[int, tuple[_StateLeaf, str]] = field(default_factory=dict)
    """The leaves by identity, and the first FQN of each. Keeping them here keeps the identities valid."""

    def root(self) -> tree.Node:
        """The tree of a checkpoint. StateError for values that cannot be stored, unless `leave_out` is set."""
        model = self.files.model.content
        state: dict[str, Any] = {"model": self._model(), "optimizer": self._optimizer()}
        masters = self._masters()
        if masters:
            state["master"] = masters
        if model.get("lr_scheduler") is not None:
            state["scheduler"] = model["lr_scheduler"]
        state["deepspeed"] = self._engine()
        for key in self.zero.unknown:
            self._refuse(f"optimizer.state.*.{key}", "it does not have one element for each element of the parameters")
        for key in _LEFT:
            if model.get(key) is not None:
                self._refuse(key, "it is an object of one of DeepSpeed's classes")
        client = {key: value for key, value in model.items() if key not in _OWN}
        nodes = self._node(state, ""), self._node(client, "client_state")
        return tree.Dict("dict", (("state", nodes[0]), ("client_state", nodes[1])))

    # --- the parts ---------------------------------------------------------------------------------------------

    def _model(self) -> dict[str, _StateLeaf]:
        """The tensors of the module, in its order; tied names have one leaf."""
        model, shared = self.files.model, self.files.shared
        module = checked(model.content.get("module"), dict, model.path, "module")
        found: dict[str, _StateLeaf] = {}
        for name, value in module.items():
            if isinstance(value, torch.Tensor) and name not in shared:
                leaf = self._of_module(name, value)
                if leaf is not None:
                    found[name] = leaf
        ordered = {name: found.get(shared.get(name, name)) for name in module}
        missing = [name for name in self.zero.trained if name not in found]
        if missing:
            raise DamagedError(
                f"{model.path} has no {missing[0]} in its module, although the optimizer steps it", key=model.path
            )
        return {str(name): leaf for name, leaf in ordered.items() if leaf is not None}

    def _of_module(self, name: str, value: torch.Tensor) -> _StateLeaf | None:
        path, trained = self.files.model.path, self.zero.trained.get(name)
        if self.files.stage < 3 or name in self.files.buffers:
            return _StateLeaf(mapped_tensor(value, path, name), trained is not None)
        if trained is not None:  # stage 3 saves only masters; a load makes the parameters from them
            alike = value.dtype == trained.master.dtype
            return _StateLeaf(trained.master if alike else ConvertedTensor(trained.master, value.dtype), True)
        return _StateLeaf(self.zero.frozen[name]) if name in self.zero.frozen else None

    def _masters(self) -> dict[str, _StateLeaf]:
        module = self.files.model.content["module"]
        return {n: _StateLeaf(p.master) for n, p in self.zero.trained.items() if module[n].dtype != p.master.dtype}

    def _optimizer(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, parameter in self.zero.trained.items():
            kept = {key: _StateLeaf(tensor) for key, tensor in parameter.states.items()} | dict(parameter.values)
            if kept:
                states[f"model.{name}"] = kept
        groups = []
        for number, settings in enumerate(self.zero.groups):
            kept = {key: value for key, value in settings.items() if key != "params" and not str(key).startswith("_ds_")}
            names = [f"model.{name}" for name, parameter in self.zero.trained.items() if parameter.group == number]
            groups.append({**kept, "params": names})
        return {"state": states, "param_groups": groups}

    def _engine(self) -> dict[str, Any]:
        model, module = self.files.model.content, self.files.model.content["module"]
        dtypes = [str(module[name].dtype) for name in self.zero.trained]
        known = self.zero.trained.keys() | self.zero.frozen.keys() | set(self.files.buffers) | self.files.shared.keys()
        return {
            **{name: model[name] for name in _COUNTERS if name in model},
            "dp_world_size": model.get("dp_world_size", self.files.ranks),
            "mp_world_size": model.get("mp_world_size", 1),
            "zero_stage": self.files.stage,
            "ds_version": str(model.get("ds_version", "")),
            "dtype": dtypes[0] if dtypes else "torch.float32",
            "scales": self._scales(),
            "left_out": [str(name) for name in module if name not in known] if self.files.stage == 3 else [],
            "buffers": self.files.buffers,
        }

    def _scales(self) -> dict[str, Any]:
        said = self.files.optimizer(0)
        own = {key: said[key] for key in ("dynamic_loss_scale", "overflow", "clip_grad") if _is_number(said.get(key))}
        scales: dict[str, Any] = {"optimizer": {"class": _WRAPPERS[self.files.stage], **own}}
        scaler = said.get("loss_scaler")
        if isinstance(scaler, Record) and isinstance(scaler.state, dict):
            numbers = {str(key): value for key, value in scaler.state.items() if _is_number(value)}
            scales["loss_scaler"] = {"class": scaler.name.rpartition(".")[2], **numbers}
        return scales

    # --- as nodes ----------------------------------------------------------------------------------------------

    def _node(self, value: Any, fqn: str) -> tree.Node:
        if isinstance(value, _StateLeaf):
            return self._tensor(value, fqn)
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            return self._tensor(_StateLeaf(mapped_tensor(value, self.files.path, fqn)), fqn)
        if type(value) in _DICTS:
            pairs = [(key_node(key, fqn), self._kept(child, _below(fqn, key))) for key, child in value.items()]
            return tree.Dict(_DICTS[type(value)], tuple((key, made[0]) for key, made in pairs if made))
        if type(value) in _SEQUENCES:
            made = [self._kept(child, _below(fqn, number)) for number, child in enumerate(value)]
            return tree.Sequence(_SEQUENCES[type(value)], tuple(one[0] for one in made if one))
        self.values += 1
        return encode(value, fqn)

    def _kept(self, value: Any, fqn: str) -> tuple[tree.Node] | None:
        """The node; None if the value is left out."""
        if isinstance(value, Record):
            self._refuse(fqn, f"it is a {value.name}, and only plain values are read")
            return None
        try:
            return (self._node(value, fqn),)
        except StateError as error:
            if not self.leave_out:
                raise
            self.left_out.append(f"{fqn} ({error})")
            return None

    def _tensor(self, leaf: _StateLeaf, fqn: str) -> tree.Node:
        if leaf.tensor.dtype not in NAMES:
            raise StateError(f"{fqn}: a tensor of {leaf.tensor.dtype} cannot be stored")
        shape = tuple(leaf.tensor.shape)
        owner = self._met.setdefault(id(leaf), (leaf, fqn))[1]
        if owner != fqn:
            self.aliases.append(Alias(fqn, owner, shape, contiguous_stride(shape), 0))
        else:
            self.tensors[fqn] = leaf.tensor
        return tree.Tensor(fqn, leaf.trained)

    def _refuse(self, fqn: str, why: str) -> None:
        if not self.leave_out:
            raise StateError(f"{fqn} of {self.files.path} cannot be stored: {why}; everything else can, without it (leave_out)")
        self.left_out.append(f"{fqn} ({why})")


def _below(fqn: str, key: object) -> str:
    return f"{fqn}.{key_text(key)}" if fqn else key_text(key)


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)
