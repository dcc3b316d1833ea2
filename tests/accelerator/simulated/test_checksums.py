"""The sums that prove a snapshot from the device's memory on, and what a save costs the training thread."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from checkpointd.errors import StagingError
from checkpointd_client import Checkpointer, devices
from checkpointd_client.capture.dtypes import DTYPES, bits, empty
from checkpointd_client.staging import device_plan, stager
from checkpointd_client.staging.device_snapshot import DeviceSnapshot
from tests.accelerator.simulated.schedules import main_stream
from tests.accelerator.simulated.small_nets import Net, loaded

SIDES = [64, 600, 3000]
"""Of square float32 tensors that are gathered, summed with others, and summed alone."""


def trained(side: int, device: torch.device) -> tuple[Net, dict[str, object]]:
    net = Net(1.0, device, side)
    return net, {"net": net, "optimizer": torch.optim.SGD([net.weight], lr=1.0)}


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("how", ["data", "stream"])
def test_a_change_that_nobody_counts_never_gets_into_a_checkpoint(
    sim: ModuleType, tmp_path: Path, device: torch.device, side: int, how: str
) -> None:
    """Through `.data`, or on a stream of its own, as a custom kernel or a graph may do it. Gathered tensors are safe."""
    net, state = trained(side, device)
    own = torch.Stream(device)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        with sim.only(main_stream(device), own):
            handle = ckpt.save(1, state)
            own.wait_stream(main_stream(device))
            with devices.on_stream(own if how == "stream" else main_stream(device)):
                net.weight.data[-1, -1] = 7.0
        torch.accelerator.synchronize(device)
        if side > SIDES[0]:
            named = r"net\.weight \(its bytes \d+ to \d+\) differs from what it was on sim:0 at save\(\); the snapshot"
            with pytest.raises(StagingError, match=named):
                handle.wait()
        else:
            handle.wait()
        ckpt.save(2, state).wait()
    if side == SIDES[0]:
        assert loaded(tmp_path, "global_step1", device, side).weight[-1, -1] == 1.0
    assert loaded(tmp_path, "global_step2", device, side).weight[-1, -1] == 7.0


def flipped(found: torch.Tensor) -> None:
    found[len(found) // 2] ^= 1


def swapped(found: torch.Tensor) -> None:
    """Two blocks of 4,096 lanes of 8 bytes change places."""
    one, two = found[: 32 << 10].clone(), found[32 << 10 : 64 << 10].clone()
    assert not torch.equal(one, two)
    found[: 32 << 10], found[32 << 10 : 64 << 10] = two, one


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("broken", [flipped, swapped])
def test_a_copy_that_goes_wrong_is_found(
    sim: ModuleType, tmp_path: Path, device: torch.device, side: int, broken: Callable[[torch.Tensor], None], monkeypatch: Any
) -> None:
    """As a device or a driver may do it: without an error, between the device's memory and the host's."""
    compared = DeviceSnapshot.differs

    def after_a_fault(part: DeviceSnapshot) -> tuple[int, int] | None:
        broken(part._slot.memory[: 64 << 10])
        return compared(part)

    net, state = trained(side, device)
    with torch.no_grad():
        net.weight.copy_(torch.arange(side * side, device=device).view(side, side))
        net.seen.copy_(-net.weight)
    if side == SIDES[0]:
        state = {"two blocks": torch.arange(1 << 14, dtype=torch.float32, device=device)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        monkeypatch.setattr(DeviceSnapshot, "differs", after_a_fault)
        with pytest.raises(StagingError, match="differs from what it was on sim:0 at save"):
            ckpt.save(1, state).wait()
        monkeypatch.undo()
        assert ckpt.latest() == "global_step0"
        ckpt.save(2, state).wait()


def test_without_checksums_nothing_is_summed(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    read = []
    for checksums in (True, False):
        _, state = trained(600, device)
        with Checkpointer(tmp_path / str(checksums), device_checksums=checksums) as ckpt:
            ckpt.save(0, state).wait()
            torch.accelerator.synchronize(device)
            before = sim.counts()
            ckpt.save(1, state).wait()
            read.append(sim.counts().since(before).read_bytes)
    assert read[1] == 0, "a clone is a copy, which is not counted"
    assert read[0] >= 2 * 4 * 600 * 600, "the weight and the clone of the buffer are summed"


def test_a_device_that_adds_with_32_bits_goes_without(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stager, "add_up", lambda _: False)
    _, state = trained(600, device)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        ckpt.save(1, state).wait()
    assert caplog.text.count("sim:0 does not add 64-bit integers exactly: snapshots from it are taken without checksums") == 1


@pytest.mark.parametrize("left", [0, 64 << 10])
def test_without_memory_the_snapshot_is_right_and_the_next_one_is_proved_again(
    sim: ModuleType, tmp_path: Path, device: torch.device, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: Counter[bool] = Counter()
    compared = DeviceSnapshot.differs

    def counted(part: DeviceSnapshot) -> tuple[int, int] | None:
        proved[part._sums is not None] += 1
        return compared(part)

    monkeypatch.setattr(DeviceSnapshot, "differs", counted)
    net, state = trained(600, device)
    with Checkpointer(tmp_path) as ckpt:
        with sim.limited(device_bytes=sim.counts().in_use + left):
            handle = ckpt.save(0, state)
        with torch.no_grad():
            net.seen.zero_()
        handle.wait()
        ckpt.save(1, state).wait()
    assert proved[True] >= 1
    assert loaded(tmp_path, "global_step0", device, 600).seen.unique().tolist() == [1.0]


# --- every kind of tensor -----------------------------------------------------------------------------------------------


def of_any_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: also NaNs with payloads, and -0."""
    made = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (made & 1).view(dtype) if dtype == torch.bool else made.view(dtype)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(torch.int64) if tensor.itemsize > 8 else bits(tensor)


