"""PyTorch's own DCP tests with their storage swapped: each file as it is, and with a checkpointd root behind it.

    python benchmarks/dcp_suite.py /path/to/pytorch [FILE ...]

The tree is a checkout of PyTorch, which is only read, and whose tests need `expecttest`. FILE names files below its
test/distributed/checkpoint, all by default.
FileSystemWriter and FileSystemReader are replaced in every process of a test before it imports them; the path that a test
gives becomes a root, and the checkpoint there has the tag `checkpoint`. Prints a line per file and
storage: passed, failed and skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from checkpointd_client.integrations.dcp import CheckpointdReader, CheckpointdWriter

class FileSystemWriter(CheckpointdWriter):
    def __init__(self, path, *_, **__):
        super().__init__(path, "checkpoint")
    def reset(self, checkpoint_id=None):
        super().reset()
        self._root = self._root if checkpoint_id is None else str(checkpoint_id)
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

class FileSystemReader(CheckpointdReader):
    def __init__(self, path, *_, **__):
        super().__init__(path, "checkpoint", weights_only=False)
    def reset(self, checkpoint_id=None):
        super().reset()
        self._root = self._root if checkpoint_id is None else str(checkpoint_id)
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

for module in (dcp, filesystem):
    module.FileSystemWriter, module.FileSystemReader = FileSystemWriter, FileSystemReader
"""
COUNTS = ("passed", "failed", "skipped", "error")


def run(file: Path, paths: Sequence[str], seconds: float) -> tuple[str, str]:
    """What became of the tests of `file`, in pytest's words, and its whole output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(file.parent), str(file)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=file.parent, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s", ""
    lines = done.stdout.strip().splitlines() or [""]
    found = {word: number for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    return ", ".join(f"{found[word]} {word}" for word in COUNTS if word in found) or lines[-1], done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a checkout of PyTorch")
    parser.add_argument("files", nargs="*", help="files below test/distributed/checkpoint")
    parser.add_argument("--seconds", type=float, default=900.0, help="the most that one file may take")
    parser.add_argument("--log", type=Path, help="where the output of all tests goes")
    arguments = parser.parse_args()
    folder = arguments.tree / "test" / "distributed" / "checkpoint"
    files = [folder / name for name in arguments.files] or sorted(folder.rglob("test_*.py"))
    ours = [str(ROOT), str(ROOT / "client")]
    with tempfile.TemporaryDirectory() as swap:
        (Path(swap) / "sitecustomize.py").write_text(SWAP)
        for file in files:
            for name, paths in (("stock", []), ("checkpointd", [swap, *ours])):
                counts, output = run(file, paths, arguments.seconds)
                sys.stdout.write(f"{file.relative_to(folder)}  {name}: {counts}\n")
                sys.stdout.flush()
                if arguments.log is not None:
                    with arguments.log.open("a") as log:
                        log.write(f"=== {file.name} {name}\n{output}\n")


if __name__ == "__main__":
    main()
