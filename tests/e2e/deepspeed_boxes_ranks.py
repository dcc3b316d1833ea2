"""Four processes that save and load DeepSpeed engines as boxes, as jobs of 1, 2, 3 and 4 ranks one after the other.

    deepspeed_boxes_ranks.py FOLDER

Every process notes what is wrong in each case: see `rank_cases.py`.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from checkpointd.errors import MismatchError
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.deepspeed import attach
from tests.e2e.deepspeed_engines import Kind, Model, deepspeed, make
from tests.e2e.forked_ranks import forked
from tests.e2e.rank_cases import CaseNotes

PROCESSES = 4
WORLDS = (1, 2, 3, 4)
UNIVERSAL, UNIVERSAL_OF = ("z1", "z3"), 2
"""What is also converted and loaded by DeepSpeed itself, and how many ranks save it."""
LIMIT = timedelta(seconds=120)
BATCH, LENGTH, STEPS = 12, 8, 3
STAGE_3 = {
    "sub_group_size": 300,  # elements: several for each group of parameters
    "stage3_param_persistence_threshold": 30,
    # It would take the place of torch's for all engines that come after it in a process: bf16 is rounded otherwise by it, and
    # where some ranks have it and some have not, stage 2 mixes up their gradients.
    "memory_efficient_linear": False,
}
ACCUMULATED = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With bf16 at stage 1, DeepSpeed takes another optimizer."""
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "z0": (0, "float32", {}),
    "z1": (1, "float32", {}),
    "z2": (2, "float32", {}),
    "z3": (3, "float32", {}),
    "z0-bf16": (0, "bfloat16", {}),
    "z1-bf16": (1, "bfloat16", ACCUMULATED),
    "z2-bf16": (2, "bfloat16", {}),
    "z3-bf16": (3, "bfloat16", {}),
}


def kinds_of(world: int) -> list[str]:
    """All stages in fp32, and in bf16 those whose number is odd or even as the number of ranks is not."""
    return [kind for kind, (stage, dtype, _) in KINDS.items() if dtype == "float32" or stage % 2 != world % 2]


def engine_of(kind: str, seed: int, **more: Any) -> Any:
    """A new engine on all ranks of the default group, for a batch that does not depend on their number; `more` settings."""
    # Both are counted per process, and compared between ranks, which have been in other numbers of jobs before.
    deepspeed.zero.Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][:] = [0]
    stage, dtype, settings = KINDS[kind]
    zero = {"stage": stage, **(STAGE_3 if stage == 3 else {})}
    batch = BATCH // dist.get_world_size()
    whole = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": zero, **settings, **more}
    return make(Kind(stage, dtype, whole), seed)


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, 19, (BATCH, LENGTH), generator=torch.Generator().manual_seed(7000 + step))


def train(engine: Any, first: int, last: int) -> None:
    size = BATCH // dist.get_world_size()
    for step in range(first, last):
        engine.backward(engine(tokens_of(step)[dist.get_rank() * size :][:size]))
        engine.step()


@torch.no_grad()
def loss_of(engine: Any, step: int) -> float:
    """The loss on a whole batch, which is the same on every rank, whatever their number."""
    engine.eval()
    loss = engine(tokens_of(step)).item()
    engine.train()
    return float(loss)


