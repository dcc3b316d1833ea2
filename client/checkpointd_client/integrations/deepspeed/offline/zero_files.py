"""Reads the files of one DeepSpeed checkpoint without DeepSpeed, and checks that they are complete and belong together.

Nothing in them is run, and their tensors stay on the disk until they are used (`safe_unpickle.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointd import arguments
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError, UsageError
from checkpointd.layout.keys import LATEST
from checkpointd.phrases import rank_runs
from checkpointd.system_errors import in_words
from checkpointd_client.integrations.deepspeed.offline.file_names import (
    MODEL,
    MODEL_END,
    OPTIM,
    OPTIM_END,
    read_latest,
)
from checkpointd_client.integrations.deepspeed.offline.safe_unpickle import read
from checkpointd_client.unpickling.records import Record

_OPTIMIZER, _INNER = "optimizer_state_dict", "optimizer_state_dict"
_PARTITIONED_EXPERTS = "zero3_partitioned"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LoadedZeroFile:
    """The path and the content of one file."""

    path: str
    content: Mapping[str, Any]

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of `key`. DamagedError if it is missing or not a `kind`."""
        return checked(self.content.get(key), kind, self.path, key)


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """A checkpoint. `models` has one file at stages 0 to 2, and one for each rank at stage 3; `optims` one for each rank."""

    path: str
    stage: int
    models: tuple[LoadedZeroFile, ...]
    optims: tuple[LoadedZeroFile, ...]

    @property
    def model(self) -> LoadedZeroFile:
        """The model file of rank 0."""
        return self.models[0]

    @property
    def ranks(self) -> int:
        return len(self.optims)

    @property
    def param_shapes(self) -> list[Shapes]:
        """For each group (at stage 3, sub-group) the names and shapes of its trained parameters, in the order of its tensor."""
        groups = self.model.get("param_shapes", list)
        return [shapes_of(group, self.model.path, f"param_shapes.{number}") for number, group in enumerate(groups)]

    @property
    def frozen_shapes(self) -> Shapes:
        """The frozen parameters, if they were saved."""
        found = self.model.content.get("frozen_param_shapes")
        return {} if found is None else shapes_of(found, self.model.path, "frozen_param_shapes")

    @property
    def shared(self) -> dict[str, str]:
        """Names of tied parameters -> the name under which each is stored."""
        path, found = self.model.path, self.model.content.get("shared_params")
        kept = checked([] if found is None else found, (dict, list, tuple), path, "shared_params")
        pairs = [
            checked(pair, tuple, path, "a pair of shared_params") for pair in (kept.items() if isinstance(kept, dict) else kept)
        ]
        if not all(len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in pairs):
            raise DamagedError(f"{path}: shared_params is not pairs of names", key=path)
        return dict(pairs)

    @property
    def buffers(self) -> list[str]:
        """The names of the buffers."""
        path = self.model.path
        names = checked(self.model.content.get("buffer_names"), (list, set, tuple), path, "buffer_names")
        return [checked(name, str, path, "a name in buffer_names") for name in names]

    def optimizer(self, rank: int) -> Mapping[str, Any]:
        """The state of ZeRO's optimizer on `rank`."""
        found: Mapping[str, Any] = self.optims[rank].get(_OPTIMIZER, dict)
        return found

    def fault(self, rank: int, what: str) -> DamagedError:
        """The error for a file of the optimizer that contradicts another one."""
        path = self.optims[rank].path
        return DamagedError(f"{path} {what}", key=path, rank=rank)


def tag_directory(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> str:
    """The directory of checkpoint `tag`, or of the tag in `latest`, below `checkpoint_dir`.

    NotFoundError if it does not exist; DamagedError or UnreadableError if `latest` cannot be used.
    """
    directory = os.fspath(checkpoint_dir)
    if tag is None or tag == LATEST:
        pointer = os.path.join(directory, LATEST)
        try:
            tag = read_latest(directory).decode().strip()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"there is no {pointer}, which names the newest checkpoint: name a tag") from None
        except UnicodeDecodeError:
            tag = ""
        except OSError as error:
            raise UnreadableError(f"{pointer} cannot be read: {in_words(error, 'file')}; or name a tag") from error
        if not tag or os.path.isabs(tag) or ".." in tag.split("/") or not tag.isprintable():
            raise DamagedError(f"{pointer} does not hold a tag", key=pointer)
    arguments.path("tag", tag)
    place = os.path.join(directory, tag)
    if not os.path.isdir(place):
        raise NotFoundError(f"there is no directory {place}")
    return place


