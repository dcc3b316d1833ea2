"""Saves and loads tensors of every kind on a device, and compares them bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd_client import Checkpointer, RngState

State = dict[str, torch.Tensor]
ODD = 1 << 12
"""Bytes of each tensor of a dtype."""


def random_bytes(nbytes: int, device: torch.device, most: int = 256) -> torch.Tensor:
    """Random bytes below `most`, made on the host, so that every device gets the same."""
    return torch.randint(0, most, (nbytes,), dtype=torch.uint8).to(device)


def of_every_dtype(device: torch.device) -> tuple[State, list[str]]:
    """A tensor of each dtype, and the names of dtypes that this torch or this device cannot hold."""
    made: State = {}
    missing: list[str] = []
    for name in ITEM_BYTES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            missing.append(name)
            continue
        try:
            made[name] = random_bytes(ODD, device, 2 if name == "bool" else 256).view(dtype)
        except RuntimeError:
            missing.append(name)
    return made, missing


def of_every_shape(device: torch.device) -> State:
    """Tensors that do not lie in memory as they are stored: transposed, with gaps, shifted, permuted, scalar and empty."""
    base = random_bytes(1 << 16, device).view(torch.int32)
    return {
        "transposed": base.view(64, 256).t(),
        "with gaps": base[::3],
        "columns": base.view(64, 256)[:, 5:17],
        "shifted": base[1:1000],
        "permuted": base.view(4, 16, 16, 16).permute(0, 2, 3, 1),
        "one byte shifted": base.view(torch.uint8)[1:1000],
        "scalar": base[7],
        "empty": base[:0],
        "empty rows": base[:0].view(0, 16),
    }


def differences(root: str, state: State) -> list[str]:
    """The names of tensors that a checkpoint of `state` gives back with other bytes."""
    with Checkpointer(root, read_back=False) as checkpointer:
        checkpointer.save(0, {"tensors": state}).wait()
        found = {name: _blank(tensor) for name, tensor in state.items()}
        checkpointer.load({"tensors": found})
    return [name for name, tensor in state.items() if _bytes(found[name]) != _bytes(tensor)]


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        blank = torch.zeros(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        return blank.view(tensor.dtype).view(tensor.shape)
    return torch.zeros_like(tensor)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes()  # as bytes: devices cannot copy every dtype


def all_like(device: torch.device) -> list[torch.device]:
    """All devices of that kind."""
    return [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]


def generators_go_on(root: str, devices: Iterable[torch.device]) -> bool:
    """Whether the generators of `devices` draw the same numbers again after a load."""
    state = {"rng": RngState()}
    with Checkpointer(root, read_back=False) as checkpointer:
        checkpointer.save(0, state).wait()
        before = [torch.rand(64, device=device).cpu() for device in devices]
        checkpointer.load(state)
        after = [torch.rand(64, device=device).cpu() for device in devices]
    return all(map(torch.equal, before, after))
