"""One rank of a job whose engines save with DeepSpeed itself, and whose files are then put together, imported and loaded.

    torchrun --nproc-per-node=2 deepspeed_tools_ranks.py FOLDER

Every rank prints a line for each thing that is wrong, and `done` last.
"""

from __future__ import annotations

import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32 as theirs

from checkpointd_client.integrations import deepspeed as ours
from checkpointd_client.integrations.deepspeed.offline.exporting import export_deepspeed
from checkpointd_client.integrations.deepspeed.offline.importing import import_deepspeed
from checkpointd_client.integrations.deepspeed.offline.zero_files import open_files
from checkpointd_client.integrations.deepspeed.offline.zero_map import map_files
from tests.e2e.deepspeed_engines import Findings, Kind, make, train

SUB_GROUPS = {"zero_optimization": {"stage": 3, "sub_group_size": 300, "stage3_param_persistence_threshold": 30}}
PATHS = (
    (Kind(1), Kind(3, settings=SUB_GROUPS)),
    (Kind(2, "bfloat16"), Kind(2, "bfloat16")),
    (Kind(3), Kind(3)),
    (Kind(3, "bfloat16", SUB_GROUPS), Kind(2, "bfloat16")),
)
"""What saves, and what loads the import of it."""
TAG = "global_step2"


class Rank(Findings):
    def run(self) -> None:
        for saving, loading in PATHS:
            what = f"{saving.name} -> {loading.name}"
            with self.case(what):
                self.save_and_load(saving, loading, what)

    def save_and_load(self, saving: Kind, loading: Kind, what: str) -> None:
        stock, root, boxes = (self.folder / f"{saving.name}-{what}" for what in ("stock", "root", "boxes"))
        losses = self.save(saving, stock, boxes)
        if dist.get_rank() == 0:
            self.compare(saving, stock, boxes)
            import_deepspeed(stock, root)
        dist.barrier()
        engine = make(loading, seed=7)
        plug = ours.attach(engine, layout="checkpointd")
        path, client = engine.load_checkpoint(str(root), TAG)
        self.check(path == str(root / TAG) and client == {"mine": {"epoch": 3}}, f"{what}: {path}, {client}")
        self.check(engine.global_steps == 2, f"{what}: step {engine.global_steps}")
        found = train(engine, 2, 4)
        exact = saving.stage == loading.stage
        near = found == losses if exact else torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=2e-2)
        self.check(near, f"{what}: losses {found}, and without a stop {losses}")
        plug.detach()
        engine.destroy()
        if exact:
            self.export(saving, root, losses)

    def export(self, kind: Kind, root: Path, losses: list[float]) -> None:
        """DeepSpeed itself loads what is exported."""
        out = self.folder / f"{kind.name}-export"
        if dist.get_rank() == 0:
            for stage, ranks in ((1, 3), (3, 2)):
                export_deepspeed(root, out, stage=stage, ranks=ranks)
                self.equal(root.with_name(f"{kind.name}-stock") / TAG, out / TAG, f"{kind.name} at stage {stage}")
                shutil.rmtree(out)
            export_deepspeed(root, out, stage=kind.stage, ranks=dist.get_world_size())
        dist.barrier()
        engine = make(kind, seed=5)
        _, client = engine.load_checkpoint(str(out))
        self.check(
            client.get("mine") == {"epoch": 3} and engine.global_steps == 2, f"{kind.name}: exported: {client.get('mine')}"
        )
        found = train(engine, 2, 4)
        self.check(found == losses, f"{kind.name}: exported: losses {found}, and without a stop {losses}")
        engine.destroy()

    def equal(self, one: Path, other: Path, what: str) -> None:
        """Both hold the same masters and the same states of the optimizer."""
        wanted, found = (map_files(open_files(str(place))).trained for place in (one, other))
        self.check(list(wanted) == list(found), f"{what}: {list(found)}")
        for name, parameter in wanted.items():
            for key, tensor in {**parameter.states, "master": parameter.master}.items():
                got = {**found[name].states, "master": found[name].master}[key]
                self.check(torch.equal(tensor.contiguous(), got.contiguous()), f"{what}: {key} of {name}")

    def save(self, kind: Kind, stock: Path, boxes: Path) -> list[float]:
        """With DeepSpeed itself, and in boxes; the losses that follow."""
        engine = make(kind)
        train(engine, 0, 2)
        engine.save_checkpoint(str(stock), client_state={"mine": {"epoch": 3}})
        plug = ours.attach(engine, layout="checkpointd")
        engine.save_checkpoint(str(boxes))
        plug.wait()
        plug.detach()
        losses = train(engine, 2, 4)
        engine.destroy()
        return losses

    def compare(self, kind: Kind, stock: Path, boxes: Path) -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            wanted = theirs.get_fp32_state_dict_from_zero_checkpoint(str(stock))
            without = theirs.get_fp32_state_dict_from_zero_checkpoint(str(stock), exclude_frozen_parameters=True)
            theirs.convert_zero_checkpoint_to_fp32_state_dict(str(stock), str(stock / "theirs"), max_shard_size=None)
        self.same(wanted, ours.get_fp32_state_dict_from_zero_checkpoint(stock), f"{kind.name}: weights")
        self.same(without, ours.get_fp32_state_dict_from_zero_checkpoint(stock, TAG, True), f"{kind.name}: without the frozen")
        ours.convert_zero_checkpoint_to_fp32_state_dict(stock, stock / "ours", max_shard_size=None)
        files = [torch.load(stock / who / "pytorch_model.bin", weights_only=True) for who in ("theirs", "ours")]
        self.same(files[0], files[1], f"{kind.name}: files")
        stored = ours.get_fp32_state_dict_from_zero_checkpoint(boxes)
        if kind.stage == 1:  # DeepSpeed leaves out what is frozen there
            stored = {name: value for name, value in stored.items() if name in wanted}
        self.same(wanted, stored, f"{kind.name}: weights of layout='checkpointd'")

    def same(self, wanted: dict[str, Any], found: dict[str, Any], what: str) -> None:
        self.check(list(wanted) == list(found), f"{what}: {list(found)}, and DeepSpeed's are {list(wanted)}")
        for name in wanted.keys() & found.keys():
            one, other = wanted[name], found[name]
            self.check(one.dtype == other.dtype and torch.equal(one, other), f"{what}: {name} is {other}, not {one}")
            ties = [{n for n in values if values[n].data_ptr() == values[name].data_ptr()} for values in (wanted, found)]
            self.check(ties[0] == ties[1], f"{what}: {name} is tied to {ties[1]}, and with DeepSpeed {ties[0]}")


if __name__ == "__main__":
    rank = Rank(Path(sys.argv[1]))
    rank.run()
    rank.finish()
