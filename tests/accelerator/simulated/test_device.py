"""The simulated device keeps what README.md promises: each mistake shows, and nothing shows where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator.simulated.pinned_memory import pinned

N = 1 << 14
POISON = torch.full((4,), 0xDB, dtype=torch.uint8).view(torch.float32).item()


def stream_of(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def copied_beside(host: torch.Tensor, source: torch.Tensor) -> tuple[torch.Stream, torch.Event]:
    """Queue a copy of `source` on a side stream that does not wait for anything; the stream, and the event after the copy."""
    side, done = torch.Stream(source.device), torch.Event(source.device)
    with side:
        host.copy_(source, non_blocking=True)
        done.record(side)
    return side, done


def values(tensor: torch.Tensor) -> list[float]:
    return sorted(tensor.unique().tolist())


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [False, True])
def test_a_source_that_changes_before_its_copy(sim: ModuleType, device: torch.device, fenced: bool) -> None:
    host, source = pinned(sim, N), torch.full((N,), 1.0, device=device)
    main, side = stream_of(device), torch.Stream(device)
    with sim.races() as races, sim.only(main):
        side.wait_stream(main)
        with side:
            host.copy_(source, non_blocking=True)
            done = torch.Event(device)
            done.record(side)
        assert values(host) == [POISON]
        if fenced:
            main.wait_event(done)
        source.mul_(7)
    done.synchronize()
    assert values(host) == [1.0 if fenced else 7.0]
    assert len(races) == (0 if fenced else 1)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_of_what_is_not_computed_yet(sim: ModuleType, device: torch.device, waits: bool) -> None:
    host, source = pinned(sim, N), torch.full((N,), 1.0, device=device)
    main, side = stream_of(device), torch.Stream(device)
    with sim.races() as races, sim.stalled(main):
        source.mul_(7)
        if waits:
            side.wait_stream(main)
        with side:
            host.copy_(source, non_blocking=True)
        before = sim.counts()
        side.synchronize()
        forced = sim.counts().since(before).forced
    assert values(host) == [7.0 if waits else 1.0]
    assert len(races) == (0 if waits else 1)
    assert (forced > 0) == waits


@pytest.mark.parametrize("kept", ["dropped", "recorded", "held"])
def test_memory_that_is_freed_while_another_stream_reads_it(sim: ModuleType, device: torch.device, kept: str) -> None:
    host, source, main, side = (
        pinned(sim, N),
        torch.full((N,), 1.0, device=device),
        stream_of(device),
        torch.Stream(device),
    )
    with sim.races() as races, sim.only(main):
        clone = source.clone()
        address = clone.data_ptr()
        side.wait_stream(main)
        with side:
            host.copy_(clone, non_blocking=True)
        if kept == "recorded":
            clone.record_stream(side)
        held = [clone] if kept == "held" else []
        del clone
        other = torch.full((N,), 9.0, device=device)
        assert (other.data_ptr() == address) == (kept == "dropped")
    side.synchronize()
    assert values(host) == [9.0 if kept == "dropped" else 1.0]
    assert bool(races) == (kept == "dropped")
    del held


def test_chaos_is_the_same_again_with_the_same_seed(sim: ModuleType, device: torch.device) -> None:
    def raced(seed: int) -> list[float]:
        found = []
        with sim.chaos(seed):
            for _ in range(20):
                host, source = pinned(sim, 16), torch.zeros(16, device=device)
                _, done = copied_beside(host, source)
                for _ in range(5):
                    source.add_(1)
                done.synchronize()
                found.append(host[0].item())
        return found

    assert raced(1) == raced(1)
    assert len({tuple(raced(seed)) for seed in range(5)}) > 1


def test_strided_accesses_that_do_not_meet_do_not_race(sim: ModuleType, device: torch.device) -> None:
    grid, side = torch.zeros(64, 64, device=device), torch.Stream(device)
    stream_of(device).synchronize()
    with sim.races() as races:
        grid[:, :32].add_(1)
        with side:
            grid[:, 32:].add_(1)
    assert races == []
    with sim.races() as races:
        grid[:, :33].add_(1)
        with side:
            grid[:, 32:].add_(1)
    assert races


def test_the_host_takes_part_in_races_where_a_test_says_so(sim: ModuleType, device: torch.device) -> None:
    host, source = pinned(sim, N), torch.ones(N, device=device)
    with sim.races() as races:
        copied_beside(host, source)
        sim.host_touches(host, writes=False, what="the writer")
    assert len(races) == 1
    assert races[0].startswith("the writer reads memory of a copy to the host")
    torch.accelerator.synchronize(device)
    with sim.races() as races:
        _, done = copied_beside(host, source)
        done.synchronize()
        sim.host_touches(host, writes=False, what="the writer")
    assert races == []


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_host_cannot_touch_the_devices_memory() -> None:
    code = (
        "import ctypes, torch; from tests.accelerator.simulated import simulator; "
        "ctypes.string_at(torch.ones(4, device='sim').data_ptr(), 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0


def test_memory_that_is_not_pinned_is_copied_while_the_host_waits(sim: ModuleType, device: torch.device) -> None:
    host, source, main = torch.zeros(N), torch.ones(N, device=device), stream_of(device)
    main.synchronize()
    before = sim.counts()
    copied_beside(host, source)
    assert values(host) == [1.0]
    assert sim.counts().since(before).unpinned == 1
    part = pinned(sim, N)
    sim.host_unregister(part.data_ptr())
    sim.host_register(part.data_ptr(), N)
    before = sim.counts()
    copied_beside(part, source)
    assert sim.counts().since(before).unpinned == 1, "only a quarter of it is pinned"


def test_unpinning_what_a_copy_still_uses(sim: ModuleType, device: torch.device) -> None:
    host, source, main = pinned(sim, N), torch.ones(N, device=device), stream_of(device)
    with sim.only(main):
        side, _ = copied_beside(host, source)
        sim.host_unregister(host.data_ptr())
    with pytest.raises(RuntimeError, match="unpinned while a copy was under way"):
        side.synchronize()


def test_a_byte_is_pinned_once_and_there_is_a_bound(sim: ModuleType) -> None:
    host = pinned(sim, N)
    assert sim.host_register(host.data_ptr() + 64, 64) != 0
    more = torch.zeros(N)
    with sim.limited(pinned_bytes=sim.counts().pinned):
        assert sim.host_register(more.data_ptr(), more.nbytes) != 0
    assert sim.host_register(more.data_ptr(), more.nbytes) == 0
    sim.host_unregister(more.data_ptr())


def test_the_devices_memory_has_a_bound(sim: ModuleType, device: torch.device) -> None:
    with sim.limited(device_bytes=sim.counts().in_use + 1000), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(N, device=device)
    torch.zeros(N, device=device)


def test_an_access_outside_a_live_block_is_an_error(sim: ModuleType, device: torch.device) -> None:
    tensor = torch.ones(N, device=device)
    beyond = tensor.as_strided((N,), (1,), 0)
    beyond.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        beyond.add_(1)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_copy_that_raises(sim: ModuleType, device: torch.device) -> None:
    host, source = pinned(sim, N), torch.ones(N, device=device)
    with sim.failing("copy", after=1):
        host.copy_(source, non_blocking=True)
        with pytest.raises(torch.OutOfMemoryError):
            host.copy_(source, non_blocking=True)


def test_a_copy_that_stops_half_way_shows_at_the_next_wait(sim: ModuleType, device: torch.device) -> None:
    host, source = pinned(sim, N), torch.ones(N, device=device)
    with sim.failing("half_copy"):
        host.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match="stopped half way"):
        torch.accelerator.synchronize(device)
    assert (host[: N // 2] == 1).all()
    assert (host[N // 2 :] == POISON).all()


def test_a_kernel_that_fails_shows_at_the_next_wait(sim: ModuleType, device: torch.device) -> None:
    source = torch.ones(N, device=device)
    with sim.failing("kernel"):
        source.mul_(2)
    with pytest.raises(RuntimeError, match="this kernel fails"):
        source.cpu()


# --- what it computes -------------------------------------------------------------------------------------------------


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 4)
    )


def attention() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(torch.nn.Flatten(1, 2), layer)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("make", [convolutions, attention])
@pytest.mark.parametrize("seed", range(3))
def test_training_is_that_of_the_cpu_bit_for_bit(
    sim: ModuleType, make: Callable[[], torch.nn.Module], seed: int, index: int
) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model, data = make(), torch.randn(5, 4, 1, 8, 8)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        for batch in data:
            optimizer.zero_grad()
            model(batch.to(device)).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with sdpa_kernel(SDPBackend.MATH):  # on the CPU as well: its own kernel rounds in another order
        with sim.races() as races, sim.chaos(seed):
            found = trained(f"sim:{index}")
        assert all(map(torch.equal, trained("cpu"), found))
    assert races == []


def test_a_list_of_tensors_is_one_launch(sim: ModuleType, device: torch.device) -> None:
    tensors = [torch.ones(10, device=device) for _ in range(50)]
    before = sim.counts()
    torch._foreach_add_(tensors, 1)
    assert sim.counts().since(before).launches == 1
    assert values(torch.cat(tensors).cpu()) == [2.0]


def test_random_numbers_follow_from_the_seed_and_the_draws_before(sim: ModuleType, device: torch.device) -> None:
    torch.manual_seed(3)
    state = torch.sim.get_rng_state(device)  # type: ignore[attr-defined]
    host = torch.get_rng_state()
    with sim.chaos(1):
        first, second = torch.randn(5, device=device).cpu(), torch.randn(5, device=device).cpu()
    assert not torch.equal(first, second)
    torch.sim.set_rng_state(state, device)  # type: ignore[attr-defined]
    with sim.chaos(2):
        assert torch.equal(torch.randn(5, device=device).cpu(), first)
    assert torch.equal(torch.get_rng_state(), host), "the host's generator is another one"


def test_a_copy_between_devices_is_in_the_order_of_both(sim: ModuleType) -> None:
    one, two = torch.device("sim", 0), torch.device("sim", 1)
    source = torch.full((N,), 2.0, device=one)
    with sim.races() as races, sim.stalled(stream_of(one)):
        source.mul_(3)
        found = source.to(two)
        source.zero_()
        found.add_(1)
    assert values(found.cpu()) == [7.0]
    assert races == []


def test_losses_and_norms_have_the_types_and_bits_of_the_cpu(sim: ModuleType, device: torch.device) -> None:
    """The CPU keeps the statistics of a bfloat16 norm in bfloat16, and its mean squared error resizes its output."""
    bits = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        norm, x = torch.nn.LayerNorm(8).to(torch.bfloat16), torch.randn(4, 8)
        norm.to(where)
        loss = torch.nn.functional.mse_loss(norm(x.to(where, torch.bfloat16)).float(), x.to(where))
        loss.backward()
        bits.append([loss.detach().cpu(), norm.weight.grad.cpu(), norm.bias.grad.cpu()])
    assert all(map(torch.equal, *bits))


def test_freed_memory_that_is_spared_is_filled_when_it_is_taken_again(sim: ModuleType, device: torch.device) -> None:
    main, side, host = stream_of(device), torch.Stream(device), pinned(sim, N)
    sim.spare_freed_memory()
    try:
        with side:
            freed = torch.full((N,), 5.0, device=device)
        main.wait_stream(side)
        with sim.races() as races, sim.stalled(main):
            host.copy_(freed, non_blocking=True)
            address = freed.data_ptr()
            del freed
            side.synchronize()
            side.wait_stream(main)
            with side:
                taken = torch.empty(N, device=device)
        assert taken.data_ptr() == address
        torch.accelerator.synchronize(device)
        assert (values(host), values(taken.cpu()), races) == ([5.0], [POISON], [])
    finally:
        torch.ops.sim.spare_freed(False)
