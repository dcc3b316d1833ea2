"""A load reads each byte once, into the tensor's own memory, and leaves nothing of a damaged checkpoint behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointd.admin.gc import deletion
from checkpointd.errors import DamagedError, NotFoundError, PartlyLoadedError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.read import decode
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, loader
from checkpointd_client.checkpointer import core_of
from tests.builders import objects
from tests.faults.jobs import wait_until

MIB = 1 << 20
NAMES = ("a", "b", "c")


class Counted:
    """Loads itself, and counts how often."""

    def __init__(self, value: int) -> None:
        self.value, self.loads = value, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value, self.loads = state["value"], self.loads + 1


def state_of(step: int) -> dict[str, Any]:
    """Three tensors of a MiB, a strided one, a small one, a module's optimizer with its moments, and an object of its own."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(MIB // 4, generator=generator) for name in NAMES}
    model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(model.weight, float(step))
    torch.nn.init.constant_(model.bias, float(step))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((1, 8), float(step))).sum().backward()
    optimizer.step()
    return {
        "tensors": tensors,
        "strided": torch.randn(300, 400, generator=generator).t(),
        "small": torch.full((5,), float(step)),
        "model": model,
        "optimizer": optimizer,
        "counted": Counted(step),
    }


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    """Every value of a state but its own object, as bytes."""
    found = dict(state["tensors"]) | {"strided": state["strided"], "small": state["small"]} | state["model"].state_dict()
    for number, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in values.items()}
    return {name: value.contiguous().numpy().tobytes() for name, value in found.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the checkpoints 1 and 2, stored raw, in chunks of 256 KiB."""
    with Checkpointer(tmp_path / "root", compression="none", chunk_bytes=MIB // 4, dedup=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
    return tmp_path / "root"


def chunks_of(root: Path, step: int) -> Path:
    [path] = [path for path in objects(root / f"global_step{step}", "-0.chunks") if path.stat().st_size]
    return path


def damage(path: Path, place: float) -> None:
    """Flip a bit of a tensor: in the first chunk, in the middle, or in the last one. Between tensors are a few free bytes."""
    data = bytearray(path.read_bytes())
    used = np.flatnonzero(np.frombuffer(bytes(data), np.uint8))
    data[int(used[int(place * (len(used) - 1))])] ^= 1
    path.write_bytes(data)


class Reads:
    """What a load reads of chunks, and which digests it computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: Counter[tuple[str, int]] = Counter()
        self.into: list[tuple[int, int]] = []
        self.digested: list[int] = []
        self.checksums = 0
        self.calls = 0
        get_parts, digest, checksum = PosixStore.get_parts, decode.xxh3_128, decode.xxh3_64

        async def counted(
            store: PosixStore, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], Any]
        ) -> Any:
            if key.endswith(".chunks"):
                self.calls += 1
                stop = offset + sum(part.nbytes for part in parts)
                self.ranges.update((key, at) for at in range(offset, stop, 64))
                addresses = [(np.frombuffer(part, np.uint8).ctypes.data, part.nbytes) for part in parts]
                self.into += [(address, address + nbytes) for address, nbytes in addresses]
            return await get_parts(store, key, offset, parts, then)

        def digested(data: Any) -> bytes:
            self.digested.append(data.nbytes)
            return digest(data)

        def summed(data: Any) -> int:
            self.checksums += 1
            return checksum(data)

        monkeypatch.setattr(PosixStore, "get_parts", counted)
        monkeypatch.setattr(decode, "xxh3_128", digested)
        monkeypatch.setattr(decode, "xxh3_64", summed)


