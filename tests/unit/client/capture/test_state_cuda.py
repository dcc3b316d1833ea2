"""Capture and restore on a device: where leaves lie, where new memory goes, and aliases found by device addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from checkpointd.layout.boxes import Box
from checkpointd_client.capture.rng import RngState
from checkpointd_client.capture.state import capture
from checkpointd_client.restore.sinks import box_sink
from checkpointd_client.restore.uploads import Uploads
from tests.unit.client.capture_and_fill import bytes_of, same, save

pytestmark = pytest.mark.gpu


def training(*, steps: int, capturable: bool = False) -> dict[str, Any]:
    model = nn.Linear(4, 3).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=capturable)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_training_state_comes_back_where_the_optimizer_keeps_it(capturable: bool, steps: int) -> None:
    source, target = training(steps=2, capturable=capturable), training(steps=steps, capturable=capturable)
    saved = save(source)
    saved.load(target)
    assert save(target).data == saved.data
    for entry in target["optimizer"].state.values():
        assert entry["exp_avg"].device.type == "cuda"
        assert entry["step"].device.type == ("cuda" if capturable else "cpu")


def test_new_memory_goes_to_the_device_and_is_tied_there() -> None:
    flat = torch.arange(8.0, device="cuda")
    saved = save({"flat": flat, "part": flat[2:4], "host": torch.ones(1)})
    assert saved.entries.keys() == {"flat", "host"}
    target: dict[str, Any] = {"flat": None, "part": None, "host": None}
    saved.load(target)
    assert [value.device.type for value in target.values()] == ["cuda", "cuda", "cpu"]
    assert target["part"].data_ptr() == target["flat"][2:].data_ptr()
    assert bytes_of(target["part"]) == bytes_of(flat[2:4])


def test_columns_interleaved_on_the_device_do_not_count_as_sharing() -> None:
    fused = torch.zeros(3, 6, device="cuda")
    save({"q": torch.ones(3, 2), "k": torch.ones(3, 4)}).load({"q": fused[:, :2], "k": fused[:, 2:]})
    assert bool(fused.all())


def test_a_live_leaf_stays_on_its_device() -> None:
    (leaf,) = capture({"t": torch.ones(2, device="cuda")}, None, exclude_frozen_parameters=False).leaves
    assert leaf.tensor.is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_box_fills_a_view_on_the_device_and_converts_where_that_was_asked_for(dtype: torch.dtype) -> None:
    stored = torch.arange(60.0).reshape(6, 10)
    whole = torch.full((4, 8), -1, dtype=dtype, device="cuda")
    with Uploads(1 << 20) as uploads:
        sink = box_sink(whole[1:, 2:5], Box((2, 4), (3, 3)), "whole", "float32", uploads)
        sink(Box((3, 5), (2, 2)), stored[3:5, 5:7].numpy().view(np.uint32))
    expected = torch.full((4, 8), -1, dtype=dtype)
    expected[2:4, 3:5] = stored[3:5, 5:7].to(dtype)
    assert same(whole.cpu(), expected)


def test_the_part_of_a_dtensor_is_taken_from_the_device_and_made_there() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cuda", [0])
        source = DTensor.from_local(torch.arange(6.0, device="cuda").reshape(3, 2), mesh, [Shard(0)])
        target = DTensor.from_local(torch.zeros(3, 2, device="cuda"), mesh, [Shard(1)])
        (leaf,) = capture({"t": source}, None, exclude_frozen_parameters=False).leaves
        assert leaf.tensor.is_cuda
        save({"t": source}).load({"t": target})
        assert same(target.to_local().cpu(), source.to_local().cpu())
    finally:
        torch.distributed.destroy_process_group()


def test_device_generators_go_on_where_they_were() -> None:
    torch.rand(3, device="cuda")
    saved = save({"rng": RngState(), "own": torch.Generator("cuda").manual_seed(1)})
    expected = torch.rand(3, device="cuda")
    own = torch.Generator("cuda").manual_seed(2)
    saved.load({"rng": RngState(), "own": own})
    assert same(torch.rand(3, device="cuda").cpu(), expected.cpu())
    again = torch.Generator("cuda").manual_seed(1)
    assert same(torch.rand(3, device="cuda", generator=own).cpu(), torch.rand(3, device="cuda", generator=again).cpu())
