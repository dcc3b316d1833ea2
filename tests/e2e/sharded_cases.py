"""What the matrix of layouts does not reach: each function is one case of `sharded_ranks.py`, run by all its processes."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from checkpointd.errors import CheckpointdError, MismatchError, StateError, UsageError
from checkpointd_client import Checkpointer, open_checkpoint
from checkpointd_client.capture.state import capture
from tests.e2e.sharded_models import DTYPES, Job, build, distribute_like, locals_of
from tests.unit.client.composite_tensors import Halves, Recipe, Rounding

if TYPE_CHECKING:
    from tests.e2e.sharded_ranks import Process

State = dict[str, Any]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, of this rank's part where it is sharded."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def expect(process: Process, name: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Note which tensors are not bit for bit what they must be."""
    wrong = [key for key in wanted if not bits(found[key]).equal(bits(wanted[key]))]
    if wrong or found.keys() != wanted.keys():
        process.wrong.append(f"{name}: {wrong or found.keys() ^ wanted.keys()} differ")


ANOTHER_LISTS = r"in \d+ places? (on rank \d+, which lists them|here, too, and rank \d+ lists its own)"


def refused(process: Process, name: str, words: str, kind: type[CheckpointdError], call: Any) -> None:
    """Note it where `call` does not raise `kind` with `words`, or names the one rank that says them all."""
    try:
        told: object = call()
    except CheckpointdError as error:
        told = error
    if not isinstance(told, kind) or not re.search(rf"{words}|{ANOTHER_LISTS}", str(told)):
        process.wrong.append(f"{name}: {told!r}")


# --- readers ---------------------------------------------------------------------------------------------------------


def readers(process: Process) -> None:
    """What other jobs saved is read without a Checkpointer: by each of two ranks on its own, and by one that has no group."""
    for target, tag in (("fsdp2", "tp-fp32-3"), ("tp", "hsdp-bf16-4"), ("hsdp", "fsdp2-fp32-2"), ("ddp", "zero-fp32-2")):
        dtype = DTYPES[tag.split("-")[1]]
        plain = torch.load(process.folder / f"{tag}.pt", weights_only=True)
        weights = {name: tensor for name, tensor in plain.items() if "/" not in name}
        with process.job(f"readers-{target}", 2) as mine:
            if mine:
                job, reference = build(target, dtype, 77), build(target, dtype, 78)
                with open_checkpoint(process.root, tag) as opened:
                    opened.load({"model": job.model}, only="model")
                distribute_like(reference, weights)
                expect(process, f"{tag} read into {target}", numbered(job), numbered(reference))
                if target == "fsdp2":
                    with open_checkpoint(process.root) as opened:
                        load = functools.partial(opened.load, {"model": job.model}, only="model", strict=False)
                        refused(process, "the newest into shards", "is sharded over ranks", UsageError, load)
        if process.number == 3:  # in no group
            with open_checkpoint(process.root, tag) as opened:
                expect(process, f"{tag} by name", dict(opened.tensors("model")), weights)
                whole = build("plain", dtype, 79)
                opened.load({"model": whole.model}, only="model")
                expect(process, f"{tag} read whole", dict(whole.model.state_dict()), weights)


def numbered(job: Job) -> dict[str, torch.Tensor]:
    """What this rank holds of the model."""
    return {str(i): bits(tensor) for i, tensor in enumerate(job.model.parameters())}


# --- DTensors of every placement ------------------------------------------------------------------------------------


