"""Tensors of torchao and bitsandbytes come back bit for bit, in their class or as ordinary tensors."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkpointd.errors import MismatchError
from tests.unit.client.capture_and_fill import bytes_of, save

torchao_optim = pytest.importorskip("torchao.optim", reason="needs torchao: make test-all installs it")
quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: make test-all installs it")
mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao: make test-all installs it")
bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: make test-all installs it")

pytestmark = pytest.mark.filterwarnings("ignore")
LOW_BIT = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]


def job(optimizer: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    return model, getattr(torchao_optim, optimizer)(model.parameters(), lr=1e-2)


def stepped(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(3, 64)).square().sum().backward()
        with unittest.mock.patch("torch.compile", lambda function, **_: function):  # compiling takes a minute
            optimizer.step()


def bits_of(tensor: Any) -> list[Any]:
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return [tensor.dtype, bytes_of(tensor)]
    names, context = tensor.__tensor_flatten__()
    return [type(tensor), repr(context), *(bits_of(getattr(tensor, name)) for name in names)]


@pytest.mark.parametrize("name", LOW_BIT)
def test_training_goes_on_bit_for_bit_after_a_load(name: str) -> None:
    model, optimizer = job(name)
    stepped(model, optimizer, 1, 2, 3, 4)
    saved = save({"model": model, "optimizer": optimizer})
    stepped(model, optimizer, 5, 6, 7, 8)
    for has_state in (False, True):
        again, other = job(name)
        if has_state:
            stepped(again, other, 9)
        before = [other.state[p].get("exp_avg") for p in again.parameters()]
        saved.load({"model": again, "optimizer": other})
        if has_state:
            assert all(other.state[p]["exp_avg"] is was for p, was in zip(again.parameters(), before, strict=True))
        stepped(again, other, 5, 6, 7, 8)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert bytes_of(one) == bytes_of(two)
            for key, value in optimizer.state[one].items():
                assert bits_of(other.state[two][key]) == bits_of(value)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_become_ordinary_tensors_and_back(name: str) -> None:
    model, optimizer = job(name)
    stepped(model, optimizer, 1, 2)
    state = optimizer.state[model[0].weight]["exp_avg"]
    saved = save({"x": state})
    target = {"x": torch.zeros(128, 64)}
    with pytest.raises(MismatchError, match="cast=True"):
        saved.load(target)
    saved.load(target, cast=True)
    assert bytes_of(target["x"]) == bytes_of(state.dequantize())
    # Back: as torchao itself rounds.
    expected = type(state).zeros((128, 64), *([True] if hasattr(state, "signed") else []), dtype=torch.float32)
    expected.copy_(target["x"])
    back = {"x": type(state).zeros((128, 64), *([True] if hasattr(state, "signed") else []), dtype=torch.float32)}
    save({"x": target["x"]}).load(back, cast=True)
    assert bits_of(back["x"]) == bits_of(expected)


def test_an_ordinary_optimizer_without_state_gets_ordinary_tensors_of_low_bit_ones() -> None:
    """Its first step makes its state, so at a load there is no tensor yet that has a class."""
    model, optimizer = job("AdamW8bit")
    stepped(model, optimizer, 1, 2)
    saved = save({"model": model, "optimizer": optimizer})
    for is_on_meta in (False, True):
        with torch.device("meta" if is_on_meta else "cpu"):
            again, _ = job("AdamW8bit")
        other = torch.optim.AdamW(again.parameters(), lr=1e-2)
        with pytest.raises(MismatchError, match=r"OptimState8bit tensor .* is stored, and a tensor of float32.*cast=True"):
            saved.load({"model": again, "optimizer": other})
        saved.load({"model": again, "optimizer": other}, cast=True)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            for key, value in optimizer.state[one].items():
                expected = value.dequantize() if hasattr(value, "dequantize") and type(value) is not torch.Tensor else value
                assert bits_of(other.state[two][key]) == bits_of(expected)
        stepped(again, other, 3)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "Float8WeightOnly": lambda: quantization.Float8WeightOnlyConfig(),
    "Int8WeightOnly": lambda: quantization.Int8WeightOnlyConfig(),
    "Int8Dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    "IntxWeightOnly": lambda: quantization.IntxWeightOnlyConfig(),
}


def quantized(config: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 64).bfloat16())
    if config == "MX":
        model[0].weight = nn.Parameter(mx.MXTensor.to_mx(model[0].weight.detach(), torch.float8_e4m3fn), requires_grad=False)
    else:
        quantization.quantize_(model, WEIGHTS[config]())
    return model


@pytest.mark.parametrize("config", [*WEIGHTS, "MX"])
def test_quantized_weights_come_back_in_place_anew_and_as_ordinary_ones(config: str) -> None:
    model = quantized(config, 1)
    weight: Any = model[0].weight
    saved = save({"model": model})
    other = quantized(config, 2)
    saved.load({"model": other})
    assert bits_of(other[0].weight) == bits_of(weight)
    made: dict[str, Any] = {}
    saved.load(made)
    assert bits_of(made["model"]["0.weight"]) == bits_of(weight)
    plain = nn.Sequential(nn.Linear(128, 64).bfloat16())
    with pytest.raises(MismatchError, match="cast=True"):
        saved.load({"model": plain})
    saved.load({"model": plain}, cast=True)
    assert bytes_of(plain[0].weight) == bytes_of(weight.dequantize().bfloat16())


def test_ordinary_numbers_are_not_rounded_into_quantized_weights() -> None:
    saved = save({"model": nn.Sequential(nn.Linear(128, 64).bfloat16())})
    with pytest.raises(MismatchError, match=r"is stored, and a torchao.*Int8Tensor tensor"):
        saved.load({"model": quantized("Int8WeightOnly", 1)}, cast=True)


def test_scales_that_are_equal_become_one() -> None:
    """As ranks store a weight with one scale that they have split."""
    whole = quantization.Float8Tensor.from_hp(torch.randn(8, 64), granularity=quantization.PerTensor())
    stored = type(whole)(whole.qdata, whole.scale.repeat(2, 1), [4, 64], dtype=whole.dtype)
    live = quantization.Float8Tensor.from_hp(torch.randn(8, 64), granularity=quantization.PerTensor())
    save({"x": stored}).load({"x": live})
    assert bits_of(live) == bits_of(whole)
    other = type(whole)(whole.qdata, torch.tensor([[1.0], [2.0]]), [4, 64], dtype=whole.dtype)
    save({"x": other}).load({"x": live})
    assert bits_of(live) == bits_of(other)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_four_bit_parameters_come_back_in_place_and_anew(quant_type: str, nested: bool) -> None:
    def module(seed: int) -> Any:
        torch.manual_seed(seed)
        linear = bnb.nn.Linear4bit(64, 128, bias=True, compress_statistics=nested, quant_type=quant_type)
        return linear.to("cpu")

    def four_bits(parameter: Any) -> tuple[Any, ...]:
        state = parameter.quant_state
        inner = () if state.state2 is None else (bytes_of(state.offset), bytes_of(state.state2.absmax), state.state2.blocksize)
        data = parameter.detach().as_subclass(torch.Tensor)
        return bytes_of(data), bytes_of(state.absmax), bytes_of(state.code), state.shape, state.dtype, state.quant_type, inner

    one, two = module(1), module(2)
    assert one.weight.quant_state is not None
    saved = save({"model": one, "weight": one.weight})
    saved.load({"model": two, "weight": two.weight})
    assert four_bits(two.weight) == four_bits(one.weight)
    made: dict[str, Any] = {}
    saved.load(made)
    assert type(made["weight"]) is bnb.nn.Params4bit
    assert four_bits(made["weight"]) == four_bits(one.weight)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_parameters_become_ordinary_ones(*, nested: bool) -> None:
    layer = bnb.nn.Linear4bit(64, 128, compress_statistics=nested, quant_type="nf4").to("cpu")
    expected = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    saved = save({"model": layer, "weight": layer.weight})
    target = {"model": nn.Linear(64, 128), "weight": torch.zeros(128, 64)}
    with pytest.raises(MismatchError, match="cast=True"):
        saved.load(target)
    saved.load(target, cast=True)
    assert bytes_of(target["model"].weight) == bytes_of(target["weight"]) == bytes_of(expected)


def test_a_4_bit_weight_of_another_shape_with_as_many_bytes_is_a_mismatch() -> None:
    def quantized(inputs: int, outputs: int) -> Any:
        layer = bnb.nn.Linear4bit(inputs, outputs, bias=False)
        layer.load_state_dict(nn.Linear(inputs, outputs, bias=False).state_dict())
        return layer.to("cpu")

    saved = save({"model": quantized(64, 32)})
    with pytest.raises(MismatchError, match=r"packed from the shape \[32, 64\], and this one from \[64, 32\]"):
        saved.load({"model": quantized(32, 64)})
