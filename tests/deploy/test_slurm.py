"""The batch script, run for real by bash: steps are local processes, and Slurm's commands stand-ins that write down calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.serve_arguments import serve_parameters

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "train.sbatch"

SRUN = """
import itertools, os, sys
options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options):]
(name,) = [word.removeprefix("--job-name=") for word in options if word.startswith("--job-name=")]
step = os.fork()
if not step:
    os.setsid()
    with open(f"{name}.new", "w") as note:
        note.write(str(os.getpid()))
    os.rename(f"{name}.new", f"{name}.step")
    os.execvp(command[0], command)
_, status = os.waitpid(step, 0)
os.rename(f"{name}.step", f"{name}.ended")
code = os.waitstatus_to_exitcode(status)
sys.exit(code if code >= 0 else 128 - code)
"""
# As Slurm does it: the signal goes to every process of the step.
SCANCEL = """
import os, sys
signal, step = sys.argv[1:]
assert signal == "--signal=TERM"
(name,) = [name for name in ("directory", "sidecar", "ready", "port", "train") if step == f"7.{name}"]
print(f"scancel {name}", file=open("calls", "a"), flush=True)
os.killpg(int(open(f"{name}.step").read()), 15)
"""
SQUEUE = """
import glob
for path in glob.glob("*.step"):
    print(f"7.{path[:-5]} {path[:-5]}")
"""
SCONTROL = """
import sys, glob
if sys.argv[1:3] == ["show", "hostnames"]:
    print("node-1")
else:
    print(*sys.argv, "with", *sorted(glob.glob("*.step")), "running", file=open("calls", "a"), flush=True)
"""
CHECKPOINTD = """
import os, signal, socket, sys
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
listening = socket.socket(socket.AF_UNIX)
if os.environ["SIDECAR"] == "broken":
    sys.exit(2)
if sys.argv[1] == "status":
    listening.connect(words["--socket"])
    sys.exit()
mode = oct(os.stat(os.path.dirname(words["--socket"])).st_mode & 0o777)
print("serve", words["--root"], mode, file=open("calls", "a"), flush=True)
print(words["--socket"], words["--http"], file=open("places", "a"), flush=True)
keys = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("AWS_"))
print(*sys.argv[sys.argv.index("--http") + 2:], *keys, sep="\\n", file=open("spool", "w"), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("sidecar leaves", file=open("calls", "a")), sys.exit()))
listening.bind(words["--socket"])
listening.listen()
while True:
    signal.pause()
"""
TORCHRUN = """
import os, signal, socket, sys
if os.environ["SIDECAR"] == "whole":
    socket.socket(socket.AF_UNIX).connect(sys.argv[sys.argv.index("--sidecar") + 1])
print("torchrun", *sys.argv[sys.argv.index("train.py"):-2], file=open("calls", "a"), flush=True)
print(*sys.argv, file=open("trained", "a"), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("last save", file=open("calls", "a")), sys.exit(1)))
code = os.environ["CODE"]
print("training", flush=True)
sys.exit(int(code)) if code else signal.pause()
"""


@dataclass
class Run:
    """A running script: what the stand-ins noted down lies in `folder`."""

    process: subprocess.Popen[str]
    folder: Path
    output: str = ""

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def places(self) -> tuple[str, str]:
        """The sidecar's socket, and where it serves its metrics."""
        socket, http = (self.folder / "places").read_text().split()
        return socket, http

    @property
    def endpoint(self) -> str:
        """Where the ranks meet."""
        [found] = re.findall(r"--rdzv-endpoint=(\S+)", (self.folder / "trained").read_text())
        return str(found)

    def end(self) -> int:
        self.output += self.process.communicate()[0]
        return self.process.returncode


