"""Proofs that checkpointd waits where it must, and nowhere else. Each proof also makes a mistake, which should show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

import torch

from checkpointd.doctor.finding import Finding
from checkpointd_client import Checkpointer, devices
from checkpointd_client.selftest import steps
from checkpointd_client.selftest.host_memory import registered
from checkpointd_client.selftest.lateness import Late
from checkpointd_client.selftest.results import REPORT, finding, ok_if_provoked
from checkpointd_client.selftest.scenes import Loading, Product, Training
from checkpointd_client.selftest.waiting import copy_waits, waits

ROUNDS = 3

Play = Callable[[steps.Mistake | None, AbstractContextManager[float]], str]
"""Plays a scene, with a mistake or without, while some work is late. Returns what is wrong with the result."""


@dataclass(frozen=True)
class Proofs:
    """Proofs on `device`, with tensors of `nbytes`. `place`: a directory for checkpoints."""

    device: torch.device
    nbytes: int
    place: str
    late: Late

    def pinning(self) -> Iterator[Finding]:
        """Whether copies into registered memory return at once, and whether copies into plain memory wait."""
        with registered(self.nbytes, self.device) as host:
            code, pinned = host.code, host.memory.is_pinned()
        if code is None:
            advice = "the step after a save waits for its copies; if you know a call that pins memory here, open an issue"
            yield finding("pinning", "warn", f"checkpointd knows no call that pins host memory for {self.device.type}", advice)
        elif code:
            advice = "allow two snapshots of locked memory (ulimit -l); until then the step after a save waits for its copies"
            yield finding("pinning", "warn", f"the driver refuses to pin host memory: error {code}", advice)
        else:
            yield self._pinned("Tensor.is_pinned() agrees" if pinned else "Tensor.is_pinned() does not see it")
        waited = copy_waits(self.nbytes, self.late, self.device, pinned=False)
        what = "a copy into plain memory, which waits for the device"
        yield ok_if_provoked("plain-memory", bool(waited), what, "a copy into plain memory waits for the device")

    def _pinned(self, said: str) -> Finding:
        waited = copy_waits(self.nbytes, self.late, self.device, pinned=True)
        if waited:
            seen = f"a copy into registered memory waits for the device; {said}"
            return finding("pinning", "fail", seen, f"registered memory is not pinned: {REPORT}")
        seen = f"a copy into registered memory returns while the device is busy; {said}"
        return ok_if_provoked("pinning", waited is False, "a copy into registered memory while the device is busy", seen)

    def staging(self) -> Iterator[Finding]:
        """Snapshots are of the moment of save(), and save() waits for nothing."""
        training = Training(self.nbytes, self.device)
        with closing(Product(f"{self.place}/staging", training)) as product:
            yield self.call(product)
            wrong = {order: self._first(lambda late: training.snapshots(product, late), order) for order in steps.ORDERS}

        def play(made: steps.Mistake | None, late: AbstractContextManager[float]) -> str:
            return training.snapshots(steps.Steps(training, self.late, made), late)

        for mistake in steps.STAGING:
            yield self._proof(mistake, wrong[mistake.late], play)

    def checksums(self) -> Iterator[Finding]:
        """Whether the device's checksums find a change that torch does not count."""
        training = Training(self.nbytes, self.device)
        found: list[str] = []
        for round_ in range(ROUNDS):
            with Checkpointer(f"{self.place}/sums{round_}", read_back=False, on_no_progress="ignore") as checkpointer:
                found.append(training.changed_unseen(checkpointer, self._late("copies")))
        wrong = [one for one in found if one not in ("thrown away", "right")]
        if wrong:
            yield finding("checksums", "fail", f"a change that torch does not count: {wrong[0]}", f"see the log; {REPORT}")
            return
        seen = (
            f"a save with a change that torch does not count was thrown away in {found.count('thrown away')} of {ROUNDS} rounds"
        )
        yield ok_if_provoked("checksums", "thrown away" in found, "a change that torch does not count", seen)

    def call(self, product: Product) -> Finding:
        """Whether save() and a fence return while the device is busy, so that the arena is really pinned."""

        def save_and_fence() -> None:
            product.take()
            product.checkpointer.fence()

        waited = waits(save_and_fence, self.late, self.device)
        product.taken()
        if waited:
            known = self.device.type in devices.PINNING
            advice = f"the arena is not pinned: {REPORT}" if known else "see pinning"
            return finding("call", "fail" if known else "warn", "save() or the step behind it waits for the device", advice)
        seen = "save() and the step behind it return while the device is busy"
        return ok_if_provoked("call", waited is False, "save() while the device is busy", seen)

    def loading(self) -> Iterator[Finding]:
        """Loads are in order with the caller's stream."""
        loading = Loading(self.nbytes, self.device)
        pinned_bytes = self.nbytes // 4  # so that blocks of pinned memory are used again
        with Checkpointer(f"{self.place}/loading", read_back=False, pinned_bytes=pinned_bytes) as checkpointer:
            loading.save(checkpointer)

            def played(late: AbstractContextManager[float]) -> str:
                return loading.loaded(lambda: loading.load(checkpointer), late)

            wrong = {order: self._first(played, order) for order in steps.ORDERS}

        def play(made: steps.Mistake | None, late: AbstractContextManager[float]) -> str:
            return loading.loaded(steps.LoadSteps(loading, made), late)

        for mistake in steps.LOADING:
            yield self._proof(mistake, wrong[mistake.late], play)

    def _proof(self, mistake: steps.Mistake, product: str, play: Play) -> Finding:
        """The finding of one check. `product`: what is wrong with checkpointd in the scene, or ""."""
        if product:
            return finding(
                mistake.check, "fail", f"checkpointd: {product}", f"do not trust checkpoints of this device: {REPORT}"
            )
        right = self._first(lambda late: play(None, late), mistake.late)
        if right:
            advice = f"the device or its driver does not keep the order of torch's streams and events: {REPORT}"
            return finding(mistake.check, "fail", f"the steps of this check, all of them right, give: {right}", advice)
        shown = sum(bool(play(mistake, self._late(mistake.late))) for _ in range(ROUNDS))
        seen = f"checkpointd is right; {mistake.words} shows in {shown} of {ROUNDS} rounds"
        return ok_if_provoked(mistake.check, shown > 0, mistake.words, seen)

    def _first(self, play: Callable[[AbstractContextManager[float]], str], order: steps.Order) -> str:
        """What is wrong in the first round that fails; "" if all rounds are right."""
        return next(filter(None, (play(self._late(order)) for _ in range(ROUNDS))), "")

    def _late(self, order: steps.Order) -> AbstractContextManager[float]:
        return self.late.compute() if order == "compute" else self.late.copies()
