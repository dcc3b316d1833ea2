"""Nested tensors: jagged ones, and those of torch's older strided layout."""

from __future__ import annotations

from typing import Any

import torch

from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind, swap

_LENGTHS = "lengths"


class Jagged(TensorKind):
    """The values of all components one after the other, and the offsets at which each begins.

    The shortest and the longest length, if torch has noted them, are the first sizes of empty tensors.
    """

    name = "jagged"
    names = frozenset({"values", "offsets", _LENGTHS, "min_seqlen_tensor", "max_seqlen_tensor"})
    needed = frozenset({"values", "offsets"})
    swaps = True

    def apart(self, tensor: Any) -> Apart:
        names, context = tensor.__tensor_flatten__()
        inner = {name.removeprefix("_"): getattr(tensor, name).detach() for name in names}
        # Two nested tensors fit each other only if they have the same offsets object, so this is not detached.
        inner["offsets"] = tensor._offsets
        return Apart(inner, {"ragged_idx": context["ragged_idx"]})

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        from torch.nested._internal.nested_tensor import NestedTensor

        self.check(facts, inner, context)
        meta = {"ragged_idx": int(context["ragged_idx"]), "requires_grad": facts.requires_grad}
        made: torch.Tensor = NestedTensor.__tensor_unflatten__(
            {f"_{name}": one for name, one in inner.items()}, meta, None, None
        )
        return made

    def refill(self, live: torch.Tensor, made: torch.Tensor) -> None:
        swap(live, made)

    def check(self, facts: OuterFacts, inner: Inner, context: Any) -> None:
        values, offsets, lengths = inner["values"], inner["offsets"], inner.get(_LENGTHS)
        dim = int(context["ragged_idx"]) - 1
        if offsets.dim() != 1 or offsets.numel() < 1 or not 0 <= dim < values.dim():
            raise ValueError("the offsets do not fit the values")
        starts, ends = offsets[:-1], offsets[1:] if lengths is None else offsets[:-1] + lengths
        if bool((starts < 0).any()) or bool((ends < starts).any()) or bool((ends > values.shape[dim]).any()):
            raise ValueError("offsets point outside the values")

    def plain(self, tensor: Any) -> torch.Tensor:
        raise ValueError("a nested tensor has no plain shape")


class StridedNested(TensorKind):
    """One buffer, in which each component lies with sizes, strides and an offset of its own."""

    name = "nested"
    names = needed = frozenset({"buffer"})
    swaps = True

    def apart(self, tensor: Any) -> Apart:
        plain, count = tensor.detach(), tensor.size(0)
        context = {
            "sizes": plain._nested_tensor_size().tolist() if count else [],  # torch has no table of none
            "strides": plain._nested_tensor_strides().tolist() if count else [],
            "offsets": plain._nested_tensor_storage_offsets().tolist(),
        }
        buffer = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        count = plain.untyped_storage().nbytes() // tensor.itemsize
        return Apart({"buffer": buffer.set_(plain.untyped_storage(), 0, (count,), (1,))}, context)

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        self.check(facts, inner, context)
        parts = (torch.tensor(context[name], dtype=torch.int64) for name in ("sizes", "strides", "offsets"))
        made: torch.Tensor
        if context["sizes"]:
            made = torch._nested_view_from_buffer(inner["buffer"], *parts)
        else:
            made = torch.nested.nested_tensor([], dtype=facts.dtype, device=inner["buffer"].device)
        return made.requires_grad_() if facts.requires_grad else made

    def refill(self, live: torch.Tensor, made: torch.Tensor) -> None:
        swap(live, made)

    def check(self, facts: OuterFacts, inner: Inner, context: Any) -> None:
        sizes, strides, offsets = context["sizes"], context["strides"], context["offsets"]
        count = inner["buffer"].numel()
        for size, stride, offset in zip(sizes, strides, offsets, strict=True):
            last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= count):
                raise ValueError("a component lies outside the buffer")

    def plain(self, tensor: Any) -> torch.Tensor:
        raise ValueError("a nested tensor has no plain shape")