def test_load_1_each_byte_is_read_once_into_its_tensor_and_digested_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = state_of(9)
    with Checkpointer(root) as ckpt:
        reads = Reads(monkeypatch)
        assert ckpt.load(target)
    assert bits_of(target) == bits_of(state_of(2))
    assert set(reads.ranges.values()) == {1}
    nbytes = sum(len(data) for data in bits_of(target).values())
    assert (sum(reads.digested), reads.checksums) == (nbytes, 0)
    for name in NAMES:  # no copy beside the target: the store itself wrote all of it there
        first = target["tensors"][name].data_ptr()
        assert sum(stop - start for start, stop in reads.into if first <= start and stop <= first + MIB) == MIB
    beside = sum(stop - start for start, stop in reads.into) - len(NAMES) * MIB
    assert beside < 600_000, "only what is strided or small is read into a buffer"


def test_tensors_of_a_mib_are_read_together_in_one_call(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = state_of(9)
    with Checkpointer(root) as ckpt:
        reads = Reads(monkeypatch)
        assert ckpt.load(target)
    assert bits_of(target) == bits_of(state_of(2))
    assert reads.calls == 1


def test_verify_first_reads_everything_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = state_of(9)
    with Checkpointer(root) as ckpt:
        reads = Reads(monkeypatch)
        assert ckpt.load(target, verify_first=True)
    assert bits_of(target) == bits_of(state_of(2))
    assert set(reads.ranges.values()) == {2}


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_load_7_load_8_after_damage_anywhere_the_older_checkpoint_overwrites_everything(
    root: Path, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    damage(chunks_of(root, 2), place)
    target = state_of(9)
    with Checkpointer(root) as ckpt, caplog.at_level(logging.ERROR):
        loaded = ckpt.load(target)
    assert loaded is not None
    assert (loaded.step, len(loaded.fell_back_from)) == (1, 1)
    assert bits_of(target) == bits_of(state_of(1))
    assert (target["counted"].value, target["counted"].loads) == (1, 1), "it never saw the damaged checkpoint"
    assert "global_step2 cannot be loaded" in caplog.text


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{"tag": "global_step2"}, {"fallback": False}])
def test_load_6_without_an_older_one_the_error_says_that_the_objects_hold_a_mixture(
    root: Path, place: float, options: dict[str, Any]
) -> None:
    damage(chunks_of(root, 2), place)
    target, untouched = state_of(9), state_of(9)
    with Checkpointer(root) as ckpt:
        with pytest.raises(DamagedError):
            ckpt.load(target, **options, verify_first=True)
        assert bits_of(target) == bits_of(untouched)
        with pytest.raises(PartlyLoadedError, match=r"hold a mixture of old and new values.*neither train with them nor save"):
            ckpt.load(target, **options)
        assert target["counted"].loads == 0


def test_an_object_that_cannot_load_itself_is_named_and_not_loaded_again_and_again(tmp_path: Path) -> None:
    class Unloadable(Counted):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"own": Unloadable(1), "w": torch.ones(3)}).wait()
        with pytest.raises(
            PartlyLoadedError, match=r"own: load_state_dict\(\) of .*: mend what failed or leave it out of the state"
        ):
            ckpt.load({"own": Unloadable(1), "w": torch.zeros(3)})
        rest = {"w": torch.zeros(3)}
        ckpt.load(rest, strict=False)
    assert rest["w"].tolist() == [1.0] * 3


def test_load_7_an_older_checkpoint_that_lacks_a_value_does_not_hide_the_damage(tmp_path: Path) -> None:
    one, two = state_of(1), state_of(2)
    del one["strided"]
    with Checkpointer(tmp_path, compression="none", dedup=False) as ckpt:
        ckpt.save(1, one).wait()
        ckpt.save(2, two).wait()
        damage(chunks_of(tmp_path, 2), 0.0)
        with pytest.raises(PartlyLoadedError, match="global_step1 does not have all values that global_step2 had"):
            ckpt.load(state_of(9), strict=False)
        target = state_of(9)
        loaded = ckpt.load(target, strict=False, verify_first=True)
    assert loaded is not None
    assert (loaded.step, loaded.missing) == (1, ("strided",))
    assert torch.equal(target["strided"], state_of(9)["strided"])


