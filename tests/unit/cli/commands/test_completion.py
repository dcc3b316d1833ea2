"""Completion in shells: what is offered for each word, and the scripts that the shells run."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.cli.program import COMMANDS
from checkpointd.store.base import Store
from tests.builders import save_checkpoint
from tests.unit.cli.conftest import Cli, With


@pytest.fixture
def used(root: Path, at: With) -> Path:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="global_step100")
        await save_checkpoint(store, tag="global_step20")
        await save_checkpoint(store, tag="best", step=100, n=101)

    at(saves)
    (root / "notes").mkdir()
    return root


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A PATH with this very checkpointd in it."""
    binary = tmp_path / "bin" / "checkpointd"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m checkpointd "$@"\n')
    binary.chmod(0o755)
    return f"{binary.parent}:{os.environ['PATH']}"


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def offered(words: list[str], **environment: str) -> list[str]:
    """What checkpointd tells a bash that completes the last of `words`: `type,value` lines."""
    asked = {"_CHECKPOINTD_COMPLETE": "bash_complete", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    kept = {name: value for name, value in os.environ.items() if name != "CHECKPOINTD_ROOT"}
    command = [sys.executable, "-m", "checkpointd"]
    done = subprocess.run(command, env={**kept, **asked, **environment}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_options(used: Path) -> None:
    assert offered(["checkpointd", ""]) == [f"plain,{name}" for name in COMMANDS]
    assert offered(["checkpointd", "ex"]) == ["plain,explain", "plain,export"]
    assert "plain,--limit" in offered(["checkpointd", "list", "--l"])
    assert offered(["checkpointd", "gc", "--mode", "m"]) == ["plain,min", "plain,max"]


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["inspect", "explain", "verify", "delete", "consolidate", "export"])
def test_tags_of_the_root_given_before_the_newest_first(used: Path, command: str) -> None:
    assert offered(["checkpointd", command, str(used), ""])[1:] == [
        *("plain,global_step100", "plain,global_step20", "plain,best", "plain,latest"),
    ]
    assert offered(["checkpointd", command, str(used), "global_step2"])[1:] == ["plain,global_step20"]


def test_roots_are_directories_and_out_is_a_file(used: Path) -> None:
    assert offered(["checkpointd", "list", "/mn"]) == ["dir,/mn"]
    assert offered(["checkpointd", "consolidate", str(used), "best", "ou"]) == ["file,ou"]
    assert offered(["checkpointd", "inspect", str(used), "best", ""]) == []
    assert offered(["checkpointd", "inspect", "/no/such/root", ""]) == ["file,"]


def test_tags_of_the_root_in_the_environment(used: Path) -> None:
    assert "plain,best" in offered(["checkpointd", "inspect", "b"], CHECKPOINTD_ROOT=str(used))
    assert offered(["checkpointd", "list", "b"], CHECKPOINTD_ROOT=str(used)) == ["dir,b"]


def test_a_real_bash_completes_commands_and_tags(used: Path, program: str) -> None:
    bash = shell("bash")
    master, slave = pty.openpty()
    environment = {"PATH": program, "HOME": str(used), "TERM": "dumb", "PS1": "$ ", "INPUTRC": "/dev/null"}
    command, folder = [bash, "--norc", "--noprofile", "-i"], used.parent
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder, start_new_session=True
    )
    os.close(slave)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(master, 65536)
        seen = seen.partition(text)[2]

    try:
        os.write(master, b"source <(checkpointd completion bash) && echo so''urced\n")
        until(b"\nsourced")
        os.write(master, b"checkpointd expla\t")
        until(b"explain ")
        os.write(master, str(used).encode() + b" global_step1\t")
        until(b"global_step100 ")
        os.write(master, b"--js\t")
        until(b"--json ")
        os.write(master, b"> answer; echo en''ded\n")
        until(b"\nended")
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert json.loads((folder / "answer").read_text())["tag"] == "global_step100"


@pytest.mark.parametrize("name", ["zsh", "fish", "bash"])
def test_the_shell_itself_takes_the_script(cli: Cli, tmp_path: Path, name: str) -> None:
    script = tmp_path / "script"
    script.write_text(cli("completion", name).out)
    done = subprocess.run([shell(name), "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "registers"),
    [
        ("bash", "complete -o nosort -F _checkpointd_completion checkpointd"),
        ("zsh", "compdef _checkpointd_completion checkpointd"),
        ("fish", "complete --no-files --command checkpointd"),
    ],
)
def test_the_script_registers_itself_and_asks_this_program(cli: Cli, name: str, registers: str) -> None:
    answer = cli("completion", name)
    assert answer.code == 0
    assert registers in answer.out
    assert f"_CHECKPOINTD_COMPLETE={name}_complete" in answer.out


def test_another_shell_is_refused_by_name(cli: Cli) -> None:
    answer = cli("completion", "tcsh")
    assert answer.code == 2
    assert "'bash', 'zsh', 'fish'" in answer.err
