"""A job of several ranks with quantized weights of torchao in DTensors, as tensor parallelism makes them: saves, or loads.

python weights_job.py ROOT save|load SAVED_BY RANK RANKS PORT
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerRow,
    PerTensor,
    quantize_,
)

from checkpointd.errors import MismatchError, PartlyLoadedError
from checkpointd_client import Checkpointer

warnings.simplefilter("ignore")
ROOT, WHAT, SAVED_BY, RANK, RANKS, PORT = sys.argv[1:]
os.environ |= {"RANK": RANK, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "LOCAL_RANK": RANK}
rank, ranks = int(RANK), int(RANKS)
Make = Callable[[torch.Tensor], Any]
ROWS, COLUMNS = 64, 256

CASES: dict[str, tuple[Make, int]] = {
    "int8 by rows": (lambda plain: Int8Tensor.from_hp(plain, PerRow()), 0),
    "int8 by columns": (lambda plain: Int8Tensor.from_hp(plain, PerRow()), 1),
    "float8 by rows": (lambda plain: Float8Tensor.from_hp(plain, granularity=PerRow()), 0),
    "float8 of one scale": (lambda plain: Float8Tensor.from_hp(plain, granularity=PerTensor()), 0),
    "mx by rows": (lambda plain: MXTensor.to_mx(plain, torch.float8_e4m3fn), 0),
    "mx by columns": (lambda plain: MXTensor.to_mx(plain, torch.float8_e4m3fn), 1),
    "nvfp4 by rows": (lambda plain: NVFP4Tensor.to_nvfp4(plain), 0),
}
"""Classes and the dimension that is split. Each is quantized whole, and then every rank takes its slice."""


def plain(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slice_of(whole: Any, dim: int) -> Any:
    size = whole.shape[dim] // ranks
    part = slice(rank * size, (rank + 1) * size)
    return (whole[part, :] if dim == 0 else whole[:, part]) if ranks > 1 else whole


def distributed(local: Any, dim: int | None = 0, **whole: Any) -> torch.Tensor:
    """A DTensor of `local`. from_local() needs a view, which Int8Tensor does not have."""
    mesh = init_device_mesh("cpu", (ranks,))
    like = torch.empty(local.shape, dtype=local.dtype)
    made: Any = DTensor.from_local(like, mesh, [Replicate() if dim is None else Shard(dim)], run_check=False, **whole)
    made._local_tensor = local
    return torch.nn.Parameter(made, requires_grad=False)


def bits(tensor: Any) -> list[Any]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    names, context = local.__tensor_flatten__()
    parts = [(name, getattr(local, name)) for name in names]
    inner = [(name, (one._local_tensor if isinstance(one, DTensor) else one).contiguous()) for name, one in parts]
    return [
        type(local),
        repr(context),
        *((name, tuple(one.shape), one.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, one in inner),
    ]


def sliced(seed: int) -> dict[str, Any]:
    """All cases, and one that all ranks hold whole."""
    made = {name: distributed(slice_of(make(plain(seed)), dim), dim) for name, (make, dim) in CASES.items()}
    made["int8 everywhere"] = distributed(Int8Tensor.from_hp(plain(seed), PerRow()), None)
    made["int8 of DTensors"] = of_dtensors(seed, Int8WeightOnlyConfig())
    made["float8 of DTensors"] = of_dtensors(seed, Float8WeightOnlyConfig())
    return made


def of_dtensors(seed: int, config: Any) -> torch.Tensor:
    """As quantize_ makes them of a model that is split already."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False))
    model[0].weight = torch.nn.Parameter(distribute_tensor(plain(seed), mesh, [Shard(0)]), requires_grad=False)
    quantize_(model, config)
    return model[0].weight


def own_scales(seed: int) -> dict[str, Any]:
    """Every rank quantizes its own rows, with a scale of its own."""
    return {"x": distributed(quantized_alone(slice_of(plain(seed), 0)))}


