"""Composite tensors for tests: one of each kind of torch, a wrapper class of the user's, and a comparison bit for bit."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.unit.client.capture_and_fill import bytes_of


def quietly(make: Callable[[], Any]) -> Any:
    """torch warns that some kinds are in beta or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _dense(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator) * (torch.rand(4, 6, generator=generator) > 0.4)


def _rows(seed: int) -> list[torch.Tensor]:
    dense = _dense(seed)
    return [dense[:1, :3], dense[1 : 3 + seed % 2, :3]]


def _channels(seed: int, *, floats: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.arange(4) + seed
    return torch.tensor([0.1, 0.2, 0.3, 0.4]) * (seed + 1), zeros.float() if floats else zeros


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "sparse_coo": lambda seed: _dense(seed).to_sparse(),
    "sparse_coo, uncoalesced": lambda seed: torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 0]]), torch.arange(6.0).reshape(3, 2) + seed, (4, 2)
    ),
    "sparse_csr": lambda seed: _dense(seed).to_sparse_csr(),
    "sparse_csc": lambda seed: _dense(seed).to_sparse_csc(),
    "sparse_bsr": lambda seed: _dense(seed).to_sparse_bsr((2, 3)),
    "sparse_bsc": lambda seed: _dense(seed).to_sparse_bsc((2, 3)),
    "jagged": lambda seed: torch.nested.nested_tensor(_rows(seed), layout=torch.jagged),
    "nested": lambda seed: torch.nested.nested_tensor(_rows(seed)),
    "quint8": lambda seed: torch.quantize_per_tensor(_dense(seed), 0.05 * (seed + 1), 3 + seed, torch.quint8),
    "qint8": lambda seed: torch.quantize_per_tensor(_dense(seed), 0.05, 0, torch.qint8),
    "qint32": lambda seed: torch.quantize_per_tensor(_dense(seed), 1e-6, 7, torch.qint32),
    "qint8, per channel": lambda seed: torch.quantize_per_channel(_dense(seed), *_channels(seed), 0, torch.qint8),
    "quint8, float zero points": lambda seed: torch.quantize_per_channel(
        _dense(seed), *_channels(seed, floats=True), 0, torch.quint8
    ),
    "quint4x2": lambda seed: torch.quantize_per_channel(_dense(seed), *_channels(seed, floats=True), 0, torch.quint4x2),
}
"""By name, tensors of every kind that torch has itself. Two seeds give other content, and mostly other sizes inside."""


def made(kind: str, seed: int = 0) -> torch.Tensor:
    tensor: torch.Tensor = quietly(lambda: KINDS[kind](seed))
    return tensor


def facts_of(tensor: Any) -> tuple[Any, ...]:
    """All of a composite tensor, by torch's own methods."""
    head = type(tensor), tensor.layout, tensor.dtype, tensor.requires_grad
    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        return *head, tensor.shape, tensor.is_coalesced(), bytes_of(plain._indices()), bytes_of(plain._values())
    if tensor.layout is torch.jagged:
        held = (tensor._values, tensor._offsets, *(tensor._metadata_cache[key] for key in sorted(tensor._metadata_cache)))
        return *head, tensor._ragged_idx, *((tuple(one.shape), bytes_of(one)) for one in held)
    if tensor.layout is not torch.strided:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        pointers, indices = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        held = tuple(getattr(tensor.detach(), name)() for name in (pointers, indices, "values"))
        return *head, tensor.shape, *((tuple(one.shape), bytes_of(one)) for one in held)
    if tensor.is_nested:
        return *head, *((tuple(one.shape), bytes_of(one.contiguous())) for one in tensor.unbind())
    if tensor.is_quantized:
        if tensor.qscheme() is torch.per_tensor_affine:
            of = (tensor.q_scale(), tensor.q_zero_point())
        else:
            held = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            of = (tensor.q_per_channel_axis(), *((one.dtype, bytes_of(one)) for one in held))
        return *head, tensor.shape, tensor.qscheme(), of, bytes_of(tensor.int_repr())
    return *head, tensor.shape, bytes_of(tensor)


class Rounding(enum.Enum):
    DOWN = 1
    NEAREST = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    block: int
    rounding: Rounding = Rounding.NEAREST


class Halves(torch.Tensor):
    """A wrapper class as a user may write it: an fp32 tensor kept as bf16 and what that loses."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor, recipe: Any) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32, device=high.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, high: torch.Tensor, low: torch.Tensor, recipe: Any) -> None:
        self.high, self.low, self.recipe = high, low, recipe

    @classmethod
    def of(cls, plain: torch.Tensor, recipe: Any = Recipe(8)) -> Halves:  # it is frozen
        high = plain.bfloat16()
        return cls(high, (plain - high.float()).bfloat16(), recipe)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], {"recipe": self.recipe}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["high"], inner["low"], context["recipe"])

    def dequantize(self) -> torch.Tensor:
        return self.high.float() + self.low.float()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if function is aten.detach.default:
            return cls(args[0].high.detach(), args[0].low.detach(), args[0].recipe)
        if function is aten.copy_.default and isinstance(args[0], cls):
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1], args[0].recipe)
            args[0].high.copy_(source.high)
            args[0].low.copy_(source.low)
            return args[0]
        plain = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


class PerRow(Halves):
    """A class with a number for each row: it is not known which ranks have which of its numbers."""

    @classmethod
    def of(cls, plain: torch.Tensor, recipe: Any = None) -> PerRow:
        largest = plain.abs().amax(1, keepdim=True)
        return cls(plain / largest, largest, recipe)

    def dequantize(self) -> torch.Tensor:
        return self.high * self.low


OWN = (Halves, PerRow, Recipe, Rounding)


def halves(seed: int = 0, shape: tuple[int, ...] = (3, 5), recipe: Any = Recipe(8)) -> Halves:  # it is frozen
    return Halves.of(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), recipe)


def per_row(rank: int, at: float = 0.0) -> Any:
    """A tensor of 5 x 3 as a DTensor of `PerRow` on this rank, one of two."""
    plain = torch.arange(15.0).reshape(5, 3) / 7 + 1 + at
    mesh = init_device_mesh("cpu", (2,))
    made: Any = DTensor.from_local(
        plain.chunk(2)[rank], mesh, [Shard(0)], run_check=False, shape=plain.shape, stride=plain.stride()
    )
    made._local_tensor = PerRow.of(plain.chunk(2)[rank])
    return made