@pytest.mark.parametrize("gathered", [0, 100, 1 << 20])
@pytest.mark.parametrize("alone", [1, 300, 1 << 20])
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    sim: ModuleType, tmp_path: Path, device: torch.device, gathered: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits that send tensors through the scratch memory, together, alone or as they are."""
    monkeypatch.setattr(device_plan, "GATHERED_BYTES", gathered)
    monkeypatch.setattr(device_plan, "ALONE_BYTES", alone)
    monkeypatch.setattr(device_plan, "SCRATCH_BYTES", 8 << 10)
    host: dict[str, torch.Tensor] = {}
    for k, (name, dtype) in enumerate(DTYPES.items()):
        for count in (0, 1, 16, 33, 64, 5000):
            host[f"{name}.{count}"] = of_any_bits(count, dtype, k)
        square = of_any_bits(48 * 48, dtype, k).view(48, 48)
        host |= {f"{name}.t": square.t(), f"{name}.cut": square[3:9, 5:40], f"{name}.off": square.view(-1)[1:98]}
    live = {key: empty(t.shape, t.dtype, device, t.stride()) for key, t in host.items()}
    for key, tensor in live.items():
        bits(tensor).copy_(bits(host[key]))
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in live.values() if t.is_floating_point()], lr=1.0)
    with Checkpointer(tmp_path) as ckpt, sim.races() as races:
        for step in range(2):
            ckpt.save(step, {"live": live, "optimizer": optimizer}).wait()
    assert races == []
    into = {key: empty(t.shape, t.dtype, torch.device("cpu")) for key, t in host.items()}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"live": into}, strict=False)
    for key, found in into.items():
        assert torch.equal(comparable(found), comparable(host[key])), key


# --- what a save costs ------------------------------------------------------------------------------------------------


def many(count: int, device: torch.device, size: int = 64) -> dict[str, object]:
    """A model and its AdamW: of 10 tensors 3 are parameters, 6 moments, and 1 is a buffer. Counts of steps are on the host."""
    model = torch.nn.Module()
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for _ in range(3 * count // 10)]
    model.parameters_ = torch.nn.ParameterList(parameters)
    for k in range(count // 10):
        model.register_buffer(f"buffer{k}", torch.ones(size, device=device))
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def lines_run(work: Callable[[], object]) -> Counter[str]:
    """The lines of Python that `work` runs on this thread, by function."""
    seen: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            seen[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return seen


@pytest.mark.timeout(300)
def test_a_save_launches_as_much_for_10_000_tensors_as_for_1_000(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    launches = []
    for count in (1_000, 10_000):
        state = many(count, device)
        with Checkpointer(tmp_path / str(count)) as ckpt:
            ckpt.save(0, state).wait()
            torch.accelerator.synchronize(device)
            before = sim.counts()
            with sim.only(main_stream(device)):
                handle = ckpt.save(1, state)
                here = sim.counts().since(before).launched_here
            handle.wait()
            done = sim.counts().since(before)
            launches.append(here)
            # The gathered bytes once into the scratch memory, which counts on both sides, and once for the sums.
            assert done.read_bytes <= 3 * count * 64 * 4 + (64 << 10)
            assert (done.unpinned, done.forced) == (0, 0)
    assert launches[0] == launches[1] <= 10


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits, all 64 times smaller than they are: tensors of 16 KiB go the way that tensors of 1 MiB go."""
    for name in ("GATHERED_BYTES", "SCRATCH_BYTES", "ALONE_BYTES"):
        monkeypatch.setattr(device_plan, name, getattr(device_plan, name) // 64)


def large(count: int, device: torch.device) -> dict[str, object]:
    parameters = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4096, device=device)) for _ in range(count)])
    return {"model": parameters, "optimizer": torch.optim.SGD(parameters, lr=1.0)}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("small_limits")
def test_large_tensors_are_read_once_and_take_few_launches(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    """With the limits as they are, this is 10,000 tensors of 1 MiB: 10 GB."""
    state, total = large(10_000, device), 10_000 * 4096 * 4
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        torch.accelerator.synchronize(device)
        before = sim.counts()
        handle = ckpt.save(1, state)
        here = sim.counts().since(before).launched_here
        handle.wait()
        read = sim.counts().since(before).read_bytes
    assert here <= 200
    assert read <= 3 * total * 1.01, "each tensor once, and the scratch memory once as the target and once for the sums"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("small_limits")
def test_a_save_of_large_tensors_runs_no_python_for_single_ones(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    runs = []
    for count in (500, 2_000):
        state = large(count, device)
        with Checkpointer(tmp_path / str(count)) as ckpt:
            for step in range(2):
                ckpt.save(step, state).wait()
            torch.accelerator.synchronize(device)
            runs.append(sum(lines_run(lambda ckpt=ckpt, state=state: ckpt.save(2, state)).values()))
    assert runs[1] - runs[0] < 1_500 / 2, "a batch of 128 tensors takes some lines, and single tensors none"


@pytest.mark.timeout(300)
def test_a_save_runs_no_python_for_single_tensors(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    runs = []
    for count in (1_000, 10_000):
        state = many(count, device)
        with Checkpointer(tmp_path / str(count)) as ckpt:
            for step in range(2):
                ckpt.save(step, state).wait()
            torch.accelerator.synchronize(device)
            runs.append(lines_run(lambda ckpt=ckpt, state=state: ckpt.save(2, state)))
    more = {name: (lines, runs[0][name]) for name, lines in runs[1].items() if lines > runs[0][name] + 1_000}
    assert more == {}
