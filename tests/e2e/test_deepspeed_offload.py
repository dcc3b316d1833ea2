"""SuperOffload and ZenFlow: DeepSpeed's own optimizers with their processes, on CPUs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED, run_ranks
from tests.e2e.rank_cases import show_cases

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(3000),
    pytest.mark.xdist_group("deepspeed_offload"),
    NEEDS_DEEPSPEED,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, for DeepSpeed's CPUAdam"),
]

HERE = Path(__file__).parent
LAYOUTS = ("deepspeed", "checkpointd")
PHASES = ("backward", "step", "process", "snapshot", "writing")
SMALL = [
    "--layers",
    "1",
    "--length",
    "16",
    "--vocabulary",
    "400",
    "--text_bytes",
    "100000",
    "--save_every",
    "5",
    "--steps",
    "8",
]


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's CPUAdam takes minutes to compile."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(Path(tempfile.gettempdir(), f"torch_extensions-{os.getuid()}")))


def test_engines_save_while_another_process_steps(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Both layouts continue as DeepSpeed's own files do; and moments at which there is no single state."""
    done = run_ranks(HERE / "deepspeed_offload_ranks.py", tmp_path, limit_s=2900)
    show_cases(subtests, tmp_path, ranks=2, output=f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def job(folder: Path, kind: str, layout: str, phase: str) -> str:
    """What a job printed. It goes to a file: the optimizer's process of a job that is killed keeps a pipe open."""
    environment = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "deepspeed_offload_job.py", folder, kind, layout, phase]
    with (folder / f"{layout}-{phase}.txt").open("w+") as output:
        subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=280, check=False)
        output.seek(0)
        return output.read()


def losses(said: str) -> str:
    found = re.search(r"^losses (.*)$", said, re.MULTILINE)
    assert found, said
    return found[1]


@pytest.mark.parametrize(("kind", "layout"), [("superoffload", "deepspeed"), ("zenflow", "checkpointd")])
def test_a_job_that_is_killed_at_any_moment_resumes_as_deepspeed_does(tmp_path: Path, kind: str, layout: str) -> None:
    for which in ("stock", layout):
        job(tmp_path, kind, which, "save")
    expected = losses(job(tmp_path, kind, "stock", "resume"))
    try:
        for phase in PHASES:
            said = job(tmp_path, kind, layout, phase)
            assert re.search("loaded .*good", said), f"{phase}: {said}"
            assert "survived" not in said, phase
        assert losses(job(tmp_path, kind, layout, "resume")) == expected
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            with suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():  # and not another process of this number
                    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_example_fine_tunes_with_superoffload_and_resumes(tmp_path: Path, layout: str) -> None:
    script, arguments = HERE / "deepspeed_offload_example.py", [*SMALL, "--offload", "superoffload", "--layout", layout]
    printed = []
    for how in ("--save_checkpoint", "--resume"):
        done = run_ranks(script, "--output_dir", tmp_path, *arguments, how, ranks=1)
        assert done.returncode == 0, done.stderr[-6000:]
        printed.append(dict(re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)))
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step5"
    assert (tmp_path / "tokenizer").is_dir()
    assert list(printed[1]) == ["5", "6", "7"]
    assert printed[1]["5"] == printed[0]["5"], "the step after the load has the saved weights"
