"""Makes CheckpointdIO the CheckpointIO that Lightning's strategies use by default, to run Lightning's own tests with it:
`pytest -p tests.integrations.lightning.as_default <their tests>`. With CHECKPOINTD_ROOT, the root lies in that directory.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import strategy

from checkpointd_client.integrations.lightning import CheckpointdIO


class Default(CheckpointdIO):
    """CheckpointdIO with the root that the tests are run with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(os.environ.get("CHECKPOINTD_ROOT"), **options)


strategy.TorchCheckpointIO = Default
