"""FullyShardedDataParallel (FSDP1): a chain of jobs, each of which loads what the one before it saved, goes on, and saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from checkpointd_client import Checkpointer
from tests.e2e.sharded_cases import expect
from tests.e2e.sharded_models import VOCABULARY, WIDTH, Job, Net, build, plain_tensors

if TYPE_CHECKING:
    from tests.e2e.sharded_ranks import Process


def _wrapped(*, originals: bool, hybrid: bool = False, vocabulary: int = VOCABULARY) -> Job:
    """A module in a wrapper of its own within a wrapped one; `originals`: the optimizer knows the original parameters."""
    torch.manual_seed(11)
    options: dict[str, Any] = {"use_orig_params": originals, "device_id": torch.device("cpu")}
    if hybrid:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model: Any = Net()
    model.embedding = nn.Embedding(vocabulary, WIDTH)
    model.large = FullyShardedDataParallel(model.large, **options)
    model = FullyShardedDataParallel(model, **options)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.01))


_JOBS: dict[str, tuple[int, Callable[[], Job]]] = {
    "of flat parameters": (3, lambda: _wrapped(originals=False)),
    "of the original parameters": (2, lambda: _wrapped(originals=True)),
    "hybrid": (4, lambda: _wrapped(originals=True, hybrid=True)),
    "of flat parameters again": (2, lambda: _wrapped(originals=False)),
    "sharded by FSDP2": (2, lambda: build("fsdp2", torch.float32, 11)),
    "of flat parameters, not sharded": (1, lambda: _wrapped(originals=False)),
    "of the original parameters on four": (4, lambda: _wrapped(originals=True)),
    "plain": (1, lambda: build("plain", torch.float32, 11)),
}


def _full(job: Job) -> dict[str, torch.Tensor]:
    """Parameters and their state in full, by torch's own means. Collective."""
    if not isinstance(job.model, FullyShardedDataParallel):
        return {name.replace("/", "."): tensor for name, tensor in plain_tensors(job).items()}
    model, optimizer = get_state_dict(job.model, job.optimizer, options=StateDictOptions(full_state_dict=True))
    state: Any = optimizer["state"]
    return {**model, **{f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}}


def _loaded_by_torch(make: Callable[[], Job], full: Mapping[str, torch.Tensor]) -> Job:
    """The same job, filled by torch's own means."""
    job = make()
    empty = make()
    empty.step(0)
    _, optimizer = get_state_dict(empty.model, empty.optimizer, options=StateDictOptions(full_state_dict=True))
    state: Any = optimizer["state"]
    given = {**optimizer, "state": {n: {key: full[f"{n}.{key}"].clone() for key in entry} for n, entry in state.items()}}
    model = {name: full[name] for name in Net().state_dict()}
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=given, options=options)  # type: ignore[arg-type]
    return job


def flat(process: Process) -> None:
    """Bit for bit through every kind of it, also into an optimizer that has stepped, and a step later as torch's own load."""
    for i, (name, (world, make)) in enumerate(_JOBS.items()):
        with (
            process.job(f"flat-{i}", world) as mine,
            Checkpointer(process.folder / "flat") if mine else process.nothing() as ckpt,
        ):
            if not mine:
                continue
            job = make()
            if i == 0 or i % 2:
                job.step(20)
            if i:
                ckpt.load(job.state)
                full = torch.load(process.folder / f"flat-{i - 1}.pt", weights_only=True)
                expect(process, f"FSDP1: {name}", _full(job), full)
                if isinstance(job.model, FullyShardedDataParallel):
                    other = _loaded_by_torch(make, full)
                    job.step(30 + i)
                    other.step(30 + i)
                    expect(process, f"FSDP1: {name}, a step later", _full(job), _full(other))
            full = _full(job)
            if process.number == 0:
                torch.save(full, process.folder / f"flat-{i}.pt")
            ckpt.save(i, job.state).wait()


def flat_in_part(process: Process) -> None:
    """Of a flat parameter in which one parameter has another shape, the state is left whole: also on the rank that holds
    nothing of that one.
    """
    with process.job("flat-in-part", 2) as mine:
        if not mine:
            return
        saved = _wrapped(originals=False)
        saved.step(20)
        job = _wrapped(originals=False, vocabulary=VOCABULARY + 3)
        job.step(21)
        stored, before = _full(saved), _full(job)
        with Checkpointer(process.folder / "flat-in-part") as ckpt:
            ckpt.save(1, saved.state).wait()
            loaded = ckpt.load(job.state, strict=False)
        kept = {name for name in before if name.startswith("embedding.") or "exp_avg" in name or name.endswith(".step")}
        kept -= {name for name in kept if name.startswith("large.")}
        expect(process, "FSDP1 in part", _full(job), stored | {name: before[name] for name in kept})
        if loaded is None or not any(line.startswith("optimizer.state.model.up.weight:") for line in loaded.mismatched):
            process.wrong.append(f"FSDP1 in part: {loaded}")
        job.step(22)
