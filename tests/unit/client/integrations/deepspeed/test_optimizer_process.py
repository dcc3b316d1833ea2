"""Optimizers that step in a process of their own, by stand-ins: deepspeed_offload_ranks.py has the real ones.

Checks OFFLOAD-1 and OFFLOAD-2.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import StateError, UsageError
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.staging import stager
from tests.unit.client.integrations.deepspeed.deepspeed_engine import Engine
from tests.unit.client.staging.test_stager import held_back_stager

FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
OLD, NEW = 1.0, 2.0


class OffloadedEngine(Engine):
    """Saves its master as stage 3 does, and loads it."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.master = torch.nn.Parameter(torch.full((5000,), OLD))
        self.optimizer = optimizer
        optimizer.fp32_partitioned_groups_flat = [self.master]
        optimizer.optimizer = SimpleNamespace(param_groups=[{"params": []}], state={})

    def save_checkpoint(self, save_dir: str, tag: str, *_: Any) -> None:
        self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        self.checkpoint_engine.save({"masters": [self.master]}, os.path.join(save_dir, tag, FILE))

    def load_checkpoint(self, load_dir: str, tag: str | None, *_: Any) -> tuple[str, str | None]:
        file = os.path.join(load_dir, str(tag), FILE)
        self.master.data.copy_(self.checkpoint_engine.load(file, map_location="cpu")["masters"][0])
        return load_dir, tag


class SuperOffload:
    """`async_step` gives the process a step, and `step` waits for it."""

    def __init__(self) -> None:
        self.superoffload_cpu_optimizer = SimpleNamespace(async_step=self._begin)
        self.async_cpuadam_num = 0
        self._submitted_cpu_sub_groups: set[int] = set()

    def _begin(self) -> None:
        self.fp32_partitioned_groups_flat[0].data.fill_(NEW)
        self._submitted_cpu_sub_groups.add(0)

    def backward(self) -> None:
        self.superoffload_cpu_optimizer.async_step()

    def step(self) -> None:
        self._submitted_cpu_sub_groups.clear()


class Operator:
    """ZenFlow's: the steps that its process has been given, and those whose end nobody has waited for."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master, self.given, self.ended = master, 0, 0

    def zenflow_adam_submit(self, control: int) -> None:
        self.given += 1

    def zenflow_adam_wait(self, control: int, timeout_s: float) -> bool:
        """The process does its step when somebody waits."""
        if self.given and not self.stuck:
            self.given, self.ended = self.given - 1, self.ended + 1
            self.master.data.fill_(NEW)
        if self.ended:
            self.ended -= 1
            return True
        return False

    stuck = False


class ZenFlow:
    """With `overlap_step`."""

    zenflow, process_optimizer_established = True, False

    def __init__(self) -> None:
        self.zf_ctrl = torch.zeros(1)
        self.alive = True
        self.process = SimpleNamespace(is_alive=lambda: self.alive)

    def start_optimizer_process(self) -> None:
        self.zf_op: Any = Operator(self.fp32_partitioned_groups_flat[0])
        self.process_optimizer_established = True

    def backward_prologue(self) -> None:
        self.fp32_partitioned_groups_flat[0].data.fill_(NEW)

    def step(self) -> None:
        if not self.process_optimizer_established:
            self.start_optimizer_process()
        self.zf_op.zenflow_adam_submit(0)


@contextmanager
def attached(optimizer: Any, **settings: Any) -> Iterator[FilesAdapter]:
    adapter = FilesAdapter(OffloadedEngine(optimizer), settings)
    adapter.connect()
    try:
        yield adapter
    finally:
        adapter.detach()


def saved(adapter: FilesAdapter, root: Path) -> torch.Tensor:
    adapter.wait(60)
    [file] = root.glob(f"*/{FILE}")
    master: torch.Tensor = torch.load(file, weights_only=False)["masters"][0]
    return master


@pytest.mark.parametrize("change", ["backward", "step"])
def test_superoffload_gets_a_step_only_when_the_snapshot_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(stager, "AT_ONCE_BYTES", 0)
    optimizer = SuperOffload()
    with attached(optimizer) as adapter:
        with held_back_stager(monkeypatch):
            adapter.save_checkpoint(str(tmp_path))
            if change == "step":
                optimizer.step()  # what it copies to the weights is copied behind the fence as well
                adapter.engine.master.data.fill_(NEW)
            else:
                optimizer.backward()
        assert saved(adapter, tmp_path).eq(OLD).all()
    assert optimizer.superoffload_cpu_optimizer.async_step == optimizer._begin, "detach() gives its methods back"


def test_zenflow_changes_nothing_before_the_snapshot_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager, "AT_ONCE_BYTES", 0)
    optimizer = ZenFlow()
    with attached(optimizer) as adapter:
        with held_back_stager(monkeypatch):
            adapter.save_checkpoint(str(tmp_path))
            optimizer.backward_prologue()
        assert saved(adapter, tmp_path).eq(OLD).all()


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
def test_superoffload_has_no_single_state_between_backward_and_step(tmp_path: Path, call: str) -> None:
    optimizer = SuperOffload()
    with attached(optimizer) as adapter:
        adapter.save_checkpoint(str(tmp_path))
        adapter.wait(60)
        optimizer.backward()
        with pytest.raises(StateError, match=r"on rank 0: SuperOffload's process has begun .* call it after engine.step\(\)"):
            getattr(adapter, call)(str(tmp_path))
        assert adapter.engine.master.eq(NEW).all(), "nothing was loaded"
        assert saved(adapter, tmp_path).eq(OLD).all(), "nothing was saved"
        optimizer.step()
        getattr(adapter, call)(str(tmp_path))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_save_waits_for_the_steps_of_zenflows_process(tmp_path: Path, steps: int) -> None:
    """Also for several, as before the first wait; and DeepSpeed's own wait for each of them then finds it done."""
    optimizer = ZenFlow()
    with attached(optimizer) as adapter:
        for _ in range(steps):
            optimizer.step()
        adapter.save_checkpoint(str(tmp_path))
        assert saved(adapter, tmp_path).eq(NEW).all(), "the steps that were given are part of it"
        waits = [optimizer.zf_op.zenflow_adam_wait(0, 0.0) for _ in range(steps + 1)]
        assert waits == [True] * steps + [False]
        optimizer.step()
        assert optimizer.zf_op.zenflow_adam_wait(0, 0.0), "and the next step is waited for as ever"


