"""RECAPTURE-1, RECAPTURE-2, CAPTUREPLAN-1 to CAPTUREPLAN-3, FACTS-1 to FACTS-3: what one save after the other captures."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef

from checkpointd.errors import StateError
from checkpointd_client.capture.recapture import capturer as capturing
from checkpointd_client.capture.recapture.capturer import Capturer
from checkpointd_client.capture.recapture.plan import CapturePlan
from checkpointd_client.capture.state import Captured, capture, walked
from tests.unit.client.capture.recapture.recaptured_states import CHANGES, Job
from tests.unit.client.composite_tensors import KINDS, made
from tests.unit.client.simulated_ranks import rank_of


def captured(capturer: Capturer, state: dict[str, Any], *, exclude_frozen: bool = False) -> Captured:
    return capturer.capture(state, None, exclude_frozen_parameters=exclude_frozen)


def two_of(made: Callable[[], torch.Tensor]) -> dict[str, Any]:
    return {"a": made(), "b": made()}


ARRANGED: list[dict[str, Any]] = [
    two_of(lambda: torch.ones(2, 3)),
    {"b": torch.ones(2, 3), "a": torch.ones(2, 3)},
    two_of(lambda: torch.ones(3, 2)),
    two_of(lambda: torch.ones(3, 2).T),
    two_of(lambda: torch.ones(2, 3, dtype=torch.float64)),
    two_of(lambda: torch.inference_mode()(torch.ones)(2, 3)),
    {"a": torch.ones(2, 3)},
]


@pytest.mark.parametrize("first", range(len(ARRANGED)))
def test_states_share_an_arrangement_only_if_they_differ_in_addresses_alone(first: int) -> None:
    """RECAPTURE-2."""
    for second in range(len(ARRANGED)):
        capturer = Capturer()
        one, two = captured(capturer, ARRANGED[first]), captured(capturer, ARRANGED[second])
        assert (one.arrangement is two.arrangement) == (first == second)
    moved = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in ARRANGED[first].items()}
    with torch.inference_mode(ARRANGED[first]["a"].is_inference()):
        moved = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in moved.items()}
    capturer = Capturer()
    assert captured(capturer, ARRANGED[first]).arrangement is captured(capturer, moved).arrangement


def test_captures_with_the_same_columns_lie_in_the_same_memory() -> None:
    """RECAPTURE-3."""
    capturer, job = Capturer(), Job()
    seen: dict[int, list[Any]] = {}
    kept = []
    for name in ["nothing", "train", "swap_data", "rate_in_a_tensor", "move_the_storage", "transpose_data"]:
        CHANGES[name](job)
        for _ in range(3):
            leaves = captured(capturer, job.state()).leaves
            kept.append(leaves.columns)  # so that no other object gets its place
            by_steps = [leaf for leaf in leaves if leaf.optimizer_only]
            places = [(leaf.fqn, leaf.tensor.data_ptr(), leaf.tensor.shape, leaf.tensor.stride()) for leaf in by_steps]
            assert seen.setdefault(id(leaves.columns), places) == places
    assert 1 < len(seen) < len(kept)


def test_a_tensor_that_an_optimizer_changes_is_arranged_otherwise() -> None:
    capturer, weight = Capturer(), nn.Parameter(torch.ones(2))
    bare = captured(capturer, {"w": weight})
    stepped = captured(capturer, {"w": weight, "optimizer": torch.optim.SGD([weight])})
    assert [leaf.fqn for leaf in bare.leaves] == [leaf.fqn for leaf in stepped.leaves]
    assert bare.arrangement is not stepped.arrangement


def told(found: Captured, state: Any) -> list[Any]:
    """All that a capture of `state` tells. The place of a tensor stands for the tensor, if it is memory of the state."""
    leaves, own = [], storages_of(state)
    for leaf in found.leaves:
        tensor = leaf.tensor
        place = tensor.data_ptr() if tensor.untyped_storage()._cdata in own else None
        kind = type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()
        leaves.append((leaf.fqn, leaf.dtype, leaf.part, leaf.optimizer_only, tensor.shape, tensor.stride(), place, kind))
    return [leaves, found.aliases, found.excluded, found.tree]


def alone(state: Any) -> list[Any]:
    """All that a capture of `state` by itself tells."""
    return told(capture(state, None, exclude_frozen_parameters=False), state)


def storages_of(value: Any) -> set[int]:
    """The storages of all tensors of a state."""
    if isinstance(value, nn.Module):
        return storages_of([*value.parameters(), *value.buffers()])
    if isinstance(value, torch.optim.Optimizer):
        return storages_of([*value.state.values(), *value.param_groups])
    if isinstance(value, dict | list | tuple):
        return set().union(*map(storages_of, value.values() if isinstance(value, dict) else value))
    if isinstance(value, torch.Tensor):
        return {(value._local_tensor if isinstance(value, DTensor) else value).untyped_storage()._cdata}
    return set()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["module", "optimizer"])
def test_a_composite_tensor_in_a_module_or_an_optimizer_is_captured_again(kind: str, place: str) -> None:
    """RECAPTURE-1: torch's guards, which a plan uses, end the process if they meet some of these."""
    capturer, job = Capturer(), Job()
    if place == "module":
        job.model.register_buffer("composite", made(kind))
    else:
        job.optimizer.state[job.model.a.linear.weight]["composite"] = made(kind)
    for _ in range(3):
        found = captured(capturer, job.state())
        whole = capture(job.state(), None, exclude_frozen_parameters=False)
        assert (found.leaves.columns.fqns, found.tree) == (whole.leaves.columns.fqns, whole.tree)


