"""`checkpointd delete` asks: on a terminal a person, anywhere else for --yes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from checkpointd.store.base import Store
from tests.builders import Arrays, break_file, save_checkpoint
from tests.unit.cli.conftest import Cli, With, contents


def _state(step: int, _rank: int) -> Arrays:
    return {"frozen": np.arange(3000, dtype=np.int32), "moving": np.full(2000, step, dtype=np.float32)}


@pytest.fixture
def three(root: Path, at: With) -> Path:
    """A root of three checkpoints, of which the later ones refer to the first."""

    async def save(store: Store) -> None:
        for step in (1, 2, 3):
            await save_checkpoint(store, tag=f"global_step{step}", world_size=1, dedup=True, tensors=partial(_state, step))

    at(save)
    return root


def answered(answer: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Call on a terminal, answer its question; the exit code, standard output (a pipe), and what the terminal showed."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "checkpointd", "delete", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, start_new_session=True)
    os.close(slave)
    shown = b""
    while b"[y/N]" not in shown:
        piece = read_or_end(master)
        assert piece, shown.decode()
        shown += piece
    os.write(master, answer.encode())
    with process:
        assert process.stdout is not None
        out = process.stdout.read()
    shown += b"".join(iter(partial(read_or_end, master), b""))
    os.close(master)
    return process.returncode, out.decode(), shown.decode()


def read_or_end(descriptor: int) -> bytes:
    """Linux ends a terminal whose other side closed with EIO."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def tags(cli: Cli, root: Path) -> list[str]:
    return [row["tag"] for row in cli("list", root, "--json").json["rows"]]


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04"])
def test_without_a_yes_nothing_goes(cli: Cli, three: Path, answer: str) -> None:
    before = contents(three)
    code, out, shown = answered(answer, three, "global_step1")
    assert (code, out) == (130 if answer == "\x04" else 1, "")
    assert contents(three) == before
    assert f"Remove global_step1 at {three}? [y/N]" in shown
    if answer != "\x04":
        assert "nothing was removed" in shown


def test_the_question_says_what_goes_how_much_and_who_still_needs_it(cli: Cli, three: Path) -> None:
    code, out, shown = answered("y\n", three, "global_step1")
    before_question = shown.partition("[y/N]")[0]
    assert "would be deleted" in before_question
    assert "1 checkpoint" in before_question
    assert "that global_step3, global_step2 refer to" in " ".join(before_question.split())
    assert code == 0
    assert out.splitlines()[0] == "deleted: 1 checkpoint"
    assert tags(cli, three) == ["global_step3", "global_step2"]
    assert cli("verify", three).code == 0


def test_force_asks_all_the_same_and_standard_output_stays_json(cli: Cli, three: Path) -> None:
    code, out, shown = answered("y\n", three, "latest", "--force", "--json")
    assert "Remove global_step3" in shown
    assert (code, out.startswith('{"root":')) == (0, True)
    assert tags(cli, three) == ["global_step2", "global_step1"]


def test_without_a_terminal_it_wants_yes_and_prints_the_whole_command(cli: Cli, three: Path) -> None:
    before = contents(three)
    answer = cli("delete", three, "global_step2")
    assert (answer.code, answer.out) == (2, "")
    assert f"standard input is not a terminal: `checkpointd delete {three} global_step2 --yes` does not ask" in answer.err
    forced = cli("delete", three, "latest", "--force")
    assert f"`checkpointd delete {three} global_step3 --yes --force`" in forced.err
    assert contents(three) == before
    assert cli("delete", three, "global_step2", "--yes").code == 0
    assert cli("delete", three, "global_step1", "-y").code == 0
    assert tags(cli, three) == ["global_step3"]


def test_a_tag_that_looks_like_an_option_is_suggested_as_a_path(cli: Cli, root: Path, at: With) -> None:
    at(partial(save_checkpoint, tag="-x"))
    at(partial(save_checkpoint, tag="global_step9"))
    said = cli("delete", root, "--", "-x").err
    assert f"`checkpointd delete {root}/-x --yes` does not ask" in said
    assert cli("delete", f"{root}/-x", "--yes").code == 0
    assert tags(cli, root) == ["global_step9"]


@pytest.mark.parametrize(
    "call", [("delete", "global_step1", "--yes"), ("gc",), ("gc", "--dry-run"), ("rollback", "global_step1")]
)
def test_nothing_changes_at_a_root_whose_log_cannot_be_read(cli: Cli, three: Path, call: tuple[str, ...]) -> None:
    break_file(sorted((three / "log").glob("*.json"))[3], "truncate")
    before = contents(three)
    answer = cli(call[0], three, *call[1:])
    assert (answer.code, answer.out) == (5, "")
    assert "nothing was changed: the log of" in answer.err
    assert f"`checkpointd recover {three}`" in answer.err
    assert contents(three) == before


def test_yes_is_not_force(cli: Cli, three: Path) -> None:
    answer = cli("delete", three, "latest", "--yes")
    assert answer.code == 2
    assert f"`checkpointd delete {three} global_step3 --force`" in answer.err


def test_a_dry_run_does_not_ask(cli: Cli, three: Path) -> None:
    found = cli("delete", three, "global_step1", "--dry-run", "--json").json
    assert (found["retired"], found["needed_by"]) == (["global_step1"], ["global_step3", "global_step2"])
