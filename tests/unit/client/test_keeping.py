"""What a training script says of its checkpoints: which stay, by which metric, and what is not written twice."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.daemon import wire
from checkpointd.errors import StaleError, UsageError
from checkpointd_client import Checkpointer, Retention
from tests.unit.client.puppet import LIMIT_S, Puppet


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), float(value))}


def tags(ckpt: Checkpointer) -> list[str]:
    return [checkpoint.tag for checkpoint in ckpt.list()]


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    rules = Retention(keep_last=1, best=1, metric="accuracy", mode="max")
    with Checkpointer(tmp_path, retention=rules) as ckpt:
        for step, accuracy in enumerate((0.1, 0.9, 0.5, 0.2)):
            ckpt.save(step, state(step), metrics={"accuracy": accuracy}).wait()
    with Checkpointer(tmp_path) as ckpt:
        assert tags(ckpt) == ["global_step3", "global_step1"]
        target = state(-1.0)
        assert ckpt.load(target, "global_step1") is not None
    assert torch.equal(target["w"], state(1.0)["w"])


def test_metrics_may_be_tensors_and_what_is_not_finite_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "checkpointd"):
        ckpt.save(1, state(1.0), metrics={"loss": torch.tensor(0.5), "bad": math.nan, "worse": math.inf}).wait()
        [found] = ckpt.list()
    assert found.outcome.metrics == {"loss": 0.5}
    assert "bad, worse" in caplog.text


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": None}, {"": 1.0}, {"x" * 300: 1.0}, {f"m{n}": 1.0 for n in range(300)}]
)
def test_metrics_that_cannot_be_are_refused(tmp_path: Path, metrics: dict[str, float]) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(UsageError, match="metric"):
        ckpt.save(1, state(1.0), metrics=metrics)


def test_frozen_layers_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300).requires_grad_(False), torch.nn.Linear(300, 100))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Checkpointer(tmp_path, chunk_bytes=65536) as ckpt:
        for step in range(3):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            handle = ckpt.save(step, {"model": model}).wait()
            assert not handle.stale
    sizes = [sum(p.stat().st_size for p in tmp_path.glob(f"global_step{step}/*/*.chunks")) for step in range(3)]
    assert sizes[1] < sizes[0] / 3
    assert sizes[2] < sizes[0] / 3
    target = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 100))
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"model": target}) is not None
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), target.state_dict().values(), strict=True))


def test_a_restarted_job_refers_to_what_the_one_before_has_saved(tmp_path: Path) -> None:
    frozen = torch.randn(300, 300)
    for step in (1, 2):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(step, {"frozen": frozen, "moving": torch.randn(100, 300)}).wait()
    assert sum(p.stat().st_size for p in tmp_path.glob("global_step2/*/*.chunks")) < 200_000


def test_without_dedup_every_checkpoint_stands_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, dedup=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(1.0)).wait()
    assert len(list(tmp_path.glob("global_step2/*/*.chunks"))) == 1


def test_a_stale_save_shows_in_handle_and_status(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    with Checkpointer(tmp_path) as ckpt:
        first = ckpt.save(1, {"model": model}).wait()
        second = ckpt.save(2, {"model": model}).wait()
        assert (first.stale, second.stale) == (False, True)
        assert [attempt.stale for attempt in ckpt.status().attempts] == [False, True]


def test_a_stale_save_is_aborted_on_request(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    with Checkpointer(tmp_path, on_stale="abort") as ckpt:
        ckpt.save(1, {"model": model}).wait()
        with pytest.raises(StaleError, match="learning rate"):
            ckpt.save(2, {"model": model}).wait()
        assert tags(ckpt) == ["global_step1"]


def test_what_to_do_with_stale_saves_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on_stale"):
        Checkpointer(tmp_path, on_stale="shout")  # type: ignore[arg-type]  # what is tested


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    with Puppet(tmp_path) as made:
        yield made


def test_the_sidecar_hears_of_all_of_it(tmp_path: Path, puppet: Puppet) -> None:
    rules = Retention(keep_last=3, every_steps=100)
    with Checkpointer(
        tmp_path / "root", sidecar=puppet.path, retention=rules, on_stale="ignore", dedup=False, on_sidecar_loss="inline"
    ) as ckpt:
        begin = puppet.expect(wire.Begin)
        assert (begin.dedup, begin.on_stale) == (False, "ignore")
        assert begin.retention is not None
        assert begin.retention.checked() == rules
        handle = ckpt.save(1, state(1.0), metrics={"loss": 2.0})
        assert puppet.expect(wire.Save).metrics == {"loss": 2.0}
        puppet.stop_listening()
        puppet.hang_up()
        handle.wait(LIMIT_S)


def test_rules_over_the_wire_are_checked() -> None:
    with pytest.raises(UsageError, match="keep_last"):
        wire.Rules(keep_last=0).checked()
