"""BINDING-2, BINDING-4 and BINDING-5 of bind.py: the strides and the dtype of what a load makes anew, or converts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from tests.unit.client.capture_and_fill import same, save

Make = Callable[[Any], torch.optim.Optimizer]


class Keeping(torch.optim.Optimizer):
    """An optimizer whose state is whatever a test puts there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        pass


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.125, fused=True)


def fused_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5, fused=True)


def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def channels_last() -> torch.Tensor:
    return torch.zeros(8, 3, 2, 2).to(memory_format=torch.channels_last)


def turned() -> torch.Tensor:
    return torch.zeros(3, 5).t()


def of_one_pixel() -> torch.Tensor:
    """Its elements lie in a row, but its strides are not those of a new tensor."""
    return torch.zeros(8, 3, 1, 1).to(memory_format=torch.channels_last)


def part_of_a_larger_one() -> torch.Tensor:
    return torch.zeros(4, 6).t()[:3]


def module_of(tensor: torch.Tensor) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    return module


# --- strides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [channels_last, turned, of_one_pixel, part_of_a_larger_one])
@pytest.mark.parametrize("make", [fused_adam, fused_momentum])
def test_binding_5_new_state_of_a_parameter_that_is_not_contiguous_has_its_strides_and_training_goes_on_to_the_bit(
    make: Make, layout: Callable[[], torch.Tensor]
) -> None:
    model, again = module_of(layout()), module_of(layout())
    optimizer, other = make(model.parameters()), make(again.parameters())
    for seed in (1, 2):
        step(model.weight, optimizer, seed)
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    strides = {
        key: value.stride()
        for key, value in other.state[again.weight].items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    assert strides
    assert set(strides.values()) == {torch.zeros_like(again.weight).stride()}
    for seed in (3, 4):
        step(model.weight, optimizer, seed)
        step(again.weight, other, seed)
    assert same(again.weight.detach(), model.weight.detach())


def test_binding_5_strides_follow_the_parameter_that_is_there_whichever_was_saved() -> None:
    model, again = module_of(torch.zeros(8, 3, 2, 2)), module_of(channels_last())
    optimizer, other = fused_adam(model.parameters()), fused_adam(again.parameters())
    step(model.weight, optimizer, 1)
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    found = other.state[again.weight]["exp_avg"]
    assert found.stride() == again.weight.stride()
    assert same(found, optimizer.state[model.weight]["exp_avg"])


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def on(mesh: DeviceMesh, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=local.shape, stride=local.stride())


def test_binding_5_the_local_part_of_new_state_has_the_strides_of_the_local_part_of_its_parameter(one_rank: DeviceMesh) -> None:
    model, again = module_of(on(one_rank, channels_last())), module_of(on(one_rank, channels_last()))
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"buffer": torch.zeros_like(model.weight)}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    found = other.state[again.weight]["buffer"]
    assert isinstance(found, DTensor)
    assert found._local_tensor.stride() == torch.zeros_like(again.weight)._local_tensor.stride() == channels_last().stride()


def test_binding_2_what_was_tied_to_a_part_of_it_stays_tied_although_it_is_contiguous_then() -> None:
    model, again = module_of(turned()), module_of(turned())
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    buffer = torch.arange(15.0).view(5, 3)
    optimizer.state[model.weight] = {"buffer": buffer, "row": buffer[1]}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    found = other.state[again.weight]
    assert same(found, optimizer.state[model.weight])
    found["buffer"][1].fill_(7)
    assert found["row"].tolist() == [7, 7, 7]


@pytest.mark.parametrize("cast", [False, True])
def test_binding_5_state_that_cannot_be_filled_is_replaced_by_its_like(cast: bool) -> None:
    """It was expanded: its elements share memory."""
    dtype = torch.bfloat16 if cast else torch.float32
    model, again = module_of(turned()), module_of(turned().to(dtype))
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"buffer": torch.arange(15.0).view(5, 3)}
    other.state[again.weight] = {"buffer": torch.zeros(3, dtype=dtype).expand(5, 3)}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other}, cast=cast)
    found = other.state[again.weight]["buffer"]
    assert (found.dtype, found.tolist()) == (dtype, torch.arange(15.0).view(5, 3).tolist())


