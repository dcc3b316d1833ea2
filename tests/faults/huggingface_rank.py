"""One rank that trains with Hugging Face's Trainer, or with Accelerate alone, and dies where it is told to.

The methods of `Rank` are its commands, as in commanded_rank.py. rank_forker_process.py forks it, so no import here may start a
thread. The variable ORDER says when `install` is called: "after" the libraries were imported, and their functions by name,
"before" that, or with "accelerate" alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.deepspeed_loss_model import CONFIG, WithLoss, examples  # first: it prepares DeepSpeed for a CPU

import torch  # isort: skip
import torch._inductor.compile_fx  # DeepSpeed's first engine would

from checkpointd.pipeline.write import persist
from checkpointd.store.posix.plain import PlainFiles
from checkpointd_client.integrations.deepspeed import files_adapter, install
from tests.faults.commanded_rank import Records

ORDER = os.environ["ORDER"]
if ORDER == "before":
    install()
if ORDER == "accelerate":
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration
else:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
if ORDER != "before":
    install()

LIMIT_S = 60.0
WIDE = 300


def killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """Its public methods are the commands."""

    def __init__(self, records: Records) -> None:
        del records
        os.environ["LOCAL_RANK"] = os.environ["RANK"]

    def die(self, point: str, step: int) -> None:
        """From here on this rank dies in the save of `step`: when the library has written its files ("filling"), before it
        votes ("persisting"), before the directory appears ("showing"), or before that is recorded ("shown").
        """
        if point == "filling":
            fill = files_adapter.FilesAdapter.save_checkpoint

            def dying(self: Any, save_dir: str, *args: Any, **kwargs: Any) -> bool:
                if self.engine.global_steps == step:
                    killed()  # what the library writes is written, and nothing of the engine's
                return fill(self, save_dir, *args, **kwargs)

            files_adapter.FilesAdapter.save_checkpoint = dying  # type: ignore[method-assign]  # a mutation
        elif point == "persisting":
            written = persist.write_shard

            async def dies(job: Any) -> Any:
                stored = await written(job)
                return killed() if job.info.step == step else stored

            persist.write_shard = dies  # a mutation
        else:
            _die_revealing(step, done=point == "shown")

    # --- Trainer ------------------------------------------------------------------------------------------------

    def train(self, folder: str, last: int, *, resume: bool = False, wide: int = 1, **options: Any) -> dict[str, Any]:
        """Train until step `last`, saving every second; from where it went on, where it ended, and what is there then."""
        trainer = self._trainer(folder, last, wide, save_total_limit=2, **options)
        begun: list[int] = []
        trainer.add_callback(_told("on_train_begin", lambda state: begun.append(state.global_step)))
        # The save before has ended when the next one begins: so it is known what a kill leaves.
        trainer.add_callback(_told("on_step_end", lambda _: _ended(trainer.deepspeed)))
        trainer.train(resume_from_checkpoint=resume)
        newest = get_last_checkpoint(folder)
        return {"from": begun[0], "step": trainer.state.global_step, "newest": newest and os.path.basename(newest)}

    def train_on_a_full_disk(self, folder: str, ballast: str, room: int, less: int) -> dict[str, Any]:
        """After the save of step 2 only `room` bytes are free, and for that of step 6 only `less`; how the saves ended."""
        trainer = self._trainer(folder, 8, WIDE)
        phases: dict[int, str] = {}

        def end(state: Any) -> None:
            _ended(trainer.deepspeed)
            if state.global_step % 2 == 1 and state.global_step > 1:
                phases[state.global_step - 1] = trainer.deepspeed.checkpoint_handle().phase
            torch.distributed.barrier()
            if os.environ["RANK"] == "0" and state.global_step >= 3:
                _leave(Path(ballast), less if state.global_step == 5 else room)
            torch.distributed.barrier()

        trainer.add_callback(_told("on_step_end", end))
        trainer.train()
        trainer.save_model()
        phases[8] = trainer.deepspeed.checkpoint_handle().phase
        return {"phases": [phases[step] for step in (2, 4, 6, 8)], "step": trainer.state.global_step}

    def _trainer(self, folder: str, last: int, wide: int, **options: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=CONFIG,
            max_steps=last,
            save_strategy="steps",
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            label_names=["tokens"],
            **options,
        )
        return Trainer(model=WithLoss(0, wide), args=arguments, train_dataset=examples(), eval_dataset=examples()[:4])

    # --- Accelerate ---------------------------------------------------------------------------------------------

    def accelerate(self, folder: str, last: int, *, resume: bool = False) -> dict[str, Any]:
        """The same as `train` in a loop of its own."""
        config = {name: value for name, value in CONFIG.items() if name != "optimizer"}  # it is made here
        naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=naming)
        model = WithLoss(3)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader = torch.utils.data.DataLoader(examples(), batch_size=2)  # type: ignore[arg-type]  # a list is a dataset
        engine, _, loader = accelerator.prepare(model, optimizer, loader)
        if resume:
            accelerator.load_state()
        begun = step = engine.global_steps
        naming.iteration = begun // 2
        for batch in loader:
            if step == last:
                break
            accelerator.backward(engine(**batch)["loss"])
            step = engine.global_steps
            _ended(engine)
            if step % 2 == 0:
                accelerator.save_state()
        engine.checkpoint_handle().wait(LIMIT_S)
        found = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
        naming.automatic_checkpoint_naming = False
        elsewhere = Path(folder, "another", "checkpoints", "state_1")
        accelerator.save_state(str(elsewhere))
        engine.checkpoint_handle().wait(LIMIT_S)
        return {"from": begun, "step": step, "newest": found[-1], "elsewhere": (elsewhere / "latest").read_text()}


def _ended(engine: Any) -> None:
    """Wait until the last save of an engine has ended, if there is one."""
    if engine is not None and engine.checkpoint_handle() is not None:
        engine.checkpoint_handle().ended_within(LIMIT_S)


def _die_revealing(step: int, *, done: bool) -> None:
    publish = PlainFiles.publish

    async def dying(self: PlainFiles, name: str, folder: str, *arguments: Any) -> None:
        if done or not folder.endswith(_name_of(step)):
            await publish(self, name, folder, *arguments)
        if folder.endswith(_name_of(step)):
            killed()

    PlainFiles.publish = dying  # type: ignore[method-assign]  # a mutation


def _name_of(step: int) -> str:
    """What the directory of a step ends with."""
    return f"checkpoint_{step // 2 - 1}" if ORDER == "accelerate" else f"checkpoint-{step}"


def _told(event: str, tell: Callable[[Any], object]) -> Any:
    """A callback of the Trainer's that calls `tell` with its state at an event."""

    def on_event(_self: Any, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        tell(state)

    return type("Told", (TrainerCallback,), {event: on_event})()


def _leave(ballast: Path, room: int) -> None:
    """Fill the disk with a file, but for `room` bytes."""
    ballast.unlink(missing_ok=True)
    found = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize - room))
