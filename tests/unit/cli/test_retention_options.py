"""The options of the rules of retention."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from checkpointd.cli.retention_options import age_s, retention_options
from checkpointd.commit.retention import Retention
from checkpointd.errors import UsageError


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("2w", 1209600)])
def test_ages(text: str, seconds: float) -> None:
    assert age_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 d", "7y"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UsageError):
        age_s(text)


def test_the_options_become_rules() -> None:
    given: list[Retention] = []

    @click.command()
    @retention_options()
    def command(rules: Retention) -> None:
        given.append(rules)

    options = ["--keep-last", "3", "--every", "100", "--younger-than", "1h", "--best", "2", "--metric", "loss", "--mode", "max"]
    assert CliRunner().invoke(command, options).exit_code == 0
    assert CliRunner().invoke(command, []).exit_code == 0
    rules = Retention(keep_last=3, every_steps=100, younger_than_s=3600.0, best=2, metric="loss", mode="max")
    assert given == [rules, Retention()]
