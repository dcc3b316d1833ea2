"""`checkpointd gc` and `checkpointd delete`: pages, JSON, exit codes, and what is left afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from checkpointd.export.own_lease import OwnExportLease
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.store.base import Store
from tests.builders import Arrays, save_checkpoint
from tests.unit.cli.conftest import Cli, With


def state(step: int) -> Arrays:
    return {"frozen": np.arange(3000, dtype=np.int32), "moving": np.full(2000, step, dtype=np.float32)}


def _state_of(step: int, _rank: int) -> Arrays:
    return state(step)


@pytest.fixture
def three(root: Path, at: With) -> Path:
    """A root of three checkpoints, of which the later ones refer to the first."""

    async def save(store: Store) -> None:
        for step in (1, 2, 3):
            await save_checkpoint(
                store,
                tag=f"global_step{step}",
                world_size=1,
                dedup=True,
                tensors=partial(_state_of, step),
                metrics={"loss": float(step)},
            )

    at(save)
    return root


def test_gc_removes_by_rule_and_says_what_stays(cli: Cli, three: Path) -> None:
    answer = cli("gc", three, "--keep-last", "1")
    assert answer.code == 0
    assert answer.lines[0] == "deleted: 2 checkpoints"
    assert "that newer checkpoints refer to" in answer.out
    assert "retention keeps the last 1" in answer.out
    assert [row["tag"] for row in cli("list", three, "--json").json["rows"]] == ["global_step3"]
    assert cli("verify", three).code == 0


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_gc_leaves_what_a_living_process_exports(cli: Cli, three: Path, at: With, dry_run: list[str]) -> None:
    async def export(store: Store) -> None:
        first = (await root_view.checkpoints(store))[-1]
        lease = OwnExportLease(store, "/models", 100, Sight())
        await lease.keep([first.prefix], first.commit.order)
        lease.lapse()

    at(export)
    answer = cli("gc", three, "--keep-last", "1", *dry_run)
    assert answer.lines[0].endswith("deleted: 1 checkpoint")
    assert "kept for exports: global_step1" in answer.lines


def test_gc_as_json(cli: Cli, three: Path) -> None:
    found = cli("gc", three, "--best", "1", "--metric", "loss", "--json").json
    assert found["retired"] == ["global_step2"]
    assert found["dry_run"] is False
    assert [removed["tag"] for removed in found["removed"]] == ["global_step2"]
    assert found["freed_bytes"] > 8000


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_metric_that_no_checkpoint_has_is_refused_with_those_that_exist(
    cli: Cli, three: Path, dry_run: tuple[str, ...]
) -> None:
    answer = cli("gc", three, "--keep-last", "1", "--best", "1", "--metric", "los", *dry_run)
    assert (answer.code, answer.out) == (2, "")
    assert "'los'" in answer.err
    assert "they have loss" in answer.err
    assert len(cli("list", three, "--json").json["rows"]) == 3


def test_a_dry_run_only_says_so(cli: Cli, three: Path) -> None:
    answer = cli("gc", three, "--keep-last", "1", "--dry-run")
    assert answer.lines[0] == "would be deleted: 2 checkpoints"
    assert len(cli("list", three, "--json").json["rows"]) == 3


def test_gc_without_rules_removes_no_checkpoint(cli: Cli, three: Path) -> None:
    assert cli("gc", three).lines[:2] == ["deleted: 0 checkpoints", "freed: 0B"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keep-last", "0"], "keep_last"),
        (["--younger-than", "soon"], "is not an age"),
        (["--best", "2"], "best and metric go together"),
        (["--mode", "least"], "least"),
    ],
)
def test_rules_that_cannot_be_are_refused(cli: Cli, three: Path, arguments: list[str], words: str) -> None:
    answer = cli("gc", three, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err


def test_delete_removes_one_checkpoint(cli: Cli, three: Path) -> None:
    answer = cli("delete", three, "global_step1", "--yes")
    assert answer.code == 0
    assert answer.lines[0] == "deleted: 1 checkpoint"
    assert cli("verify", three).code == 0
    again = cli("delete", three, "global_step1", "--yes", "--json")
    assert (again.code, again.error["code"]) == (4, "NotFoundError")


def test_delete_refuses_the_newest_without_force(cli: Cli, three: Path) -> None:
    refused = cli("delete", three, "latest")
    assert (refused.code, refused.out) == (2, "")
    assert f"`checkpointd delete {three} global_step3 --force`" in refused.err
    forced = cli("delete", three, "latest", "--force", "--yes", "--json").json
    assert (forced["retired"], forced["latest_moved_to"]) == (["global_step3"], "global_step2")


def test_inspect_shows_written_and_referred_bytes(cli: Cli, three: Path) -> None:
    found = cli("inspect", three, "global_step3", "--json").json
    assert (found["contents"]["referred_bytes"], found["contents"]["stored_bytes"]) == (12000, 20000)
    assert found["metrics"] == {"loss": 3.0}
    assert "7.8KiB written, 11.7KiB referred to" in cli("inspect", three, "global_step3").out


def test_verify_leaves_a_record_that_keeps_the_checkpoint(cli: Cli, three: Path) -> None:
    assert cli("verify", "--record", three, "global_step2").code == 0
    cli("gc", three, "--keep-last", "1")
    assert [row["tag"] for row in cli("list", three, "--json").json["rows"]] == ["global_step3", "global_step2"]
