"""What continuous integration runs, and that it does not pass where tests were skipped for want of a tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CI = REPOSITORY / ".ci"
SKIPPED = """
import pytest

pytestmark = pytest.mark.filterwarnings("default")


def test_tool():
    pytest.skip("needs promtool: apt-get install prometheus")


@pytest.mark.skipif(True, reason="needs a C++ compiler, to build the simulated device")
def test_compiler():
    pass


def test_module():
    pytest.importorskip("no_such_module_anywhere")


def test_machine():
    pytest.skip("this kernel has no Landlock")


@pytest.mark.xfail(reason="needs a fault to be mended")
def test_expected():
    assert False
"""


def called(tmp_path: Path, script: str, *, user: int = 1000, has: tuple[str, ...] = ()) -> str:
    """What .ci/`script` calls: `make`, and for root `apt-get`. Its PATH has only stand-ins; `has` are tools of tests."""
    stubs = {
        "make": 'printf "%s|" make "$@"',
        "apt-get": 'printf "%s|" apt-get "$@"; case "$*" in download*) touch prometheus_1.deb;; esac',
        "dpkg-deb": "printf ''",
        "tar": 'cat > /dev/null; printf "%s|" tar',
        "id": f"echo {user}",
        **dict.fromkeys(has, "true"),
    }
    for name in ("env", "bash", "dirname", "mkdir", "mktemp", "rm", "touch", "cat"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name if (Path("/usr/bin") / name).exists() else Path("/bin") / name)
    for name, does in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "ARGS": "-k device", "TMPDIR": str(tmp_path)}
    script_copy = tmp_path / ".ci" / script  # so that what it makes stays there
    script_copy.parent.mkdir()
    script_copy.write_bytes((CI / script).read_bytes())
    done = subprocess.run(["/bin/bash", script_copy], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


TOOLS = [
    "c++",
    "chromium",
    "fish",
    "mkfs.btrfs",
    "mkfs.xfs",
    "openssl",
    "promtool",
    "rsync",
    "shellcheck",
    "strace",
    "systemd-analyze",
    "zsh",
]


@pytest.mark.parametrize(("script", "verb", "require"), [("run", "test", "compiler"), ("night", "test-all", "everything")])
def test_continuous_integration_says_what_must_be_there(tmp_path: Path, script: str, verb: str, require: str) -> None:
    assert called(tmp_path, script) == f"make|{verb}|ARGS=--require={require} -k device|"


def test_the_night_installs_what_is_missing(tmp_path: Path) -> None:
    found = called(tmp_path, "night", user=0, has=tuple({*TOOLS} - {"chromium", "mkfs.xfs", "promtool"}))
    update, install, download = found.split("apt-get|")[1:]
    assert update == "update|-q|"
    assert install.startswith("install|")
    assert {"chromium", "xfsprogs"} == {word for word in install.rstrip("|").split("|")[1:] if not word.startswith("-")}
    assert download.startswith("download|-q|prometheus|tar|make|test-all|")


def test_the_night_installs_nothing_where_all_is_there(tmp_path: Path) -> None:
    assert called(tmp_path, "night", user=0, has=tuple(TOOLS)).startswith("make|test-all|")


def failures(tmp_path: Path, text: str, require: str) -> tuple[set[str], str]:
    """The tests of `text` that fail, or their file as "", and what pytest printed, in a run with `--require`."""
    (tmp_path / "test_skipped.py").write_text(text)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q", *([f"--require={require}"] if require else [])]
    command = [sys.executable, "-m", "pytest", "-c", REPOSITORY / "pyproject.toml", *options, tmp_path / "test_skipped.py"]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR "))]
    assert bool(done.returncode) == bool(lines), done.stdout + done.stderr
    return {line[1].partition("::")[2] for line in lines}, done.stdout


@pytest.mark.parametrize(
    ("require", "failed"),
    [("", set()), ("compiler", {"test_compiler"}), ("everything", {"test_compiler", "test_tool", "test_module"})],
)
def test_what_needs_a_missing_tool_fails_where_it_is_required(tmp_path: Path, require: str, failed: set[str]) -> None:
    found, _ = failures(tmp_path, SKIPPED, require)
    assert found == failed


def test_a_module_whose_package_is_missing_fails_where_it_is_required(tmp_path: Path) -> None:
    text = 'import pytest\npytest.importorskip("no_such_module_anywhere", reason="needs it")\ndef test_one(): pass\n'
    found, said = failures(tmp_path, text, "everything")
    assert found == {""}
    assert "needs it" in said