@contextmanager
def running(
    folder: Path, code: str = "", sidecar: str = "whole", mkdir: str = 'exec /bin/mkdir "$@"', **others: str
) -> Iterator[Run]:
    """Start the script as Slurm's batch step would; `code` is what training ends with, "" for training that goes on."""
    binaries = folder / "bin"
    binaries.mkdir()
    stand_ins = {"srun": SRUN, "scancel": SCANCEL, "squeue": SQUEUE, "scontrol": SCONTROL}
    for name, text in {**stand_ins, "checkpointd": CHECKPOINTD, "torchrun": TORCHRUN}.items():
        (binaries / name).write_text(f"#!{sys.executable} -S\n{text}")
        (binaries / name).chmod(0o755)
    (binaries / "python3").symlink_to(sys.executable)
    patience_s = 60 if sidecar == "whole" else 1
    # The root's directory is made with -p, by the script itself.
    (binaries / "mkdir").write_text(f'#!/bin/sh\n[ "$1" != -p ] || exec /bin/mkdir "$@"\n{mkdir}\n')
    (binaries / "mkdir").chmod(0o755)
    (binaries / "timeout").write_text(f'#!/bin/sh\nshift\nexec /usr/bin/timeout {patience_s} "$@"\n')
    (binaries / "timeout").chmod(0o755)
    environment = {
        "PATH": f"{binaries}:/usr/bin:/bin",
        "ROOT": "runs/run-1",
        "USER": "alice",
        "CODE": code,
        "SIDECAR": sidecar,
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node-1",
        **others,
    }
    command = [shutil.which("bash") or "bash", str(SCRIPT), "train.py", "--lr", "3e-4"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield Run(process, folder)
    finally:
        end_all(process, folder)


def end_all(process: subprocess.Popen[str], folder: Path) -> None:
    """Whatever went wrong, nothing is left running."""
    for group in [process.pid, *(int(path.read_text()) for path in folder.glob("*.step"))]:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def test_bash_takes_it() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run([tool, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_training_that_ends_well(tmp_path: Path) -> None:
    """The sidecar is there before training, in a directory that only its user can enter, and leaves after it."""
    with running(tmp_path, code="0") as run:
        assert run.end() == 0, run.output
        assert run.calls == [
            "serve runs/run-1 0o700",
            "torchrun train.py --lr 3e-4 --root runs/run-1",
            "scancel sidecar",
            "sidecar leaves",
        ]
    assert (tmp_path / "runs/run-1").is_dir(), "a daemon refuses to serve what is not there"
    assert not Path(run.places[0]).parent.exists(), "tidied up"


def test_metrics_are_beside_the_socket_and_the_job_says_where(tmp_path: Path) -> None:
    with running(tmp_path, code="0") as run:
        assert run.end() == 0, run.output
        socket_path, http = run.places
    assert http == str(Path(socket_path).with_name("http"))
    assert f"metrics and page at {http}" in run.output


def test_two_jobs_on_a_node_get_in_each_others_way_nowhere(tmp_path: Path) -> None:
    """Of one user, and started at once: sockets, metrics and the port at which ranks meet are each job's own."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "one") as one, running(tmp_path / "two", code="0") as two:
        assert two.end() == 0, two.output
        assert one.process.stdout is not None
        assert "training\n" in iter(one.process.stdout.readline, "")
        assert set(one.places).isdisjoint(two.places)
        assert one.endpoint != two.endpoint
        host, port = one.endpoint.split(":")
        assert host == "node-1"
        with socket.create_server(("", int(port))):
            pass  # it was free
        os.kill(one.process.pid, signal.SIGTERM)
        one.end()


def test_the_job_stops_where_the_directory_cannot_be_made(tmp_path: Path) -> None:
    """As where somebody has taken the name: no daemon and no training is started, and no trainer finds what lies there."""
    with running(tmp_path, code="0", mkdir="exit 1") as run:
        assert run.end() == 1
        assert "cannot be made on every node: the job stops" in run.output
    assert not (tmp_path / "calls").exists()


def test_the_directory_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, code="0") as run:
            run.end()
            names.add(Path(run.places[0]).parent)
    assert len(names) == 2, "of one job id and one count of restarts"


BUCKET = "s3://my-bucket/alice/run-1?region=eu-west-1"


def test_a_root_in_a_bucket_with_a_spool(tmp_path: Path) -> None:
    """Daemon and trainer get the URL; the spool is this job's own; the keys come from a file that nobody else can read."""
    (tmp_path / "keys").write_text("AWS_ACCESS_KEY_ID=id\nAWS_SECRET_ACCESS_KEY='a secret'\n")
    (tmp_path / "keys").chmod(0o600)
    with running(tmp_path, code="0", ROOT=BUCKET, SPOOL="/nvme/alice", CREDENTIALS=str(tmp_path / "keys")) as run:
        assert run.end() == 0, run.output
        assert run.calls[:2] == [f"serve {BUCKET} 0o700", f"torchrun train.py --lr 3e-4 --root {BUCKET}"]
    *spool, key, secret = (tmp_path / "spool").read_text().splitlines()
    assert spool[:2] == ["--spool", f"/nvme/alice/job-test-{os.getpid()}"]
    assert serve_parameters([*spool, "--root", BUCKET])["spool_finish"] is True
    assert serve_parameters([*spool, "--root", BUCKET])["spool_retain"] is False
    assert [key, secret] == ["AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=a secret"]
    assert "a secret" not in run.output
    assert not (tmp_path / "s3:").exists(), "no directory is made for a bucket"


@pytest.mark.parametrize("mode", [0o640, 0o604, None])
def test_the_job_stops_where_others_may_read_the_keys(tmp_path: Path, mode: int | None) -> None:
    if mode is not None:
        (tmp_path / "keys").touch()
        (tmp_path / "keys").chmod(mode)
    with running(tmp_path, code="0", ROOT=BUCKET, CREDENTIALS=str(tmp_path / "keys")) as run:
        assert run.end() == 1
        assert f"chmod 600 {tmp_path / 'keys'}" in run.output
    assert not (tmp_path / "calls").exists()


def test_without_a_spool_the_daemon_hears_of_none(tmp_path: Path) -> None:
    with running(tmp_path, code="0") as run:
        assert run.end() == 0, run.output
    assert (tmp_path / "spool").read_text().split() == []


def test_training_that_fails_is_not_queued_again(tmp_path: Path) -> None:
    with running(tmp_path, code="5") as run:
        assert run.end() == 5, run.output
        assert run.calls[-1] == "sidecar leaves"


def test_training_goes_on_without_a_sidecar_that_does_not_start(tmp_path: Path) -> None:
    with running(tmp_path, code="0", sidecar="broken") as run:
        assert run.end() == 0, run.output
        assert run.calls == ["torchrun train.py --lr 3e-4 --root runs/run-1"]
        assert "the ranks of its node persist their saves themselves" in run.output


def test_a_job_that_is_asked_to_stop_is_queued_again(tmp_path: Path) -> None:
    """The batch shell alone is told. Training makes its last save while the sidecar is there; both end before it is queued."""
    with running(tmp_path) as run:
        assert run.process.stdout is not None
        assert "training\n" in iter(run.process.stdout.readline, "")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 1, run.output
        assert run.calls[2:] == [
            "scancel train",
            "last save",
            "scancel sidecar",
            "sidecar leaves",
            f"{tmp_path}/bin/scontrol requeue test-{os.getpid()} with running",
        ]


def test_slurm_tells_the_script_alone() -> None:
    """A sidecar that got the signal too would take no last save."""
    options = dict(line.split("--", 1)[1].partition("=")[::2] for line in SCRIPT.read_text().splitlines() if "#SBATCH" in line)
    target, _, seconds = options["signal"].partition("@")
    assert target == "B:TERM"
    assert "requeue" in options
    times = [int(word) for word in ("120", "120") if word in SCRIPT.read_text()]
    assert int(seconds) >= sum(times) + 30, "the last save, the sidecar's grace, and some room"
