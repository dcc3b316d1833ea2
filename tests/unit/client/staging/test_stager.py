"""STAGING-1 to STAGING-3 of stager.py: what a save holds is the state at the call, however training goes on.

Each test saves, changes everything it can at once, and loads into fresh objects: what comes back must be the state at save().
To make tearing likely the stager's thread is held back, so that the copies happen as late as they ever could.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from checkpointd.errors import AbortedError, StagingError
from checkpointd.pipeline.pace import Pace
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from checkpointd_client.capture import state as state_module
from checkpointd_client.capture.recapture.capturer import Capturer
from checkpointd_client.capture.state import capture
from checkpointd_client.staging import arena as arena_module
from checkpointd_client.staging import stager as stager_module
from checkpointd_client.staging.arena import Arena, SlotHold
from checkpointd_client.staging.copies import Copies
from checkpointd_client.staging.slot_layout import plan_slot
from checkpointd_client.staging.stager import AT_ONCE_BYTES, Stager, Staging
from checkpointd_client.staging.torn_check import Proof, Sample
from tests.unit.client.composite_tensors import OWN, halves


@pytest.fixture(autouse=True)
def late_copies_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are copied in the background as well: the nets of these tests are small."""
    monkeypatch.setattr(stager_module, "AT_ONCE_BYTES", 0)


