"""Each planted mistake shows every time under some schedule: so the tests of staging and loading can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from checkpointd.errors import CheckpointdError, DeviceError
from checkpointd.layout.boxes import whole
from checkpointd_client import Checkpointer, devices
from checkpointd_client.restore.sinks import box_sink, sink_for
from checkpointd_client.restore.uploads import Uploads
from checkpointd_client.staging import device_plan
from checkpointd_client.staging.device_snapshot import DeviceSnapshot
from checkpointd_client.staging.stager import Staging
from tests.accelerator.simulated.mistakes import LOADING, STAGING, Mistake
from tests.accelerator.simulated.schedules import main_stream, under
from tests.accelerator.simulated.small_nets import Net, loaded
from tests.faults.jobs import wait_until


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("mistake_rounds"))


class Gate:
    """Holds the stager's thread back while it is closed."""

    def __init__(self, *, closed: bool) -> None:
        self._closed, self._go = closed, threading.Event()
        self.waits = threading.Event()
        """Set when a thread waits for copies from the device or for their sums, as the stager's does at the end."""
        if not closed:
            self._go.set()

    def passed(self) -> None:
        self._go.wait()

    def set(self) -> None:
        self._go.set()

    @contextmanager
    def open(self) -> Iterator[None]:
        self._go.set()
        yield
        if self._closed:
            self._go.clear()


@contextmanager
def conditions(mistake: Mistake) -> Iterator[Gate]:
    """The conditions under which `mistake` shows."""
    gate, finish = Gate(closed=mistake.late), Staging.finish
    wait_for, differs = DeviceSnapshot._wait_for, DeviceSnapshot.differs

    def late(staging: Staging) -> None:
        gate.passed()
        finish(staging)

    def waits(snapshot: DeviceSnapshot, event: torch.Event | None) -> None:
        gate.waits.set()
        wait_for(snapshot, event)

    def adds_up(snapshot: DeviceSnapshot) -> tuple[int, int] | None:
        if snapshot._sums is not None:
            gate.waits.set()
        return differs(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "finish", late)
        patch.setattr(DeviceSnapshot, "_wait_for", waits)
        patch.setattr(DeviceSnapshot, "differs", adds_up)
        if not mistake.gathered:
            patch.setattr(device_plan, "GATHERED_BYTES", 0)
        try:
            yield gate
        finally:
            gate.set()


def staged(sim: ModuleType, root: Path, device: torch.device, mistake: Mistake, *, checksums: bool) -> list[str]:
    """What is wrong with two snapshots that are taken under the schedule of `mistake`; nothing where all is right."""
    net = Net(1.0, device)
    optimizer = torch.optim.SGD([net.weight], lr=1.0)
    net.weight.grad = torch.ones_like(net.weight)
    state = {"net": net, "optimizer": optimizer}
    said: list[str] = []
    with conditions(mistake) as go, Checkpointer(root, device_checksums=checksums) as ckpt:
        with go.open():
            ckpt.save(0, state).wait()
        torch.accelerator.synchronize(device)
        before = sim.counts()
        go.waits.clear()
        with under(sim, mistake.schedule, main_stream(device), mistake.patience_ms):
            with torch.no_grad():
                net.weight.mul_(5)
                net.seen.mul_(5)
            handles = [ckpt.save(1, state)]
            with torch.no_grad():
                net.seen.mul_(3)
            other = [torch.full_like(net.seen, 9.0) for _ in range(3)]
            if mistake.steps:
                optimizer.step()
            handles.append(ckpt.save(2, state))
            optimizer.step()
            if sim.counts().since(before).forced:
                said.append("the training thread waited for the device")
            go.set()
            if mistake.lingers:
                wait_until(lambda: handles[0].done() or go.waits.is_set(), "the save ends, or waits for the device")
        for handle in handles:
            try:
                handle.wait()
            except CheckpointdError as error:
                said.append(f"a save failed: {error}")
        del other
    for step, expected in ((1, (5.0, 5.0)), (2, (4.0 if mistake.steps else 5.0, 15.0))):
        try:
            found = loaded(root, f"global_step{step}", device)
        except CheckpointdError as error:
            said.append(f"a load failed: {error}")
        else:
            if (found.weight.unique().tolist(), found.seen.unique().tolist()) != ([expected[0]], [expected[1]]):
                said.append(f"step {step} holds other bytes")
    return said


