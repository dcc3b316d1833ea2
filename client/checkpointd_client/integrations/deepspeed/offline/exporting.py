"""Exports a checkpoint as files for DeepSpeed's load_checkpoint, at ZeRO 1, 2 or 3 and for a number of ranks.

DeepSpeed pickles objects of its own classes into them, so it must be installed here.

Invariant
  ZEROEXPORT-1  The tensors of one file are in memory at a time: those of the model at stages 1 and 2, or one rank's part of the
      optimizer state.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from checkpointd import arguments
from checkpointd.errors import CheckpointdError, FormatError, UsageError
from checkpointd.export.consolidate import ExportedFile, check_outside
from checkpointd.export.output import Output, translated
from checkpointd.layout import tree
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd.store import open_store
from checkpointd_client.capture import scalars
from checkpointd_client.export.state_dict import StateDict
from checkpointd_client.integrations.deepspeed.offline.file_names import STATES_END
from checkpointd_client.integrations.deepspeed.offline.fp32_stored import StoredEngine, part_requests
from checkpointd_client.integrations.deepspeed.offline.safe_unpickle import read
from checkpointd_client.integrations.deepspeed.offline.zero_map import latest
from checkpointd_client.restore.building import is_scalar, value_of
from checkpointd_client.restore.stored import by_name

_STEP = "step"
_SUB_GROUP = 10**9
"""DeepSpeed's default sub_group_size: how many elements of a rank's part of a group form one sub-group at stage 3."""


class ExportedDeepSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export, for load_checkpoint(`out`, `tag`) of an engine at `stage` on `ranks` ranks."""

    root: str
    tag: str
    step: int
    out: str
    format: str
    stage: int
    ranks: int
    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    files: tuple[ExportedFile, ...]