def test_binding_5_state_that_was_apart_and_is_tied_now_is_replaced_in_its_strides() -> None:
    model, again = module_of(turned()), module_of(turned())
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"one": torch.ones_like(turned()), "two": torch.zeros_like(turned())}
    other.state[again.weight] = dict.fromkeys(("one", "two"), turned())
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    found = other.state[again.weight]
    assert same(found, optimizer.state[model.weight])
    assert {value.stride() for value in found.values()} == {turned().stride()}


class Object:
    """An object that keeps what its state_dict() gave it."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def numbered(sizes: list[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "turned": lambda: numbered([3, 5]).t(),
    "channels_last": lambda: numbered([2, 3, 4, 5]).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: numbered([2, 3, 2, 2, 2]).to(memory_format=torch.channels_last_3d),
    "any_order": lambda: numbered([2, 3, 4]).permute(1, 2, 0),
    "of_one_row": lambda: numbered([4, 1]).t(),
    "of_one_column": lambda: torch.linalg.qr(numbered([4, 1]))[0],
    "eigenvectors": lambda: torch.linalg.eigh(numbered([3, 3]) + numbered([3, 3]).t())[1],
    "empty": lambda: torch.empty(3, 0, 2).permute(2, 1, 0),
    "bfloat16": lambda: numbered([3, 5]).bfloat16().t(),
    "conjugate": lambda: torch.complex(numbered([3, 5]), numbered([3, 5])).t().conj(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_binding_5_any_dense_layout_comes_back_wherever_it_was(name: str) -> None:
    one = LAYOUTS[name]()
    nested: dict[str, Any] = {"inner": [one, (LAYOUTS[name](), {"deep": LAYOUTS[name]()})]}
    model, again = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"q": one.real, "many": [one.real, None]}
    mine, empty = Object(), dict[str, Any]()
    state = {"object": Object(nested), "dict": nested, "m": model, "o": optimizer}
    saved = save(state, {"extra": one})
    client = saved.load({"object": mine, "dict": empty, "m": again, "o": other})
    found = [mine.value["inner"][0], mine.value["inner"][1][0], mine.value["inner"][1][1]["deep"]]
    found += [empty["inner"][0], empty["inner"][1][1]["deep"], client["extra"]]
    for value in found:
        assert value.stride() == one.stride()
        assert torch.equal(value, one)
    for value in (other.state[again.weight]["q"], other.state[again.weight]["many"][0]):
        assert value.stride() == torch.empty_like(one.real).stride()
        assert torch.equal(value, one.real)


def test_binding_5_existing_state_in_other_strides_is_replaced() -> None:
    model, again = nn.Linear(3, 5), nn.Linear(3, 5)
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"turned": turned(), "plain": torch.ones(5, 3)}
    other.state[again.weight] = {"turned": torch.ones(5, 3), "plain": torch.zeros(3, 5).t()}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    found = other.state[again.weight]
    assert found["turned"].stride() == turned().stride()
    assert found["plain"].is_contiguous()
    assert same(found, optimizer.state[model.weight])


def test_binding_5_a_part_of_a_sharded_tensor_keeps_the_order_of_its_dimensions(one_rank: DeviceMesh) -> None:
    model, again = module_of(on(one_rank, torch.ones(5, 3))), module_of(on(one_rank, torch.zeros(5, 3)))
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    optimizer.state[model.weight] = {"q": on(one_rank, turned())}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other})
    assert other.state[again.weight]["q"].to_local().stride() == turned().stride()


def test_binding_5_an_array_comes_back_in_its_order() -> None:
    mine = Object()
    save({"object": Object(np.asfortranarray(np.arange(6.0).reshape(2, 3)))}).load({"object": mine})
    assert mine.value.flags.f_contiguous
    assert mine.value.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(("live", "stride"), [(torch.ones(5, 3), (1, 1)), (np.ones(3, "<M8[s]"), (8, 1))])
def test_strides_that_cannot_be_are_damage(live: Any, stride: tuple[int, ...]) -> None:
    saved = save({"object": Object(live)})
    forged = replace(saved, tree=with_stride(saved.tree, stride))
    with pytest.raises(FormatError, match="strides"):
        forged.prepare({"object": Object()})


def with_stride(node: tree.Node, stride: tuple[int, ...]) -> tree.Node:
    if isinstance(node, tree.Tensor | tree.Array):
        return msgspec.structs.replace(node, stride=stride)
    if isinstance(node, tree.Dict):
        return tree.Dict(node.kind, tuple((key, with_stride(child, stride)) for key, child in node.items))
    return node


# --- dtypes ----------------------------------------------------------------------------------------------------------

EXACT = 1.001
"""No number of bfloat16, nor of float16."""


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_binding_4_tied_when_saved_and_apart_now_in_two_dtypes_each_is_converted_from_the_stored_values(
    one_rank: DeviceMesh, dtypes: tuple[str, str], is_sharded: bool
) -> None:
    tied = torch.full((4, 3), EXACT)
    target: dict[str, Any] = {
        name: torch.zeros(4, 3, dtype=getattr(torch, dtype)) for name, dtype in zip("ab", dtypes, strict=True)
    }
    if is_sharded:
        target["b"] = on(one_rank, target["b"])
    save({"a": tied, "b": tied}).load(target, cast=True)
    for value in target.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        assert same(local, tied.to(value.dtype))


def test_binding_4_new_state_in_another_dtype_than_live_memory_of_the_same_values_is_tied_to_its_like() -> None:
    model, again = module_of(torch.zeros(2, 2)), module_of(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    buffer = torch.full((2, 2), EXACT)
    optimizer.state[model.weight] = {"one": buffer, "two": buffer}
    average = torch.zeros(2, 2)
    save({"average": buffer, "m": model, "o": optimizer}).load({"average": average, "m": again, "o": other}, cast=True)
    found = other.state[again.weight]
    assert same(average, buffer)
    assert same(found["one"], buffer.bfloat16())
    assert found["one"].data_ptr() == found["two"].data_ptr() != average.data_ptr()


def test_the_state_of_a_parameter_is_cast_with_it() -> None:
    model, again = module_of(torch.zeros(2, 2)), module_of(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer, other = fused_adam(model.parameters()), fused_adam(again.parameters())
    step(model.weight, optimizer, 1)
    save({"m": model, "o": optimizer}).load({"m": again, "o": other}, cast=True)
    assert same(other.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"].bfloat16())
    step(again.weight, other, 2)


def test_a_step_count_is_never_cast() -> None:
    """That of a fused optimizer lies beside its parameter, which has no dimension here either."""
    model, again = module_of(torch.tensor(1.0)), module_of(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizer, other = fused_adam(model.parameters()), fused_adam(again.parameters())
    step(model.weight, optimizer, 1)
    optimizer.state[model.weight]["step"].fill_(1001)
    save({"m": model, "o": optimizer}).load({"m": again, "o": other}, cast=True)
    found = other.state[again.weight]
    assert (found["step"].dtype, float(found["step"])) == (torch.float32, 1001)
    assert found["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_that_was_of_another_dtype_than_its_parameter_keeps_it(dtype: torch.dtype) -> None:
    model, again = module_of(torch.zeros(2, 2, dtype=torch.bfloat16)), module_of(torch.zeros(2, 2, dtype=dtype))
    optimizer, other = Keeping(model.parameters()), Keeping(again.parameters())
    follows = torch.ones(2, 2, dtype=torch.bfloat16)
    optimizer.state[model.weight] = {"master": torch.full((2, 2), EXACT), "follows": follows}
    save({"m": model, "o": optimizer}).load({"m": again, "o": other}, cast=True)
    found = other.state[again.weight]
    assert same(found["master"], torch.full((2, 2), EXACT))
    assert found["follows"].dtype == dtype
