"""The kinds of composite tensors of a Checkpointer: torch's own, and the classes of tensors that are allowed.

Invariants
  ALLOWED-1  Only classes that are allowed, here or by the user, are stored and made. Nothing is imported: a name is looked
      up among the modules that this process has imported.
  ALLOWED-2  A load calls no code that the checkpoint names, except `__tensor_unflatten__` of an allowed class and the
      constructors of allowed classes in its context. It calls the former only when every byte was verified.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkpointd.arguments import shown
from checkpointd.errors import StateError, UsageError
from checkpointd_client.capture.tensor_kinds import four_bit, tiles
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS
from checkpointd_client.capture.tensor_kinds.contexts import name_of
from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind, swap
from checkpointd_client.capture.tensor_kinds.nested import Jagged, StridedNested
from checkpointd_client.capture.tensor_kinds.quantized import Quantized
from checkpointd_client.capture.tensor_kinds.sparse import SparseCompressed, SparseCoo

_FLATTEN, _UNFLATTEN = "__tensor_flatten__", "__tensor_unflatten__"


class WrapperClass(TensorKind):
    """A class of wrapper tensors that follow torch's protocol: `__tensor_flatten__` and `__tensor_unflatten__`."""

    swaps = True

    def __init__(self, cls: Any) -> None:
        self.name, self._class = name_of(cls), cls
        self.rounds = self.name in BLOCKS or self.name not in BUILT_IN  # torchao's weights do not

    def apart(self, tensor: Any) -> Apart:
        names, context = self._flattened(tensor)
        inner = {name: getattr(tensor, name, None) for name in names}
        strange = [name for name, one in inner.items() if not isinstance(one, torch.Tensor) or one is tensor]
        if strange or len(inner) != len(names):
            raise ValueError(f"its {_FLATTEN} names {', '.join(map(repr, strange or names))}, which are not its inner tensors")
        return Apart({name: one for name, one in inner.items() if isinstance(one, torch.Tensor)}, context)

    def _flattened(self, tensor: Any) -> tuple[list[str], object]:
        try:
            names, context = tensor.__tensor_flatten__()
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"its {_FLATTEN} failed: {type(error).__name__}: {error}") from error
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"its {_FLATTEN} returned {shown(names)} in place of the names of its inner tensors")
        return list(names), context

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        stride = torch.empty(facts.shape, device="meta").stride()
        made = self._class.__tensor_unflatten__(dict(inner), context, facts.shape, stride)
        if type(made) is not self._class or (tuple(made.shape), made.dtype) != (facts.shape, facts.dtype):
            found = f"{made.dtype}{list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
            raise ValueError(f"{_UNFLATTEN} of {self.name} made a {found} in place of {facts.dtype}{list(facts.shape)}")
        assert isinstance(made, torch.Tensor)
        return made.requires_grad_() if facts.requires_grad else made

    def refill(self, live: Any, made: torch.Tensor) -> None:
        if self.name in tiles.TILED and tiles.filled(self.apart(live), self.apart(made)):
            return
        swap(live, made)  # its copy_ might keep the context that `live` has

    def plain(self, tensor: Any) -> torch.Tensor:
        dense: torch.Tensor = tensor.dequantize()
        return dense


_COMPRESSED = {
    getattr(torch, kind): SparseCompressed(kind) for kind in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
}
_COO, _JAGGED, _NESTED, _QUANTIZED = SparseCoo(), Jagged(), StridedNested(), Quantized()
_OF_TORCH: Mapping[str, TensorKind] = {k.name: k for k in (_COO, *_COMPRESSED.values(), _JAGGED, _NESTED, _QUANTIZED)}

BUILT_IN: frozenset[str] = frozenset(
    {
        "torchao.optim.subclass_8bit:OptimState8bit",
        "torchao.optim.subclass_4bit:OptimState4bit",
        "torchao.optim.subclass_fp8:OptimStateFp8",
        "torchao.quantization:Float8Tensor",
        "torchao.quantization:Int8Tensor",
        "torchao.quantization:Int4Tensor",
        "torchao.quantization:IntxUnpackedToInt8Tensor",
        "torchao.prototype.mx_formats.mx_tensor:MXTensor",
        "torchao.prototype.mx_formats.nvfp4_tensor:NVFP4Tensor",
        four_bit.NAME,
    }
)
"""Classes of tensors that every Checkpointer allows."""
BUILT_IN_CONTEXTS: frozenset[str] = frozenset(
    {
        "torchao.float8.inference:Float8MMConfig",
        "torchao.prototype.mx_formats.config:ScaleCalculationMode",
        "torchao.prototype.mx_formats.mx_tensor:QuantizeTensorToMXKwargs",
        "torchao.prototype.mx_formats.nvfp4_tensor:QuantizeTensorToNVFP4Kwargs",
        "torchao.quantization.granularity:PerGroup",
        "torchao.quantization.granularity:PerRow",
        "torchao.quantization.granularity:PerTensor",
        "torchao.quantization.quant_primitives:MappingType",
        "torchao.quantization.quantize_.common.kernel_preference:KernelPreference",
        "torchao.quantization.quantize_.workflows.float8.float8_tensor:QuantizeTensorToFloat8Kwargs",
        "torchao.quantization.quantize_.workflows.int8.int8_tensor:QuantizeTensorToInt8Kwargs",
    }
)
"""Classes of values that the context of a built-in class may hold."""


