from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.builders import save_checkpoint
from tests.unit.cli.conftest import Cli, With


def test_goes_back_and_says_what_is_left_behind(root: Path, at: With, cli: Cli) -> None:
    for step in (1, 2, 3):
        at(partial(save_checkpoint, tag=f"global_step{step}", step=step))
    plan = cli("rollback", root, "global_step1", "--dry-run")
    assert plan.code == 0
    assert "would be left behind: 2 checkpoints" in plan.out
    assert [row["state"] for row in cli("list", root, "--json").json["rows"]] == ["committed"] * 3
    done = cli("rollback", root, "global_step1")
    assert done.code == 0
    assert "the next load takes: global_step1 (step 1)" in done.out
    assert [row["state"] for row in cli("list", root, "--json").json["rows"]] == ["left-behind", "left-behind", "committed"]
    assert "2 were left behind (global_step3, global_step2)" in cli("status", root).out
    why = cli("explain", root, "global_step3").out
    assert "training went on from an older checkpoint" in why
    assert f"checkpointd rollback {root} global_step3 --attempt 00000001-0" in why
    assert cli("inspect", root, "latest", "--json").json["tag"] == "global_step1"
    assert cli("rollback", root, "latest", "--json").json["left_behind"] == []
    assert cli("rollback", root, "global_step9").code == 4


def test_a_checkpoint_that_no_load_would_take_is_refused(root: Path, at: With, cli: Cli) -> None:
    at(partial(save_checkpoint, tag="best", step=1, save_latest=False))
    at(partial(save_checkpoint, tag="global_step2", step=2))
    refused = cli("rollback", root, "best")
    assert (refused.code, "save_latest=False" in refused.err) == (2, True)
    assert [row["state"] for row in cli("list", root, "--json").json["rows"]] == ["committed"] * 2