def tensors_of(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers, masters and optimizer state in full, by DeepSpeed's own functions. Collective."""
    found: dict[str, torch.Tensor] = {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # by its first step, for the first group alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
        if parameter.requires_grad:
            found.update({f"{name}/{key}": value.clone() for key, value in _kept(engine, parameter)})
    found.update({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    return found


def _kept(engine: Any, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage():
        yield "master", deepspeed.utils.safe_get_full_fp32_param(parameter).float()
        for key in ("exp_avg", "exp_avg_sq"):
            yield key, deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
    else:
        lower, upper = getattr(optimizer, "fp16_groups", None), getattr(optimizer, "fp32_groups", None)
        pairs = [pair for both in zip(lower or (), upper or (), strict=True) for pair in zip(*both, strict=True)]
        master = next((high for low, high in pairs if low is parameter), parameter)
        base = getattr(optimizer, "optimizer", optimizer)
        yield "master", master.detach()
        yield from ((key, base.state[master][key]) for key in ("exp_avg", "exp_avg_sq"))


class Process:
    """This process in all the jobs that it takes part in."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.store = dist.FileStore(str(folder / "rendezvous"), PROCESSES)
        self.store.set_timeout(timedelta(seconds=200))
        self.notes = CaseNotes(folder, number)
        self.resumed: dict[tuple[str, int], float] = {}
        """By kind and number of ranks, the losses some steps after a load of what UNIVERSAL_OF ranks have saved."""

    @contextmanager
    def job(self, name: str, world: int) -> Iterator[bool]:
        """Whether this process is one of the first `world`, which are a process group meanwhile. All leave together."""
        mine = self.number < world
        if mine:
            os.environ.update(RANK=str(self.number), LOCAL_RANK=str(self.number), WORLD_SIZE=str(world))
            store = dist.PrefixStore(name, self.store)
            dist.init_process_group("gloo", store=store, rank=self.number, world_size=world, timeout=LIMIT)
        yield mine
        if mine:
            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None
        self.meet(name)

    def meet(self, name: str) -> None:
        """Wait for all processes."""
        self.store.set(f"{name}/left/{self.number}", "")
        self.store.wait([f"{name}/left/{number}" for number in range(PROCESSES)])

    def check(self, true: object, what: str) -> None:
        if not true:
            self.notes.wrong.append(what)

    # --- the matrix ----------------------------------------------------------------------------------------------

    def save_all(self, world: int) -> None:
        """Engines of every kind, and in a file what each was when it was saved, and how its losses went on."""
        with self.job(f"save-{world}", world) as mine:
            for kind in kinds_of(world) if mine else ():
                with self.notes.case(f"save {kind} of {world}"):
                    self.save_one(kind, world)

    def save_one(self, kind: str, world: int) -> None:
        engine = engine_of(kind, seed=world)
        train(engine, 0, STEPS)
        engine.module.seen.fill_(world)
        if kind in UNIVERSAL and world == UNIVERSAL_OF:
            engine.save_checkpoint(str(self.stock(kind)), "step")
        plug = attach(engine, layout="checkpointd")
        engine.empty_partition_cache()
        engine.save_checkpoint(str(self.root), tag_of(kind, world), {"world": world, "kind": kind})
        kept = getattr(engine.optimizer, "persistent_parameters", [])
        self.check(all(p.shape == p.ds_shape for p in kept), "a parameter that is kept whole is not whole after a save")
        before = tensors_of(engine)
        losses = [loss_of(engine, STEPS)]
        train(engine, STEPS, STEPS + 2)
        losses.append(loss_of(engine, STEPS + 2))
        plug.handle.wait()
        if self.number == 0:
            torch.save((before, losses), self.folder / f"{tag_of(kind, world)}.pt")
        engine.destroy()

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def load_all(self, world: int) -> None:
        """Every kind of engine, from what it is to be able to load."""
        with self.job(f"load-{world}", world) as mine:
            for kind in kinds_of(world) if mine else ():
                engine = engine_of(kind, seed=100)
                attach(engine, layout="checkpointd")
                for source, source_world in sources_of(kind, world):
                    with self.notes.case(f"{source} of {source_world} into {kind} of {world}"):
                        self.load_one(engine, kind, source, source_world)
                engine.destroy()

    def load_one(self, engine: Any, kind: str, source: str, source_world: int) -> None:
        world = dist.get_world_size()
        before, losses = torch.load(self.folder / f"{tag_of(source, source_world)}.pt")
        path, client = engine.load_checkpoint(str(self.root), tag_of(source, source_world))
        self.check(path and client == {"world": source_world, "kind": source}, f"loaded {path} {client}")
        self.check(engine.global_steps == STEPS and engine.lr_scheduler.last_batch_iteration == STEPS - 1, "counters")
        after = tensors_of(engine)
        different = [key for key in before if not equal(before[key], after[key])]
        self.check(before.keys() == after.keys() and not different, f"{len(different)} differ, as {different[:3]}")
        self.check(loss_of(engine, STEPS) == losses[0], "the first loss is another one")
        train(engine, STEPS, STEPS + 2)  # the next load finds an engine that is in use
        loss = loss_of(engine, STEPS + 2)
        if (kind, world) == (source, source_world):
            self.check(loss == losses[1], "the losses after a restart are others")
        else:  # where not the same numbers are added up in the same order
            self.check(
                math.isclose(loss, losses[1], rel_tol=1e-2 if "bf16" in kind else 1e-4), f"losses {loss} and {losses[1]}"
            )
        if (kind, UNIVERSAL_OF) == (source, source_world):
            self.resumed[kind, world] = loss

    # --- DeepSpeed's own way -------------------------------------------------------------------------------------

    def stock(self, kind: str) -> Path:
        return self.folder / f"{kind}-stock"

    def convert(self) -> None:
        """What DeepSpeed has saved itself becomes universal."""
        for kind in UNIVERSAL if self.number == 0 else ():
            place = str(self.stock(kind) / "step")
            ds_to_universal.main(
                Namespace(
                    input_folder=place,
                    output_folder=f"{place}_universal",
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
        self.meet("converted")

    def load_universal(self, world: int) -> None:
        """After what was saved of two ranks, engines go on as those do which load the same state from here."""
        with self.job(f"universal-{world}", world) as mine:
            for kind in UNIVERSAL if mine else ():
                with self.notes.case(f"{kind} of {UNIVERSAL_OF} into {world}, universal"):
                    self.load_universal_one(kind, world)

    def load_universal_one(self, kind: str, world: int) -> None:
        before, losses = torch.load(self.folder / f"{tag_of(kind, UNIVERSAL_OF)}.pt")
        # Frozen parameters and buffers are not loaded there: the same seed makes the same.
        engine = engine_of(kind, UNIVERSAL_OF, checkpoint={"load_universal": True})
        engine.load_checkpoint(str(self.stock(kind)), "step_universal")
        after = tensors_of(engine)
        different = [key for key in before if key != "seen" and not equal(before[key], after[key])]
        self.check(not different, f"{len(different)} differ, as {different[:3]}")
        self.check(loss_of(engine, STEPS) == losses[0], "the first loss is another one")
        if kind == "z3":
            mend_universal(engine)
        train(engine, STEPS, STEPS + 2)
        loss, ours = loss_of(engine, STEPS + 2), self.resumed[kind, world]
        self.check(loss == ours, f"the loss after two steps is {loss}, and from our checkpoint {ours}")
        engine.destroy()


def mend_universal(engine: Any) -> None:
    """What DeepSpeed's universal load of stage 3 leaves wrong, so that losses drift: settings of groups, and counts of steps.

    All groups of parameters get the settings of the first; and all parts of the optimizer count steps in one tensor, each for
    all of them.
    """
    optimizer = engine.optimizer.optimizer
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def tag_of(kind: str, world: int) -> str:
    return f"{kind}-{world}"


def sources_of(kind: str, world: int) -> Iterator[tuple[str, int]]:
    """What an engine loads: its own kind of every number of ranks, and other stages of the same dtype, which take turns."""
    stage, dtype, _ = KINDS[kind]
    yield from ((kind, number) for number in WORLDS if kind in kinds_of(number))
    others = [other for other, (_, other_dtype, _) in KINDS.items() if other_dtype == dtype and other != kind]
    for turn, other in enumerate(others):
        if dtype == "float32" and turn != world % 3:
            continue  # one for each number of ranks: all three in the end
        worlds = [number for number in WORLDS if other in kinds_of(number)]
        yield other, worlds[(world + stage) % len(worlds)]


# --- beside engines -------------------------------------------------------------------------------------------------


def plain(process: Process) -> None:
    """A plain model and torch's AdamW load an engine's checkpoint by name, and the reverse; parts of a checkpoint."""
    with process.job("plain", 1) as mine:
        if mine:
            with process.notes.case("an engine into a plain model"):
                before = into_plain(process)
            with process.notes.case("a plain model into an engine"):
                from_plain(process, before)
            with process.notes.case("parts of a checkpoint"):
                parts(process, before)


def into_plain(process: Process) -> Mapping[str, torch.Tensor]:
    """The tensors of the engine whose checkpoint a plain model has loaded, and stored again."""
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]]  # as the engines have them
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.5)
    with Checkpointer(process.root) as ckpt:
        loaded = ckpt.load({"model": model, "optimizer": optimizer}, tag=tag_of("z3", 3), strict=False)
    before, _ = torch.load(process.folder / "z3-3.pt")
    process.check(loaded and loaded.missing == (), f"{loaded}")
    for name, parameter in model.named_parameters():
        process.check(equal(parameter, before[name]), f"{name}")
        for key, value in optimizer.state.get(parameter, {}).items():
            process.check(key == "step" or equal(value, before[f"{name}/{key}"]), f"{key} of {name}")
    process.check(len(optimizer.state) == 5, f"state of {len(optimizer.state)} parameters")
    with Checkpointer(process.folder / "plain") as ckpt:
        ckpt.save(STEPS, {"model": model, "optimizer": optimizer}).wait()
    return before


def from_plain(process: Process, before: Mapping[str, torch.Tensor]) -> None:
    engine = engine_of("z2", seed=5)
    plug = attach(engine, layout="checkpointd")
    engine.load_checkpoint(str(process.folder / "plain"))
    different = [key for key, value in tensors_of(engine).items() if not equal(value, before[key])]
    process.check(not different, f"{different} differ")
    engine.save_checkpoint(str(process.folder / "parts"), exclude_frozen_parameters=True)
    plug.close()
    engine.destroy()


def parts(process: Process, before: Mapping[str, torch.Tensor]) -> None:
    """Without what is frozen; parameters alone; what does not fit is told, and nothing is touched."""
    again = engine_of("z3", seed=6)
    attach(again, layout="checkpointd")
    frozen = tensors_of_module(again)["frozen.weight"]
    try:
        again.load_checkpoint(str(process.folder / "parts"), load_module_only=True)
        process.check(False, "a strict load of a checkpoint without what is frozen")
    except MismatchError as error:
        process.check("pass load_module_strict=False" in str(error), f"what is frozen is missing: {error}")
    again.load_checkpoint(str(process.folder / "parts"), load_module_strict=False, load_module_only=True)
    found = tensors_of_module(again)
    process.check(equal(found["frozen.weight"], frozen), "what is frozen was loaded, and was not stored")
    process.check(equal(found["hidden.weight"], before["hidden.weight"]), "parameters alone: hidden.weight")
    master = deepspeed.utils.safe_get_full_fp32_param(again.module.hidden.weight)
    process.check(equal(master, before["hidden.weight"]), "parameters alone: the master of hidden.weight")
    process.check(again.global_steps == 0, f"parameters alone: step {again.global_steps}")
    with Checkpointer(process.folder / "other") as ckpt:
        ckpt.save(1, {"model": {"other": torch.zeros(2)}}).wait()
    try:
        again.load_checkpoint(str(process.folder / "other"))
    except MismatchError as error:
        process.check("model.hidden.weight: missing" in str(error) and "model.other" in str(error), f"other: {error}")
    else:
        process.check(False, "another model was loaded")
    process.check(equal(tensors_of_module(again)["hidden.weight"], before["hidden.weight"]), "a load that failed changed it")
    again.destroy()


def tensors_of_module(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bool(one.equal(two))


def run(folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    process = Process(folder, number)
    for world in WORLDS:
        process.save_all(world)
    for world in WORLDS:
        process.load_all(world)
    process.convert()
    for world in (1, 3):
        process.load_universal(world)
    plain(process)
    process.notes.finish()


def main() -> None:
    forked(Path(sys.argv[1]), PROCESSES, run)


if __name__ == "__main__":
    main()