def kind_of_torch(tensor: torch.Tensor) -> TensorKind | None:
    """The kind of a sparse, nested or quantized tensor; None for any other."""
    if tensor.layout is torch.sparse_coo:
        return _COO
    if tensor.layout is not torch.strided:
        return _COMPRESSED.get(tensor.layout) or (_JAGGED if tensor.layout is torch.jagged else None)
    return _NESTED if tensor.is_nested else _QUANTIZED if tensor.is_quantized else None


@dataclass(frozen=True)
class TensorClasses:
    """The classes that may be stored and made. `own`: those that the user allows, by name."""

    own: Mapping[str, type] = field(default_factory=dict)

    @classmethod
    def of(cls, classes: object) -> TensorClasses:
        """The classes of the argument `tensor_classes`. UsageError if one of them is of no kind that can be stored."""
        if isinstance(classes, str | type) or not isinstance(classes, Iterable):
            raise UsageError(
                f"tensor_classes is {shown(classes)}; it must be a list of classes, as in tensor_classes=[MyTensor]"
            )
        own: dict[str, type] = {}
        for one in classes:
            if not isinstance(one, type) or not (_follows_protocol(one) or _is_of_contexts(one) or _is_of_parameters(one)):
                raise UsageError(
                    f"tensor_classes has {shown(one)}; give subclasses of torch.Tensor with {_FLATTEN} and {_UNFLATTEN}, the "
                    "enumerations, dataclasses and namedtuples that these return beside their inner tensors, and subclasses of "
                    "nn.Parameter"
                )
            own[name_of(one)] = one
        return cls(own)

    def allows(self, cls: type) -> bool:
        """Whether values of `cls` may stand in a context."""
        name = name_of(cls)
        return self.own.get(name) is cls or name in BUILT_IN_CONTEXTS

    def kind_of(self, tensor: Any) -> TensorKind | None:
        """The kind of a composite tensor; None if it is none, or of a class that is not allowed."""
        found = kind_of_torch(tensor)
        if found is not None:
            return found
        cls = type(tensor)
        name = name_of(cls)
        allowed = self.own.get(name) is cls or name in BUILT_IN
        return _kind_of_class(cls) if allowed else None

    def is_plain_parameter(self, tensor: Any) -> bool:
        """Whether `tensor` is of an allowed subclass of nn.Parameter whose elements are all that is stored of it."""
        cls = type(tensor)
        return _is_of_parameters(cls) and self.own.get(name_of(cls)) is cls

    def kind(self, name: str) -> TensorKind:
        """The kind that the state tree calls `name`. StateError, with what to do, if it cannot be made here."""
        found = _OF_TORCH.get(name)
        if found is not None:
            return found
        cls = self._find(name, BUILT_IN)
        kind = _kind_of_class(cls)
        if kind is None:
            raise StateError(f"{name} is no class of tensors with {_FLATTEN} and {_UNFLATTEN}")
        return kind

    def in_context(self, name: str) -> type:
        """The class of a value in a context. StateError if it is not allowed, or not imported."""
        return self._find(name, BUILT_IN_CONTEXTS)

    def _find(self, name: str, built_in: frozenset[str]) -> type:
        if name in self.own:
            return self.own[name]
        module, _, path = name.partition(":")
        if name not in built_in:
            last = path.rpartition(".")[2]
            moved = next((ours for ours in self.own if ours.rpartition(".")[2].rpartition(":")[2] == last), None)
            if moved is not None:
                raise StateError(
                    f"it is of the class {name!r:.200}, and tensor_classes has {moved!r:.200}: if that is the same class in "
                    f"another module, set its __module__ to {module!r:.200} and its __qualname__ to {shown(path)} first"
                )
            raise StateError(
                f"it is of the class {name!r:.200}, which is not allowed: if you trust it, pass tensor_classes=[{last:.80}]"
            )
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise StateError(f"it is of the class {name}, which this process has not imported: import {module} before the load")
        return found


ONLY_BUILT_IN = TensorClasses()
"""What is allowed if the user allows no classes of his own."""


def _kind_of_class(cls: type) -> TensorKind | None:
    if name_of(cls) == four_bit.NAME:
        return four_bit.FourBit(cls)
    return WrapperClass(cls) if _follows_protocol(cls) else None


def _follows_protocol(cls: type) -> bool:
    return issubclass(cls, torch.Tensor) and all(callable(getattr(cls, name, None)) for name in (_FLATTEN, _UNFLATTEN))


def _is_of_parameters(cls: type) -> bool:
    return issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not _follows_protocol(cls)


def _is_of_contexts(cls: type) -> bool:
    return issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