def export_deepspeed(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    stage: int = 2,
    ranks: int = 1,
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> ExportedDeepSpeed:
    """Write checkpoint `tag` (default: latest) as DeepSpeed's files below `out`, with `latest` beside them.

    Pass `out` to load_checkpoint of an engine with the same model and parameter groups, at ZeRO `stage` on `ranks` ranks. The
    checkpoint may come from an engine with `layout="checkpointd"`, from an import, or from `{"model": ..., "optimizer": ...}`.
    UsageError if DeepSpeed is missing, or if its files cannot hold a part of the checkpoint; other errors as `consolidate`.
    """
    arguments.path("out", out)
    if stage not in (1, 2, 3) or ranks < 1:
        raise UsageError(f"stage {stage} on {ranks} ranks: only stages 1, 2 and 3 can be written, for at least one rank")
    try:
        import deepspeed  # noqa: F401  # its classes are pickled
    except ImportError as error:
        raise UsageError(f"DeepSpeed's files hold objects of its classes, and it cannot be imported: {error}") from error
    check_outside(open_store(root), out)
    stored = StoredEngine.opened(root, tag)
    state, export = stored.state, _Export(stored, stage, ranks)
    with _DeepSpeedOutput(out, directory=True, force=force) as output:
        folder = output.path(state.tag)
        with translated("writing", output.place):
            os.mkdir(folder)
            for number, (name, make) in enumerate(export.files()):
                on_progress(number, len(export.files()))
                with open(os.path.join(folder, name), "xb") as file:
                    torch.save(make(), file)
                    file.flush()
                    os.fsync(file.fileno())
            written = [ExportedFile(name=f"{state.tag}/{n}", size=os.path.getsize(f"{folder}/{n}")) for n, _ in export.files()]
        output.create(LATEST, state.tag.encode(), len(state.tag.encode()))
        output.publish()
    return ExportedDeepSpeed(
        root=os.fspath(root),
        tag=state.tag,
        step=state.step,
        out=output.place,
        format="deepspeed",
        stage=stage,
        ranks=ranks,
        tensors=len(export.model),
        bytes=sum(file.size for file in written),
        left_out=(),
        files=tuple(written),
    )


class _DeepSpeedOutput(Output):
    """The output directory. An earlier export in its place is told from a save of DeepSpeed's by its empty `ds_config`."""

    def is_exported(self, name: str) -> bool:
        folder = os.path.join(self.place, name)
        if name == LATEST or not os.path.isdir(folder):
            return name == LATEST
        with suppress(CheckpointdError):
            files = [os.path.join(folder, file) for file in os.listdir(folder)]
            return all(file.endswith(STATES_END) and read(file).get("ds_config") == {} for file in files)
        return False


class _Export:
    """The files of one checkpoint; each is made when it is written."""

    def __init__(self, stored: StoredEngine, stage: int, ranks: int) -> None:
        self._state, self._stage, self._ranks = stored.state, stage, ranks
        state, self.model, self._masters, self._parts = stored.state, stored.model, stored.masters, stored.parts
        self._client_state = stored.client_state
        self._engine = self._plain(self._parts.get("deepspeed")) or {}
        optimizer = by_name(self._parts.get("optimizer"))
        groups = optimizer.get("param_groups")
        if not self.model or not isinstance(groups, tree.Sequence) or not groups.items:
            raise UsageError(f"{state.tag} does not hold the model and optimizer of an engine, which DeepSpeed's files need")
        self._settings = [self._plain(group) for group in groups.items]
        self._kept = by_name(optimizer.get("state"))
        self.groups = [[str(name).removeprefix("model.") for name in group["params"]] for group in self._settings]
        self._check()
        self._owner = stored.first_names()
        buffers = self._engine.get("buffers", [])
        trained = {name for group in self.groups for name in group}
        self._buffers = [name for name in self.model if name in buffers]
        self._frozen = [n for n in self.model if n not in buffers and self._owner[n] == n and n not in trained]

    def _check(self) -> None:
        unknown = [name for group in self.groups for name in group if name not in self.model]
        if unknown:
            raise UsageError(
                f"the optimizer of {self._state.tag} steps {unknown[0]}, which is not a parameter of the model in it"
            )
        scaler = self._engine.get("scales", {}).get("loss_scaler", {}).get("class", "LossScaler")
        if scaler != "LossScaler":
            raise UsageError(f"{self._state.tag} was saved with a dynamic loss scale ({scaler}), which is not exported")
        largest = max(sum(-(-self._count(name) // self._ranks) for name in group) for group in self.groups)
        if self._stage == 3 and largest > _SUB_GROUP:
            raise UsageError(f"a group has {largest} elements on each rank; up to {_SUB_GROUP}, one sub-group, can be exported")

    def files(self) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
        """The names of the files, each with the function that makes its content."""
        found: list[tuple[str, Callable[[], dict[str, Any]]]] = []
        half = "bf16_" if any(self._dtype(name) == torch.bfloat16 for group in self.groups for name in group) else ""
        for rank in range(self._ranks):
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            if self._stage == 3 or rank == 0:
                model = f"{name}_model_states.pt" if self._stage == 3 else "mp_rank_00_model_states.pt"
                found.append((model, lambda rank=rank: self._model_file(rank)))  # type: ignore[misc]  # bound now
            found.append((f"{half}{name}_optim_states.pt", lambda rank=rank: self._optim_file(rank)))  # type: ignore[misc]
        return found

    # --- the model -------------------------------------------------------------------------------------------------

    def _model_file(self, rank: int) -> dict[str, Any]:
        import deepspeed

        reads = _TensorReads(self._state)
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in self.model:
            owner, whole = self._owner[name], self._stage < 3 or name in self._buffers
            if owner != name and owner in module:
                module[name] = module[owner]
            else:
                module[name] = reads.whole(f"model.{name}") if whole else torch.empty(0, dtype=self._dtype(name))
        fragments: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in self._frozen:
            part = self._flat(reads, [f"model.{name}"], rank, self._dtype(name)) if self._stage == 3 else module[name]
            fragments[name] = part
        reads.run()
        shapes = {name: torch.Size(self._state.shape(f"model.{name}")) for name in self.model}
        client = self._plain(self._client_state) or {}
        return {
            "module": module,
            "buffer_names": self._buffers,
            "optimizer": None,
            "param_shapes": [OrderedDict((name, shapes[name]) for name in group) for group in self.groups],
            "frozen_param_shapes": OrderedDict((name, shapes[name]) for name in self._frozen),
            "shared_params": {name: owner for name, owner in self._owner.items() if name != owner},
            "frozen_param_fragments": fragments,
            "lr_scheduler": self._plain(self._parts.get("scheduler")),
            "data_sampler": None,
            "random_ltd": None,
            **{key: self._engine.get(key, 0) for key in ("skipped_steps", "global_samples")},
            "global_steps": self._engine.get("global_steps", self._state.step),
            "dp_world_size": self._ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": deepspeed.__version__,
            **client,
        }

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _optim_file(self, rank: int) -> dict[str, Any]:
        import deepspeed
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum

        scales = self._engine.get("scales", {})
        reads = _TensorReads(self._state)
        masters, states = [], {}
        for number, group in enumerate(self.groups):
            fqns = [f"master.{name}" if name in self._masters else f"model.{name}" for name in group]
            masters.append(self._flat(reads, fqns, rank))
            states[number] = self._states(reads, group, rank)
        reads.run()
        groups = [
            {**{k: v for k, v in settings.items() if k != "params"}, "params": [number]}
            for number, settings in enumerate(self._settings)
        ]
        base = {"state": {number: kept for number, kept in states.items() if kept}, "param_groups": groups}
        content = {
            "zero_stage": ZeroStageEnum(self._stage),
            "loss_scaler": LossScaler(scale=scales.get("loss_scaler", {}).get("cur_scale", 1.0)),
            "dynamic_loss_scale": False,
            "overflow": False,
        }
        if self._stage == 3:
            content |= {"partition_count": self._ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            paddings = [self._padding(group) if rank == self._ranks - 1 else 0 for group in self.groups]
            content |= {
                "clip_grad": scales.get("optimizer", {}).get("clip_grad", 0.0),
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [
                    master[: master.numel() - padding] for master, padding in zip(masters, paddings, strict=True)
                ],
                "group_paddings": paddings,
                "param_alignment_paddings": [[0] * len(group) for group in self.groups],
                "partition_count": [self._ranks] * len(self.groups),
                "ds_version": deepspeed.__version__,
                "param_slice_mappings": [self._slices(group, rank) for group in self.groups],
            }
        return {"optimizer_state_dict": content, "ds_config": {}, "ds_version": deepspeed.__version__}

    def _states(self, reads: _TensorReads, group: Sequence[str], rank: int) -> dict[str, Any]:
        items = [by_name(self._kept.get(f"model.{name}")) for name in group]
        if any(one.keys() != items[0].keys() for one in items):
            raise UsageError(
                f"the optimizer of {self._state.tag} keeps other state for {group[0]} than for the rest of its group"
            )
        found: dict[str, Any] = {}
        for key in items[0]:
            fqns = [child.fqn for one in items if isinstance(child := one[key], tree.Tensor)]
            shapes = [self._state.shape(fqn) for fqn in fqns]
            if key != _STEP and shapes == [self._state.shape(f"model.{name}") for name in group]:
                found[key] = self._flat(reads, fqns, rank)
            elif all(math.prod(shape) == 1 for shape in shapes):
                found[key] = latest([self._plain(one[key]) for one in items], key)
            else:
                raise UsageError(f"optimizer.state.*.{key} of {self._state.tag} does not have the shapes of the parameters")
        return found

    def _flat(self, reads: _TensorReads, fqns: Sequence[str], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The part of `rank` of some tensors: at stage 3 a part of each, else a part of all in a row; padding is zero."""
        counts = [math.prod(self._state.shape(fqn)) for fqn in fqns]
        if self._stage == 3:
            sizes = [-(-count // self._ranks) for count in counts]
            made, at = torch.zeros(sum(sizes), dtype=dtype), 0
            for fqn, size, count in zip(fqns, sizes, counts, strict=True):
                start = min(rank * size, count)
                reads.add(fqn, start, min(start + size, count), made[at:])
                at += size
            return made
        size = self._row(sum(counts)) // self._ranks
        made, offset = torch.zeros(size, dtype=dtype), -rank * size
        for fqn, count in zip(fqns, counts, strict=True):
            start, stop = max(0, -offset), min(count, size - offset)
            if start < stop:
                reads.add(fqn, start, stop, made[offset + start :])
            offset += count
        return made

    def _row(self, count: int) -> int:
        """The length of the row of a group with its padding: a multiple of twice the number of ranks, as in DeepSpeed."""
        return -(-count // (2 * self._ranks)) * 2 * self._ranks

    def _padding(self, group: Sequence[str]) -> int:
        count = sum(map(self._count, group))
        return self._row(count) - count

    def _slices(self, group: Sequence[str], rank: int) -> OrderedDict[str, Any]:
        from deepspeed.utils.tensor_fragment import fragment_address

        size = self._row(sum(map(self._count, group))) // self._ranks
        found: OrderedDict[str, Any] = OrderedDict()
        at = -rank * size
        for name in group:
            start, stop = max(at, 0), min(at + self._count(name), size)
            if start < stop:
                found[name] = fragment_address(numel=stop - start, start=start)
            at += self._count(name)
        return found

    # --- stored values -------------------------------------------------------------------------------------------------

    def _count(self, name: str) -> int:
        return math.prod(self._state.shape(f"model.{name}"))

    def _dtype(self, name: str) -> torch.dtype:
        return self._state.dtype(f"model.{name}")

    def _plain(self, node: tree.Node) -> Any:
        """The Python value of a node; tensors are read whole."""
        return value_of(node, self._leaf)

    def _leaf(self, node: tree.Node) -> Any:
        if isinstance(node, tree.Tensor):
            return self._state[node.fqn]
        if is_scalar(node):
            return scalars.decode(node, stand_in=True)
        raise UsageError(f"{self._state.tag} holds a {type(node).__name__}, which DeepSpeed's files cannot hold")


class _TensorReads:
    """Tensors that are filled from the store together."""

    def __init__(self, state: StateDict) -> None:
        self._state, self._wants = state, list[BoxRequest]()

    def whole(self, fqn: str) -> torch.Tensor:
        """Memory for all of a tensor, in its own dtype."""
        made = torch.empty(self._state.shape(fqn), dtype=self._state.dtype(fqn))
        self.add(fqn, 0, made.numel(), made.view(-1))
        return made

    def add(self, fqn: str, start: int, stop: int, target: torch.Tensor) -> None:
        """Read elements `[start, stop)` of a tensor into the beginning of the flat tensor `target`, in its dtype."""
        wants = part_requests(self._state, fqn, start, target[: stop - start])
        if wants is None:
            raise FormatError(f"{fqn} shares the memory of a larger tensor, which DeepSpeed's files cannot hold", fqn=fqn)
        self._wants += wants

    def run(self) -> None:
        """Fill the tensors. Raises the first damage."""
        if self._wants:
            self._state.read(self._wants)