def test_load_7_the_older_checkpoint_loads_after_damage_where_a_tensor_is_converted(tmp_path: Path) -> None:
    states = [{"w": torch.full((6,), float(step)), "q": torch.full((4, 6), float(step)).to_sparse()} for step in (1, 2)]
    with Checkpointer(tmp_path, compression="none", dedup=False) as ckpt:
        for step, state in enumerate(states, 1):
            ckpt.save(step, state).wait()
        damage(chunks_of(tmp_path, 2), 0.0)
        target = {"w": torch.zeros(6), "q": torch.zeros(4, 6)}
        loaded = ckpt.load(target, cast=True)
    assert loaded is not None
    assert (loaded.step, len(loaded.fell_back_from)) == (1, 1)
    assert torch.equal(target["w"], states[0]["w"])
    assert torch.equal(target["q"], states[0]["q"].to_dense())


def test_afresh_verifies_first_so_that_a_job_may_go_on_with_its_own_values(root: Path) -> None:
    for step in (1, 2):
        damage(chunks_of(root, step), 0.5)
    target = state_of(9)
    with Checkpointer(root, afresh=True) as ckpt:
        assert ckpt.load(target) is None
    assert bits_of(target) == bits_of(state_of(9))


@pytest.mark.parametrize("how", ["well", "with damage", "by Ctrl-C as it begins"])
def test_readback_4_nothing_is_read_back_while_a_load_reads(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).wait()
        core, seen, get_parts = core_of(ckpt), list[bool](), PosixStore.get_parts
        reader = core._saver._state.reader
        call_soon = core._writer.call_soon

        async def reading(self: PosixStore, *arguments: Any) -> Any:
            seen.append(reader.is_paused)
            if how == "with damage":
                raise DamagedError("the chunk is damaged")
            return await get_parts(self, *arguments)

        def interrupted(call: Callable[..., object], *arguments: object) -> None:
            call_soon(call, *arguments)
            if call == reader.pause:
                raise KeyboardInterrupt

        monkeypatch.setattr(PosixStore, "get_parts", reading)
        if how == "well":
            ckpt.load(state_of(0))
        elif how == "with damage":
            with pytest.raises(PartlyLoadedError):
                ckpt.load(state_of(0), tag="global_step1")
        else:
            monkeypatch.setattr(core._writer, "call_soon", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.load(state_of(0))
        assert all(seen)
        assert bool(seen) == (how != "by Ctrl-C as it begins")
        wait_until(lambda: not reader.is_paused, "reading back may go on")


def _removes(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """Let another process remove the checkpoint `tag` when rank 0 has chosen it."""
    check = loader.check_whole

    async def removed_first(store: Store, checkpoint: LoggedAttempt, patience: Patience) -> None:
        if checkpoint.tag == tag:
            async with PosixStore(store.url) as other:
                await deletion(other, tag, force=True, dry_run=False)
        await check(store, checkpoint, patience)

    monkeypatch.setattr(loader, "check_whole", removed_first)


def test_load_9_a_checkpoint_that_is_removed_meanwhile_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _removes(monkeypatch, "global_step2")
    with Checkpointer(root) as ckpt:
        state = state_of(0)
        loaded = ckpt.load(state, fallback=False)
    assert loaded is not None
    assert (loaded.tag, loaded.fell_back_from) == ("global_step1", ())
    assert bits_of(state) == bits_of(state_of(1))
    assert "global_step2 was removed while it was loaded: deleted on request. Loading the newest" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_load_9_the_last_checkpoint_may_go_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _removes(monkeypatch, "global_step2")
    with Checkpointer(root) as ckpt:
        ckpt.delete("global_step1")
        assert ckpt.load(state_of(0)) is None


def test_load_9_a_named_checkpoint_that_is_removed_meanwhile_is_not_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _removes(monkeypatch, "global_step1")
    with Checkpointer(root) as ckpt, pytest.raises(NotFoundError, match="global_step1 was removed while it was loaded"):
        ckpt.load(state_of(0), tag="global_step1")
