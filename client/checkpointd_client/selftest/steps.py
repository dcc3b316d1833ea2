"""The steps of staging and loading, each of which can be done wrong.

They are the same steps as in `staging/` and `restore/`, made of torch's streams alone. The selftest never changes checkpointd.
It plays a scene with all of these steps right, and again with one of them wrong. If the mistake shows, the scene would
also show it in checkpointd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from checkpointd_client import devices
from checkpointd_client.selftest.lateness import Late
from checkpointd_client.selftest.scenes import Loading, Training, Values

Order = Literal["compute", "copies"]
ORDERS: tuple[Order, ...] = ("compute", "copies")


@dataclass(frozen=True)
class Mistake:
    """`check`: its stable name. `late`: the work that must be late for it to show."""

    check: str
    words: str
    late: Order


COPY_WAITS = Mistake("copy-waits", "a copy that does not wait for the computation", "compute")
CLONE_WAITS = Mistake("clone-waits", "a copy that waits for the computation, but not for the clone", "compute")
CLONE = Mistake("clone", "a buffer that is not cloned", "copies")
CLONE_KEPT = Mistake("clone-kept", "a clone that is freed before it is copied", "copies")
STEP_WAITS = Mistake("step-waits", "a step that does not wait for the copy", "copies")
EVENT_AFTER = Mistake("event-after-copy", "an event that is recorded before the copies", "copies")
EVENT_STREAM = Mistake("event-on-side-stream", "an event that is recorded on the stream of the computation", "copies")
READ_WAITS = Mistake("read-waits", "a snapshot that is read before its copies are done", "copies")
STAGING = (COPY_WAITS, CLONE_WAITS, CLONE, CLONE_KEPT, STEP_WAITS, EVENT_AFTER, EVENT_STREAM, READ_WAITS)

LOAD_WAITS = Mistake("load-waits", "a load that does not wait for the work that was queued before it", "compute")
LOAD_READ = Mistake("load-then-read", "work behind a load that does not wait for it", "copies")
LOADING = (LOAD_WAITS, LOAD_READ)


@dataclass
class CopiedNet:
    """Host memory that one snapshot of a Net is copied to, the event behind the copies, and the clones that they read."""

    values: Values
    event: torch.Event
    held: list[torch.Tensor]


class Steps:
    """Takes two snapshots of `training` by the steps of staging, one of which may be wrong."""

    def __init__(self, training: Training, late: Late, wrong: Mistake | None) -> None:
        self._training, self._late, self._wrong = training, late, wrong
        self._side = torch.Stream(training.device)
        state = training.net.state_dict()
        # Made before any work is queued: to make pinned memory, drivers may wait for the device.
        self._hosts = [{name: torch.zeros(tensor.shape, pin_memory=True) for name, tensor in state.items()} for _ in range(2)]
        self._taken: list[CopiedNet] = []

    def take(self) -> None:
        """Queue the copies on a side stream."""
        net, wrong, event = self._training.net, self._wrong, torch.Event(self._training.device)
        compute = torch.accelerator.current_stream(self._training.device)
        host = self._hosts[len(self._taken)]
        if wrong is CLONE_WAITS:
            self._side.wait_stream(compute)
        self._late.delay()  # only CLONE_WAITS needs this: a clone takes less time than a copy
        buffers = {name: buffer if wrong is CLONE else buffer.clone() for name, buffer in net.named_buffers()}
        sources = {**buffers, **dict(net.named_parameters())}
        if wrong not in (COPY_WAITS, CLONE_WAITS):
            self._side.wait_stream(compute)
        if wrong is EVENT_AFTER:
            event.record(self._side)
        with devices.on_stream(self._side):
            for name, source in sources.items():
                host[name].copy_(source.detach(), non_blocking=True)
        if wrong is not EVENT_AFTER:
            event.record(compute if wrong is EVENT_STREAM else self._side)
        self._taken.append(CopiedNet(host, event, [] if wrong is CLONE_KEPT else list(buffers.values())))

    def before_step(self) -> None:
        """Make the current stream wait for the copies."""
        if self._wrong is not STEP_WAITS:
            for snapshot in self._taken:
                torch.accelerator.current_stream(self._training.device).wait_event(snapshot.event)

    def taken(self) -> list[Values]:
        """What was copied."""
        if self._wrong is not READ_WAITS:
            for snapshot in self._taken:
                snapshot.event.synchronize()
        return [{name: tensor.clone() for name, tensor in snapshot.values.items()} for snapshot in self._taken]


class LoadSteps:
    """Fills the targets of `loading` by the steps of a load, one of which may be wrong."""

    def __init__(self, loading: Loading, wrong: Mistake | None) -> None:
        self._loading, self._wrong = loading, wrong
        self._side = torch.Stream(loading.device)
        self._values = {name: loading.values.to(target.dtype).pin_memory() for name, target in loading.targets.items()}

    def __call__(self) -> None:
        """Copy from pinned memory on a side stream, behind the current one, and make the current stream wait."""
        current = torch.accelerator.current_stream(self._loading.device)
        if self._wrong is not LOAD_WAITS:
            self._side.wait_stream(current)
        with devices.on_stream(self._side):
            for name, target in self._loading.targets.items():
                target.copy_(self._values[name], non_blocking=True)
        if self._wrong is not LOAD_READ:
            current.wait_stream(self._side)
