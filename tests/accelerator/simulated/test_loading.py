"""Loads to devices: in any order of their streams, in little pinned memory, and with faults, a load fills all or raises."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointd.codec.checksum import xxh3_128
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol.wire import RetainedSnapshot, Snapshot
from checkpointd.errors import DeviceError, PartlyLoadedError
from checkpointd_client import Checkpointer, RngState, devices, open_checkpoint
from checkpointd_client.integrations.dcp.reader import CheckpointdReader
from checkpointd_client.restore import uploads
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.memory_source import FetchedSnapshot, MemorySource
from checkpointd_client.restore.sinks import sink_for
from checkpointd_client.restore.uploads import Uploads
from tests.accelerator.simulated.schedules import main_stream, under
from tests.accelerator.simulated.small_nets import Net
from tests.builders import make_shard

ORDERS = ("compute ahead", "copies ahead", *(f"chaos {seed}" for seed in range(4)))
SEEDS = torch.Generator().manual_seed(0)
STATE = {
    "plain": torch.randn(64, 64, generator=SEEDS),
    "strided": torch.randn(48, 64, generator=SEEDS),
    "half": torch.randn(40, 3, 5, generator=SEEDS).bfloat16(),
    "complex": torch.randn(70, dtype=torch.complex128, generator=SEEDS),
    "scalar": torch.tensor(7),
    "flags": torch.randn(3000, generator=SEEDS) > 0,
    "channels": torch.randn(4, 8, 6, 6, generator=SEEDS),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path, chunk_bytes=4096) as ckpt:
        ckpt.save(0, {"s": dict(STATE)}).wait()
    return tmp_path


def targets(device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for STATE on the device, some of it not contiguous."""
    made = {name: torch.zeros_like(tensor, device=device) for name, tensor in STATE.items()}
    made["strided"] = torch.zeros(64, 48, device=device).t()
    made["channels"] = torch.zeros(4, 6, 6, 8, device=device).permute(0, 3, 1, 2)
    return made


def differing(found: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in found.items() if not torch.equal(tensor.cpu(), STATE[name])]