def cut(full: torch.Tensor, mesh: DeviceMesh, *placements: Any, turned: bool = False) -> DTensor:
    """`full` on a mesh, cut from left to right. `turned`: the local part lies in memory column by column."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = full
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = local.chunk(mesh.size(i), placement.dim)
            at = coordinate[i]
            local = pieces[at] if at < len(pieces) else local.narrow(placement.dim, 0, 0)
    local = local.t().clone(memory_format=torch.contiguous_format).t() if turned else local.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _numbers(*shape: int, dtype: torch.dtype = torch.float32, first: int = 1) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(first, first + count)
    made = (numbers % 251).to(torch.uint8).view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)
    return made.reshape(shape)


def _whole() -> dict[str, torch.Tensor]:
    return {
        "columns": _numbers(5, 7),
        "uneven": _numbers(5, 3),
        "empty": _numbers(2, 3),
        "both": _numbers(5, 7, first=100),
        "twice": _numbers(7, 3),
        "copied": _numbers(40, 1000),
        "whole": _numbers(7, 4000),
        "scalar": torch.tensor(2.5),
        "complex": _numbers(5, dtype=torch.complex64) * (1 - 2j),
        "fp8": _numbers(6, 5, dtype=torch.float8_e4m3fn),
        "turned": _numbers(6, 5, first=50),
        "none": torch.empty(0, 4),
        "a": _numbers(3, 2),
        "b": _numbers(3, 2),
    }


def _on_four(whole: Mapping[str, torch.Tensor]) -> State:
    row, square = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [[0, 1], [2, 3]])
    placed: dict[str, tuple[Any, ...]] = {
        "columns": (row, Shard(1)),
        "both": (square, Shard(0), Shard(1)),
        "twice": (square, Shard(0), Shard(0)),
        "copied": (square, Replicate(), Shard(0)),
        "whole": (square, Replicate(), Replicate()),
        "scalar": (square, Replicate(), Replicate()),
    }
    state: State = {
        name: cut(full, *placed.get(name, (row, Shard(0))), turned=name == "turned") for name, full in whole.items()
    }
    return state | {"b": state["a"]}


def _on_three(whole: Mapping[str, torch.Tensor]) -> State:
    row = DeviceMesh("cpu", [0, 1, 2])
    state: State = {}
    for i, (name, full) in enumerate(whole.items()):
        placement = Shard(min(i % 2, full.dim() - 1)) if full.dim() and i % 5 else Replicate()
        state[name] = cut(torch.zeros_like(full), row, placement, turned=name == "both")
    return state | {"b": state["a"]}


def placements(process: Process) -> None:
    """Saved on four ranks; loaded on three that are placed otherwise, and whole into one, with and without another dtype."""
    whole, root = _whole(), process.folder / "placements"
    with process.job("placements-4", 4) as mine, Checkpointer(root) if mine else process.nothing() as ckpt:
        if mine:
            ckpt.save(1, {"w": _on_four(whole)}).wait()
            partial = DTensor.from_local(torch.ones(4), DeviceMesh("cpu", [0, 1, 2, 3]), [Partial()], run_check=False)
            call = functools.partial(capture, {"w": {"sum": partial}}, None, exclude_frozen_parameters=False)
            refused(process, "partial", r"w\.sum: its placement is P", StateError, call)
    with process.job("placements-3", 3) as mine, Checkpointer(root) if mine else process.nothing() as ckpt:
        if mine:
            found, expected = _on_three(whole), _on_three(whole)
            _fill(expected, whole)
            ckpt.load({"w": found})
            expect(process, "placements on 3", found, expected)
            _another_dtype(process, ckpt, whole)
            _one_rank_asks_for_another_shape(process, ckpt, whole)
    with process.job("placements-1", 1) as mine, Checkpointer(root) if mine else process.nothing() as ckpt:
        if mine:
            plain = {name: torch.zeros_like(full) for name, full in whole.items()}
            plain["b"] = plain["a"]
            ckpt.load({"w": plain})
            expect(process, "placements on 1", plain, whole)


def _fill(state: State, whole: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        (placement,), mesh = tensor.placements, tensor.device_mesh
        tensor._local_tensor.copy_(cut(whole[name], mesh, placement)._local_tensor)


def _another_dtype(process: Process, ckpt: Checkpointer, whole: Mapping[str, torch.Tensor]) -> None:
    """bfloat16 gets what was saved in float32, and float64 as well, where it is asked for; not by itself."""
    row = DeviceMesh("cpu", [0, 1, 2])
    for dtype in (torch.bfloat16, torch.float64):
        state = {name: cut(torch.zeros_like(whole[name], dtype=dtype), row, Shard(1)) for name in ("columns", "both")}
        words = r"w\.columns: dtype float32 is stored, and \w+ is there now"
        refused(process, f"{dtype} by itself", words, MismatchError, lambda s=state: ckpt.load({"w": s}, strict=True))
        ckpt.load({"w": state}, strict=False, cast=True)
        expect(process, f"{dtype}", state, {name: cut(whole[name].to(dtype), row, Shard(1)) for name in state})


def _one_rank_asks_for_another_shape(process: Process, ckpt: Checkpointer, whole: Mapping[str, torch.Tensor]) -> None:
    """Every rank hears of it, and none is touched; nobody hangs."""
    state = _on_three(whole)
    if process.number == 1:
        state["fp8"] = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
    before = {name: bits(tensor) for name, tensor in state.items()}
    refused(process, "another shape on rank 1", r"w\.fp8: shape", MismatchError, lambda: ckpt.load({"w": state}))
    if any(not bits(tensor).equal(before[name]) for name, tensor in state.items()):
        process.wrong.append("a load that was refused has touched a tensor")


# --- ranks that hold different layers -------------------------------------------------------------------------------


def _layers(numbers: range, seed: int) -> State:
    """Some of four layers under their own names, and an optimizer that has made two steps, with one param group for the weights
    and one for the biases, which only the first two layers have.
    """
    torch.manual_seed(seed)
    every = [nn.Linear(5, 5 + i, bias=i < 2) for i in range(4)]
    model = nn.ModuleDict({str(i): every[i] for i in numbers})
    named = [[(name, p) for name, p in model.named_parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    groups = [{"params": found, "weight_decay": 0.1 * seed * (1 - i)} for i, found in enumerate(named) if found]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1 * seed), foreach=False)
    for _ in range(2):
        for i in numbers:
            every[i](torch.full((2, 5), 1.0 + i)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _named(state: State) -> dict[str, torch.Tensor]:
    """Parameters, their state, and the settings of their groups by name."""
    model, optimizer = state["model"], state["optimizer"]
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": value.detach().clone() for key, value in optimizer.state[p].items()}
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            found[f"{name}/settings"] = torch.tensor([float(group["lr"]), group["weight_decay"]])
    return found


def stages(process: Process) -> None:
    """Two pipeline stages into one process and into stages that are split elsewhere; one process into stages."""
    every = _named(_layers(range(4), 1))
    split = {2: (range(2), range(2, 4)), 3: (range(1), range(1, 2), range(2, 4)), 1: (range(4),)}
    roots = {name: process.folder / f"stages-{name}" for name in "ab"}

    def job(name: str, world: int, *, saves: bool, moved: bool = False) -> None:
        with process.job(f"stages-{name}-{world}-{saves}-{moved}", world) as mine:
            if not mine:
                return
            layers = split[world][process.number] if not moved else (range(3), range(3, 4))[process.number]
            with Checkpointer(roots[name]) as ckpt:
                if saves:
                    ckpt.save(1, _layers(layers, 1)).wait()
                    return
                state = _layers(layers, 2)
                ckpt.load(state)
                wanted = {key: value for key, value in every.items() if int(key[0]) in layers}
                expect(process, f"stages {name} on {world}, moved: {moved}", _named(state), wanted)
                if world == 3:  # layer 3 is nobody's
                    fewer = _layers(range(process.number, process.number + 1), 3)
                    words = r"model\.3\.weight.*optimizer\.state\.model\.3\.weight"
                    refused(process, "a layer of nobody", f"(?s){words}", MismatchError, lambda: ckpt.load(fewer))
                    named = ckpt.load(fewer, strict=False).unexpected
                    if named != ("model.3.weight", "optimizer.state.model.3.weight"):
                        process.wrong.append(f"unexpected without strict: {named}")

    job("a", 2, saves=True)
    job("a", 1, saves=False)
    job("a", 2, saves=False, moved=True)
    job("b", 1, saves=True)
    job("b", 2, saves=False)
    job("b", 3, saves=False)


# --- DistributedDataParallel inside a module ------------------------------------------------------------------------


class Nested(nn.Module):
    """Two DDP modules inside another one: one broadcasts its buffers, the other does not; a frozen layer, and one outside."""

    def __init__(self, seed: int, *, parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4001))
        head = nn.Sequential(nn.Linear(4001, 2), nn.BatchNorm1d(2))
        self.outside, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.body: Any = DistributedDataParallel(body) if parallel else body
        self.head: Any = DistributedDataParallel(head, broadcast_buffers=False) if parallel else head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.outside(self.head(self.body(x))).detach()) + self.head(self.body(x))  # type: ignore[no-any-return]


def replicas(process: Process) -> None:
    """Parameters are divided and loaded; buffers are rank 0's where they are broadcast, and each rank's own where not."""
    root = process.folder / "replicas"
    with process.job("replicas-2", 2) as mine, Checkpointer(root) if mine else process.nothing() as ckpt:
        if mine:
            model = Nested(1, parallel=True)
            optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
            # Every rank sees other data, and gathers other statistics.
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(process.number))
            model(data).sum().backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer}
            _check_divided(process, state)
            _over_tensor_parallelism(process)
            ckpt.save(1, state, exclude_frozen_parameters=True).wait()
            plain = {name.replace("module.", ""): tensor.clone() for name, tensor in model.state_dict().items()}
            torch.save(plain, process.folder / f"replicas-{process.number}.pt")
            again = Nested(2, parallel=True)
            ckpt.load({"model": again, "optimizer": torch.optim.AdamW(p for p in again.parameters() if p.requires_grad)})
            wanted = _with_first_buffers(process, plain) | {
                name: t for name, t in again.state_dict().items() if "frozen" in name
            }
            expect(process, "nested DDP", {n.replace("module.", ""): t for n, t in again.state_dict().items()}, wanted)
    with process.job("replicas-1", 1) as mine, Checkpointer(root) if mine else process.nothing() as ckpt:
        if mine:
            alone = Nested(3, parallel=False)
            before = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
            loaded = ckpt.load(
                {"model": alone, "optimizer": torch.optim.AdamW(p for p in alone.parameters() if p.requires_grad)}
            )
            left = ("model.head.1.running_mean", "model.head.1.running_var")
            if loaded is None or sorted(loaded.per_rank_left) != sorted(left):
                process.wrong.append(f"nested DDP on one rank: {loaded}")
            kept = [*(name.removeprefix("model.") for name in left), "frozen.weight", "frozen.bias"]
            wanted = torch.load(process.folder / "replicas-0.pt", weights_only=True) | {name: before[name] for name in kept}
            expect(process, "nested DDP on one rank", alone.state_dict(), wanted)


def _over_tensor_parallelism(process: Process) -> None:
    """DDP that takes DTensors apart is refused by name, before a step and after one."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    inner = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh["tp"], {"0": ColwiseParallel()})
    model: Any = DistributedDataParallel(inner, device_mesh=mesh["dp"])
    for when in ("before a step", "after it"):
        call = functools.partial(capture, {"model": model}, None, exclude_frozen_parameters=False)
        refused(process, f"DDP over TP {when}", r"model\.0\.(weight|bias): DistributedDataParallel", StateError, call)
        model(torch.ones(2, 4)).sum().backward()


