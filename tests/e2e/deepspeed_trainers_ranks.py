"""One rank of a job of Hugging Face's Trainer and Accelerate, which make their DeepSpeed engines themselves.

    torchrun --nproc-per-node=2 deepspeed_trainers_ranks.py FOLDER Trainer|Accelerate

Every rank prints a line for each thing that is wrong, and `done` last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.deepspeed_engines import Findings  # first: it prepares DeepSpeed for a CPU

import torch  # isort: skip
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import Trainer, TrainingArguments

from checkpointd.errors import NotFoundError
from checkpointd_client.integrations.deepspeed import install
from tests.e2e.deepspeed_loss_model import CONFIG, WithLoss, examples
from tests.faults.jobs import wait_until

LIMIT_S = 60.0


def handle_of(engine: Any) -> Any:
    return engine.checkpoint_handle()


class Rank(Findings):
    # --- Trainer -----------------------------------------------------------------------------------------------

    def trainer(self, name: str, seed: int, *, last: int, **options: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(self.folder / name),
            deepspeed=CONFIG,
            max_steps=last,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            **options,
        )
        return Trainer(model=WithLoss(seed), args=arguments, train_dataset=examples())

    def trainer_saves_and_resumes(self) -> None:
        """Stopped after six of eight steps, and started again, it ends where an uninterrupted run ends."""
        whole = self.trainer("whole", 0, last=8, save_strategy="no")
        whole.train()
        first = self.trainer("resumed", 0, last=6, save_strategy="steps", save_steps=2, save_total_limit=1)
        first.train()
        handle = handle_of(first.deepspeed)
        handle.wait(LIMIT_S)
        self.check(handle.phase == "committed", f"Trainer: {handle}")
        dist.barrier()
        wait_until(lambda: self.saved("resumed") == ["checkpoint-6"], "the older checkpoint has gone")
        self.check((self.folder / "resumed" / "checkpoint-6" / "latest").read_text() == "global_step6", "latest")
        again = self.trainer("resumed", 1, last=8, save_strategy="no")
        again.train(resume_from_checkpoint=True)
        self.check(again.state.global_step == 8, f"resumed to {again.state.global_step}")
        losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        expected = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
        self.check(losses == expected and len(losses) == 8, f"losses: {losses} and not {expected}")
        for (key, one), two in zip(whole.model.state_dict().items(), again.model.state_dict().values(), strict=True):
            self.check(torch.equal(one, two), f"resumed: {key} differs")

    def saved(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.folder / name).glob("checkpoint-*"))

    # --- Accelerate --------------------------------------------------------------------------------------------

    def accelerate_saves_and_loads(self) -> None:
        config = {name: value for name, value in CONFIG.items() if name != "optimizer"}  # it is made here
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = WithLoss(3)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader = torch.utils.data.DataLoader(examples(), batch_size=2)  # type: ignore[arg-type]  # a list is a dataset
        engine, _, loader = accelerator.prepare(model, optimizer, loader)
        where = self.folder / "accelerate" / "checkpoint-1"
        where.mkdir(parents=True, exist_ok=True)
        try:
            accelerator.load_state(str(where))
        except (NotFoundError, AssertionError):  # the latter is DeepSpeed's own, of a tag that is not there
            pass
        except Exception as error:
            self.wrong.append(f"load_state of nothing: {error!r}")
        else:
            self.wrong.append("load_state of nothing raised nothing")
        for number, batch in enumerate(loader):
            accelerator.backward(engine(**batch)["loss"])
            if number == 2:
                accelerator.save_state(str(where))
                kept = {key: value.clone() for key, value in engine.module.state_dict().items()}
            if number == 5:
                break
        moved = [key for key, value in engine.module.state_dict().items() if not torch.equal(value, kept[key])]
        self.check(bool(moved), "nothing was trained")
        accelerator.load_state(str(where))  # waits for the save
        self.check(handle_of(engine).phase == "committed", f"Accelerate: {handle_of(engine)}")
        for key, value in engine.module.state_dict().items():
            self.check(torch.equal(value, kept[key]), f"Accelerate: {key} differs")


def main() -> None:
    install()
    rank = Rank(Path(sys.argv[1]))
    run = rank.trainer_saves_and_resumes if sys.argv[2] == "Trainer" else rank.accelerate_saves_and_loads
    with rank.case(run.__name__):
        run()
    rank.finish()
    os._exit(0)  # DeepSpeed's atexit hooks wait for ranks that have left


if __name__ == "__main__":
    main()
