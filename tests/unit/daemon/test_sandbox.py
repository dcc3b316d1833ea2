"""The daemon's sandbox: tried in processes of their own, since nothing gives back what a process has taken from itself."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.config import ServeConfig
from checkpointd.daemon import sandbox
from checkpointd.daemon import served_roots as roots_module
from checkpointd.daemon.sandbox import landlock_version, remount_safe
from checkpointd.daemon.served_roots import ServedRoots
from checkpointd.errors import SidecarError, UsageError
from checkpointd_client import Checkpointer

TRIED = """
import ctypes, errno, os, sys, threading
from checkpointd.daemon import sandbox
LIBC = ctypes.CDLL(None, use_errno=True)
def tried(what, call):
    try:
        call()
        print(what, "done")
    except OSError as error:
        print(what, errno.errorcode[error.errno])
def raw(*arguments):
    if LIBC.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
"""
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
needs_seccomp = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="seccomp is not known for it")


def said(program: str, *arguments: object) -> list[str]:
    """What a process with the sandbox prints."""
    done = subprocess.run(
        [sys.executable, "-c", TRIED + program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_seccomp
def test_no_program_is_started_by_any_thread() -> None:
    """Of a thread that ran before, too. What the daemon does with the ids of its threads stays allowed."""
    program = """
go, ran = threading.Event(), []
older = threading.Thread(target=lambda: (go.wait(), tried("older thread", lambda: os.execv("/bin/true", ["true"]))))
older.start()
print(sandbox.forbid_system_calls() or "holds")
go.set()
older.join()
tried("exec", lambda: os.execv("/bin/true", ["true"]))
column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
for name in sorted(sandbox.FORBIDDEN):
    tried(name, lambda: raw(sandbox.FORBIDDEN[name][column], 0, 0, 0, 0, 0, 0))
LIBC.setfsuid(os.geteuid())
os.close(os.memfd_create("x"))
tried("fork", lambda: os.waitpid(os.fork() or os._exit(0), 0))
"""
    lines = said(program)
    assert lines[:3] == ["holds", "older thread EPERM", "exec EPERM"]
    assert lines[3:-1] == [f"{name} EPERM" for name in sorted(sandbox.FORBIDDEN)]
    assert lines[-1] == "fork done"


@needs_landlock
def test_files_outside_are_neither_read_nor_changed(tmp_path: Path) -> None:
    for name in ("root", "elsewhere"):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "empty").mkdir()
        (tmp_path / name / "file").write_text("x")
    program = """
root, elsewhere = sys.argv[1:]
print(sandbox.confine([root], list(sandbox._readable())) or "holds")
for name, at in (("root", root), ("elsewhere", elsewhere)):
    tried(f"read {name}", lambda: open(f"{at}/file").close())
    tried(f"write {name}", lambda: open(f"{at}/file", "r+").close())
    tried(f"create {name}", lambda: open(f"{at}/new", "w").close())
    tried(f"mkdir {name}", lambda: os.mkdir(f"{at}/b"))
    tried(f"rename {name}", lambda: os.rename(f"{at}/file", f"{at}/a/file"))
    tried(f"link {name}", lambda: os.symlink("a", f"{at}/c"))
    tried(f"remove {name}", lambda: os.rmdir(f"{at}/empty"))
tried("move out", lambda: os.rename(f"{root}/a", f"{elsewhere}/out"))
import tomllib, xml.dom.minidom  # what is imported late
open("/etc/passwd").close()
"""
    lines = said(program, tmp_path / "root", tmp_path / "elsewhere")
    verbs = ("read", "write", "create", "mkdir", "rename", "link", "remove")
    assert lines[0] == "holds"
    assert lines[1:8] == [f"{verb} root done" for verb in verbs]
    assert lines[8:15] == [f"{verb} elsewhere EACCES" for verb in verbs]
    assert lines[15] in ("move out EACCES", "move out EXDEV")


@needs_landlock
@pytest.mark.root
@pytest.mark.parametrize(("rule", "expected"), [("above", "done"), ("itself", "EACCES")])
def test_what_is_mounted_anew_needs_the_rule_above_it(tmp_path: Path, rule: str, expected: str) -> None:
    """Why the rule of "auto" is for the directory above a mount point, and that of "require" does not survive a mount."""
    point = tmp_path / "disks" / "one"
    point.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(point)]
    subprocess.run(mount, check=True)
    try:
        (point / "run").mkdir()
        assert remount_safe(str(point / "run")) == str(tmp_path / "disks")
        program = """
