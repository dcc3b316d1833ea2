"""`checkpointd serve`: what it says of options and settings that cannot be."""

from __future__ import annotations

from pathlib import Path

from tests.unit.cli.conftest import Cli


def test_a_choice_that_is_none_is_refused_with_those_that_there_are(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[serve]\nsocket = "{tmp_path}/socket"\nroots = ["{tmp_path}"]\nsandbox = "maybe"\n')
    answer = cli("serve", "--config", file)
    assert (answer.code, answer.err) == (2, "error: sandbox is 'maybe'; choose one of auto, require, off\n")


def test_a_user_is_a_number(cli: Cli) -> None:
    answer = cli("serve", "--root", "/mnt", "--uid", "alice")
    assert answer.code == 2
    assert "'alice' is not a number; `id -u alice` prints the number of a user" in answer.err


def test_the_options_of_a_spool_are_checked_by_name(tmp_path: Path, cli: Cli) -> None:
    serve = ("serve", "--socket", tmp_path / "socket", "--root", tmp_path, "--uid", "0", "--spool", tmp_path / "spool")
    answer = cli(*serve, "--spool-windows", "night")
    assert (answer.code, "'night' is no window of a day: write HH:MM-HH:MM" in answer.err) == (2, True)
    answer = cli(*serve, "--spool-keep", "some")
    assert (answer.code, "'some' is not one of 'all', 'newest'" in answer.err) == (2, True)
    (tmp_path / "file").write_text("")
    answer = cli("serve", "--socket", tmp_path / "s", "--root", tmp_path, "--uid", "0", "--spool", tmp_path / "file" / "spool")
    assert (answer.code, "the spool" in answer.err) == (2, True)
