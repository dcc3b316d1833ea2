"""The command line as a process: what it imports, pipes, terminals and signals."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from checkpointd.cli import COMMANDS
from checkpointd.cli.program import MODULES
from checkpointd.store.base import Store
from tests.builders import leave_in_doubt, save_checkpoint
from tests.unit.cli.conftest import With

COMMAND = [sys.executable, "-m", "checkpointd"]

DIES = """
import asyncio, sys
from tests.builders import leave_in_doubt
from checkpointd.store.posix.store import PosixStore

async def main(root):
    async with PosixStore(root) as store:
        await leave_in_doubt(store)

asyncio.run(main(sys.argv[1]))
"""


def imported(code: str) -> set[str]:
    """The top-level modules that are loaded after `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_looking_imports_neither_torch_nor_numpy_nor_rich(root: Path, at: With) -> None:
    at(save_checkpoint)
    for command in (f"['list', {str(root)!r}]", f"['status', {str(root)!r}]", f"['explain', {str(root)!r}, 'latest']"):
        found = imported(f"from checkpointd.cli import run; assert run({command}) == 0")
        assert "checkpointd" in found
        assert not found & {"torch", "numpy", "rich", "uvloop"}


def test_no_command_imports_torch_or_the_client() -> None:
    found = imported("\n".join(f"import checkpointd.cli.commands.{MODULES.get(command, command)}" for command in COMMANDS))
    assert not found & {"torch", "checkpointd_client"}


def test_a_reader_that_goes_away_is_no_error(root: Path, at: With) -> None:
    at(save_checkpoint)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, "list", str(root)], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def on_terminal(arguments: list[str], columns: int, **environment: str) -> tuple[int, str]:
    """Run the command with standard output and error on a terminal of its own; its exit code and what it wrote."""
    master, slave = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=slave, stderr=slave, env={**os.environ, **size, **environment})
    os.close(slave)
    written = b"".join(iter(lambda: read_or_end(master), b""))
    os.close(master)
    return process.wait(), written.decode()


def read_or_end(descriptor: int) -> bytes:
    """Linux ends a terminal whose other side closed with EIO."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_there_are_colours_and_no_line_is_too_long(root: Path, at: With, columns: int) -> None:
    at(save_checkpoint)
    code, written = on_terminal(["list", str(root)], columns, NO_COLOR="")
    assert code == 0
    assert "\x1b[32mcommitted" in written
    shown = [visible(line) for line in written.splitlines()]
    assert all(len(line) <= columns for line in shown)
    assert shown[0].split()[0] == "tag"
    assert shown[-1].split()[0] == "global_step1"


def visible(line: str) -> str:
    """`line` without its colours."""
    parts = line.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])


def test_no_color_is_respected(root: Path, at: With) -> None:
    at(save_checkpoint)
    _, written = on_terminal(["list", str(root)], 100, NO_COLOR="1")
    assert "\x1b[32m" not in written
    assert "committed" in written


def test_verify_shows_a_bar_on_a_terminal_and_json_stays_json(root: Path, at: With) -> None:
    at(save_checkpoint)
    code, written = on_terminal(["verify", str(root)], 100)
    assert code == 0
    assert "━" in written
    assert "whole" in written
    done = subprocess.run([*COMMAND, "verify", "--json", str(root)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith('{"root":')


class Watching:
    """`status --watch` with its output on a pipe, line by line."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [*COMMAND, "status", str(root), "--watch", "--interval", "0.01", *options]
        # Where the tests run in the background of a shell, Ctrl-C is ignored, and a child would inherit that.
        hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear)

    def until(self, text: str) -> list[str]:
        """The lines up to one that holds `text`."""
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if text in line:
                return lines
        raise AssertionError(f"{text!r} never came: {lines}")

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


def test_watch_tells_each_change_in_a_line_and_ends_well_on_ctrl_c(root: Path, at: With) -> None:
    async def save(store: Store) -> None:
        await leave_in_doubt(store, tag="global_step1", voting=(1,))

    with Watching(root) as watch:
        first = watch.until("latest: none")
        assert [line.split("  ", 1)[1] for line in first] == ["job: none ever ran here", "checkpoints: 0", "latest: none"]
        at(save)
        assert "waiting for rank 0" in watch.until("1 of 2 voted")[-1]
        at(lambda store: save_checkpoint(store, tag="global_step2"))
        watch.until("latest: global_step2")
        assert watch.interrupt() == 0


def test_watch_with_json_is_one_document_per_change(root: Path, at: With) -> None:
    with Watching(root, "--json") as watch:
        [first] = watch.until("checkpoints")
        at(save_checkpoint)
        watch.until('"checkpoints":1')
        assert json.loads(first)["checkpoints"] == 0
        assert watch.interrupt() == 0


def test_recover_after_the_process_really_died(root: Path) -> None:
    """No stand-in: another process takes the start and ends, and recovery finds its pid gone."""
    here = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", DIES, str(root)], check=True, cwd=here)
    done = subprocess.run([*COMMAND, "recover", str(root)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "global_step1  00000001-0  commit" in done.stdout
    assert (root / "latest").read_text() == "global_step1\n"
