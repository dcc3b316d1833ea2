"""A process that trains with Hugging Face's Trainer and with Accelerate, and saves through checkpointd; or one rank of two.

training.py FOLDER CASE... runs the cases, each a function below, in a folder of its own, and notes what is wrong in them. With
the variable STOCK, checkpointd is not installed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointd.errors import DamagedError, StateError
from checkpointd.pipeline.write import persist
from checkpointd.store.posix.plain import PlainFiles
from checkpointd_client.integrations import huggingface
from checkpointd_client.integrations.huggingface.replacing import instead
from checkpointd_client.integrations.huggingface.saving import DirectorySaver
from tests.e2e.rank_cases import CaseNotes

INSTALLED: DirectorySaver | None = None if os.environ.get("STOCK") else huggingface.install(commit_timeout_s=60, absence_s=0.1)

import accelerate.accelerator
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration, set_seed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NUMBER = re.compile(r"checkpoint[-_](\d+)")


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """64 of them, each of eight tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class After(TrainerCallback):
    """Calls `act` after each step; the training stops after `last`."""

    def __init__(self, last: int, act: Callable[[int], None]) -> None:
        self.last, self.act = last, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.last
        self.act(state.global_step)


def trainer_of(
    folder: Path,
    last: int,
    act: Callable[[int], None] = lambda _: None,
    model: Any = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """A Trainer of a tiny model with dropout, which saves every second of its eight steps and stops after `last`."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        attention_dropout=0.1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=2,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        ddp_find_unused_parameters=False,
        **{"save_total_limit": 3, "logging_steps": 100, **options},
    )
    made = LlamaForCausalLM(config)
    made = made if model is None else model(made)
    return kind(made, arguments, train_dataset=Examples(), eval_dataset=Examples(), callbacks=[After(last, act)])


def state_of(trainer: Trainer) -> list[Any]:
    """All that a training goes on with."""
    assert trainer.lr_scheduler is not None
    optimizer: Any = trainer.optimizer
    return [
        trainer.model.state_dict() if isinstance(trainer.model, torch.nn.Module) else None,
        optimizer.state_dict(),
        trainer.lr_scheduler.state_dict(),
        [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        trainer.state.global_step,
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    one, other = (getattr(each, "_local_tensor", each) for each in (one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((torch.as_tensor(one).view(-1) == torch.as_tensor(other).view(-1)).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def shown(folder: Path) -> list[int]:
    """The numbers of the checkpoints that anybody sees."""
    return sorted(int(found[1]) for path in folder.iterdir() if (found := NUMBER.fullmatch(path.name)))


def flip_a_byte(path: Path) -> None:
    """Damage the stored file that `path` shows."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def phase() -> str | None:
    """Of the last save."""
    return None if INSTALLED is None or INSTALLED.handle is None else INSTALLED.handle.phase


def settle() -> None:
    if INSTALLED is not None:
        INSTALLED.settle()


def bits(value: Any) -> bytes:
    """A state in bytes; two are the same only if the states are, bit for bit."""
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return torch.as_tensor(value).reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + bits(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(bits, value))
    return repr(value).encode()


def fingerprint(state: Any) -> str:
    return hashlib.sha256(bits(state)).hexdigest()


def together() -> None:
    if WORLD > 1:
        torch.distributed.barrier()


# --- Trainer ------------------------------------------------------------------------------------------------------


def eight_steps_are_four_and_four_that_are_resumed(folder: Path) -> None:
    whole = trainer_of(folder / "whole", 8)
    whole.train()
    assert phase() == "committed"
    assert shown(folder / "whole") == [4, 6, 8], shown(folder / "whole")
    trainer_of(folder / "parts", 4).train()
    assert get_last_checkpoint(folder / "parts") == str(folder / "parts" / "checkpoint-4")
    resumed = trainer_of(folder / "parts", 8)
    resumed.train(resume_from_checkpoint=True)
    assert same(state_of(whole), state_of(resumed))
    assert shown(folder / "parts") == [4, 6, 8]
    names = {path.name for path in (folder / "parts" / "checkpoint-8").iterdir()}
    states = {"rng_state.pth"} if WORLD == 1 else {f"rng_state_{rank}.pth" for rank in range(WORLD)}
    assert names >= {*states, "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json"}, names
    assert {path.name for path in (folder / "parts").iterdir() if not NUMBER.fullmatch(path.name)} == {".checkpointd"}
    loaded = LlamaForCausalLM.from_pretrained(folder / "parts" / "checkpoint-8")
    assert same(dict(loaded.state_dict()), dict(resumed.model.state_dict()))  # type: ignore[union-attr]  # a module


class ShardedTrainer(Trainer):
    """With FSDP2, which the Trainer and Accelerate choose on devices only."""

    states = "SHARDED_STATE_DICT"

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self.accelerator, self.states)
        self.is_fsdp_enabled = True