def outcome(capture_one: Callable[..., Captured], job: Any) -> list[Any] | str:
    try:
        return told(capture_one(job.state(), job.client_state, exclude_frozen_parameters=job.excludes), job.state())
    except StateError as error:
        return str(error)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """One entry for each walk over a whole state."""
    found: list[object] = []

    def counted(*args: Any, **options: Any) -> Any:
        found.append(args)
        return walked(*args, **options)

    monkeypatch.setattr(capturing, "walked", counted)
    yield found
    found.clear()


@pytest.mark.nightly
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8), st.integers(0, 2))
def test_captures_one_after_the_other_find_what_each_would_find_alone(changes: list[str], twice: int) -> None:
    """RECAPTURE-1, CAPTUREPLAN-1, FACTS-2."""
    job, capturer = Job(), Capturer()
    for name in ["nothing", *changes]:
        # Earlier changes may have taken away what this one changes.
        with suppress(LookupError, AttributeError, RuntimeError, TypeError):
            CHANGES[name](job)
        for _ in range(1 + twice):
            assert outcome(capturer.capture, job) == outcome(capture, job), name


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_alone_is_seen(name: str, walks: list[object]) -> None:
    """RECAPTURE-1, CAPTUREPLAN-1, FACTS-2."""
    job, capturer = Job(), Capturer()
    arranged: list[tuple[object, list[Any]]] = []
    for _ in range(2):
        assert outcome(capturer.capture, job) == outcome(capture, job)
    assert len(walks) == 1
    for change in ["nothing", name, name, name]:
        CHANGES[change](job)
        for _ in range(2):
            assert outcome(capturer.capture, job) == outcome(capture, job)
        with suppress(StateError):
            found = capturer.capture(job.state(), job.client_state, exclude_frozen_parameters=job.excludes)
            facts = [(leaf.fqn, leaf.dtype, leaf.part, leaf.tensor.shape, leaf.tensor.stride()) for leaf in found.leaves]
            assert all(facts == others for arrangement, others in arranged if arrangement is found.arrangement)
            arranged.append((found.arrangement, facts))


