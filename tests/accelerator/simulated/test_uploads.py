"""Uploads to a device: in any order of its streams, in little pinned memory, and with faults, a load fills all or raises."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointd.codec.checksum import xxh3_128
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol.wire import RetainedSnapshot, Snapshot
from checkpointd.errors import DeviceError, PartlyLoadedError
from checkpointd_client import Checkpointer, devices, open_checkpoint
from checkpointd_client.integrations.dcp.reader import CheckpointdReader
from checkpointd_client.restore import uploads
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.memory_source import FetchedSnapshot, MemorySource
from checkpointd_client.restore.sinks import sink_for
from checkpointd_client.restore.uploads import Uploads
from tests.accelerator.simulated.schedules import main_stream, under
from tests.builders import make_shard

ORDERS = ("compute ahead", "copies ahead", *(f"chaos {seed}" for seed in range(6)))
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
@pytest.mark.parametrize("pinned_bytes", [1 << 20, 8192, 4096, 0])
@pytest.mark.parametrize("own_stream", [False, True])
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