class GatheringTrainer(ShardedTrainer):
    """Its shards are gathered when they are saved."""

    states = "FULL_STATE_DICT"


def eight_sharded_steps_are_four_and_four_that_are_resumed(folder: Path) -> None:
    from torch.distributed.tensor import DTensor

    whole = trainer_of(folder / "whole", 8, kind=ShardedTrainer)
    whole.train()
    assert all(isinstance(value, DTensor) for value in whole.model.parameters())  # type: ignore[union-attr]  # a module
    assert phase() == "committed"
    assert shown(folder / "whole") == [4, 6, 8], shown(folder / "whole")
    trainer_of(folder / "parts", 4, kind=ShardedTrainer).train()
    together()
    resumed = trainer_of(folder / "parts", 8, kind=ShardedTrainer)
    resumed.train(resume_from_checkpoint=True)
    assert same(state_of(whole), state_of(resumed))
    assert shown(folder / "parts") == [4, 6, 8]
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        names = {path.name for path in (folder / "parts" / "checkpoint-8" / part).iterdir()}
        assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(WORLD))}, names


def eight_gathered_steps_are_four_and_four_that_are_resumed(folder: Path) -> None:
    whole = trainer_of(folder / "whole", 8, kind=GatheringTrainer)
    whole.train()
    assert phase() == "committed"
    trainer_of(folder / "parts", 4, kind=GatheringTrainer).train()
    together()
    resumed = trainer_of(folder / "parts", 8, kind=GatheringTrainer)
    resumed.train(resume_from_checkpoint=True)
    assert same(state_of(whole), state_of(resumed))
    names = {path.name for path in (folder / "parts" / "checkpoint-8").iterdir()}
    assert names >= {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors"}, names


def gathered_adapters_have_the_shards_of_all_ranks(folder: Path) -> None:
    """Each rank's part of the adapters is in the file, and comes back on each rank."""
    from peft import LoraConfig, get_peft_model

    def adapted(base: Any) -> Any:
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    whole = trainer_of(folder / "whole", 8, model=adapted, kind=GatheringTrainer)
    whole.train()
    trainer_of(folder / "parts", 4, model=adapted, kind=GatheringTrainer).train()
    together()
    resumed = trainer_of(folder / "parts", 8, model=adapted, kind=GatheringTrainer)
    resumed.train(resume_from_checkpoint=True)
    assert same(state_of(whole), state_of(resumed))
    gathered = torch.load(folder / "parts" / "checkpoint-8" / "pytorch_model_fsdp.bin", weights_only=True)
    assert gathered.keys() == {key for key, value in resumed.model.named_parameters() if value.requires_grad}  # type: ignore[union-attr]  # a module
    for key, parameter in resumed.model.named_parameters():  # type: ignore[union-attr]
        if parameter.requires_grad:
            assert same(gathered[key], parameter.full_tensor()), key


def the_best_checkpoint_stays_and_is_loaded_in_the_end(folder: Path) -> None:
    kept: dict[int, Any] = {}
    options = {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True, "metric_for_best_model": "eval_loss"}

    def keep(step: int) -> None:
        kept[step] = {key: value.clone() for key, value in trainer.model.state_dict().items()}  # type: ignore[union-attr]

    trainer = trainer_of(folder, 8, keep, save_total_limit=1, load_best_model_at_end=True, **options)
    trainer.train()
    best = int(NUMBER.fullmatch(os.path.basename(str(trainer.state.best_model_checkpoint)))[1])  # type: ignore[index]  # it has a number
    together()  # rank 0 removes the last one at the end of its training
    assert best == 2, "the loss falls, and the highest counts as the best"
    assert same(kept[best], dict(trainer.model.state_dict()))  # type: ignore[union-attr]
    assert shown(folder) == [2], shown(folder)


def a_damaged_checkpoint_is_not_resumed_from(folder: Path) -> None:
    trainer_of(folder, 4).train()
    together()
    if RANK == 0:
        flip_a_byte(folder / "checkpoint-4" / "model.safetensors")
    together()
    assert INSTALLED is not None
    INSTALLED.close()
    begun: list[int] = []
    trainer = trainer_of(folder, 4, begun.append)
    with pytest.raises(DamagedError, match="checkpoint-4"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    trainer.train(resume_from_checkpoint=True)
    assert begun[0] == 3, begun


def what_cannot_be_pickled_ends_the_save_and_leaves_nothing(folder: Path) -> None:
    trainer = trainer_of(folder, 2)
    trainer.args.a_function = lambda: None  # type: ignore[attr-defined]  # of the user's
    with pytest.raises(StateError, match=r"training_args.bin cannot be saved as torch.save saves it: Can't pickle"):
        trainer.train()
    settle()
    assert phase() == "failed"
    assert shown(folder) == []


def what_a_method_of_the_user_writes_is_there_when_its_call_returns(folder: Path) -> None:
    """It saves an average in place of the weights, puts these back by a way that torch does not count, renames and reads."""
    trainer = trainer_of(folder, 2)
    save, model = trainer.save_model, trainer.model
    assert isinstance(model, torch.nn.Module)

    def saved(output_dir: str, _internal_call: bool = False) -> None:
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.fill_(7)
        save(output_dir, _internal_call)
        for parameter, own in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(own)
        torch.save(weights[0], os.path.join(output_dir, "head.tmp"))
        os.replace(os.path.join(output_dir, "head.tmp"), os.path.join(output_dir, "head.pt"))
        assert os.path.getsize(os.path.join(output_dir, "model.safetensors"))

    trainer.save_model = saved  # type: ignore[method-assign,assignment]  # as a subclass would
    trainer.train()
    assert phase() == "committed"
    loaded = LlamaForCausalLM.from_pretrained(folder / "checkpoint-2")
    assert all(bool((value == 7).all()) for value in loaded.parameters())
    assert (folder / "checkpoint-2" / "head.pt").is_file()


def a_push_to_the_hub_leaves_the_store_out(folder: Path) -> None:
    from huggingface_hub import HfApi

    trainer = trainer_of(folder, 2)
    trainer.train()
    (folder / "notes.txt").write_text("of the user's")
    trainer.hub_model_id, trainer.create_model_card = "a/b", lambda **_: None  # type: ignore[method-assign]  # not asked for
    added: list[str] = []

    class Uploaded(Exception):
        """Nothing goes further."""

    usual = HfApi._prepare_upload_folder_additions

    def noted(*args: Any, **options: Any) -> Any:
        added.extend(one.path_in_repo for one in usual(*args, **options))
        raise Uploaded

    HfApi._prepare_upload_folder_additions = noted  # type: ignore[method-assign]  # there is no network
    try:
        with pytest.raises(Uploaded):
            trainer.push_to_hub()
    finally:
        HfApi._prepare_upload_folder_additions = usual  # type: ignore[method-assign]
    assert added, "a file beside the checkpoint and the store"
    assert not [path for path in added if ".checkpointd" in path or "checkpoint-2" in path], added


def adapters_are_saved_alone_and_resumed(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(base: Any) -> Any:
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        return model

    whole = trainer_of(folder / "whole", 8, model=adapted)
    whole.train()
    trainer_of(folder / "parts", 4, model=adapted).train()
    resumed = trainer_of(folder / "parts", 8, model=adapted)
    resumed.train(resume_from_checkpoint=True)
    assert same(state_of(whole), state_of(resumed))
    checkpoint = folder / "parts" / "checkpoint-8"
    weights = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.safetensors"))
    assert weights == ["adapter_model.safetensors", "second/adapter_model.safetensors"], weights
    size = (checkpoint / weights[0]).stat().st_size
    assert size < 20_000, f"{size} bytes are more than the adapters have"


# --- Accelerate ---------------------------------------------------------------------------------------------------


class Counter:
    """An object of the user."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "as a tensor": torch.full((3,), float(self.n))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def accelerated(folder: Path, last: int, *, first: int = 0, sharded: str = "") -> list[Any]:
    """Train from step `first`, which the newest checkpoint has, until step `last`, saving every second; the state in the end.

    `sharded`: with FSDP2, whose states are saved in this way.
    """
    set_seed(0)
    naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    if sharded:
        shard_on_cpu(accelerator, sharded)
    layers = [torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)]
    model: Any = torch.nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    model, optimizer, schedule, batches = accelerator.prepare(
        model, optimizer, schedule, torch.utils.data.DataLoader(data, batch_size=4)
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for step, (x, y) in enumerate(batches):
        if first and step == first:
            accelerator.load_state()
            assert counter.n == first, counter.n
            naming.iteration = first // 2
        if step < first:
            continue
        if step == last:
            break
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.n = step + 1
        if step % 2 == 1:
            accelerator.save_state()
    settle()
    together()
    weights = {key: getattr(value, "to_local", lambda v=value: v)() for key, value in model.state_dict().items()}
    moments = [getattr(v, "to_local", lambda v=v: v)() for state in optimizer.optimizer.state.values() for v in state.values()]
    found = [weights, moments, schedule.state_dict(), [torch.get_rng_state(), random.getstate()], counter.n]
    accelerator.free_memory()
    return found


def shard_on_cpu(accelerator: Accelerator, states: str) -> None:
    """Accelerate itself chooses FSDP on devices only; everything below that choice runs on a CPU, too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=states, cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap"
    )
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    plugin.activation_checkpointing = False


def a_state_is_saved_and_loaded(folder: Path) -> None:
    whole = accelerated(folder / "whole", 8)
    assert shown(folder / "whole" / "checkpoints") == [2, 3]
    accelerated(folder / "parts", 4)
    resumed = accelerated(folder / "parts", 8, first=4)
    assert same(whole, resumed)
    assert shown(folder / "parts" / "checkpoints") == [2, 3]
    names = {path.name for path in (folder / "parts" / "checkpoints" / "checkpoint_3").iterdir()}
    states = {f"random_states_{rank}.pkl" for rank in range(WORLD)}
    assert names == {*states, "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "scheduler.bin"}, names


def checked_halves(folder: Path, sharded: str) -> set[str]:
    """Eight steps, and four and four that are resumed; what the last checkpoint of these holds."""
    whole = accelerated(folder / "whole", 8, sharded=sharded)
    accelerated(folder / "parts", 4, sharded=sharded)
    resumed = accelerated(folder / "parts", 8, first=4, sharded=sharded)
    assert same(whole, resumed)
    return {path.name for path in (folder / "parts" / "checkpoints" / "checkpoint_3").iterdir()}


def a_gathered_state_is_saved_and_loaded(folder: Path) -> None:
    names = checked_halves(folder, "FULL_STATE_DICT")
    assert names >= {"pytorch_model_fsdp.bin", "optimizer.bin"}, names


def shards_without_dcp_are_saved_and_loaded(folder: Path) -> None:
    """Only functions of Accelerate's have that argument, not `save_state`."""
    module: Any = accelerate.accelerator
    kinds = ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer")
    with instead(module, **{kind: functools.partial(getattr(module, kind), use_dcp=False) for kind in kinds}):
        names = checked_halves(folder, "SHARDED_STATE_DICT")
    parts = {f"{kind}_0_rank{rank}.bin" for kind in ("pytorch_model_fsdp", "optimizer") for rank in range(WORLD)}
    assert names >= parts, names


def a_sharded_state_is_saved_and_loaded(folder: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    checked_halves(folder, "SHARDED_STATE_DICT")
    checkpoint = folder / "parts" / "checkpoints" / "checkpoint_3"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        names = {path.name for path in (checkpoint / part).iterdir()}
        assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(WORLD))}, names
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(folder / "merged"))  # rank 0 does it, all ranks wait
    assert (folder / "merged" / "model.safetensors").is_file()


# --- with and without checkpointd -----------------------------------------------------------------------------------

# On two ranks with FSDP2: DCP's files are read by the libraries as well.
KIND, SHARDED = (Trainer, "") if WORLD == 1 else (ShardedTrainer, "SHARDED_STATE_DICT")


def stock_saves_four_steps(folder: Path) -> None:
    assert INSTALLED is None
    whole = trainer_of(folder / "whole", 8, kind=KIND)
    whole.train()
    ends = [state_of(whole), accelerated(folder / "accelerated", 8, sharded=SHARDED)]
    (folder.parent / f"whole-{RANK}.txt").write_text("\n".join(map(fingerprint, ends)))
    trainer_of(folder.parent / "trainer", 4, kind=KIND).train()
    accelerated(folder.parent / "accelerate", 4, sharded=SHARDED)


def ours_goes_on_to_six(folder: Path) -> None:
    shared, begun = folder.parent, list[int]()
    trainer_of(shared / "trainer", 6, begun.append, kind=KIND).train(resume_from_checkpoint=True)
    assert (begun[0], phase()) == (5, "committed"), begun
    accelerated(shared / "accelerate", 6, first=4, sharded=SHARDED)
    assert phase() == "committed"
    assert shown(shared / "trainer") == [2, 4, 6]
    assert shown(shared / "accelerate" / "checkpoints") == [1, 2], "Accelerate keeps two"


def stock_goes_on_to_eight(folder: Path) -> None:
    assert INSTALLED is None
    shared, begun = folder.parent, list[int]()
    trainer = trainer_of(shared / "trainer", 8, begun.append, kind=KIND)
    trainer.train(resume_from_checkpoint=True)
    assert begun[0] == 7, begun
    ends = [state_of(trainer), accelerated(shared / "accelerate", 8, first=6, sharded=SHARDED)]
    assert list(map(fingerprint, ends)) == (shared / f"whole-{RANK}.txt").read_text().split("\n")


# --- killed -------------------------------------------------------------------------------------------------------


def killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(point: str, step: int) -> None:
    """From here on this process dies in the save of `step`: while it fills the directory ("filling"), before it votes
    ("persisting"), or before the directory appears ("showing").
    """
    if point == "filling":
        save = Trainer._save_rng_state

        def dying(self: Any, directory: str) -> None:
            save(self, directory)
            if self.state.global_step == step:
                killed()

        Trainer._save_rng_state = dying  # type: ignore[method-assign]  # a mutation
    elif point == "persisting":
        write = persist.write_shard

        async def dies(job: Any) -> Any:
            stored = await write(job)
            return killed() if job.info.step == step else stored

        persist.write_shard = dies  # a mutation
    else:
        publish = PlainFiles.publish

        async def dies_before(self: PlainFiles, name: str, folder: str, *rest: Any) -> None:
            if folder.endswith(f"-{step}"):
                killed()
            await publish(self, name, folder, *rest)

        PlainFiles.publish = dies_before  # type: ignore[method-assign]  # a mutation


def dies_filling(folder: Path) -> None:
    _dies("filling", folder)


def dies_persisting(folder: Path) -> None:
    _dies("persisting", folder)


def dies_showing(folder: Path) -> None:
    _dies("showing", folder)


def _dies(point: str, folder: Path) -> None:
    """Every save but the one that kills has ended before the next begins."""
    die(point, 6)
    trainer_of(folder.parent / "killed", 8, lambda _: settle()).train()


def goes_on(folder: Path) -> None:
    """After a kill: from what there is, to the end of an uninterrupted run."""
    last = get_last_checkpoint(folder.parent / "killed")
    assert last is not None
    assert os.path.basename(last) == "checkpoint-4", last
    assert os.path.isfile(os.path.join(last, "trainer_state.json"))
    resumed = trainer_of(folder.parent / "killed", 8)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer_of(folder / "whole", 8)
    whole.train()
    assert same(state_of(whole), state_of(resumed))
    left = list((folder.parent / "killed").glob(".checkpointd/.checkpointd/unfinished/*"))
    assert left == [], left


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    notes = CaseNotes(folder, RANK)
    for name in names:
        with notes.case(name):
            globals()[name](folder / name)
            settle()
            together()
    notes.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
