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
