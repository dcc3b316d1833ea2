"""A training job, and changes of it that a capture after another one must see."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from checkpointd_client.capture.rng import RngState


class Block(nn.Module):
    """Parameters, a parameter that is None, and buffers of each kind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.ones(width))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_buffer("missing", None)
        self.unused: nn.Module | None
        self.register_module("unused", None)


class Reporting(Block):
    """A block with extra state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None: ...


class Renaming(Block):
    """A block with a state_dict of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "only"] = self.kept


class Job:
    """A model with blocks of the same shape, its optimizer and its scheduler."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(OrderedDict(a=Block(4), b=Block(4), norm=nn.BatchNorm1d(4), c=Block(4)))
        groups = [{"params": list(self.model.a.parameters())}, {"params": list(self.model.b.parameters()), "lr": 0.5}]
        self.optimizer: Any = torch.optim.AdamW(groups)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.more: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        self.client_state: dict[str, Any] | None = {"step": 1}
        self.excludes = False
        self.turn = 0
        self.spare = torch.zeros(4, 4)
        self.step()

    def state(self) -> dict[str, Any]:
        own = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rng": RngState()}
        return {**self.before, **own, **self.more}

    def step(self) -> None:
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and not parameter.is_inference():
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.scheduler.step()


Change = Callable[[Job], object]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. Of a tensor whose storage was freed only the shape: torch would read memory that is not there, and crash."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() >= end else torch.zeros(tensor.shape, dtype=tensor.dtype)


@change
def nothing(job: Job) -> None: ...


@change
def train(job: Job) -> None:
    job.step()


@change
def evaluate(job: Job) -> None:
    job.model.train(not job.model.training)


@change
def freeze(job: Job) -> None:
    job.model.a.linear.bias.requires_grad_(not job.model.a.linear.bias.requires_grad)


@change
def exclude(job: Job) -> None:
    job.excludes = not job.excludes


@change
def replace_parameter(job: Job) -> None:
    job.model.c.linear.weight = nn.Parameter(torch.zeros(4, 4))


@change
def replace_by_a_plain_tensor(job: Job) -> None:
    job.model.a._parameters["absent"] = torch.ones(2)


@change
def swap_data(job: Job) -> None:
    job.model.a.linear.weight.data = job.model.a.linear.weight.data.clone()


@change
def transpose_data(job: Job) -> None:
    job.model.b.linear.weight.data = job.model.b.linear.weight.data.T


@change
def shorten_data(job: Job) -> None:
    job.model.a.linear.bias.data = job.model.a.linear.bias.data[:-1]


@change
def make_a_buffer_a_parameter(job: Job) -> None:
    own = job.model.a.kept
    own.__class__ = nn.Parameter if type(own) is torch.Tensor else torch.Tensor


@change
def swap_data_of_two(job: Job) -> None:
    one, two = job.model.a.linear.weight, job.model.b.linear.weight
    one.data, two.data = two.data, one.data


@change
def move_all(job: Job) -> None:
    for tensor in (*job.model.parameters(), *job.model.buffers()):
        tensor.data = _copy_of(tensor.data)


@change
def retype(job: Job) -> None:
    job.model.norm.double() if job.model.norm.weight.dtype is torch.float32 else job.model.norm.float()


@change
def view_as_another_dtype(job: Job) -> None:
    own = job.model.a.kept
    own.data = own.data.view(torch.int32 if own.dtype is torch.float32 else torch.float32)


@change
def resize_in_place(job: Job) -> None:
    job.model.b.kept.resize_(7 - job.model.b.kept.numel())


@change
def move_within_the_storage(job: Job) -> None:
    own = job.model.c.kept
    storage = own.untyped_storage() if own.untyped_storage().nbytes() >= 32 else torch.ones(8).untyped_storage()
    own.set_(storage, 0 if own.storage_offset() else 4, (4,), (1,))


@change
def free_the_storage(job: Job) -> None:
    storage = job.model.a.kept.untyped_storage()
    storage.resize_(0 if storage.nbytes() else 16)


@change
def move_the_storage(job: Job) -> None:
    storage = job.model.b.linear.weight.untyped_storage()
    storage.resize_(storage.nbytes() + 4096)


@change
def negate_data(job: Job) -> None:
    job.model.c.linear.bias.data = torch.zeros(4, dtype=torch.complex64).conj().imag


@change
def turn_negative_in_place(job: Job) -> None:
    own = job.model.c.linear.bias
    own.data = torch._neg_view(own.data)


@change
def tie(job: Job) -> None:
    job.model.c.linear.weight = job.model.a.linear.weight


@change
def tie_by_memory(job: Job) -> None:
    job.model.c.linear.weight = nn.Parameter(job.model.a.linear.weight.data)


@change
def overlap(job: Job) -> None:
    memory = torch.zeros(6)
    job.model.a.kept, job.model.b.kept = memory[:4], memory[2:]


@change
def fold(job: Job) -> None:
    job.model.c.kept = torch.ones(1).expand(4)


@change
def add_module(job: Job) -> None:
    job.model.add_module(f"new{len(job.model)}", nn.Linear(2, 2))


@change
def remove_module(job: Job) -> None:
    last = list(job.model._modules)[-1]
    if last not in ("a", "b", "norm", "c"):
        del job.model._modules[last]


@change
def replace_module(job: Job) -> None:
    job.model.c.linear = nn.Linear(4, 4)


@change
def use_module_twice(job: Job) -> None:
    job.model.again = job.model.norm


@change
def reorder_modules(job: Job) -> None:
    job.model._modules["norm"] = job.model._modules.pop("norm")


@change
def rename_module(job: Job) -> None:
    job.model._modules = {{"new4": "renamed", "renamed": "new4"}.get(name, name): m for name, m in job.model._modules.items()}


@change
def reorder_parameters(job: Job) -> None:
    own = job.model.c.linear._parameters
    own["weight"] = own.pop("weight")


@change
def drop_a_parameter(job: Job) -> None:
    job.model.c.linear.register_parameter("bias", None if job.model.c.linear.bias is not None else nn.Parameter(torch.ones(4)))


@change
def fill_the_none_buffer(job: Job) -> None:
    job.model.b.missing = torch.ones(2) if job.model.b.missing is None else None


@change
def renew_passing_buffer(job: Job) -> None:
    job.model.a.passing = torch.ones(5)


@change
def persist(job: Job) -> None:
    own = job.model.a._non_persistent_buffers_set
    own.symmetric_difference_update({"passing"})


@change
def add_buffer(job: Job) -> None:
    job.model.c.register_buffer("added", torch.ones(1))


@change
def reclass(job: Job) -> None:
    job.model.c.__class__ = Block if type(job.model.c) is Reporting else Reporting


@change
def reclass_to_own_state_dict(job: Job) -> None:
    job.model.c.__class__ = Block if type(job.model.c) is Renaming else Renaming


@change
def hook(job: Job) -> None:
    def renamed(module: nn.Module, found: dict[str, Any], prefix: str, _: object) -> None:
        found[prefix + "hooked"] = found.pop(prefix + "kept")

    job.model.b._state_dict_hooks.clear() if job.model.b._state_dict_hooks else job.model.b._register_state_dict_hook(renamed)


@change
def pre_hook(job: Job) -> None:
    def swapped(module: Any, *_: object) -> None:
        module.linear.weight.data = job.spare

    own = job.model.b._state_dict_pre_hooks
    own.clear() if own else job.model.b.register_state_dict_pre_hook(swapped)


@change
def override_on_the_module(job: Job) -> None:
    def state_dict(*, destination: dict[str, Any], prefix: str, **_: object) -> None:
        destination[prefix + "mine"] = job.spare

    own = vars(job.model.c)
    if own.pop("state_dict", None) is None:
        own["state_dict"] = state_dict


@change
def parametrize(job: Job) -> None:
    if not hasattr(job.model.c.linear, "parametrizations"):
        nn.utils.parametrizations.weight_norm(job.model.c.linear)


@change
def wrap_inside(job: Job) -> None:
    job.model.norm = nn.DataParallel(job.model.norm) if type(job.model.norm) is nn.BatchNorm1d else job.model.norm.module


@change
def wrap_outside(job: Job) -> None:
    job.model = nn.DataParallel(job.model)
    job.model.a, job.model.b, job.model.norm, job.model.c = (
        getattr(job.model.module, name) for name in ("a", "b", "norm", "c")
    )


@change
def mark_as_parameter(job: Job) -> None:
    own = vars(job.model.a.kept)
    own["_is_param"] = not own.get("_is_param", False)


@change
def use_inference_buffer(job: Job) -> None:
    with torch.inference_mode():
        job.model.b.kept = torch.ones(4)


@change
def clear_state(job: Job) -> None:
    job.optimizer.state.clear()


@change
def forget_one(job: Job) -> None:
    job.optimizer.state.pop(job.model.a.linear.weight, None)


@change
def note_none(job: Job) -> None:
    job.optimizer.state[job.model.a.linear.bias]["extra"] = None


@change
def note_a_number(job: Job) -> None:
    entry = job.optimizer.state[job.model.a.linear.bias]
    entry["number"] = -entry.get("number", 0.0)


@change
def note_a_list(job: Job) -> None:
    job.optimizer.state[job.model.a.linear.bias]["list"] = [torch.ones(1)]


@change
def reorder_entry(job: Job) -> None:
    entry = job.optimizer.state[job.model.a.linear.weight]
    for key in sorted(entry, reverse=True):
        entry[key] = entry.pop(key)


@change
def reorder_state(job: Job) -> None:
    own = job.optimizer.state
    for parameter in list(own)[:1]:
        own[parameter] = own.pop(parameter)


@change
def share_state(job: Job) -> None:
    own = job.optimizer.state
    if "exp_avg" in own[job.model.a.linear.weight]:
        own[job.model.b.linear.weight]["exp_avg"] = own[job.model.a.linear.weight]["exp_avg"]


@change
def add_group(job: Job) -> None:
    if len(job.optimizer.param_groups) == 2:
        job.optimizer.add_param_group({"params": list(job.model.norm.parameters()), "lr": 0.25})


@change
def add_unknown_parameter(job: Job) -> None:
    job.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


@change
def drop_from_group(job: Job) -> None:
    parameters = job.optimizer.param_groups[0]["params"]
    if len(parameters) > 1:
        job.optimizer.state.pop(parameters.pop(), None)


@change
def reorder_group(job: Job) -> None:
    job.optimizer.param_groups[1]["params"].reverse()


@change
def change_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] *= 0.5


@change
def rate_in_a_tensor(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


@change
def rate_in_the_model(job: Job) -> None:
    job.optimizer.param_groups[1]["other"] = job.model.a.kept[:1]


@change
def name_the_parameters(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["names"] = [f"p{i}" for i in range(len(group["params"]))]


@change
def rename_a_parameter(job: Job) -> None:
    job.optimizer.param_groups[0].setdefault("names", ["p0"])[0] += "x"


@change
def hook_the_optimizer(job: Job) -> None:
    own = job.optimizer._optimizer_state_dict_post_hooks
    own.clear() if own else job.optimizer.register_state_dict_post_hook(lambda _, found: {**found, "hooked": job.spare})


@change
def replace_optimizer(job: Job) -> None:
    job.optimizer = torch.optim.SGD(job.model.parameters(), momentum=0.5)


@change
def load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


@change
def put_before(job: Job) -> None:
    job.before = {} if job.before else {"first": {"t": torch.ones(2), "empty": np.ones(0)}}


@change
def put_beside(job: Job) -> None:
    job.more["beside"] = {"t": torch.ones(len(job.more) + 1), "words": ["a", None], "list": [1, np.ones(2)]}


@change
def put_a_view_beside(job: Job) -> None:
    job.more["view"] = job.model.a.linear.weight[1:]


@change
def put_a_folded_tensor_beside(job: Job) -> None:
    job.more["folded"] = torch.ones(1).expand(3)


@change
def put_tied_tensors_beside(job: Job) -> None:
    tied = torch.ones(3)
    job.more["tied"] = [tied, tied]


@change
def put_a_module_beside(job: Job) -> None:
    job.more["modules"] = [nn.Linear(2, 2)]


@change
def put_the_model_twice(job: Job) -> None:
    job.more["copy"] = job.model


@change
def put_an_average_beside(job: Job) -> None:
    job.more["average"] = {
        name: _copy_of(value.detach()) for name, value in job.model.state_dict().items() if value is not None
    }


@change
def put_a_name_twice(job: Job) -> None:
    job.more["model.a"] = {"kept": torch.ones(1)}


@change
def put_what_cannot_be_stored(job: Job) -> None:
    job.more["bad"] = object()


@change
def clean_up(job: Job) -> None:
    job.more.clear()


@change
def change_client_state(job: Job) -> None:
    states: list[dict[str, Any] | None] = [None, {"step": 2}, {"step": torch.ones(1), "deep": {"er": [None]}}]
    job.turn += 1
    job.client_state = states[job.turn % 3]


@change
def make_weights_empty(job: Job) -> None:
    job.model.c.linear.bias = nn.Parameter(torch.ones(0))
