"""Runs all checks of an accelerator, one after another. A check that fails does not stop the others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from checkpointd.doctor.finding import DeviceReport, Figure, Finding
from checkpointd.doctor.scratch import scratch
from checkpointd.errors import UsageError
from checkpointd.phrases import byte_size
from checkpointd_client import Checkpointer
from checkpointd_client.selftest import content, facts, rates
from checkpointd_client.selftest.clock import Clock
from checkpointd_client.selftest.lateness import Late, LateByWork, Work
from checkpointd_client.selftest.proofs import Proofs
from checkpointd_client.selftest.results import REPORT, each_made, finding, ok_if_same

BYTES_MOST = 1 << 30
BYTES_LEAST = 16 << 20
"""With less, checkpointd would gather all tensors of the proofs, and copy none directly."""
BYTES_UNKNOWN = 256 << 20
"""Device memory to use if torch cannot tell how much is free."""
RUNS = 3
SLOW = 0.5
"""A staging rate below this part of the rate of a pinned copy is worth a warning."""
STALLS = 0.25
"""A stall above this part of the copy's time is worth a warning, if the step came after work that is longer than the copy."""
STALL_S_LEAST = 1e-3
"""Below this, no stall matters."""
PLACE = "checkpointd-selftest"


def accelerator() -> torch.device:
    """The device to test. UsageError if torch sees none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise UsageError(
            f"there is no accelerator to test: torch {torch.__version__} sees none on this machine. "
            "Run it on a machine that has one, with the torch of your training environment, or leave out --device"
        )
    return torch.device(found.type, 0)


def examine(
    device_bytes: int | None = None, directory: str | None = None, late: Callable[[Work], Late] = LateByWork
) -> DeviceReport:
    """Test the accelerator with at most `device_bytes` of its memory.

    `directory`: where checkpoints are written meanwhile, in a new directory that is removed afterwards. `late`: makes work of
    the device late. UsageError if there is no accelerator.
    """
    device = accelerator()
    torch.accelerator.set_device_index(device)
    nbytes = device_bytes or min(BYTES_MOST, (facts.free_bytes(device) or 4 * BYTES_UNKNOWN) // 4)
    if nbytes < BYTES_LEAST:
        raise UsageError(f"{byte_size(nbytes)} of device memory are too little for the test: it needs {byte_size(BYTES_LEAST)}")
    clock = Clock(device)
    work = Work(clock, nbytes // 8)
    directory = directory or f"{tempfile.gettempdir()}/{PLACE}-{os.getuid()}"
    try:
        with scratch(directory) as place:
            examiner = _Examiner(clock, work, late(work), nbytes, place)
            findings = tuple(examiner.findings())
    except OSError as error:
        raise UsageError(f"{directory} cannot hold checkpoints ({error}): set TMPDIR to a directory that can") from error
    return DeviceReport(facts=facts.facts(device, clock.name), figures=tuple(examiner.figures), findings=findings)


@dataclass
class _Examiner:
    clock: Clock
    work: Work
    late: Late
    nbytes: int
    place: str
    figures: list[Figure] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def findings(self) -> Iterator[Finding]:
        yield finding("accelerator", "ok", f"{self.device.type}, {torch.accelerator.device_count()} of them")
        proofs = Proofs(self.device, self._part(32), self.place, self.late)
        for check, make in (
            ("pinning", proofs.pinning),
            ("staging", proofs.staging),
            ("checksums", proofs.checksums),
            ("loading", proofs.loading),
            ("dtypes", self._dtypes),
            ("shapes", self._shapes),
            ("devices", self._devices),
            ("generators", self._generators),
            ("speed", self._speed),
        ):
            yield from each_made(check, make)

    def _dtypes(self) -> Iterator[Finding]:
        state, missing = content.of_every_dtype(self.device)
        without = f"; not here: {', '.join(missing)}" if missing else ""
        yield ok_if_same("dtypes", content.differences(f"{self.place}/dtypes", state), f"{len(state)} dtypes{without}")

    def _shapes(self) -> Iterator[Finding]:
        state = content.of_every_shape(self.device)
        yield ok_if_same("shapes", content.differences(f"{self.place}/shapes", state), ", ".join(state))

    def _devices(self) -> Iterator[Finding]:
        every = content.all_like(self.device)
        if len(every) < 2:
            yield finding("devices", "note", "there is one device, so a state on several was not tested")
            return
        state = {f"{name} on {one}": tensor for one in every for name, tensor in content.of_every_shape(one).items()}
        yield ok_if_same("devices", content.differences(f"{self.place}/devices", state), f"a state on {len(every)} devices")

    def _generators(self) -> Iterator[Finding]:
        if not hasattr(torch.get_device_module(self.device.type), "get_rng_state"):
            yield finding("generators", "note", "torch cannot read the state of this device's random number generators")
        elif content.generators_go_on(f"{self.place}/generators", content.all_like(self.device)):
            yield finding("generators", "ok", "random numbers go on where they were")
        else:
            advice = f"training does not resume exactly: {REPORT}"
            yield finding("generators", "fail", "random numbers differ after a load", advice)

    def _speed(self) -> Iterator[Finding]:
        copy = rates.copy_rates(self.clock, self._part(8), RUNS)
        state = rates.parameters(self._part(4), 16, self.device)
        nbytes = rates.bytes_of(state)
        place = f"{self.place}/speed"
        with Checkpointer(place, compression="none", retention=1, read_back=False, on_no_progress="ignore") as checkpointer:
            cost = rates.Saving(checkpointer, state, self.clock, self.work).median(RUNS)
            load_bps = nbytes / rates.load_s(checkpointer, state, self.device)
        staging_bps = nbytes / cost.staging_s
        self.figures += [
            Figure("copy into memory pinned as the arena is", copy.arena_bps, "B/s"),
            Figure("copy into memory pinned by torch", copy.pinned_bps, "B/s"),
            Figure("copy into plain memory", copy.plain_bps, "B/s"),
            Figure(f"staging of {byte_size(nbytes, '')}", staging_bps, "B/s"),
            Figure("load, from the page cache", load_bps, "B/s"),
            Figure("call of save()", cost.call_s, "s"),
            Figure("wait of a step right after save()", cost.staging_s, "s"),
            Figure("wait of a step after work that is longer than the copy", cost.stall_s, "s"),
        ]
        part, stall = staging_bps / copy.arena_bps, cost.stall_s / cost.staging_s
        advice = f"run it again on a quiet machine; if it stays so: {REPORT}"
        seen = f"{part:.0%} of the rate of a pinned copy"
        yield finding("staging-rate", "warn", seen, advice) if part < SLOW else finding("staging-rate", "ok", seen)
        seen = f"a step after enough work waits for {stall:.0%} of the copy's time"
        stalls = stall > STALLS and cost.stall_s > STALL_S_LEAST
        yield finding("stall", "warn", seen, advice) if stalls else finding("stall", "ok", seen)

    def _part(self, of: int) -> int:
        """That part of the memory that may be used, in whole pages."""
        return max(self.nbytes // of // 4096, 1) * 4096
