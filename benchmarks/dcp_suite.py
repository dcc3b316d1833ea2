"""PyTorch's own DCP tests with their storage swapped: each file as it is, and with a checkpointd root behind it.

    python benchmarks/dcp_suite.py [--on-cpu] /path/to/pytorch [FILE ...]

The tree is a checkout of PyTorch, which is only read, and whose tests need `expecttest`. FILE names files below its
test/distributed/checkpoint, all by default.
FileSystemWriter and FileSystemReader are replaced in every process of a test before it imports them, and where DCP takes them
itself for a `checkpoint_id`; the path that a test gives becomes a root, and the checkpoint there has the tag `checkpoint`. Of
their options, `overwrite` is passed on. With --on-cpu both runs are of a copy of the file, in which GPUs are neither asked for
nor used: gloo and four processes on the CPU.
Prints a line per file and storage: passed, failed and skipped; and the tests in which the two differ.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAP = """
import sys
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from torch.distributed.checkpoint import filesystem
from checkpointd_client.integrations.dcp import CheckpointdReader, CheckpointdWriter

class Placed:
    def reset(self, checkpoint_id=None):
        super().reset()
        self._root = self._root if checkpoint_id is None else str(checkpoint_id)
    @property
    def checkpoint_id(self):
        return self._root
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return "://" not in str(checkpoint_id)

class FileSystemWriter(Placed, CheckpointdWriter):
    def __init__(self, path, *_, overwrite=True, **__):
        super().__init__(path, "checkpoint", overwrite=overwrite)

class FileSystemReader(Placed, CheckpointdReader):
    def __init__(self, path, *_, **__):
        super().__init__(path, "checkpoint", weights_only=False)

swapped = {filesystem.FileSystemWriter: FileSystemWriter, filesystem.FileSystemReader: FileSystemReader}
for name, module in list(sys.modules.items()):
    if name.startswith("torch.distributed.checkpoint"):
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in swapped:
                setattr(module, attribute, swapped[value])
"""
ON_CPU = (
    (r"(?m)^ *@skip_if_lt_x_gpu\(\d+\)\n", ""),
    (r"(?m)^ *@(requires_nccl|requires_accelerator_dist_backend)\(.*\)\n", ""),
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"device=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
    (r"\.cuda\((?:[^()]|\([^()]*\))*\)", ""),
    (r"""(["'])cuda\1""", '"cpu"'),
    (r"torch\.(cuda|accelerator)\.device_count\(\)", "4"),
)
PLUGIN = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_fsdp import FSDPTest

def fork(self):
    self._start_processes(torch.multiprocessing.get_context("fork").Process)

def init(self, *arguments, init=FSDP.__init__, **options):
    init(self, *arguments, **{**options, "device_id": torch.device("cpu")})

def run(cls, rank, test, file, pipe, **_):
    self = cls(test)
    self.rank, self.file_name = rank, file
    dist.init_process_group("gloo", init_method=self.init_method, world_size=self.world_size, rank=rank)
    self.run_test(test, pipe)
    dist.barrier()
    dist.destroy_process_group()

if os.environ.get("DCP_SUITE_FORK"):
    MultiProcessTestCase._spawn_processes = fork
if os.environ.get("DCP_SUITE_ON_CPU"):
    FSDP.__init__ = init
    FSDPTest._run = classmethod(run)
"""
WORD = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
Outcome = dict[str, str]
"""What became of each test of a file."""


def run(files: Sequence[Path], paths: Sequence[str], options: Sequence[str], seconds: float) -> tuple[dict[str, Outcome], str]:
    """The outcome of each of `files`, by its name, and the whole output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    top = os.path.commonpath([file.parent for file in files])
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--rootdir", top, *options]
    with tempfile.TemporaryFile("w+") as into:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, *map(str, files)], env=environment, cwd=top, stdout=into, stderr=into, check=False, timeout=seconds
            )
        into.seek(0)
        output = into.read()
    outcomes: dict[str, Outcome] = {file.name: {} for file in files}
    for name, test, word in re.findall(r"(?m)^(?:\S*/)?([^/\s]+?)::(\S+).*? (PASSED|FAILED|ERROR|SKIPPED)\b", output):
        outcomes.setdefault(name, {})[test] = WORD[word]
    for name, test in re.findall(r"(?m)^FAILED (?:\S*/)?([^/\s]+?)::(\S+)", output):
        outcomes.setdefault(name, {})[test] = "failed"  # a process that crashed has torn the line apart
    return outcomes, output


def told(outcome: Outcome) -> str:
    counts = [(sum(1 for word in outcome.values() if word == each), each) for each in ("passed", "failed", "skipped")]
    return f"{len(outcome)} ended: " + ", ".join(f"{n} {word}" for n, word in counts if n)


def on_cpu(file: Path, where: Path) -> Path:
    """A copy of `file` below `where` that needs no GPU."""
    text = file.read_text()
    for pattern, instead in ON_CPU:
        text = re.sub(pattern, instead, text)
    copy = where / file.name
    copy.write_text(text)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a checkout of PyTorch")
    parser.add_argument("files", nargs="*", help="files below test/distributed/checkpoint")
    parser.add_argument("--on-cpu", action="store_true", help="run tests for several GPUs on the CPU")
    parser.add_argument("--fork", action="store_true", help="fork the processes of a test rather than start them: much faster")
    parser.add_argument("--only", choices=("stock", "checkpointd"), help="one storage alone")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the most that all files may take with one storage")
    parser.add_argument("--select", default="", help="tests, as pytest's -k has them")
    parser.add_argument("--log", type=Path, help="where the output of all tests goes")
    arguments = parser.parse_args()
    folder = arguments.tree / "test" / "distributed" / "checkpoint"
    files = [folder / name for name in arguments.files] or sorted(folder.rglob("test_*.py"))
    options = ["-p", "dcp_suite_plugin", *["-k", arguments.select] * bool(arguments.select)]
    os.environ["DCP_SUITE_FORK"], os.environ["DCP_SUITE_ON_CPU"] = "x" * arguments.fork, "x" * arguments.on_cpu
    with tempfile.TemporaryDirectory() as temporary:
        plain, swap, copies = (Path(temporary) / name for name in ("plain", "swap", "copies"))
        for path in (plain, swap, copies):
            path.mkdir()
        (plain / "dcp_suite_plugin.py").write_text(PLUGIN)
        (swap / "sitecustomize.py").write_text(SWAP)
        sources = [on_cpu(file, copies) if arguments.on_cpu else file for file in files]
        all_paths = {"stock": [plain], "checkpointd": [swap, plain, ROOT, ROOT / "client"]}
        outcomes = {}
        for name in [arguments.only] if arguments.only else all_paths:
            outcomes[name], output = run(sources, [str(path) for path in all_paths[name]], options, arguments.seconds)
            for file, outcome in outcomes[name].items():
                sys.stdout.write(f"{file}  {name}: {told(outcome)}\n")
            sys.stdout.flush()
            if arguments.log is not None:
                with arguments.log.open("a") as log:
                    log.write(f"=== {name}\n{output}\n")
        if len(outcomes) == len(all_paths):
            differences(outcomes["stock"], outcomes["checkpointd"])


def differences(stock: dict[str, Outcome], swapped: dict[str, Outcome]) -> None:
    for file in stock:
        for test in sorted(stock[file].keys() | swapped[file].keys()):
            one, other = stock[file].get(test, "did not end"), swapped[file].get(test, "did not end")
            if one != other:
                sys.stdout.write(f"{file} {test}: {one} with stock, {other} with checkpointd\n")


if __name__ == "__main__":
    main()
