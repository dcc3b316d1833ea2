"""The 4-bit parameters of bitsandbytes: packed integers, and a quantization state that is no tensor itself."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from typing import Any

import torch

from checkpointd_client.capture.tensor_kinds.contexts import name_of
from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind

NAME = "bitsandbytes.nn.modules:Params4bit"
_PLAIN = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
_PACKED = ".quant_state.bitsandbytes__"
_DERIVED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_OF_STATE = ("blocksize", "quant_type", "dtype", "shape")


class FourBit(TensorKind):
    """`data`: the packed integers. `quant_state.absmax`, `.code`, and for nested statistics `.offset`, `.state2.absmax` and
    `.state2.code`: the tensors of its quantization state. Its numbers are in the context.
    """

    names = frozenset(
        {"data", *(f"quant_state.{name}" for name in ("absmax", "code", "offset", "state2.absmax", "state2.code"))}
    )
    needed = frozenset({"data"})

    def __init__(self, cls: Any) -> None:
        self.name, self._class = name_of(cls), cls

    def apart(self, tensor: Any) -> Apart:
        inner = {"data": tensor.detach().as_subclass(torch.Tensor)}
        context: dict[str, Any] = {name: getattr(tensor, name) for name in _PLAIN}
        state = tensor.quant_state
        if state is None:
            return Apart(inner, context)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError("a forward pass has packed it for this CPU: call state_dict() of its module, which unpacks it")
        inner |= {"quant_state.absmax": state.absmax, "quant_state.code": state.code}
        context["state"] = _numbers(state)
        if state.state2 is not None:
            inner |= {"quant_state.offset": state.offset}
            inner |= {f"quant_state.state2.{name}": getattr(state.state2, name) for name in ("absmax", "code")}
            context["state2"] = _numbers(state.state2)
        return Apart(inner, context)

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        options = {name: context[name] for name in _PLAIN}
        state = _state(inner, context) if "state" in context else None
        made: torch.Tensor = self._class(inner["data"], requires_grad=facts.requires_grad, quant_state=state, **options)
        return made

    def refill(self, live: Any, made: Any) -> None:
        live.data = made.detach().as_subclass(torch.Tensor)
        for name in (*_PLAIN, "quant_state"):
            setattr(live, name, getattr(made, name))
        if getattr(live, "module", None) is not None:
            live.module.quant_state = live.quant_state

    def packed_shape(self, context: Any) -> object:
        state = context.get("state") if isinstance(context, dict) else None
        return state.get("shape") if isinstance(state, dict) else None

    def plain(self, tensor: Any) -> torch.Tensor:
        functional = sys.modules["bitsandbytes.functional"]
        dense: torch.Tensor = tensor.detach().as_subclass(torch.Tensor)
        return dense if tensor.quant_state is None else functional.dequantize_4bit(dense, tensor.quant_state)


def is_derived(key: str, tensors: Mapping[str, Any]) -> bool:
    """Whether the tensor at `key` of a module's state_dict is only made for it, from the numbers of a 4-bit parameter there."""
    name, found, _ = key.partition(_PACKED)
    return bool(found) and name_of(type(tensors.get(name))) == NAME


def is_part(key: str, parameters: Container[str]) -> bool:
    """Whether `key` of a stored module is one that its state_dict made for one of the 4-bit `parameters`."""
    name, last = key.partition(_PACKED)[0], key.rpartition(".")[2]
    return (name != key and name in parameters) or (last in _DERIVED and key.removesuffix(f".{last}") in parameters)


def _numbers(state: Any) -> dict[str, Any]:
    found = {name: getattr(state, name) for name in _OF_STATE}
    return found | {"shape": None if state.shape is None else list(state.shape)}


def _state(inner: Inner, context: Any) -> Any:
    """The quantization state. Its class comes with that of the parameter, which is allowed."""
    make: Any = sys.modules["bitsandbytes.functional"].QuantState
    nested = None
    if "state2" in context:
        nested = make(inner["quant_state.state2.absmax"], code=inner["quant_state.state2.code"], **_options(context["state2"]))
    options = _options(context["state"])
    offset = inner.get("quant_state.offset")
    return make(inner["quant_state.absmax"], code=inner["quant_state.code"], offset=offset, state2=nested, **options)


def _options(numbers: Any) -> dict[str, Any]:
    shape = numbers["shape"]
    return {name: numbers[name] for name in _OF_STATE} | {"shape": None if shape is None else torch.Size(shape)}