def test_a_buffer_that_became_a_frozen_parameter_is_left_out() -> None:
    """CAPTUREPLAN-1, FACTS-2."""
    model, capturer = nn.BatchNorm1d(2), Capturer()
    left_out = []
    for kind in (torch.Tensor, nn.Parameter, torch.Tensor):
        model.running_mean.__class__ = kind
        left_out.append(captured(capturer, {"model": model}, exclude_frozen=True).excluded)
    assert left_out == [(), ("model.running_mean",), ()]


@pytest.mark.parametrize(
    "name", ["nothing", "train", "evaluate", "change_rate", "rate_in_a_tensor", "renew_passing_buffer", "change_client_state"]
)
def test_the_state_of_a_training_job_is_walked_once(name: str, walks: list[object]) -> None:
    job, capturer = Job(), Capturer()
    for _ in range(4):
        outcome(capturer.capture, job)
        CHANGES[name](job)
    assert len(walks) == 1


def test_a_state_that_is_made_anew_for_every_save_is_rarely_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    whole = CapturePlan.__init__
    monkeypatch.setattr(CapturePlan, "__init__", lambda *args: (planned.append(saves), whole(*args))[1])
    job, capturer = Job(), Capturer()
    for saves in range(40):
        if saves < 20:
            CHANGES["move_all"](job)
        assert outcome(capturer.capture, job) == outcome(capture, job)
    assert planned == [0, 1, 2, 4, 8, 16, 32]


def test_states_that_are_saved_in_turn_are_each_walked_once(walks: list[object]) -> None:
    jobs, capturer = [Job(), Job()], Capturer()
    jobs[1].more["other"] = torch.ones(1)
    arrangements = []
    for _ in range(3):
        for job in jobs:
            found = capturer.capture(job.state(), None, exclude_frozen_parameters=False)
            arrangements.append(found.arrangement)
            assert told(found, job.state()) == alone(job.state())
    assert len(walks) == 2
    assert len(set(map(id, arrangements))) == 2
    assert arrangements[:2] * 3 == arrangements


def test_what_is_walked_at_every_save_can_be_arranged_otherwise() -> None:
    job, capturer = Job(), Capturer()
    arrangements = []
    for size in (1, 1, 2, 2, 1):
        job.more["beside"] = torch.ones(size)
        arrangements.append(capturer.capture(job.state(), None, exclude_frozen_parameters=False).arrangement)
    one, two = arrangements[0], arrangements[2]
    assert one is not two
    assert arrangements == [one, one, two, two, one]


def test_leaves_that_move_to_another_place_in_the_state_are_arranged_otherwise() -> None:
    model, capturer = nn.Linear(2, 2), Capturer()
    states = [{"a": {"x": torch.ones(1)}, "model": model, "a.x": {}}, {"a": {}, "model": model, "a.x": torch.ones(1)}]
    found = [captured(capturer, states[i]) for i in (0, 0, 1, 1, 0)]
    assert [[leaf.fqn for leaf in one.leaves].index("a.x") for one in found] == [0, 0, 2, 2, 0]
    assert [one.arrangement is found[0].arrangement for one in found] == [True, True, False, False, True]


class Compiled(nn.Module):
    """A block that torch.compile returned, inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.compile(nn.Linear(2, 2))


class Wrapping(nn.Module):
    """It looks like what torch.compile returns, but its keys keep the wrapper's name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_a_block_in_another_wrapper_has_other_names() -> None:
    """CAPTUREPLAN-1, FACTS-2."""
    inner, capturer = nn.Linear(2, 2), Capturer()
    names = []
    for wrapped in (torch.compile(inner), Wrapping(inner), torch.compile(inner)):
        state = {"model": nn.Sequential(wrapped)}
        assert told(captured(capturer, state), state) == alone(state)
        names.append(captured(capturer, state).leaves[0].fqn)
    assert names == ["model.0.weight", "model.0._orig_mod.weight", "model.0.weight"]


