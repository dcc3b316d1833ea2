"""Staging from CUDA memory: side stream, event, pinned arena; the host never blocks. Needs a GPU, skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd_client import Checkpointer, RngState
from checkpointd_client.staging import stager

pytestmark = pytest.mark.gpu


def _net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64)
    )
    return net.cuda()


def _train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(64, 512, device="cuda")).pow(2).sum().backward()
    optimizer.step()


def _frozen(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().cpu() for name, value in net.state_dict().items()}


def _busy() -> None:
    """Queue work of about a tenth of a second, so that copies behind it cannot have run when save() returns."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(64):
        a = a @ a.softmax(-1)


def test_steps_queued_right_after_save_do_not_reach_the_snapshot(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    _train(net, optimizer)
    expected = {}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"net": net, "optimizer": optimizer})
        for step in range(6):
            expected[step] = _frozen(net)
            _busy()
            ckpt.save(step, {"net": net, "optimizer": optimizer})
            _train(net, optimizer)
    for step, values in expected.items():
        found = _net()
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.load({"net": found}, tag=f"global_step{step}", strict=False)
        for name, value in _frozen(found).items():
            assert torch.equal(value, values[name]), (step, name)


def test_save_does_not_wait_for_the_device(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net, "optimizer": optimizer}).wait()
        _busy()
        behind = torch.cuda.Event()
        behind.record()
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        assert not behind.query()  # the queued work still runs: save() and the step's fence did not wait for it
        ckpt.fence()
        assert not behind.query()
        handle.wait()


@pytest.mark.parametrize("cloned", [0, 20_000, stager.CLONED_BYTES_MAX])
def test_buffers_and_emas_are_cloned_in_stream_order_or_waited_for(
    tmp_path: Path, cloned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager, "CLONED_BYTES_MAX", cloned)
    net = _net()
    ema = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        expected, expected_ema = _frozen(net), _frozen(ema)
        _busy()
        ckpt.save(0, {"net": net, "ema": ema, "optimizer": optimizer})
        net(torch.randn(64, 512, device="cuda"))
        for parameter in ema.parameters():
            parameter.detach().mul_(3)
        ckpt.wait()
    found, found_ema = _net(), torch.optim.swa_utils.AveragedModel(_net())
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"net": found, "ema": found_ema}, strict=False)
    for name, value in _frozen(found).items():
        assert torch.equal(value, expected[name]), name
    for name, value in _frozen(found_ema).items():
        assert torch.equal(value, expected_ema[name]), name


def test_the_arena_is_pinned(tmp_path: Path) -> None:
    net = _net()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net}).wait()
        slot = ckpt._core._saver._arena.acquire(1, timeout=10)
        assert slot is not None
        assert slot.pinned
        ckpt._core._saver._arena.release(slot)


def test_a_fresh_optimizer_and_cuda_rng_come_back_on_the_device(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    _train(net, optimizer)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net, "optimizer": optimizer, "rng": RngState()}).wait()
        expected = torch.rand(8, device="cuda")
    fresh_net = _net()
    fresh = torch.optim.AdamW(fresh_net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"net": fresh_net, "optimizer": fresh, "rng": RngState()})
    assert torch.equal(torch.rand(8, device="cuda"), expected)
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found = fresh.state_dict()["state"][key][name]
            assert found.device == value.device
            assert torch.equal(found, value)


def test_every_dtype_survives_the_way_through_pinned_memory(tmp_path: Path) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64, device="cuda").to(torch.int32)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.complex64)
    state = {str(dtype): bits.view(dtype).clone() for dtype in dtypes}
    state["strided"] = bits.view(256, 256).t()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        ckpt.load(found)
    for name, tensor in state.items():
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