def _with_first_buffers(process: Process, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dist.barrier()
    first = torch.load(process.folder / "replicas-0.pt", weights_only=True)
    broadcast = ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked")
    if process.number == 1 and first[broadcast[0]].equal(plain[broadcast[0]]):
        process.wrong.append("the statistics are the same on both ranks, so that nothing is shown")
    return plain | {name: first[name] for name in broadcast}


def _check_divided(process: Process, state: State) -> None:
    """What both ranks write of each tensor, together, is once all of it; of the large one, half each."""
    leaves = capture(state, None, exclude_frozen_parameters=True).leaves
    mine: dict[str, int] = {}
    for leaf in leaves:  # a tensor may be written in several parts
        mine[leaf.fqn] = -1 if leaf.part is None else mine.get(leaf.fqn, 0) + leaf.tensor.numel()
    both: list[dict[str, int]] = [{}, {}]
    dist.all_gather_object(both, mine)
    one, two = both
    for name, parameter in state["model"].named_parameters():
        fqn = "model." + name.replace("module.", "")
        if "frozen" in name or "outside" in name:
            if one.get(fqn) != (None if "frozen" in name else -1):
                process.wrong.append(f"{fqn}: {one.get(fqn)} elements are divided")
        elif one.get(fqn, 0) + two.get(fqn, 0) != parameter.numel() or min(one.get(fqn, 0), two.get(fqn, 0)) < 0:
            process.wrong.append(f"{fqn}: {one.get(fqn)} and {two.get(fqn)} of {parameter.numel()} elements are written")
    large = "model.body.2.weight"
    if abs(one[large] - two[large]) > 6 or one["optimizer.state.model.body.2.weight.exp_avg"] < 12000:
        process.wrong.append("a large tensor is not divided")


# --- what changes from save to save ---------------------------------------------------------------------------------


def one_rank_changes(process: Process) -> None:
    """The layout changes on one rank alone: what it adds, drops or makes larger; each save is what both ranks had then."""
    with process.job("one-rank", 2) as mine:
        if not mine:
            return
        number, row = process.number, DeviceMesh("cpu", [0, 1])
        with Checkpointer(process.folder / "one-rank") as ckpt:
            base: State = {"w": cut(_numbers(5, 3), row, Shard(0)), "own": torch.full((3,), float(number))}
            added = {"new": torch.full((2,), 7.0)} if number == 1 else {}
            grown = {"own": torch.full((9,), 3.0)} if number == 0 else {}
            moved = {"w": cut(_numbers(6, 3), row, Shard(0))}
            narrower = {"own": torch.full((3,), float(number), dtype=torch.float16)} if number == 1 else {}
            for step, change in enumerate((base, added, {}, grown, narrower, moved, {})):
                state = base | change
                ckpt.save(step, {"s": state}).wait()
                found = {name: _zeros(tensor) for name, tensor in state.items()}
                ckpt.load({"s": found})
                expect(process, f"one rank changes, step {step}", found, state)
            torn = base | ({"w": cut(_numbers(5, 3), row, Replicate())} if number == 0 else {})
            words = r"s\.w \(ranks \[0, 1\]\): boxes .* overlap"
            refused(process, "w changes on one rank", words, CheckpointdError, lambda: ckpt.save(8, {"s": torn}).wait(300))
            ckpt.save(9, {"s": base}).wait()


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


# --- objects that load themselves -----------------------------------------------------------------------------------


class Handing:
    """Hands out its tensor, and takes one of the same kind only, as torch's set_model_state_dict() does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> State:
        return {"w": self.tensor}

    def load_state_dict(self, state: State) -> None:
        if type(state["w"]) is not type(self.tensor):
            raise TypeError(type(state["w"]))
        self.tensor = state["w"]


class Gathering:
    """Gathers what it holds on rank 0 and scatters it from there, so that all ranks must call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> State:
        dist.reduce(found := self.tensor.clone(), 0)
        return {"w": found} if dist.get_rank() == 0 else {}

    def load_state_dict(self, state: State) -> None:
        dist.broadcast(found := state.get("w", self.tensor), 0)
        self.tensor = found


class Counting(Handing):
    """Counts the ranks that call it, so that all must call it as often."""

    def state_dict(self) -> State:
        dist.all_reduce(count := torch.ones(()))
        return {"w": self.tensor, "ranks": int(count)}


def objects_that_load_themselves(process: Process) -> None:
    """Each rank's plain tensor is loaded where ranks hold it together now; what rank 0 alone has stored asks no rank alone.
    Nor does the match ask again that one rank makes of what the others saved, for an object that is new there.
    """
    whole = _numbers(5, 3)
    for world in (2, 1):
        with process.job(f"objects-{world}", world) as mine:
            if not mine:
                continue
            mesh = DeviceMesh("cpu", list(range(world)))
            with Checkpointer(process.folder / "objects") as ckpt:
                if world == 2:
                    ckpt.save(1, {"hands": Handing(whole), "gathers": Gathering(whole), "counts": Counting(whole)}).wait()
                hands = Handing(cut(torch.zeros(5, 3), mesh, Shard(0)))
                gathers = Gathering(torch.zeros(5, 3))
                counts = Counting(cut(torch.zeros(5, 3), mesh, Shard(0)))
                new = {"new": torch.zeros(1)} if process.number == 1 else {}
                ckpt.load({"hands": hands, "gathers": gathers, "counts": counts, **new}, strict=False)
                found = {"hands": hands.tensor, "gathers": gathers.tensor, "counts": counts.tensor}
                sharded = cut(whole, mesh, Shard(0))
                expect(process, f"objects on {world}", found, {"hands": sharded, "gathers": whole * 2, "counts": sharded})


def steps_go_on(process: Process) -> None:
    """A step right after save() returns: the checkpoint holds what was before it, of what is sharded as well."""
    with process.job("go-on", 2) as mine:
        if not mine:
            return
        with Checkpointer(process.folder / "go-on") as ckpt:
            job = build("fsdp2", torch.float32, 9)
            job.step(0)
            before = {str(i): tensor.clone() for i, tensor in enumerate(locals_of(job))}
            handle = ckpt.save(1, job.state)
            job.step(1)
            handle.wait()
            after = locals_of(job)
            if all(bits(after[int(i)]).equal(bits(tensor)) for i, tensor in before.items()):
                process.wrong.append("the step changed nothing")
            again = build("fsdp2", torch.float32, 10)
            ckpt.load(again.state)
            expect(process, "a step right after save()", dict(zip(before, locals_of(again), strict=True)), before)


# --- tensors of a user's class ---------------------------------------------------------------------------------------


def _halves(whole: torch.Tensor, mesh: DeviceMesh, placement: Any, block: int) -> Any:
    """A DTensor of `Halves` with `block` in its context."""
    made: Any = cut(whole, mesh, placement)
    made._local_tensor = Halves.of(made._local_tensor, Recipe(block))
    return made


WAYS = ((Shard(0), False), (Shard(1), False), (Replicate(), False), (Replicate(), True))
"""Placements to load into, and whether the DTensor is an ordinary one."""


def contexts_of_their_own(process: Process) -> None:
    """Ranks that keep their own contexts get their own elements back, and nobody gets those of another rank (COMPOSITE-5)."""
    whole, root, classes = torch.arange(24.0).reshape(4, 6) / 7, process.folder / "contexts", [Halves, Recipe, Rounding]
    for world in (2, 1):
        with process.job(f"contexts-{world}", world) as mine:
            if not mine:
                continue
            with Checkpointer(root, tensor_classes=classes) as ckpt:
                if world == 2:
                    _save_and_load_halves(process, ckpt, whole)
                    continue
                alone = Halves.of(whole + 1)
                words = "w: the ranks that saved it had different values, and the number of ranks has changed"
                load = functools.partial(ckpt.load, {"w": alone})
                refused(process, "contexts of two ranks on one", words, MismatchError, load)
                _expect_halves(process, "contexts of two ranks on one", alone, whole + 1)


def _save_and_load_halves(process: Process, ckpt: Checkpointer, whole: torch.Tensor) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    for step, blocks in enumerate(((8, 8), (8, 4))):
        block, tag = blocks[process.number], f"global_step{step}"
        ckpt.save(step, {"w": _halves(whole, mesh, Shard(0), block)}).wait()
        with open_checkpoint(process.folder / "contexts", tag, tensor_classes=[Halves, Recipe, Rounding]) as opened:
            for (placement, is_plain), reader in itertools.product(WAYS, (ckpt, opened)):
                name = f"{tag} on {placement}, plain {is_plain}, by {type(reader).__name__}"
                target: Any = cut(whole + 1, mesh, placement)
                if not is_plain:
                    target = _halves(whole + 1, mesh, placement, block)
                load = functools.partial(reader.load, {"w": target}, strict=reader is opened, cast=is_plain)
                if placement == Shard(0) or blocks[0] == blocks[1]:
                    load()
                    _expect_halves(process, name, target._local_tensor, cut(whole, mesh, placement)._local_tensor)
                else:
                    words = r"kept different contexts(.|\n)*w: its elements for this rank are from rank [01]"
                    refused(process, name, words, MismatchError, load)


def _expect_halves(process: Process, name: str, local: torch.Tensor, wanted: torch.Tensor) -> None:
    found = local.dequantize() if isinstance(local, Halves) else local
    if not torch.equal(found, Halves.of(wanted).dequantize()):
        process.wrong.append(f"{name}: {found}")
