"""META-1 and META-2 of materialise.py: modules on the meta device get memory for what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from checkpointd.errors import MismatchError, StateError
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from tests.unit.client.capture_and_fill import bytes_of, save
from tests.unit.client.composite_tensors import OWN, Halves, Recipe, facts_of, halves, made, quietly


@pytest.fixture(name="one_rank")
def in_a_group_of_one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """A tied weight, a frozen one, a buffer, a stride that is not contiguous, and bf16."""

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.short = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
        if extra:
            self.register_buffer("angles", torch.arange(3.0), persistent=False)


def on_meta(**options: bool) -> Model:
    with torch.device("meta"):
        return Model(**options)


def plain(module: Model) -> Model:
    return module


def sharded(module: Model) -> Model:
    fully_shard(module.norm)
    return module


Wrap = Callable[[Model], Model]


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [plain, sharded])
def test_a_module_on_the_meta_device_gets_memory_in_the_objects_that_it_has(wrap: Wrap) -> None:
    model = Model()
    saved = save({"m": model})
    made = wrap(on_meta())
    before = dict(made.named_parameters())
    saved.load({"m": made})
    assert made.head.weight is made.embedding.weight
    for name, parameter in made.named_parameters():
        was = model.get_parameter(name)
        assert parameter is before[name]
        assert (bytes_of(whole(parameter)), parameter.dtype) == (bytes_of(was), was.dtype)
        assert (parameter.requires_grad, parameter.stride()) == (was.requires_grad, was.stride())
        assert isinstance(parameter, nn.Parameter)
        assert parameter.device.type == "cpu"
    for name, buffer in made.named_buffers():
        assert bytes_of(whole(buffer)) == bytes_of(model.get_buffer(name))
    made.norm(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("first", ["m", "o"])
def test_an_optimizer_that_was_made_on_the_meta_device_goes_on_as_if_it_had_not(first: str) -> None:
    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    saved = save({"m": model, "o": optimizer})
    made = on_meta()
    again = torch.optim.AdamW(made.parameters())
    objects = {"m": made, "o": again}
    saved.load({first: objects[first], **objects})
    for one, two in ((model, optimizer), (made, again)):
        stepped(one, two)
    for parameter, was in zip(made.parameters(), model.parameters(), strict=True):
        assert bytes_of(parameter) == bytes_of(was)
        assert again.state[parameter].keys() == optimizer.state[was].keys()


def test_an_optimizer_whose_module_is_not_loaded_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(StateError, match=r"^o: 6 of its tensors, such as parameter 0, are on the meta device"):
        save({"o": optimizer}).load({"o": torch.optim.SGD(on_meta().parameters(), momentum=0.9)})


def test_a_buffer_that_no_checkpoint_has_is_named() -> None:
    saved = save({"m": Model(extra=True)})
    made = on_meta(extra=True)
    with pytest.raises(MismatchError, match=r"m\.angles: this buffer is on the meta device, and is not persistent"):
        saved.load({"m": made})
    assert made.frozen.is_meta
    made.angles = torch.arange(3.0)
    saved.load({"m": made})
    assert not made.frozen.is_meta


def test_a_parameter_that_the_checkpoint_lacks_stays_on_the_meta_device_and_is_named() -> None:
    saved = save({"m": Model()}, exclude_frozen=True)
    made = on_meta()
    with pytest.raises(MismatchError, match=r"m\.frozen: it is on the meta device, and is not in the checkpoint"):
        saved.load({"m": made})
    saved.load({"m": made}, strict=False)
    assert made.frozen.is_meta
    assert not made.turned.is_meta


def test_tensors_that_were_tied_and_are_two_now_get_memory_each() -> None:
    model = Model()
    saved = save({"m": model})
    made = on_meta()
    made.head.weight = nn.Parameter(torch.empty(5, 4, device="meta"))
    saved.load({"m": made})
    assert made.head.weight.data_ptr() != made.embedding.weight.data_ptr()
    assert bytes_of(made.head.weight) == bytes_of(made.embedding.weight) == bytes_of(model.head.weight)


def test_tensors_that_are_tied_now_and_had_different_values_are_a_mismatch() -> None:
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(5, 4))
    with pytest.raises(MismatchError, match=r"m\.head\.weight: this tensor is tied to another one now"):
        save({"m": model}).load({"m": on_meta()})


def test_a_tensor_in_a_dict_and_a_converted_one_get_memory() -> None:
    saved = save({"t": torch.arange(3.0)})
    target = {"t": torch.empty(3, dtype=torch.bfloat16, device="meta")}
    with pytest.raises(MismatchError, match="cast=True"):
        saved.load(target)
    before = target["t"]
    saved.load(target, cast=True)
    assert target["t"] is before
    assert bytes_of(before) == bytes_of(torch.arange(3.0).bfloat16())


@pytest.mark.parametrize("recipe", [Recipe(8), Recipe(4)])
def test_a_wrapper_tensor_on_the_meta_device_gets_memory_with_all_that_shows_it(recipe: Recipe) -> None:
    one, two = nn.Module(), nn.Module()
    one.weight = nn.Parameter(halves(0))
    hollow = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    two.weight = two.tied = nn.Parameter(Halves(hollow, hollow.clone(), recipe))
    one.tied, weight = one.weight, two.weight
    classes = TensorClasses.of(OWN)
    save({"model": one}, classes=classes).load({"model": two}, classes=classes)
    found: Any = two.weight
    assert found is weight is two.tied
    assert (found.device.type, found.high.device.type, found.recipe) == ("cpu", "cpu", Recipe(8))
    assert torch.equal(found.dequantize(), halves(0).dequantize())


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "jagged"])
def test_a_sparse_or_nested_tensor_on_the_meta_device_gets_memory(kind: str) -> None:
    live = quietly(lambda: made(kind, 1).to("meta"))
    quietly(lambda: save({"x": made(kind)}).load({"x": live}))
    assert facts_of(live) == facts_of(made(kind))


@pytest.mark.parametrize("cast", [False, True])
def test_an_ordinary_tensor_on_the_meta_device_does_not_get_a_composite_one(*, cast: bool) -> None:
    model = nn.Linear(6, 4, bias=False, device="meta")
    with pytest.raises(MismatchError, match=r"m\.weight: a sparse_coo tensor .* on the meta device.*to_empty"):
        save({"m": {"weight": made("sparse_coo")}}).load({"m": model}, cast=cast)
    model.to_empty(device="cpu")
    save({"m": {"weight": made("sparse_coo")}}).load({"m": model}, cast=True)
    assert torch.equal(model.weight, made("sparse_coo").to_dense())


def test_a_parameter_on_the_meta_device_keeps_the_attributes_that_libraries_set_on_it() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.weight.is_parallel = True  # type: ignore[attr-defined]
    save({"model": nn.Linear(2, 2)}).load({"model": model})
    assert model.weight.is_parallel  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [plain, sharded])
def test_hooks_of_parameters_on_the_meta_device_run_after_the_load_and_can_be_removed(wrap: Wrap) -> None:
    model = wrap(on_meta())
    called: list[str] = []
    weight: Any = model.frozen.requires_grad_()
    on_grad = weight.register_hook(lambda _: called.append("gradient"))
    after = weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    save({"m": Model()}).load({"m": model})
    weight.sum().backward()
    assert called == ["gradient", "accumulated"]
    on_grad.remove()
    after.remove()
    weight.sum().backward()
    assert called == ["gradient", "accumulated"]