BOX = whole((64, 64))


def sinks_of(net: Net, load: Uploads) -> list[tuple[torch.Tensor, Callable[[], None]]]:
    """A tensor for each way to fill one on a device, and the call of its sink with threes."""
    threes = np.full((64, 64), 3.0, dtype=np.float32)
    rows, carriers = threes.reshape(-1).view(np.uint8), threes.view(np.uint32)
    plain, strided, part, converted = (torch.full_like(net.seen, 0.0) for _ in range(4))
    strided, converted = strided.t(), converted.double()
    return [
        (plain, partial(sink_for(plain, "plain", "float32", load), 0, rows)),
        (strided, partial(sink_for(strided, "strided", "float32", load), 0, rows)),
        (part, partial(box_sink(part, BOX, "part", "float32", load), BOX, carriers)),
        (converted, partial(box_sink(converted, BOX, "converted", "float32", load), BOX, carriers)),
    ]


def filled(sim: ModuleType, device: torch.device, schedule: str, pinned_bytes: int) -> list[str]:
    """What is wrong with tensors that another thread fills, if the caller's stream is not the default one."""
    caller, said = torch.Stream(device), list[str]()
    torch.accelerator.synchronize(device)
    before = sim.counts()
    with devices.on_stream(caller), sim.races() as races:
        with under(sim, schedule, caller, patience_ms=5), ThreadPoolExecutor(1) as reader:
            try:
                with Uploads(pinned_bytes) as load:
                    pairs = sinks_of(Net(-1.0, device), load)
                    for tensor, _ in pairs:
                        tensor.fill_(0.5)
                    for _, fill in pairs:
                        reader.submit(fill).result()
                seen = [tensor * 1 for tensor, _ in pairs]
            except DeviceError as error:
                return [str(error)]
        torch.accelerator.synchronize(device)
    for k, ((tensor, _), read) in enumerate(zip(pairs, seen, strict=True)):
        if (tensor.unique().tolist(), read.unique().tolist()) != ([3.0], [3.0]):
            said.append(f"sink {k} filled {tensor.unique().tolist()}, and the caller read {read.unique().tolist()}")
    after = sim.counts().since(before)
    if (after.pinned, after.unpinned) != (before.pinned, 0):
        said.append(f"{after.pinned - before.pinned} bytes are still pinned, {after.unpinned} copies were of other memory")
    return [*said, *races]


def unheard(sim: ModuleType, device: torch.device) -> list[str]:
    """What is wrong if a copy fails and nobody tells."""
    with sim.only(main_stream(device), patience_ms=5), sim.failing("half_copy"):
        try:
            with Uploads(8192) as load:
                sinks_of(Net(-1.0, device), load)[0][1]()
        except DeviceError:
            return []
    with suppress(RuntimeError):
        torch.accelerator.synchronize(device)
    return ["a copy failed, and the load did not"]


def ways_wrong(sim: ModuleType, device: torch.device, schedule: str) -> list[str]:
    """What is wrong with loads, in little pinned memory, in none, and after a fault."""
    said = [line for pinned_bytes in (8192, 0) for line in filled(sim, device, schedule, pinned_bytes)]
    return said + unheard(sim, device)


@pytest.mark.parametrize("checksums", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", STAGING)
def test_a_mistake_in_staging_shows_every_time(
    sim: ModuleType, tmp_path: Path, device: torch.device, name: str, rounds: int, checksums: bool
) -> None:
    mistake = STAGING[name]
    for k in range(rounds):
        with mistake.made():
            said = staged(sim, tmp_path / str(k), device, mistake, checksums=checksums)
        assert said or (checksums and mistake.mended), f"round {k} saw nothing"
        if checksums:
            assert not any("holds other bytes" in one for one in said), f"round {k} committed wrong bytes: {said}"
    assert staged(sim, tmp_path / "right", device, mistake, checksums=checksums) == []


@pytest.mark.parametrize("name", LOADING)
def test_a_mistake_in_loading_shows_every_time(sim: ModuleType, device: torch.device, name: str, rounds: int) -> None:
    mistake = LOADING[name]
    for k in range(rounds):
        with mistake.made():
            assert ways_wrong(sim, device, mistake.schedule), f"round {k} saw nothing"
    assert ways_wrong(sim, device, mistake.schedule) == []
