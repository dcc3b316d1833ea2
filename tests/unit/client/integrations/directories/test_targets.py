"""Where the root of a directory is."""

from __future__ import annotations

import pytest

from checkpointd_client.integrations.directories.targets import own_root


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        ("/runs/a", "/runs/a"),
        ("/runs/a/checkpoint-30", "/runs/a"),
        ("/runs/a/checkpoints/checkpoint_3", "/runs/a"),
        ("/mnt/checkpoints/checkpoint-3", "/mnt/checkpoints"),
        ("/runs/a/checkpoints", "/runs/a/checkpoints"),
        ("/runs/a/checkpoint-best", "/runs/a/checkpoint-best"),
    ],
)
def test_whose_store_is_where(folder: str, root: str) -> None:
    assert own_root(folder) == root
