"""The state that all connections of a daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.config import ServeConfig
from checkpointd.daemon import hub as hub_module
from checkpointd.daemon.hub import Hub


def test_the_rank_that_has_been_gone_for_longest_is_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "RANKS_KEPT", 2)
    hub, root = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),))), str(tmp_path / "job")
    first, second = (hub.rank(root, rank, world_size=3, pid=7) for rank in range(2))
    first.gone_at, second.gone_at = 200.0, 100.0
    hub.rank(root, 2, world_size=3, pid=7)
    assert [record.rank for record in hub.ranks_at(root)] == [0, 2]