def test_a_process_that_died_or_hangs_within_a_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ZenFlow()
    with attached(optimizer, commit_timeout_s=2.0) as adapter:
        optimizer.step()
        monkeypatch.setattr(Operator, "stuck", True)
        with pytest.raises(StateError, match="has not finished its step within 1 s"):
            adapter.save_checkpoint(str(tmp_path))
        optimizer.alive = False
        with pytest.raises(StateError, match="on rank 0: ZenFlow's optimizer process has died within a step"):
            adapter.save_checkpoint(str(tmp_path))
        assert not list(tmp_path.glob("*")), "nothing was saved"


def test_zenflows_steps_are_counted_from_the_first_one_on() -> None:
    optimizer = ZenFlow()
    with attached(optimizer):
        optimizer.step()
    with attached(optimizer) as adapter:  # once more
        assert adapter._process.fault(60.0) is None
        assert optimizer.zf_op.zenflow_adam_wait(0, 0.0)
    late = ZenFlow()
    late.fp32_partitioned_groups_flat = [torch.ones(1)]
    late.step()
    with pytest.raises(UsageError, match=r"attach\(engine\) before the first engine.step\(\)"), attached(late):
        pass


def test_a_load_puts_its_weights_in_the_place_of_those_of_the_last_step(tmp_path: Path) -> None:
    """The next step() of ZenFlow copies them over the weights."""
    optimizer = ZenFlow()
    with attached(optimizer) as adapter:
        adapter.save_checkpoint(str(tmp_path))
        master = adapter.engine.master
        master.stale_param = torch.full_like(master, NEW)
        optimizer.step()
        adapter.load_checkpoint(str(tmp_path))
        assert master.eq(OLD).all(), "the step ended before the load"
        assert master.stale_param.eq(OLD).all()


@pytest.mark.parametrize("optimizer", [SuperOffload, ZenFlow])
def test_what_deepspeed_does_not_save_is_said_once_per_job(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "checkpointd")
    for rank in (0, 1):
        monkeypatch.setattr(OffloadedEngine, "global_rank", rank)
        with attached(optimizer()):
            pass
    assert [
        record for record in caplog.messages if "DeepSpeed saves the weights" in record and "moments" in record
    ] == caplog.messages
    assert len(caplog.messages) == 1


def test_steps_are_measured_though_torch_does_not_report_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, seen = SuperOffload(), []
    with attached(optimizer) as adapter:
        adapter.save_checkpoint(str(tmp_path))
        [checkpointer] = adapter._roots.checkpointers.values()
        monkeypatch.setattr(checkpointer._saver.governor, "stepped", seen.append)
        optimizer.step()
    assert seen == [optimizer]
