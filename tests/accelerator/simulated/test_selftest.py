"""The selftest of accelerators on the simulated one: it finds nothing wrong, and it finds the mistakes that are planted."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from checkpointd.doctor.finding import Finding
from checkpointd_client.selftest import examine, lateness, steps, waiting
from checkpointd_client.selftest.proofs import Proofs
from checkpointd_client.selftest.results import each_made
from checkpointd_client.staging.device_snapshot import DeviceSnapshot
from tests.accelerator.simulated.late_streams import LateByHolding
from tests.accelerator.simulated.mistakes import LOADING, STAGING

LATE_THREAD = "on real hardware nothing makes the stager's thread late"
UNSEEN: dict[str, str] = {
    "the step does not wait until the copies are queued": LATE_THREAD,
    "the scratch memory is filled again before its copy is queued": LATE_THREAD,
    "the load returns before it knows of errors": "on real hardware nothing makes a copy fail",
    "blocks are unpinned before their copies are done": "drivers wait for copies before they unpin their memory",
    "device memory for strided tensors is made on another stream": "it shows as a race alone, not as wrong bytes",
    "memory that is not pinned is copied as if it were": "torch itself waits for such copies",
}
"""Mistakes that the selftest cannot see, and why."""
TIMED = {"pinning", "call"}
"""Checks that time a call. Under chaos, the simulated device does its work within the host's calls, which may thus be slow."""
NBYTES = 512 << 10


@pytest.fixture
def late(sim: ModuleType, device: torch.device) -> LateByHolding:
    return LateByHolding(sim, device)


@pytest.fixture
def proofs(device: torch.device, late: LateByHolding, tmp_path: Path) -> Proofs:
    return Proofs(device, NBYTES, str(tmp_path), late)


def every(proofs: Proofs) -> Iterator[Finding]:
    yield from proofs.pinning()
    yield from proofs.staging()
    yield from proofs.checksums()
    yield from proofs.loading()


def test_every_proof_works(proofs: Proofs) -> None:
    """Nothing is wrong, and each mistake that the selftest makes by itself shows in each round."""
    found = {finding.check: finding for finding in every(proofs)}
    assert [finding for finding in found.values() if finding.level != "ok"] == []
    for mistake in steps.STAGING + steps.LOADING:
        assert found[mistake.check].seen == f"checkpointd is right; {mistake.words} shows in 3 of 3 rounds"


@pytest.mark.parametrize("name", [name for name in {**STAGING, **LOADING} if name not in UNSEEN])
def test_a_mistake_in_checkpointd_fails_a_proof(proofs: Proofs, name: str) -> None:
    with {**STAGING, **LOADING}[name].made():
        findings = each_made("all", proofs.staging if name in STAGING else proofs.loading)
        assert next((finding for finding in findings if finding.level == "fail"), None)


def test_checksums_that_are_switched_off_fail_their_proof(proofs: Proofs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSnapshot, "differs", lambda _: None)
    (found,) = proofs.checksums()
    assert (found.level, found.seen) == (
        "fail",
        "a change that torch does not count: weight has 131072 of 131072 elements of another moment",
    )


def test_a_call_that_is_slow_by_itself_does_not_wait(
    device: torch.device, late: LateByHolding, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: now[0])

    def slow() -> None:
        now[0] += 1000.0

    assert waiting.waits(slow, late, device) is False
    assert waiting.waits(lambda: (slow(), torch.accelerator.synchronize(device)), late, device) is True


def test_the_mistakes_that_are_not_seen_exist() -> None:
    assert set(UNSEEN) <= {*STAGING, *LOADING}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [None, 5])
def test_the_whole_selftest_finds_nothing_wrong(
    sim: ModuleType, tmp_path: Path, seed: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(lateness, "LATE_S", 0.005)  # the simulated device computes on the host
    monkeypatch.setattr(sys, "argv", ["selftest", "--device-bytes", "16MiB", "--json"])
    with nullcontext() if seed is None else sim.chaos(seed), pytest.raises(SystemExit) as ended:
        runpy.run_module("checkpointd_client.selftest", run_name="__main__")
    told = capsys.readouterr()
    assert told.err == ""
    answer = json.loads(told.out)
    failed = {found["check"] for found in answer["findings"] if found["level"] == "fail"}
    assert failed <= (set() if seed is None else TIMED), answer["findings"]
    assert ended.value.code == (1 if failed else 0)
    page = (Path(__file__).parents[3] / "docs" / "DOCTOR.md").read_text()
    assert [found["check"] for found in answer["findings"] if f"`{found['topic']}/{found['check']}`" not in page] == []
    checks = {found["check"]: found for found in answer["findings"] if found["topic"] == "device"}
    assert {"dtypes", "shapes", "devices", "generators"} <= {check for check, found in checks.items() if found["level"] == "ok"}
    assert all(figure["value"] > 0 for figure in answer["device_figures"])
    assert answer["device_facts"][0] == {"name": "device", "value": "sim, 2 of them: a device without a name"}
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(sim: ModuleType, late: LateByHolding, tmp_path: Path) -> None:
    pinned = sim.counts().pinned

    class Interrupted(LateByHolding):
        def copies(self):  # type: ignore[no-untyped-def]
            assert list((tmp_path / "new").rglob("staging")), "a checkpoint is being written"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine.examine(16 << 20, str(tmp_path / "new"), lambda work: Interrupted(sim, work.clock.device))
    assert not (tmp_path / "new").exists()
    assert sim.counts().pinned == pinned