def load(root: Path, into: dict[str, torch.Tensor], pinned_bytes: int = 1 << 20, *, cast: bool = False) -> None:
    with open_checkpoint(root, pinned_bytes=pinned_bytes) as checkpoint:
        checkpoint.load({"s": into}, cast=cast)


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pinned_bytes", [1 << 20, 4096, 0])
@pytest.mark.parametrize("own_stream", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_upload_1_a_load_is_in_order_under_every_schedule(
    sim: ModuleType, root: Path, device: torch.device, order: str, pinned_bytes: int, own_stream: bool
) -> None:
    stream = torch.Stream(device) if own_stream else main_stream(device)
    with devices.on_stream(stream):
        into = targets(device)
        torch.accelerator.synchronize(device)
        before = sim.counts()
        with sim.races() as races, under(sim, order, stream, patience_ms=5):
            for tensor in into.values():
                tensor.fill_(1)
            load(root, into, pinned_bytes)
            read = {name: tensor.clone() for name, tensor in into.items()}
        torch.accelerator.synchronize(device)
        after = sim.counts().since(before)
    assert differing(into) == differing(read) == races == []
    assert (after.pinned, after.unpinned) == (before.pinned, 0)


def test_two_devices_share_what_may_be_pinned(sim: ModuleType, root: Path) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(1, {"a": dict(STATE), "b": dict(STATE)}).wait()
    into = {name: targets(torch.device("sim", index)) for index, name in enumerate("ab")}
    before = sim.counts()
    with (
        sim.races() as races,
        sim.chaos(3),
        sim.limited(pinned_bytes=before.pinned + 16384),
        open_checkpoint(root, pinned_bytes=16384) as checkpoint,
    ):
        checkpoint.load(into)
    after = sim.counts().since(before)
    assert differing(into["a"]) == differing(into["b"]) == races == []
    assert (after.pinned, after.unpinned) == (before.pinned, 0)


def test_elements_are_converted_as_for_host_memory(sim: ModuleType, root: Path, device: torch.device) -> None:
    names = ("plain", "strided", "half", "channels")
    on_host = {name: torch.zeros(STATE[name].shape, dtype=torch.float16) for name in names}
    on_device = {name: torch.zeros_like(tensor, device=device) for name, tensor in on_host.items()}
    with Checkpointer(root) as ckpt:
        ckpt.save(1, {"s": {name: STATE[name] for name in names}}).wait()
    with sim.only(main_stream(device), patience_ms=5):
        load(root, on_device, cast=True)
    load(root, on_host, cast=True)
    assert [name for name in names if not torch.equal(on_host[name], on_device[name].cpu())] == []


def test_reading_goes_on_while_the_device_copies(
    sim: ModuleType, root: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks are read and queued while not one copy can run."""
    queued: list[int] = []
    end = uploads._DeviceUploads.end

    def counted(self: uploads._DeviceUploads) -> None:
        queued.append(sim.counts().pending)
        end(self)

    monkeypatch.setattr(uploads._DeviceUploads, "end", counted)
    into = targets(device)
    before = sim.counts()
    with sim.only(main_stream(device), patience_ms=0):
        load(root, into)
    copies = sim.counts().since(before).copies_up
    assert copies <= queued[0]
    assert differing(into) == []


def saved(root: Path, device: torch.device) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(0, {"net": Net(3.0, device)}).wait()


def empty_net(device: torch.device, strided: bool) -> Net:
    net = Net(-1.0, device)
    if strided:
        net.weight.data = net.weight.data.t()
    return net


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_work_that_was_queued_before_does_not_overwrite_what_is_loaded(
    sim: ModuleType, tmp_path: Path, device: torch.device, strided: bool, own_stream: bool
) -> None:
    saved(tmp_path, device)
    net = empty_net(device, strided)
    stream = torch.Stream(device) if own_stream else torch.accelerator.current_stream(device)
    torch.accelerator.synchronize(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(stream, patience_ms=100):
        with torch.no_grad():
            net.weight.fill_(0.5)
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"net": net})
    torch.accelerator.synchronize(device)
    assert net.weight.unique().tolist() == [3.0]
    assert races == []


@pytest.mark.parametrize("strided", [False, True])
def test_work_that_is_queued_after_reads_what_was_loaded(
    sim: ModuleType, tmp_path: Path, device: torch.device, strided: bool
) -> None:
    saved(tmp_path, device)
    net, default, stream = empty_net(device, strided), torch.accelerator.current_stream(device), torch.Stream(device)
    torch.accelerator.synchronize(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(default, patience_ms=100):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"net": net})
        read = net.weight.detach() * 1
        stream.synchronize()
    assert read.unique().tolist() == [3.0]
    assert races == []


# --- pinned memory ------------------------------------------------------------------------------------------------------


def pins(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are pinned from now on."""
    sizes: list[int] = []

    def register(address: int, nbytes: int) -> int:
        sizes.append(nbytes)
        return int(sim.host_register(address, nbytes))

    monkeypatch.setitem(devices.PINNING, "sim", devices.Pinning(register, sim.host_unregister))
    return sizes


@pytest.mark.parametrize("pinned_bytes", [4096, 12288, 65536])
def test_upload_3_a_load_pins_no_more_than_it_may(
    sim: ModuleType, root: Path, device: torch.device, pinned_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, into = pins(sim, monkeypatch), targets(device)
    with sim.only(main_stream(device), patience_ms=5):
        load(root, into, pinned_bytes)
    assert 0 < sum(sizes) <= pinned_bytes
    assert differing(into) == []


def test_upload_3_a_small_load_pins_little(
    sim: ModuleType, root: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, into = pins(sim, monkeypatch), targets(device)
    load(root, into, 256 << 20)
    assert sum(sizes) <= 2 * sum(tensor.nbytes for tensor in into.values())


@pytest.mark.parametrize("why", ["refused", "raises", "unknown", "not wanted"])
def test_without_pinned_memory_a_load_waits_for_its_copies(
    sim: ModuleType,
    root: Path,
    device: torch.device,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(address: int, nbytes: int) -> int:
        raise RuntimeError("the driver is not loaded\nframes of it")

    if why == "raises":
        monkeypatch.setitem(devices.PINNING, "sim", devices.Pinning(broken, sim.host_unregister))
    if why == "unknown":
        monkeypatch.delitem(devices.PINNING, "sim")
    into = targets(device)
    before = sim.counts()
    refused = sim.limited(pinned_bytes=before.pinned) if why == "refused" else sim.limited()
    with caplog.at_level(logging.WARNING, "checkpointd"), sim.races() as races, refused:
        load(root, into, 0 if why == "not wanted" else 1 << 20)
    assert differing(into) == races == []
    assert sim.counts().since(before).unpinned == 0
    told = {
        "refused": ["host memory cannot be pinned (error 2): the load waits for copies to sim:0"],
        "raises": ["host memory cannot be pinned (the driver is not loaded): the load waits for copies to sim:0"],
        "unknown": ["host memory cannot be pinned (torch offers no call for sim devices): the load waits for copies to sim:0"],
        "not wanted": [],
    }
    assert [record.getMessage() for record in caplog.records] == told[why]


def test_a_load_goes_on_with_the_memory_that_could_be_pinned(
    sim: ModuleType, root: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_CUT_BYTES", 4096)
    into = targets(device)
    before = sim.counts()
    with sim.limited(pinned_bytes=before.pinned + 8192), sim.only(main_stream(device), patience_ms=5):
        load(root, into, 65536)
    after = sim.counts().since(before)
    assert differing(into) == []
    assert (after.pinned, after.unpinned) == (before.pinned, 0)


# --- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned_bytes", [1 << 20, 4096, 0])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("copy", r"could not be copied to sim:0: sim: this copy fails, as asked for"),
        ("half_copy", r"sim:0( failed)?: sim: a kernel failed: a copy stopped half way, as asked for"),
        ("kernel", r"sim:0( failed)?: sim: a kernel failed: this kernel fails, as asked for"),
    ],
)
@pytest.mark.parametrize("after", [0, 3, 11])
def test_upload_4_a_copy_that_fails_ends_the_load_by_name_and_leaves_nothing_pinned(
    sim: ModuleType, root: Path, device: torch.device, fault: str, told: str, after: int, pinned_bytes: int
) -> None:
    into = targets(device)
    before = sim.counts()
    with (
        sim.only(main_stream(device), patience_ms=5),
        sim.failing(fault, after=after),
        pytest.raises(PartlyLoadedError, match=told) as raised,
    ):
        load(root, into, pinned_bytes)
    assert any(f"s.{name}" in str(raised.value) for name in STATE)
    assert isinstance(raised.value.__cause__, DeviceError)
    counts = sim.counts()
    assert (counts.pinned, counts.pending) == (before.pinned, 0)
    load(root, into, pinned_bytes)
    assert differing(into) == []


def test_without_device_memory_for_a_strided_tensor_the_load_fails_by_name(
    sim: ModuleType, root: Path, device: torch.device
) -> None:
    into = targets(device)
    before = sim.counts()
    with (
        sim.limited(device_bytes=0),
        pytest.raises(PartlyLoadedError, match=r"s\.(strided|channels) could not be copied to sim:0: sim: out of memory"),
    ):
        load(root, into)
    assert sim.counts().pinned == before.pinned


def test_upload_4_blocks_stay_where_the_device_cannot_say_that_it_is_done(
    sim: ModuleType, root: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[uploads._Block] = []
    monkeypatch.setattr(uploads, "_KEPT", kept)
    into = targets(device)
    before = sim.counts()
    with monkeypatch.context() as broken:
        broken.setattr(devices, "is_over", lambda _: False)
        load(root, into)
    assert sim.counts().pinned > before.pinned
    for block in kept:
        block.free()
    assert sim.counts().pinned == before.pinned
    assert differing(into) == []


def test_upload_4_memory_that_cannot_be_unpinned_stays(
    sim: ModuleType, root: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[uploads._Block] = []
    monkeypatch.setattr(uploads, "_KEPT", kept)
    addresses: list[int] = []

    def refuses(address: int) -> int:
        addresses.append(address)
        return 3

    monkeypatch.setitem(devices.PINNING, "sim", devices.Pinning(sim.host_register, refuses))
    load(root, targets(device))
    assert len(kept) == len(addresses) > 0
    assert "of host memory cannot be unpinned, and are kept: error 3" in caplog.text
    for address in addresses:
        sim.host_unregister(address)


def test_upload_4_an_interrupted_end_frees_no_block_that_a_copy_may_use(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the load waits for one device: its blocks stay, and the other device is waited for."""
    kept: list[uploads._Block] = []
    monkeypatch.setattr(uploads, "_KEPT", kept)
    ones = np.ones(64, dtype=np.float32).view(np.uint8)
    into = [torch.zeros(64, device=f"sim:{index}") for index in range(2)]
    before = sim.counts()
    finish = uploads._DeviceUploads._finish

    def interrupted(self: uploads._DeviceUploads) -> None:
        if self._device.index == 1:
            raise KeyboardInterrupt
        finish(self)

    monkeypatch.setattr(uploads._DeviceUploads, "_finish", interrupted)

    def load_both() -> None:
        with Uploads(1 << 20) as load:
            for sink in [sink_for(tensor, "s.t", "float32", load) for tensor in into]:
                sink(0, ones)

    with sim.only(main_stream(into[0].device)), pytest.raises(KeyboardInterrupt):
        load_both()
    assert [tensor.tolist() for tensor in into] == [[1.0] * 64] * 2
    assert sim.counts().pinned - before.pinned == sum(block._bytes.nbytes for block in kept) > 0
    for block in kept:
        block.free()
    assert sim.counts().pinned == before.pinned


def test_upload_5_bytes_that_come_after_the_end_are_refused(sim: ModuleType, device: torch.device) -> None:
    target = torch.zeros(64, device=device)
    ones = np.ones(64, dtype=np.float32).view(np.uint8)
    with Uploads(1 << 20) as load:
        sink = sink_for(target, "s.late", "float32", load)
        sink(0, ones[:128])
    before = sim.counts()
    with pytest.raises(DeviceError, match=r"s\.late was read after its load had been given up, and is not copied to sim:0"):
        sink(128, ones[128:])
    assert sim.counts().since(before).launches == 0
    assert target.tolist() == [1.0] * 32 + [0.0] * 32


def test_upload_5_the_end_waits_for_a_thread_that_queues(
    sim: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read was given up, and the load ends, while a thread is between its block and the queue."""
    load, queue = Uploads(1 << 20), uploads._queue
    target = torch.zeros(64, device=device)
    sink = sink_for(target, "s.t", "float32", load)
    (own,) = load._by_device.values()
    ended = threading.Thread(target=load.__exit__, args=(None, None, None))

    def queued_late(*args: Any, **options: Any) -> None:
        ended.start()
        with own._change:
            own._change.wait_for(lambda: own._has_ended)
        queue(*args, **options)

    monkeypatch.setattr(uploads, "_queue", queued_late)
    before = sim.counts()
    sink(0, np.ones(64, dtype=np.float32).view(np.uint8))
    ended.join()
    after = sim.counts().since(before)
    assert target.tolist() == [1.0] * 64
    assert (after.pinned, after.unpinned) == (before.pinned, 0)


def test_upload_2_threads_that_share_few_blocks_never_write_into_one_that_is_copied(
    sim: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race check knows each write of the host into a block, so it sees one that no wait puts after the copies."""
    reserve = uploads._Block.reserve

    def watched(self: uploads._Block, nbytes: int, fqn: str) -> tuple[Any, torch.Tensor]:
        memory, row = reserve(self, nbytes, fqn)
        sim.host_touches(row, writes=True, what="the next elements")
        return memory, row

    monkeypatch.setattr(uploads._Block, "reserve", watched)
    values = [torch.full((50, 30), float(k)) for k in range(64)]
    into = [torch.zeros(30, 50, device=device).t() if k % 2 else torch.zeros(50, 30, device=device) for k in range(64)]
    torch.accelerator.synchronize(device)
    with sim.races() as races, sim.only(main_stream(device), patience_ms=1), Uploads(16384) as load:
        sinks = [sink_for(tensor, f"s.{k}", "float32", load) for k, tensor in enumerate(into)]
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda k: sinks[k](0, values[k].reshape(-1).view(torch.uint8).numpy()), range(64)))
    assert [k for k in range(64) if not torch.equal(into[k].cpu(), values[k])] == races == []


def test_a_thread_makes_no_context_on_a_device_that_it_does_not_use(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", asked.append)
    side = torch.Stream("sim:1")
    with devices.on_stream(side):
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(side.device) != side
    assert asked == []


# --- what else fills devices ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_fills_a_device(sim: ModuleType, root: Path, device: torch.device) -> None:
    into = {f"s.{name}": tensor for name, tensor in targets(device).items()}
    before, stream = sim.counts(), torch.Stream(device)
    torch.accelerator.synchronize(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(stream, patience_ms=5):
        for tensor in into.values():
            tensor.fill_(1)
        dcp.load(into, storage_reader=CheckpointdReader(root), no_dist=True)
    torch.accelerator.synchronize(device)
    assert differing({name.removeprefix("s."): tensor for name, tensor in into.items()}) == races == []
    assert sim.counts().pinned == before.pinned


def test_a_sidecars_memory_fills_a_device(sim: ModuleType, device: torch.device) -> None:
    values = {name: torch.randn(40, 30, generator=SEEDS) for name in ("one", "two")}
    shard = make_shard({name: tensor.numpy() for name, tensor in values.items()})
    digests = tuple(xxh3_128(shard.buffer[tensor.offset : tensor.offset + tensor.nbytes]) for tensor in shard.tensors)
    descriptor = os.memfd_create("held")
    os.write(descriptor, bytes(shard.buffer))
    held = RetainedSnapshot(
        tag="global_step1",
        attempt="00000001-0",
        step=1,
        order=(1, 1),
        world_size=1,
        nbytes=len(shard.buffer),
        phase="staged",
        nonce="n",
    )
    snapshot = Snapshot(
        held=held,
        nbytes=len(shard.buffer),
        tensors=wire_tensors(shard.tensors),
        aliases=(),
        excluded=(),
        tree=shard.tree,
        digests=digests,
    )
    source = MemorySource(FetchedSnapshot(snapshot, descriptor, 0), {}, 0, pinned_bytes=8192)
    into = [Target("one", torch.zeros(40, 30, device=device)), Target("two", torch.zeros(30, 40, device=device).t())]
    torch.accelerator.synchronize(device)
    before, stream = sim.counts(), torch.Stream(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(stream, patience_ms=5):
        for target in into:
            target.tensor.fill_(1)
        source.fill(into, source.content())
    torch.accelerator.synchronize(device)
    assert [target.fqn for target in into if not torch.equal(target.tensor.cpu(), values[target.fqn])] == races == []
    after = sim.counts().since(before)
    assert (after.pinned, after.unpinned) == (before.pinned, 0)


def test_generators_of_the_devices_go_on_where_they_were(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"rng": RngState()}).wait()
        expected = [torch.randn(3, device=f"sim:{index}").cpu() for index in range(2)]
        ckpt.load({"rng": RngState()})
        found = [torch.randn(3, device=f"sim:{index}").cpu() for index in range(2)]
    assert all(map(torch.equal, expected, found))
