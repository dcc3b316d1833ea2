"""A job of several ranks with FSDP2 and a low-bit optimizer of torchao: trains and saves, or loads and compares.

python sharded_job.py ROOT CLASS save|resume|compare RANK RANKS PORT REFERENCE
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import unittest.mock
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
ROOT, CLASS, WHAT, RANK, RANKS, PORT, REFERENCE = sys.argv[1:]
os.environ |= {"RANK": RANK, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "LOCAL_RANK": RANK}
KEYS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Its parameters are kept in other classes by other numbers of ranks; one of two rows leaves ranks without any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quarters = nn.Parameter(torch.randn(128, 128))
        self.halves = nn.Parameter(torch.randn(96, 128))
        self.uneven = nn.Parameter(torch.randn(7, 1024))
        self.few = nn.Parameter(torch.randn(2, 8192))

    def forward(self) -> torch.Tensor:
        return sum((p.float() * torch.linspace(0.5, 2, p.shape[1])).square().mean() for p in self.parameters())  # type: ignore[return-value]


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    import torchao.optim

    model = Model()
    fully_shard(model)
    return model, getattr(torchao.optim, CLASS)(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        with unittest.mock.patch("torch.compile", lambda function, **_: function):  # compiling takes a minute
            optimizer.step()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    return (local.dequantize() if hasattr(local, "codes") else local).float()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """Digests of every bit of this rank's parameters and states."""
    found = {}
    for name, parameter in model.named_parameters():
        local = local_of(parameter.detach())
        found[name] = [digest(local)]
        for key in KEYS:
            state = local_of(optimizer.state[parameter][key])
            parts = [getattr(state, part) for part in ("codes", "scale", "qmap") if hasattr(state, part)] or [state]
            found[f"{name}.{key}"] = [type(state).__name__, *map(digest, parts)]
    return found


def rows_of(parameter: torch.Tensor) -> tuple[int, int]:
    """The first row of this rank, and the number of its rows."""
    size = -(-parameter.shape[0] // int(RANKS))
    start = min(int(RANK) * size, parameter.shape[0])
    return start, min(size, parameter.shape[0] - start)


def main() -> None:
    from checkpointd_client import Checkpointer

    dist.init_process_group("gloo")
    model, optimizer = job()
    reference = f"{REFERENCE}-{RANK}.npz"
    if WHAT == "save":
        trained(model, optimizer, 2)
        with Checkpointer(ROOT) as checkpointer:
            checkpointer.save(2, {"model": model, "optimizer": optimizer}).wait()
        held = {}
        for name, parameter in model.named_parameters():
            for key in KEYS:
                state = optimizer.state[parameter][key]
                held[f"{name}.{key}"] = plain(state).numpy()
                held[f"{name}.{key}.low"] = np.array(hasattr(local_of(state), "codes"))
        np.savez(reference, **held)
        trained(model, optimizer, 2)
        np.savez(f"{REFERENCE}-after-{RANK}.npz", json.dumps(bits(model, optimizer)))
        return
    for made in (False, True):
        if made:  # the second load fills states that exist
            model, optimizer = job()
            trained(model, optimizer, 1)
        with Checkpointer(ROOT) as checkpointer:
            loaded = checkpointer.load({"model": model, "optimizer": optimizer})
            assert loaded is not None
            assert (loaded.missing, loaded.unexpected, loaded.mismatched, loaded.per_rank_left) == ((), (), (), ())
        if WHAT == "resume":
            trained(model, optimizer, 2)
            expected = json.loads(str(np.load(f"{REFERENCE}-after-{RANK}.npz")["arr_0"]))
            found = bits(model, optimizer)
            assert found == expected, [key for key in expected if found[key] != expected[key]]
        else:
            compare(model, optimizer)
            trained(model, optimizer, 1)
    dist.barrier()


def compare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    files = []
    while os.path.exists(f"{REFERENCE}-{len(files)}.npz"):
        files.append(np.load(f"{REFERENCE}-{len(files)}.npz"))
    for name, parameter in model.named_parameters():
        start, count = rows_of(parameter)
        for key in KEYS:
            state = local_of(optimizer.state[parameter][key])
            whole = torch.from_numpy(np.concatenate([file[f"{name}.{key}"] for file in files]))
            low = np.concatenate([np.full(len(file[f"{name}.{key}"]), file[f"{name}.{key}.low"]) for file in files])
            expected = whole[start : start + count]
            fresh = optimizer._new_buffer(torch.empty(expected.shape, dtype=parameter.dtype), key == "exp_avg")
            assert type(state) is type(fresh), (name, key, type(state), type(fresh))
            if hasattr(state, "codes") and not low[start : start + count].all():
                fresh.copy_(expected)
                expected = fresh.dequantize()
            elif not hasattr(state, "codes"):
                expected = expected.to(state.dtype).float()
            assert torch.equal(plain(state), expected), (name, key, type(state))


if __name__ == "__main__":
    main()
