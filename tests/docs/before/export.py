"""What EXPORT takes for granted: a root with a checkpoint."""

from pathlib import Path

from checkpointd_client import Checkpointer
from tests.docs.before.training import state

Path("/mnt/models").mkdir()
WORDS = {"ROOT": "/mnt/ckpts/run1"}

with Checkpointer(WORDS["ROOT"]) as ckpt:
    ckpt.save(100, state)

Path("base-model").mkdir()
Path("base-model/config.json").write_text("{}")
Path("/mnt/base-model").mkdir()
