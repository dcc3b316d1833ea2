"""Files of checkpoints on file systems that clone files: changing a shown file never changes the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd.cli import run
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.faults import mounts

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("mounts")]


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_program_that_writes_over_a_clone_damages_nothing(kind: str, tmp_path: Path) -> None:
    with mounts.cloning(kind, tmp_path) as folder:
        root = folder / ".checkpointd"
        with Checkpointer(root) as ckpt:
            core_of(ckpt).save_files(1, {"model.pt": {"weight": torch.arange(100_000.0)}}).wait(60)
            shown = folder / "global_step1" / "model.pt"
            (stored,) = root.glob("global_step1/*/*.file")
            assert shown.read_bytes() == stored.read_bytes()
            assert shown.stat().st_ino != stored.stat().st_ino, f"{kind} shares blocks between files"
            (found,) = core_of(ckpt).checkpoints()
            assert core_of(ckpt).damage(found, [0]) == ()

            torch.save({"weight": torch.zeros(3)}, shown)
            assert run(["verify", str(root)]) == 0, "what was committed is whole"
            (said,) = core_of(ckpt).damage(found, [0])
            assert "model.pt in global_step1 changed" in said
            shown.unlink()  # as that message says
            assert core_of(ckpt).damage(found, [0]) == ()
            assert torch.equal(torch.load(shown)["weight"], torch.arange(100_000.0))
