"""Whatever is given in the place of an argument, the error names the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointd import arguments
from checkpointd.errors import UsageError
from checkpointd.store import open_store
from checkpointd_client import Checkpointer, consolidate, open_checkpoint
from checkpointd_client.integrations.dcp.exporting import export_dcp
from checkpointd_client.integrations.dcp.importing import import_dcp
from checkpointd_client.integrations.deepspeed.offline.fp32 import get_fp32_state_dict_from_zero_checkpoint
from checkpointd_client.integrations.deepspeed.offline.importing import import_deepspeed

HUGE = 1 << 20_000
"""Python refuses to write it as a decimal number."""


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("value", [-HUGE, HUGE, Mute(), float("nan"), "x" * 9999], ids=["-huge", "huge", "mute", "nan", "long"])
def test_a_value_that_cannot_be_shown_is_refused_all_the_same(value: object) -> None:
    for check in (
        lambda: arguments.whole("n", value, most=9),
        lambda: arguments.seconds("n", value, most=9.0),
        lambda: arguments.flag("n", value),
        lambda: arguments.choice("n", value, ("a",)),
    ):
        with pytest.raises(UsageError, match=r"^n is .{1,99}; ") as caught:
            check()
        assert len(str(caught.value)) < 200


def test_steps_and_metrics_that_cannot_be_shown(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": {}}).wait()
        with pytest.raises(UsageError, match="step is"):
            ckpt.save(HUGE, {"model": {}})
        with pytest.raises(UsageError, match="metric 'loss' is"):
            ckpt.save(2, {"model": {}}, metrics={"loss": HUGE})
    with pytest.raises(UsageError, match="step is"):
        open_checkpoint(tmp_path / "root", step=HUGE)


CALLS: list[Callable[[Any, Path], object]] = [
    lambda given, _: open_store(given),
    lambda given, out: consolidate(given, out),
    lambda given, root: consolidate(root, given),
    lambda given, root: export_dcp(root, given),
    lambda given, root: import_dcp(given, root),
    lambda given, root: import_deepspeed(given, root),
    lambda given, _: get_fp32_state_dict_from_zero_checkpoint(given),
    lambda given, root: get_fp32_state_dict_from_zero_checkpoint(root, given),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", [7, b"x", "a\0b", "\ud800", [], ""])
def test_what_no_path_can_be_is_refused_by_every_call(
    call: Callable[[Any, Path], object], given: object, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="must be a path"):
        call(given, tmp_path)