def test_a_block_that_lost_its_hook_has_the_same_names() -> None:
    """CAPTUREPLAN-1, FACTS-2, WRAPPERS-1."""
    state, capturer = {"model": nn.Sequential(*(checkpoint_wrapper(nn.Linear(2, 2)) for _ in range(2)))}, Capturer()
    found = []
    for i in (None, 0, 1):
        if i is not None:
            state["model"][i]._state_dict_hooks.clear()
        assert told(captured(capturer, state), state) == alone(state)
        found.append(sum("_checkpoint_wrapped_module" in leaf.fqn for leaf in captured(capturer, state).leaves))
    assert found == [0, 0, 0]


MODELS: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),
    "compiled_inside": Compiled,
    "recomputed": lambda: nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
    "complex": lambda: nn.ParameterDict({"c": torch.ones(2, dtype=torch.complex64), "i": torch.ones(2)}),
    "without_tensors": nn.ReLU,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_are_walked_once(name: str, walks: list[object]) -> None:
    state, capturer = {"model": MODELS[name](), "more": 3}, Capturer()
    for _ in range(3):
        assert told(captured(capturer, state), state) == alone(state)
    assert len(walks) == 1


MODES: list[Callable[[], Any]] = [
    *(torch.inference_mode, torch.no_grad, torch.enable_grad),
    lambda: torch.device("meta"),
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_at_the_save_changes_nothing(mode: Callable[[], Any], walks: list[object]) -> None:
    state, capturer = blocks(2), Capturer()
    first = captured(capturer, state)
    with mode():
        assert told(captured(capturer, state), state) == alone(state)
        assert captured(capturer, state).arrangement is first.arrangement
    assert len(walks) == 1


@pytest.mark.parametrize(
    "state", [[], {1: torch.ones(1)}, {"client_state": 1}, {"o": {"state": {}, "param_groups": [{"params": []}]}}]
)
def test_a_state_that_is_refused_is_refused_in_the_same_words(state: Any) -> None:
    for _ in range(2):
        with pytest.raises(StateError) as ours:
            captured(Capturer(), state)
        with pytest.raises(StateError) as whole:
            capture(state, None, exclude_frozen_parameters=False)
        assert str(ours.value) == str(whole.value)


# --- states of several ranks -----------------------------------------------------------------------------------------


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def blocks(count: int, wrap: Callable[[nn.Module], nn.Module] = as_it_is, *, width: int = 2) -> dict[str, Any]:
    """A state of 16 tensors for each block: two layers, and their optimizer state."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(count))
    bare = nn.Sequential(*layers)
    bare.register_buffer("scale", torch.ones(2))
    model = wrap(bare)
    optimizer = torch.optim.AdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [as_it_is, nn.parallel.DistributedDataParallel, fully_shard]


def unshard(state: dict[str, Any]) -> None:
    if isinstance(state["model"], FSDPModule):
        state["model"].unshard()


def swap_data(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        local.data = local.data.clone()


def freeze(state: dict[str, Any]) -> None:
    parameter = next(state["model"].parameters())
    parameter.requires_grad_(not parameter.requires_grad)


def replace_spec(state: dict[str, Any]) -> None:
    parameter = next(state["model"].parameters())
    if isinstance(parameter, DTensor):
        parameter._spec = copy.copy(parameter._spec)


def replicate(state: dict[str, Any]) -> None:
    """Take a local shard for the whole of a smaller tensor."""
    parameter = next(state["model"].parameters())
    if isinstance(parameter, DTensor):
        spec = copy.copy(parameter._spec)
        spec.placements = (Replicate(),)
        spec.tensor_meta = TensorMeta(parameter._local_tensor.shape, parameter._local_tensor.stride(), parameter.dtype)
        parameter._spec = spec


def tie_empty_shards(state: dict[str, Any]) -> None:
    """Give two biases one storage, of which a rank may have no element."""
    one, two = (p for name, p in state["model"].named_parameters() if name.endswith(("0.0.bias", "1.0.bias")))
    if isinstance(one, DTensor):
        two._local_tensor = one._local_tensor
    else:
        two.data = one.data


def untie_empty_shards(state: dict[str, Any]) -> None:
    tensors = [p._local_tensor for p in state["model"].parameters() if isinstance(p, DTensor)]
    for tensor in tensors:
        if not tensor.numel():
            tensor.set_(torch.empty(0).untyped_storage(), 0, tensor.shape, tensor.stride())


def other_ranks(state: dict[str, Any]) -> None:
    if isinstance(state["model"], nn.parallel.DistributedDataParallel):
        state["model"].process_group = dist.new_group([0, 3])


def no_broadcast(state: dict[str, Any]) -> None:
    state["model"].broadcast_buffers = not getattr(state["model"], "broadcast_buffers", False)


def ignore_one(state: dict[str, Any]) -> None:
    if isinstance(state["model"], nn.parallel.DistributedDataParallel):
        state["model"].parameters_to_ignore = {"0.0.weight"}


def unwrap(state: dict[str, Any]) -> None:
    state["model"] = getattr(state["model"], "module", state["model"])


def step(state: dict[str, Any]) -> None:
    state["optimizer"].step()


OF_RANKS = [
    *(step, unshard, swap_data, freeze, replace_spec, replicate, tie_empty_shards, untie_empty_shards),
    *(other_ranks, no_broadcast, ignore_one, unwrap),
]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("change", OF_RANKS, ids=lambda change: change.__name__)
def test_a_change_on_a_rank_is_seen(
    change: Callable[[dict[str, Any]], None], wrap: Callable[[nn.Module], nn.Module], rank: int
) -> None:
    """RECAPTURE-1, CAPTUREPLAN-1, FACTS-2."""
    with rank_of(rank, 4):
        state, capturer = blocks(2, wrap, width=130), Capturer()
        for _ in range(3):
            for _ in range(2):
                assert told(captured(capturer, state), state) == told(
                    capture(state, None, exclude_frozen_parameters=False), state
                )
            change(state)


# --- the cost of a capture -------------------------------------------------------------------------------------------


def lines_of(action: Callable[[], object]) -> int:
    """How many lines of Python this thread runs."""
    lines = 0

    def trace(_frame: object, event: str, _arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    around = sys.gettrace()
    gc.collect()
    gc.disable()  # finalizers of other tests' objects would count
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(around)
        gc.enable()
    return lines


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_more_tensors_run_no_more_python(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """CAPTUREPLAN-3, FACTS-3."""
    counts, lines = (63, 625), []
    with rank_of(1, 4):
        for count in counts:
            state, capturer = blocks(count, wrap), Capturer()
            assert lines_of(lambda: captured(capturer, state)) > 16 * count  # noqa: B023  # called at once
            lines.append(lines_of(lambda: captured(capturer, state)))  # noqa: B023
            assert told(captured(capturer, state), state) == alone(state)
    assert lines[0] == lines[1]


# --- what is kept ---------------------------------------------------------------------------------------------------


def weakly(*objects: object) -> list[Callable[[], object]]:
    """Weak references to objects, and to the storages of tensors among them."""
    return [*map(weakref.ref, objects), *(_storage_of(one) for one in objects if isinstance(one, torch.Tensor))]


def _storage_of(tensor: torch.Tensor) -> Callable[[], object]:
    weak = StorageWeakRef(tensor.untyped_storage())
    return lambda: None if weak.expired() else weak


def is_gone(references: list[Callable[[], object]]) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


@pytest.mark.nightly
def test_between_two_saves_the_user_can_free_everything() -> None:
    """CAPTUREPLAN-2, FACTS-1."""
    capturer, state = Capturer(), blocks(3)
    for _ in range(2):
        captured(capturer, state)
    model, optimizer = state["model"], state["optimizer"]

    old = [_storage_of(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert is_gone(old)

    moments = weakly(*(value for entry in optimizer.state.values() for value in entry.values()))
    optimizer.state.clear()
    assert is_gone(moments)

    rest = weakly(model, optimizer, *model.modules(), *model.parameters(), state["scheduler"])
    del model, optimizer, parameter
    state.clear()
    assert is_gone(rest)