def quantized_alone(part: torch.Tensor) -> Any:
    return Float8Tensor.from_hp(part, granularity=PerTensor())


def as_it_is(seed: int) -> dict[str, Any]:
    """A class whose inner tensors are not known to have an item for each tile."""
    scale = torch.tensor(0.5 + rank)
    return {"x": distributed(NVFP4Tensor.to_nvfp4(slice_of(plain(seed), 0), per_tensor_scale=scale))}


def uneven(seed: int) -> dict[str, Any]:
    whole = Int8Tensor.from_hp(plain(seed, 7), PerRow())
    size = -(-7 // ranks)
    local = whole[rank * size : (rank + 1) * size, :] if ranks > 1 else whole
    return {"x": distributed(local, shape=torch.Size((7, COLUMNS)), stride=(COLUMNS, 1))}


AS_MANY = "load it with as many ranks as saved it"
JOBS = {"sliced": sliced, "own_scales": own_scales, "as_it_is": as_it_is, "uneven": uneven}


def loaded(name: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    with Checkpointer(f"{ROOT}/{name}") as checkpointer:
        found = checkpointer.load(state, **options)
        assert found is not None
        assert (found.missing, found.mismatched, found.per_rank_left) == ((), (), ())
    return state


def refused(name: str, state: dict[str, Any], words: str) -> None:
    others = "rank 0 lists its own"  # what the other ranks say
    with pytest.raises((MismatchError, PartlyLoadedError), match=f"{words}|{others}"):
        loaded(name, state)


def check(saved_by: int) -> None:
    for name, one in loaded("sliced", sliced(1)).items():
        expected = sliced(0)[name]
        assert bits(one) == bits(expected), (name, bits(one)[1], bits(expected)[1])
    if ranks == saved_by or saved_by < 4:
        assert bits(loaded("uneven", uneven(1))["x"]) == bits(uneven(0)["x"])
    else:  # one of four ranks has one row, and cannot tell what its scale stands for
        refused("uneven", uneven(1), AS_MANY)
    if ranks % saved_by == 0:
        at = rank * saved_by // ranks
        size = ROWS // saved_by
        quantized = quantized_alone(plain(0)[at * size : (at + 1) * size])
        within = rank * (ROWS // ranks) - at * size
        expected = quantized[within : within + ROWS // ranks, :] if ranks > saved_by else quantized
        assert bits(loaded("own_scales", own_scales(1))["x"]) == bits(expected)
    elif ranks == 1:  # it takes over all scales
        expected = torch.cat([quantized_alone(part).dequantize() for part in plain(0).split(ROWS // saved_by)])
        assert torch.equal(loaded("own_scales", own_scales(1))["x"]._local_tensor.dequantize(), expected)
    else:
        refused("own_scales", own_scales(1), "had a scale each, and these differ")
    if ranks == saved_by:
        assert bits(loaded("as_it_is", as_it_is(1))["x"]) == bits(as_it_is(0)["x"])
    else:
        refused("as_it_is", as_it_is(1), AS_MANY if saved_by > 1 else "with cast=True, an ordinary tensor")
    whole = {"x": torch.zeros(ROWS, COLUMNS)}
    size = ROWS // saved_by
    parts = [quantized_alone(part).dequantize() for part in plain(0).split(size)]
    assert torch.equal(loaded("own_scales", whole, cast=True)["x"], torch.cat(parts).float())
    if ranks == 1:
        without = {name: make(plain(1)) for name, (make, _) in CASES.items()}  # no DTensors
        found = loaded("sliced", without, strict=False)
        for name, (make, _) in CASES.items():
            assert bits(found[name]) == bits(make(plain(0))), name


def main() -> None:
    dist.init_process_group("gloo")
    if WHAT == "save":
        for name, job in JOBS.items():
            with Checkpointer(f"{ROOT}/{name}") as checkpointer:
                checkpointer.save(1, job(0)).wait()
    else:
        check(int(SAVED_BY))
    dist.barrier()


if __name__ == "__main__":
    main()
