"""What users see when something is wrong: words or JSON on standard error, the exit code of the class, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.cli import COMMANDS, failures, run
from checkpointd.errors import ERRORS, AbortedError, CheckpointdError, DamagedError, FencedError, MismatchError, StoreError
from checkpointd.pipeline.root import root_view
from tests.builders import break_file, save_checkpoint
from tests.unit.cli.conftest import Cli, With

LOOKS_AT_A_ROOT = [command for command in COMMANDS if command not in ("serve", "doctor", "import", "completion", "mirror")]
TAKE_A_TAG = ("inspect", "explain", "consolidate", "delete", "export", "rollback")


@pytest.mark.parametrize("command", LOOKS_AT_A_ROOT)
def test_a_root_that_is_not_there(tmp_path: Path, cli: Cli, command: str) -> None:
    answer = cli(command, tmp_path / "nowhere", *(["tag"] if command in TAKE_A_TAG else []))
    assert (answer.code, answer.out) == (4, "")
    assert answer.err == f"error: there is no directory {tmp_path}/nowhere: give the root that the job was given\n"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", LOOKS_AT_A_ROOT)
def test_a_root_that_is_a_file(tmp_path: Path, cli: Cli, command: str) -> None:
    (tmp_path / "file").write_text("")
    answer = cli(command, tmp_path / "file", *(["tag"] if command in TAKE_A_TAG else []), "--json")
    assert answer.code == 2
    assert answer.error == {
        "code": "UsageError",
        "message": f"the root {tmp_path}/file is not a directory: give the root that the job was given",
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lst",), "No such command 'lst'"),
        (("list", "--bogus"), "No such option '--bogus'; `checkpointd list --help` shows the arguments"),
        (("inspect", "/", "t", "--rank", "x"), "Invalid value for '--rank'"),
        (("status", "--interval", "0"), "Invalid value for '--interval'"),
        (("list",), "which root? Give its path"),
        (("list", "a", "b"), "2 arguments are more than this command takes"),
        (("list", "hf://bucket/run"), "there is no store for hf:// URLs"),
        (("list", "s3://bucket/run?acces=x"), "there is no option 'acces'"),
        (("list", "memory://x"), "exists only in the process that made it"),
    ],
)
def test_wrong_calls_end_with_code_2(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    answer = cli(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert words in answer.err
    assert answer.err.count("\n") == 1
    error = cli(*arguments, "--json").error
    assert (error["code"], error["exit_code"]) == ("UsageError", 2)


@pytest.mark.parametrize("tag", ["a/b", "..", "", " x", "a\nb"])
def test_what_cannot_be_a_tag_is_refused(root: Path, at: With, cli: Cli, tag: str) -> None:
    at(save_checkpoint)
    for command in ("inspect", "verify", "explain"):
        answer = cli(command, root, tag)
        assert answer.code == 2
        assert "cannot be used" in answer.err


@pytest.mark.parametrize("error", [kind("the message") for kind in ERRORS.values()], ids=lambda error: error.code)
def test_every_class_of_error_ends_with_its_own_code(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, error: CheckpointdError
) -> None:
    async def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(root_view, "state_of", fail)
    answer = cli("list", root)
    assert (answer.code, answer.err) == (error.exit_code, "error: the message\n")
    found = cli("list", root, "--json").error
    assert (found["code"], found["message"], found["exit_code"]) == (error.code, "the message", error.exit_code)
    assert found.get("retryable", False) == error.retryable


def test_json_errors_carry_what_the_error_knows() -> None:
    damage = failures.of_error(DamagedError("m", key="k", fqn="f", rank=3))
    assert (damage.key, damage.fqn, damage.rank) == ("k", "f", 3)
    assert failures.of_error(AbortedError("m", ranks=(1, 2))).ranks == (1, 2)


def test_the_codes_in_the_help_are_those_of_the_classes(cli: Cli) -> None:
    text = " ".join(cli("--help").out.split())
    for kind, word in (
        (MismatchError, "mismatch"),
        (DamagedError, "damaged"),
        (StoreError, "storage"),
        (FencedError, "fenced"),
    ):
        assert f"{kind.exit_code} {word}" in text


def test_a_defect_is_said_without_a_traceback_and_shown_with_debug(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(root_view, "state_of", fail)
    answer = cli("list", root)
    assert answer.code == 1
    assert answer.err.startswith("error: ZeroDivisionError: division by zero: this is a defect of checkpointd")
    assert "Traceback" not in answer.err
    with pytest.raises(ZeroDivisionError):
        run(["--debug", "list", str(root)])


def test_a_hostile_message_is_printed_harmless(root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> None:
        raise DamagedError("evil \x1b[2J\nsecond line")

    monkeypatch.setattr(root_view, "state_of", fail)
    assert cli("list", root).err == "error: evil \\x1b[2J\nsecond line\n"


def test_an_interrupt_ends_with_130_and_no_words(root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(root_view, "state_of", interrupted)
    answer = cli("list", root)
    assert (answer.code, answer.out, answer.err) == (130, "", "")


def test_damage_is_an_answer_and_stays_on_standard_output(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    break_file(root / "global_step1/00000001-0/00000-0.chunks", "flip")
    answer = cli("verify", root, "--json")
    assert (answer.code, answer.err) == (5, "")
    assert answer.json["checkpoints"][0]["state"] == "damaged"


def test_help_and_version(cli: Cli) -> None:
    shown = cli("--help")
    assert shown.code == 0
    assert [line.split()[0] for line in shown.out.partition("Commands:")[2].splitlines()[1 : 1 + len(COMMANDS)]] == list(
        COMMANDS
    )
    assert cli("--version").out.startswith("checkpointd ")
    assert "Usage: checkpointd" in cli().out
    for command in COMMANDS:
        answer = cli(command, "-h")
        assert answer.code == 0
        assert ("--json" in answer.out) == (command not in ("serve", "completion"))


def test_a_name_that_the_locale_cannot_write_ends_nothing(root: Path, at: With) -> None:
    at(lambda store: save_checkpoint(store, tag="étape_β", step=1))
    done = subprocess.run(
        [sys.executable, "-m", "checkpointd", "list", str(root)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert b"\\xe9tape_\\u03b2" in done.stdout
