"""Which tensors of a device are gathered, summed together or alone. The host's memory stands for a device here."""

from __future__ import annotations

import pytest
import torch

from checkpointd_client.capture.state import capture
from checkpointd_client.staging import device_plan
from checkpointd_client.staging.device_plan import DevicePlan, plan_device, taking
from checkpointd_client.staging.slot_layout import SlotLayout, plan_slot

HOST = torch.device("cpu")


def planned(tensors: list[torch.Tensor], stable: list[int], *, checksums: bool = True) -> tuple[DevicePlan, SlotLayout]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensors[i]) for i in stable] or [torch.nn.Parameter(torch.ones(1))], lr=1.0)
    tensors = [optimizer.param_groups[0]["params"][stable.index(i)] if i in stable else t for i, t in enumerate(tensors)]
    captured = capture({"t": tensors, "optimizer": optimizer}, None, exclude_frozen_parameters=False)
    layout = plan_slot(captured)
    leaves = captured.leaves[: len(tensors)]
    return plan_device(HOST, leaves, layout, still=False, checksums=checksums), layout


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "GATHERED_BYTES", 256)
    monkeypatch.setattr(device_plan, "ALONE_BYTES", 4096)
    monkeypatch.setattr(device_plan, "SCRATCH_BYTES", 8192)


def test_small_neighbours_are_gathered_into_one_run() -> None:
    plan, layout = planned([torch.ones(n) for n in (3, 64, 2000, 5, 0, 7)], [0, 1, 2, 3, 5])
    offsets = [offset for offset, *_ in layout.parts]
    assert [(run.slot, run.nbytes) for run in plan.runs] == [(offsets[0], 64 + 256), (offsets[3], 128)]
    assert [run.scratch for run in plan.runs] == [0, 320]
    assert (plan.moving, plan.stable) == ((), (2,))
    assert plan.is_whole


def test_tensors_that_would_be_cloned_are_gathered_first() -> None:
    plan, _ = planned([torch.ones(64) for _ in range(64)], list(range(40)))
    assert plan.gathered is not None
    assert plan.gathered.memory.nbytes == 8192
    assert (plan.moving, plan.stable) == ((), tuple(range(8, 40))), "of the stable ones the first eight find room"


def test_what_is_summed_together_fits_the_scratch_memory() -> None:
    plan, layout = planned([torch.ones(n) for n in (512, 512, 1000, 1024, 500)], list(range(5)))
    assert [[nbytes for _, nbytes in batch.row.pieces] for batch in plan.batches if batch.row] == [[2048, 2048]]
    assert [i for i, _ in plan.alone] == [2, 3, 4], "not a multiple of 64 bytes, or as large as a launch is worth"
    sums = sorted(k for row in plan.rows for k in range(row.at, row.at + row.count))
    assert sums == list(range(plan.sums)), "each sum has its own place"
    covered = sorted(piece for row in plan.rows for piece in row.pieces)
    assert covered == sorted((offset, nbytes) for offset, nbytes, *_ in layout.parts[:5])


def test_without_checksums_nothing_is_summed() -> None:
    plan, _ = planned([torch.ones(n) for n in (3, 512, 1000)], [0, 1, 2], checksums=False)
    assert (plan.rows, plan.sums, plan.batches, plan.alone) == ([], 0, (), ())


def test_without_memory_for_the_scratch_every_tensor_goes_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "zeros", full)
    plan, _ = planned([torch.ones(n) for n in (3, 512)], [0, 1])
    assert (plan.scratch, plan.runs, plan.is_whole) == (None, (), False)
    assert [i for i, _ in plan.alone] == [0, 1]


def test_items_are_taken_in_the_order_of_their_positions() -> None:
    assert [tuple(taking(some)("abcd")) for some in ([], [2], [3, 0])] == [(), ("c",), ("d", "a")]