allowed, run = sys.argv[1:]
rule = sandbox.Rule.of(run, allowed)
sandbox.confine([allowed], [])
assert not rule.lost()
tried("before", lambda: open(f"{run}/x", "w").close())
print("confined", flush=True)
sys.stdin.readline()
tried("after", lambda: open(f"{run}/x", "w").close())
print("lost", rule.lost())
"""
        allowed = tmp_path / "disks" if rule == "above" else point
        command = [sys.executable, "-c", TRIED + program, str(allowed), str(point / "run")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline(), process.stdout.readline()] == ["before done\n", "confined\n"]
            subprocess.run(["umount", str(point)], check=True)
            subprocess.run(mount, check=True)
            (point / "run").mkdir()
            left, _ = process.communicate("\n")
        assert left == f"after {expected}\nlost {rule == 'itself'}\n"
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.root
def test_the_rule_lies_above_the_topmost_of_nested_mounts(tmp_path: Path) -> None:
    """All of them may be unmounted and mounted anew."""
    points = [tmp_path / "disks", tmp_path / "disks" / "one"]
    try:
        for point in points:
            point.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(point)], check=True)
        (points[-1] / "run").mkdir()
        assert remount_safe(str(points[-1] / "run")) == str(tmp_path)
    finally:
        for point in reversed(points):
            subprocess.run(["umount", str(point)], check=False)


def test_the_first_landlock_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It forbids links and renames from one directory to another, of which each save makes some."""
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 1)
    monkeypatch.setattr(sandbox, "forbid_system_calls", lambda: "")
    monkeypatch.setattr(sandbox, "_allow", lambda *_: pytest.fail("confined"))
    config = {"socket": str(tmp_path / "s"), "roots": (str(tmp_path / "root"),)}
    assert sandbox.apply(ServeConfig(**config, sandbox="auto")) == []  # type: ignore[arg-type]
    assert "the sandbox is incomplete: Landlock 1 forbids links between directories; Linux 5.19 has 2" in caplog.text
    with pytest.raises(UsageError, match="Landlock 1 forbids links between directories"):
        sandbox.apply(ServeConfig(**config, sandbox="require"))  # type: ignore[arg-type]


def test_a_root_that_hangs_does_not_hold_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are served, and the log names it. A rule that cannot be known leaves files as they are."""
    real_path, going_on = os.path.realpath, threading.Event()
    monkeypatch.setattr(os.path, "realpath", lambda path, **_: going_on.wait() and "" if "hangs" in path else real_path(path))
    monkeypatch.setattr(roots_module, "ANSWER_S", 0.05)
    monkeypatch.setattr(sandbox, "forbid_system_calls", lambda: "")
    monkeypatch.setattr(sandbox, "confine", lambda *_: pytest.fail("confined"))
    try:
        roots = (str(tmp_path / "hangs"), str(tmp_path))
        assert sandbox.apply(ServeConfig(socket=str(tmp_path / "s"), roots=roots, sandbox="auto")) == []
        assert f"files are not confined, since {tmp_path}/hangs does not answer" in caplog.text
        assert ServedRoots(roots).check(f"{tmp_path}/job") == f"{tmp_path}/job"
        assert f"the file system of the root {tmp_path}/hangs has not answered" in caplog.text
    finally:
        going_on.set()


def test_the_directory_of_python_m_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/modules"])
    assert str(tmp_path) not in list(sandbox._readable())
    assert "/modules" in list(sandbox._readable())


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    monkeypatch.setattr(sandbox, "forbid_system_calls", lambda: "seccomp: Invalid argument")
    config = {"socket": str(tmp_path / "s"), "roots": (str(tmp_path / "root"),)}
    sandbox.apply(ServeConfig(**config, sandbox="auto"))  # type: ignore[arg-type]
    assert "the sandbox is incomplete: this kernel has no Landlock" in caplog.text
    assert "the sandbox is incomplete: seccomp: Invalid argument" in caplog.text
    with pytest.raises(UsageError, match=r"this kernel has no Landlock, .*; seccomp: Invalid argument"):
        sandbox.apply(ServeConfig(**config, sandbox="require"))  # type: ignore[arg-type]


def test_a_root_that_is_mounted_directly_below_the_top_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule that outlives a mount there would be one for everything."""
    monkeypatch.setattr(sandbox, "remount_safe", lambda _: "/")
    monkeypatch.setattr(sandbox, "confine", lambda *_: pytest.fail("confined"))
    monkeypatch.setattr(sandbox, "forbid_system_calls", lambda: "")
    sandbox.apply(ServeConfig(socket=str(tmp_path / "s"), roots=("/scratch/run",), sandbox="auto"))
    assert "files are not confined, since /scratch/run could not be mounted again" in caplog.text