@contextmanager
def held_back_stager(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keep the background copy from starting until the event is set: only the step hook and fence() can copy before."""
    go = threading.Event()
    finish = Staging.finish

    def late(self: Staging) -> None:
        if threading.current_thread().name == "checkpointd-stager":
            go.wait(30)
        finish(self)

    monkeypatch.setattr(Staging, "finish", late)
    try:
        yield go
    finally:
        go.set()


def _net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def _train(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.randn(8, 16)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def _frozen(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _add_one(net: torch.nn.Module) -> None:
    """A change by hand that torch's version counter does not see."""
    for parameter in net.parameters():
        parameter.data.add_(1.0)


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _loaded_net(root: Path, others: dict[str, object] | None = None) -> dict[str, torch.Tensor]:
    net = _net()
    for value in net.state_dict().values():
        value.zero_()
    with Checkpointer(root) as ckpt:
        assert ckpt.load({"net": net, **(others or {})}, strict=False)
    return _frozen(net)


class Run:
    """A net and its optimizer, trained with a Checkpointer whose stager is held back."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        self.net = _net()
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1)

    @contextmanager
    def saving(self, **state: object) -> Iterator[Checkpointer]:
        """Saves `net` and `state`. The block changes `net`; the checkpoint must hold the net as it was at save()."""
        with Checkpointer(self.root) as ckpt, held_back_stager(self._monkeypatch):
            expected = _frozen(self.net)
            ckpt.save(1, {"net": self.net, **state})
            yield ckpt
        _same(_loaded_net(self.root), expected)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_step_right_after_save_is_held_until_its_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    _train(net, optimizer)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected, moments = _frozen(net), copy.deepcopy(optimizer.state_dict())
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        assert handle.phase == "staging"
        _train(net, optimizer)  # forward changes BatchNorm's buffers, step changes the rest
        assert not torch.equal(net[0].weight, expected["0.weight"])
    _same(_loaded_net(tmp_path), expected)
    fresh = torch.optim.AdamW(_net().parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"optimizer": fresh}, strict=False)
    for number, state in moments["state"].items():
        assert torch.equal(fresh.state_dict()["state"][number]["exp_avg"], state["exp_avg"])
    assert handle.timings.fence_s >= 0


async def test_the_commit_says_what_the_save_cost(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": run.net})
        _train(run.net, run.sgd)
        handle.wait()
    async with PosixStore(tmp_path) as store:
        [checkpoint] = await root_view.checkpoints(store)
    cost, timings = checkpoint.commit.cost, handle.timings
    assert cost is not None
    assert cost.held_s == pytest.approx(timings.held_s, abs=1e-5)
    assert timings.held_s > 0
    assert cost.took_s > 0
    assert cost.raw_bytes == sum(value.nbytes for value in run.net.state_dict().values())
    assert 0 < cost.stored_bytes <= cost.written_bytes


def test_a_snapshot_is_done_when_the_step_that_waited_for_it_goes_on() -> None:
    """So its save can tell by then how long it held training."""
    staging = Staging(SimpleNamespace(complete=lambda: None))
    staging._host_copied.set()
    finishing = threading.Thread(target=staging.finish)
    with staging._fencing:
        finishing.start()
        assert not staging.done.done()
        staging.fence_s = 2.0
    finishing.join(30)
    assert staging.done.done()


def test_buffers_that_the_forward_pass_changes_are_copied_inside_save(run: Run) -> None:
    before = _frozen(run.net)
    with run.saving(optimizer=run.sgd):
        for _ in range(5):
            run.net(torch.randn(8, 16))
        assert not torch.equal(run.net[1].running_mean, before["1.running_mean"])


def test_an_ema_updated_in_place_before_the_next_step_does_not_tear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _train(net, optimizer)
    ema.update_parameters(net)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(ema)
        ckpt.save(1, {"net": net, "optimizer": optimizer, "ema": ema})
        ema.update_parameters(net)
        for parameter in ema.parameters():
            parameter.detach().mul_(3)
    found = torch.optim.swa_utils.AveragedModel(_net())
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"ema": found}, strict=False)
    _same(_frozen(found), expected)


def test_parameters_whose_optimizer_is_not_in_the_state_need_no_fence(run: Run) -> None:
    with run.saving():
        _add_one(run.net)


def test_fence_makes_a_change_by_hand_safe(run: Run) -> None:
    with run.saving(optimizer=run.sgd) as ckpt:
        ckpt.fence()
        _add_one(run.net)


def test_waiting_for_staged_makes_a_change_by_hand_safe(run: Run, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        expected = _frozen(run.net)
        ckpt.save(1, {"net": run.net, "optimizer": run.sgd}).wait(until="staged")
        _add_one(run.net)
    _same(_loaded_net(tmp_path), expected)


def test_an_unfenced_change_by_hand_spoils_the_save_instead_of_tearing_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path)
    with held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": run.net, "optimizer": run.sgd})
        with torch.no_grad():
            run.net[0].weight.add_(1.0)
    with pytest.raises(StagingError, match=r"net\.0\.weight was changed while its snapshot was taken"):
        handle.wait()
    assert isinstance(handle.exception().__context__, AbortedError)
    assert handle.phase == "failed"
    again = ckpt.save(2, {"net": run.net, "optimizer": run.sgd}).wait()
    assert again.phase == "committed"
    ckpt.close()


# --- changes that torch does not count: the sample ----------------------------------------------------------------------


def _averaged(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What an average holds: near to the parameter, and another value in every element."""
    return parameter.detach() * 1.25 + torch.where(parameter.detach() < 0, -0.125, 0.125).to(parameter.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.copy_(_averaged(p)),
        lambda p: p.data.add_(1.0),
        lambda p: p.detach().numpy().__iadd__(1.0),
        lambda p: p.data.zero_(),
    ],
)
def test_a_change_that_torch_does_not_count_spoils_the_save(
    run: Run, change: Callable[[torch.nn.Parameter], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path)
    with held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": run.net, "optimizer": run.sgd})
        for parameter in run.net.parameters():
            change(parameter)
    with pytest.raises(StagingError, match=r"net\.0\.weight was changed while its snapshot was taken.*ckpt\.fence\(\)"):
        handle.wait()
    assert isinstance(handle.exception().__context__, AbortedError)
    assert ckpt.latest() is None
    assert ckpt.save(2, {"net": run.net, "optimizer": run.sgd}).wait().phase == "committed"
    ckpt.close()


def test_the_state_of_an_optimizer_that_is_changed_by_hand_spoils_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    _train(net, optimizer)
    ckpt = Checkpointer(tmp_path)
    with held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        optimizer.state[net[3].bias]["exp_avg_sq"].data.mul_(0.5)
    with pytest.raises(StagingError, match=r"optimizer\.state\.net\.3\.bias\.exp_avg_sq was changed"):
        handle.wait()
    ckpt.close()


def test_a_change_that_goes_through_a_composite_tensor_spoils_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts it for the composite tensor, not for its inner ones. No sample shows it: the same bytes are written."""
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight]["average"] = halves()
    ckpt = Checkpointer(tmp_path, tensor_classes=OWN)
    with held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        optimizer.state[net.weight]["average"].copy_(halves())
    with pytest.raises(StagingError, match=r"optimizer\.state\.net\.weight\.average\.(high|low) was changed"):
        handle.wait()
    ckpt.close()


def test_swapping_whole_tensors_by_data_leaves_the_snapshot_whole(run: Run) -> None:
    """`p.data, average = average, p.data` moves no bytes: the snapshot reads the memory that it saw."""
    with run.saving(optimizer=run.sgd):
        for parameter in run.net.parameters():
            parameter.data = _averaged(parameter)


Stage = tuple[Arena, Stager]


@pytest.fixture
def lazy() -> Iterator[Stage]:
    yield from _stager("lazy")


@pytest.fixture
def eager() -> Iterator[Stage]:
    yield from _stager("eager")


def _stager(mode: Literal["lazy", "eager"]) -> Iterator[Stage]:
    arena, stager = Arena(), Stager(mode)
    yield arena, stager
    stager.close(30)
    arena.close()


class Swapped:
    """Parameters of several dtypes and sizes that an average is swapped into, and a slot that they are copied to."""

    def __init__(self, arena: Arena, stager: Stager) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        sizes = (1, 3, 64, 300, 4096, 70_001)
        self.params = [
            torch.nn.Parameter(torch.randn(size, dtype=torch.float64).to(dtype)) for dtype in dtypes for size in sizes
        ]
        self.averages = [_averaged(p) for p in self.params]
        assert all((p != average).all() for p, average in zip(self.params, self.averages, strict=True))
        optimizer = torch.optim.SGD(self.params, lr=0.1)
        self._captured = capture({"p": self.params, "o": optimizer}, None, exclude_frozen_parameters=False)
        self._arena, self._stager = arena, stager
        self.before = [p.detach().clone() for p in self.params]

    def swap(self, i: int) -> None:
        self.params[i].data.copy_(self.averages[i])

    @contextmanager
    def staged(self) -> Iterator[tuple[Staging, list[torch.Tensor]]]:
        """The snapshot, begun, and what will lie in the slot."""
        layout = plan_slot(self._captured)
        hold = SlotHold(self._arena)
        assert self._arena.acquire(hold, layout.nbytes, timeout=0.0)
        try:
            staging = Staging(hold.slot)
            self._stager.begin(staging, self._captured, layout)
            yield staging, hold.slot.views(layout.parts)
        finally:
            staging.done.exception(30)
            hold.release()

    def holds_the_moment_of_save(self, found: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, two) for one, two in zip(found, self.before, strict=True))

    def was_swapped_beside_the_copy_at_most(self, found: list[torch.Tensor]) -> bool:
        """Whether each tensor has elements of before the swap, which changes them all."""
        return all(bool((one == two).any()) for one, two in zip(found, self.before, strict=True))


def test_an_average_swapped_in_at_any_point_of_the_copy_is_caught(
    lazy: Stage, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Copies and swaps in every order that two threads can bring about: torn if and only if a swap came before its copy."""
    copied = Copies.run
    monkeypatch.setattr(stager_module, "TASK_BYTES", 1)  # each tensor alone
    for seed in range(request.config.getoption("--ema-swaps")):
        chance, case = random.Random(seed), Swapped(*lazy)
        count = len(case.params)
        late = chance.choice([0, chance.randrange(count + 1), chance.randrange(count + 1)])
        begins = sorted(chance.choice([late, chance.randrange(late, count + 1)]) for _ in range(count))
        """Before which copy each swap happens."""
        done = 0

        def run(copies: Copies, case: Swapped = case, begins: list[int] = begins) -> None:
            nonlocal done
            for i, begin in enumerate(begins):
                if begin == done:
                    case.swap(i)
            done += 1
            copied(copies)

        monkeypatch.setattr(Copies, "run", run)
        with case.staged() as (staging, found):
            error = staging.done.exception(30)
            torn = any(begin <= i for i, begin in enumerate(begins))
            assert isinstance(error, StagingError) == torn, f"seed {seed}"
            assert torn or case.holds_the_moment_of_save(found), f"seed {seed}"


def test_an_average_swapped_in_while_the_copy_runs_is_caught_or_came_after_it(
    lazy: Stage, request: pytest.FixtureRequest
) -> None:
    """With real threads: a swap that has ended before the copy of its tensor is caught. One that runs beside this very copy may
    change bytes alone that no sample has (`torn_check.py`); then the rest of the tensor is of save().
    """
    for seed in range(request.config.getoption("--ema-swaps")):
        chance, case = random.Random(seed), Swapped(*lazy)
        order = chance.sample(range(len(case.params)), len(case.params))
        with case.staged() as (staging, found):
            for i in order:
                case.swap(i)
            error = staging.done.exception(30)
            assert isinstance(error, StagingError) or case.was_swapped_beside_the_copy_at_most(found), f"seed {seed}"


def test_an_average_swapped_in_right_after_save_is_always_caught(
    lazy: Stage, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The copy runs after the swap of everything, as it does where the stager's thread gets no processor."""
    for _ in range(request.config.getoption("--ema-swaps")):
        case = Swapped(*lazy)
        with held_back_stager(monkeypatch) as go, case.staged() as (staging, _):
            for i in range(len(case.params)):
                case.swap(i)
            go.set()
            with pytest.raises(StagingError, match=r"p\.0 was changed while its snapshot was taken"):
                staging.done.result(30)
        monkeypatch.undo()
        monkeypatch.setattr(stager_module, "AT_ONCE_BYTES", 0)


def test_what_cannot_be_compared_is_not_persisted(lazy: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Proof):
        def torn(self) -> int | None:
            raise MemoryError("no room")

    monkeypatch.setattr(Sample, "take", lambda *_: Failing())
    case = Swapped(*lazy)
    with (
        case.staged() as (staging, _),
        pytest.raises(StagingError, match=r"could not be compared with what save\(\) saw: MemoryError"),
    ):
        staging.done.result(30)


def test_eager_staging_takes_no_sample(eager: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample, "take", None)
    case = Swapped(*eager)
    with case.staged() as (staging, found):
        staging.done.result(30)
        assert case.holds_the_moment_of_save(found)


def lines_run(work: Callable[[], object]) -> int:
    """The lines of our capture and staging that `work` runs on this thread. Others depend on how the save before ends."""
    count = 0
    rooms = tuple(str(Path(module.__file__).parent) for module in (stager_module, state_module))

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(rooms) or frame.f_code.co_filename == arena_module.__file__:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def test_more_tensors_run_no_more_python_in_an_eager_save(tmp_path: Path) -> None:
    counts = []
    for tensors in (50, 500):
        state = {"net": torch.nn.ParameterList(torch.zeros(3) for _ in range(tensors))}
        with Checkpointer(tmp_path / str(tensors), staging="eager", on_no_progress="ignore") as ckpt:
            for step in range(2):
                ckpt.save(step, state).wait()
            counts.append(lines_run(lambda ckpt=ckpt, state=state: ckpt.save(2, state)))
    assert counts[0] == counts[1] > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_that_are_copied_together_keep_their_bits(eager: Stage, dtype: torch.dtype) -> None:
    """Also those of signalling NaNs, which arithmetic would make quiet."""
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) * (1 << 16 if dtype.itemsize == 4 else 1) + 1
    arena, stager = eager
    tensors = [bits.to(integers)[:-1].view(dtype), bits.to(integers)[1::2].view(dtype)]
    captured = capture({"t": tensors}, None, exclude_frozen_parameters=False)
    layout, hold = plan_slot(captured), SlotHold(arena)
    assert arena.acquire(hold, layout.nbytes, timeout=0.0)
    staging = Staging(hold.slot)
    stager.begin(staging, captured, layout)
    for target, source in zip(hold.slot.views(layout.parts), tensors, strict=True):
        assert torch.equal(target.view(integers), source.view(integers))
    hold.release()


class Resting(Pace):
    """A pace whose background copy rests for longer than any test after its first task."""

    def copy_rest_after(self, busy_s: float, needed_s: float) -> float:
        resting.set()
        return 600.0


resting = threading.Event()


def test_staging_5_a_step_takes_over_what_a_resting_copy_has_left(lazy: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy rests by its pace until a step waits; then nothing of the rest is waited for."""
    monkeypatch.setattr(stager_module, "TASK_BYTES", 1024)
    arena, stager = lazy
    params = [torch.nn.Parameter(torch.full((512,), float(i))) for i in range(8)]
    captured = capture({"p": params, "o": torch.optim.SGD(params, lr=0.1)}, None, exclude_frozen_parameters=False)
    layout, hold = plan_slot(captured), SlotHold(arena)
    assert arena.acquire(hold, layout.nbytes, timeout=0.0)
    resting.clear()
    staging = Staging(hold.slot, Resting(share=0.5))
    stager.begin(staging, captured, layout)
    assert resting.wait(30)
    assert not staging.done.done()
    staging.fence()
    staging.done.result(30)
    assert staging.pace.copy_rested_s > 0
    for target, source in zip(hold.slot.views(layout.parts), params, strict=True):
        assert torch.equal(target, source)
    hold.release()


def test_gradient_accumulation_leaves_the_snapshot_alone(run: Run) -> None:
    before = _frozen(run.net)
    with run.saving(optimizer=run.sgd):
        for _ in range(4):
            run.net(torch.randn(8, 16)).pow(2).sum().backward()
        run.sgd.step()
        assert not torch.equal(run.net[0].weight, before["0.weight"])


def test_the_step_of_any_optimizer_is_fenced(run: Run) -> None:
    first = torch.optim.SGD(run.net[0].parameters(), lr=0.1)
    second = torch.optim.Adam(run.net[3].parameters(), lr=0.1)
    with run.saving(first=first, second=second):
        run.net(torch.randn(8, 16)).pow(2).sum().backward()
        second.step()
        first.step()


def test_saves_at_every_step_hold_each_steps_own_state(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    expected = {}
    with Checkpointer(tmp_path) as ckpt:
        for step in range(12):
            _train(net, optimizer)
            expected[step] = _frozen(net)
            ckpt.save(step, {"net": net, "optimizer": optimizer})
    for step in (0, 1, 6, 10, 11):
        net = _net()
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.load({"net": net}, tag=f"global_step{step}", strict=False)
        _same(_frozen(net), expected[step])


def test_eager_staging_holds_everything_when_save_returns(run: Run, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, staging="eager") as ckpt:
        expected = _frozen(run.net)
        handle = ckpt.save(1, {"net": run.net, "optimizer": run.sgd})
        assert handle.timings.staged_s is not None
        _add_one(run.net)
    _same(_loaded_net(tmp_path), expected)


# --- small tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 8, 60])
def test_small_tensors_are_whole_when_save_returns(lazy: Stage, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Of any size and dtype, at any address, whatever lies between them."""
    monkeypatch.setattr(stager_module, "AT_ONCE_BYTES", AT_ONCE_BYTES)
    arena, stager = lazy
    nbytes = [*range(1, 200, 7), 1000, 1024, 1025, AT_ONCE_BYTES - 1, AT_ONCE_BYTES, AT_ONCE_BYTES + 1, 3 * AT_ONCE_BYTES]
    memory = torch.randint(0, 256, (2 * sum(nbytes) + 64 * len(nbytes),), dtype=torch.uint8)
    at, tensors = shift, []
    for n in nbytes:
        tensors.append(memory[at : at + n])
        at += n + shift + (-n) % 8
    tensors += [torch.randn(5, dtype=torch.complex64), torch.randn(3, 7).t(), torch.tensor(2.0), torch.zeros(0)]
    parameters = [torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for tensor in tensors]
    state = {"p": parameters, "o": torch.optim.SGD(parameters, lr=0.1)}
    capturer, expected = Capturer(), [tensor.clone() for tensor in tensors]
    for _ in range(3):
        captured = capturer.capture(state, None, exclude_frozen_parameters=False)
        layout, hold = plan_slot(captured), SlotHold(arena)
        assert arena.acquire(hold, layout.nbytes, timeout=1.0)
        hold.slot.buffer[:] = 0xA5
        staging = Staging(hold.slot)
        with held_back_stager(monkeypatch):
            stager.begin(staging, captured, layout)
            found = [view.clone() for view in hold.slot.views(layout.parts)]
        for one, two in zip(found, expected, strict=True):
            if one.nbytes <= AT_ONCE_BYTES and two.is_contiguous():
                assert torch.equal(one, two)
        staging.done.result(30)
        assert all(torch.equal(one, two) for one, two in zip(hold.slot.views(layout.parts), expected, strict=True))
        hold.release()
        for tensor in tensors:
            tensor.bitwise_not_() if tensor.dtype is torch.uint8 else tensor.add_(1)
        expected = [tensor.clone() for tensor in tensors]


# --- the memory of late copies ------------------------------------------------------------------------------------------


def test_memory_that_is_freed_before_its_copy_spoils_the_snapshot_alone(run: Run, tmp_path: Path) -> None:
    """COPIES-1."""
    with Checkpointer(tmp_path) as ckpt:
        with pytest.MonkeyPatch.context() as patch, held_back_stager(patch) as go:
            handle = ckpt.save(1, {"net": run.net, "o": run.sgd})
            storage = run.net[0].weight.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            go.set()
            with pytest.raises(StagingError, match="was freed or resized after save"):
                handle.wait(30)
        storage.resize_(size)
        assert ckpt.save(2, {"net": run.net, "o": run.sgd}).wait().phase == "committed"


def test_memory_that_the_user_lets_go_is_copied_as_it_was(run: Run) -> None:
    """COPIES-1: parameters and their optimizer are dropped right after save()."""
    with run.saving(o=run.sgd):
        for parameter in run.net.parameters():
            parameter.data = torch.zeros_like(parameter)
        del parameter
        run.sgd.param_groups.clear()
