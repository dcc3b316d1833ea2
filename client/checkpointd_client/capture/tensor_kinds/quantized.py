"""torch's quantized tensors: integers with a scale and a zero point, for the whole tensor or for each channel."""

from __future__ import annotations

import math
from typing import Any

import torch

from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind

_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_PACKED = frozenset({torch.quint4x2, torch.quint2x4})
"""dtypes of several elements a byte. Their integers are stored as the bytes of the memory."""
_AXIS = "axis"


class Quantized(TensorKind):
    """The integers as they lie in memory. Scales and zero points of channels are inner tensors; one alone is in the context."""

    name = "quantized"
    names = frozenset({"integers", "scales", "zero_points"})
    needed = frozenset({"integers"})

    def apart(self, tensor: Any) -> Apart:
        plain = tensor.detach()
        integers = _integers(plain)
        if plain.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return Apart({"integers": integers}, {"scale": plain.q_scale(), "zero_point": plain.q_zero_point()})
        channels = {"scales": plain.q_per_channel_scales(), "zero_points": plain.q_per_channel_zero_points()}
        return Apart({"integers": integers, **channels}, {_AXIS: plain.q_per_channel_axis()})

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        device = inner["integers"].device
        made: torch.Tensor
        if _AXIS in context:
            axis, scales, zeros = int(context[_AXIS]), inner["scales"], inner["zero_points"]
            if not 0 <= axis < len(facts.shape) or not scales.shape == zeros.shape == (facts.shape[axis],):
                raise ValueError("the scales do not fit the shape")
            made = torch._empty_per_channel_affine_quantized(
                facts.shape, scales=scales, zero_points=zeros, axis=axis, dtype=facts.dtype, device=device
            )
        else:
            scale, zero = float(context["scale"]), int(context["zero_point"])
            made = torch._empty_affine_quantized(facts.shape, scale=scale, zero_point=zero, dtype=facts.dtype, device=device)
        memory = _integers(made)
        if (memory.shape, memory.dtype) != (inner["integers"].shape, inner["integers"].dtype):
            raise ValueError(f"its integers are {inner['integers'].dtype}{list(inner['integers'].shape)}")
        memory.copy_(inner["integers"])
        return made

    def refill(self, live: torch.Tensor, made: torch.Tensor) -> None:
        live.data = made  # copy_() refuses another scheme, such as channels in place of the whole tensor

    def plain(self, tensor: Any) -> torch.Tensor:
        dense: torch.Tensor = tensor.dequantize()
        return dense


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a quantized tensor as integers."""
    storage = tensor.untyped_storage()
    if tensor.dtype not in _PACKED:
        view = torch.empty(0, dtype=_INTEGERS[tensor.dtype], device=tensor.device)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.storage_offset() or not tensor.is_contiguous():
        raise ValueError(f"a part of a {tensor.dtype} tensor, which has several elements a byte: store .clone() of it")
    per_byte = 2 if tensor.dtype == torch.quint4x2 else 4
    count = math.ceil(tensor.numel() / per_byte)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (count,), (1,))
