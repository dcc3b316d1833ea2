"""Which calls close the roots of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.config import Ranks

pytest.importorskip("lightning", reason="needs lightning: make test-all installs it")

from checkpointd_client.integrations.lightning.saves import TrainingSaves


@pytest.mark.parametrize("ranks", [None, Ranks()])
def test_a_removal_leaves_roots_open_that_all_ranks_have_opened(ranks: Ranks | None, tmp_path: Path) -> None:
    saves = TrainingSaves(tmp_path, {}, ranks)
    saves.roots.core(str(tmp_path))
    saves.remove(str(tmp_path / "gone.ckpt"))
    assert saves.roots.is_open(str(tmp_path)) is (ranks is None)
    saves.close()
    assert not saves.roots.is_open(str(tmp_path))