def start(tmp_path: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """A daemon for tmp_path/a/roots at tmp_path/run/socket that is ready."""
    roots = tmp_path / "a" / "roots"
    roots.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "checkpointd", "serve", "--socket", str(tmp_path / "run" / "socket"), "--root", str(roots)]
    process = subprocess.Popen(
        [*command, "--uid", str(os.geteuid()), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    if not process.stdout.readline().startswith("ready at"):
        pytest.fail(process.communicate()[1])
    return process


def make_anew(directory: Path) -> None:
    """Put another directory with the same content in its place."""
    before = directory.rename(directory.with_name("elsewhere"))
    directory.mkdir()
    for entry in before.iterdir():
        entry.rename(directory / entry.name)


@pytest.mark.nightly
@needs_landlock
@pytest.mark.parametrize("changed", ["above the root", "the root", "the socket's"])
def test_a_daemon_whose_rule_is_for_another_directory_leaves(tmp_path: Path, changed: str) -> None:
    """It could save nothing there any more. The trainer goes on without it, with what it wrote before."""
    process = start(tmp_path, "--sandbox", "require" if changed == "the root" else "auto")
    root = tmp_path / "a" / "roots" / "run"
    try:
        with Checkpointer(root, sidecar=tmp_path / "run" / "socket", on_sidecar_loss="inline") as ckpt:
            ckpt.save(1, {"w": torch.zeros(4)}).wait(60)
            if changed == "the socket's":
                shutil.rmtree(tmp_path / "run")
            else:
                make_anew(tmp_path / "a" if changed == "above the root" else tmp_path / "a" / "roots")
            _, err = process.communicate(timeout=60)
            ckpt.save(2, {"w": torch.ones(4)}).wait(60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == SidecarError.exit_code
    assert "the sandbox's rule is for a directory that is gone" in err
    assert "restart the daemon" in err


@pytest.mark.nightly
@needs_landlock
def test_http_where_its_packages_are_links(tmp_path: Path) -> None:
    """As some installers make them: the sandbox forbids the place to which they lead."""
    here = importlib.util.find_spec("aiohttp")
    assert here is not None
    assert here.origin is not None
    shutil.copytree(Path(here.origin).parent, tmp_path / "cache" / "aiohttp")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "aiohttp").symlink_to(tmp_path / "cache" / "aiohttp")
    process = start(tmp_path, "--http", "127.0.0.1:0", "--sandbox", "require", PYTHONPATH=str(tmp_path / "lib"))
    process.terminate()
    process.communicate()
    assert process.returncode == 0


@pytest.mark.nightly
def test_numpy_starts_no_thread_that_the_sandbox_would_miss(tmp_path: Path) -> None:
    program = """
import os, sys
from checkpointd.cli.program import main
def said(event, arguments):
    if event == "import" and arguments[0] == "numpy":
        print(os.environ.get("OPENBLAS_NUM_THREADS"))
sys.addaudithook(said)
main(["serve", "--socket", sys.argv[1] + "/socket", "--root", sys.argv[1] + "/none"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["1"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The socket and the process of a daemon that has all of the sandbox."""
    process = start(tmp_path, "--sandbox", "require")
    yield str(tmp_path / "run" / "socket"), process.pid
    process.terminate()
    process.communicate()


@needs_landlock
@needs_seccomp
def test_a_daemon_with_all_of_it_saves_and_holds(served: tuple[str, int], tmp_path: Path) -> None:
    path, pid = served
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert (lines["Seccomp"].strip(), lines["NoNewPrivs"].strip()) == ("2", "1")
    root = tmp_path / "a" / "roots" / "run"
    with Checkpointer(root, sidecar=path, on_sidecar_loss="raise", retention=1) as ckpt:
        ckpt.save(0, {"no": "tensor"}).wait(60)
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.full((64, 64), float(step))}).wait(60)
        found = {"w": torch.zeros(64, 64)}
        loaded = ckpt.load(found)
    assert loaded is not None
    assert (loaded.step, loaded.source) == (3, "memory")
    assert bool((found["w"] == 3.0).all())