def open_files(directory: str) -> ZeroFiles:
    """Open the files in `directory`, which is the directory of a tag.

    NotFoundError if files are missing; DamagedError if they cannot be read or do not belong together; UsageError if several
    model-parallel ranks, pipeline stages or experts saved them, or ZenFlow.
    """
    names = sorted(os.listdir(directory))
    models = _by_rank(directory, [name for name in names if name.endswith(MODEL_END)], MODEL)
    optims = _by_rank(directory, [name for name in names if name.endswith(OPTIM_END)], OPTIM)
    if not models:
        raise NotFoundError(f"{directory} has no file *{MODEL_END}: it is not a checkpoint of DeepSpeed")
    if not optims:
        raise NotFoundError(
            f"{directory} has no file *{OPTIM_END}: it was saved without ZeRO's optimizer. Its weights are "
            f"the `module` of {models[min(models)]}"
        )
    loaded = [LoadedZeroFile(path, read(path)) for _, path in sorted(optims.items())]
    stage = _stage(loaded[0])
    _check_count(directory, loaded, sorted(optims))
    _check_masters(directory, loaded[0])
    return ZeroFiles(directory, stage, _models(directory, stage, models, len(loaded)), tuple(loaded))


def _by_rank(directory: str, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        match, path = pattern.match(name), os.path.join(directory, name)
        if match is None:
            raise UsageError(
                f"{path} is of a model whose layers or experts have files of their own, which cannot be put together"
            )
        if int(match["mp"]):
            raise UsageError(
                f"{path} is of a model that is divided among several model-parallel ranks, which cannot be put together"
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise DamagedError(
                f"{path} and {found[rank]} are both of rank {rank}: one is left over from another save", key=path
            )
        found[rank] = path
    return found


def _models(directory: str, stage: int, paths: Mapping[int, str], ranks: int) -> tuple[LoadedZeroFile, ...]:
    wanted = range(ranks) if stage == 3 else range(1)
    missing = next((rank for rank in wanted if rank not in paths), None)
    if missing is not None:
        raise NotFoundError(f"{directory} has no model states of rank {missing}, of the {ranks} that saved it at stage {stage}")
    models = tuple(LoadedZeroFile(paths[rank], read(paths[rank])) for rank in wanted)
    for model in models:
        if "buffer_names" not in model.content:
            raise DamagedError(f"{model.path} has no buffer_names: it is not a model file of DeepSpeed", key=model.path)
        layers = model.content.get("ds_autoep_layers") or model.content.get("autoep_layers") or ()
        if _PARTITIONED_EXPERTS in repr(layers):
            raise UsageError(f"{model.path} is of a model whose experts are partitioned, which cannot be put together")
    return models


def _stage(optim: LoadedZeroFile) -> int:
    value = optim.get(_OPTIMIZER, dict).get("zero_stage")
    if isinstance(value, Record):  # an enum of DeepSpeed's
        value = next(iter(value.args or ()), None)
    if type(value) is not int or value not in (1, 2, 3):
        said = value if type(value) is int else f"a {type(value).__name__}"
        raise DamagedError(f"{optim.path} says that its zero_stage is {said}; 1, 2 and 3 are known", key=optim.path)
    return int(value)


def _check_masters(directory: str, optim: LoadedZeroFile) -> None:
    settings = optim.content.get("ds_config")
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    if isinstance(zero, Mapping) and zero.get("zenflow"):
        raise UsageError(
            f"{directory} was saved with ZenFlow: its fp32 masters lack what the selected columns have learnt, and some "
            "are transposed. For the weights, use engine.save_16bit_model. To train without ZenFlow, load it with an engine "
            "that is attached with layout='checkpointd', and save"
        )


def _check_count(directory: str, optims: Sequence[LoadedZeroFile], ranks: Sequence[int]) -> None:
    for rank, optim in zip(ranks, optims, strict=True):
        count = optim.get(_OPTIMIZER, dict).get("partition_count")
        counts = count if isinstance(count, list) else [count]
        if not counts or not all(isinstance(one, int) for one in counts):
            raise DamagedError(f"{optim.path} does not say how many ranks saved it", key=optim.path, rank=rank)
        if max(counts) != len(optims) or rank != ranks.index(rank):
            raise DamagedError(
                f"{optim.path} was saved by {max(counts)} ranks, but {directory} has the files of "
                f"{rank_runs(ranks)}: files are missing, or left over from another save",
                key=optim.path,
                rank=rank,
            )


def checked(value: Any, kind: type | tuple[type, ...], path: str, what: str) -> Any:
    """`value`, if it is a `kind`. Otherwise DamagedError with the file and the name of the value, `what`."""
    if not isinstance(value, kind):
        raise DamagedError(f"{path}: {what} is a {type(value).__name__}, which DeepSpeed does not save there", key=path)
    return value


def flat_tensor(value: Any, path: str, what: str) -> torch.Tensor:
    """A contiguous tensor of one dimension. DamagedError for anything else."""
    tensor: torch.Tensor = checked(value, torch.Tensor, path, what)
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise DamagedError(f"{path}: {what} is not a flat tensor", key=path)
    return tensor.detach()


def shapes_of(value: Any, path: str, what: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes. DamagedError if `value` has another form."""
    found = {}
    for name, shape in checked(value, dict, path, what).items():
        sizes = tuple(checked(shape, (tuple, list), path, f"{what}.{name}"))
        if not isinstance(name, str) or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise DamagedError(f"{path}: {what}.{name} is not a shape", key=path)
        found[name] = sizes
    return found
