"""Mistakes in staging and loading, each a change of one line of the product, and what shows them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from checkpointd_client.restore import uploads
from checkpointd_client.restore.uploads import _DeviceUploads as DeviceUploads
from checkpointd_client.staging import device_snapshot
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.device_snapshot import DeviceSnapshot


@dataclass(frozen=True)
class Mistake:
    """`line`, which stands once in the source of the function `name` of `owner`, becomes `instead`."""

    owner: Any
    name: str
    line: str
    instead: str
    schedule: str
    """The schedule under which it shows every time."""
    lingers: bool = False
    """Whether the schedule lasts after the step, for the save to end too early, until the stager waits for the device."""
    gathered: bool = True
    """Whether the tensors are gathered. Otherwise they are copied directly."""
    steps: bool = True
    """Whether an optimizer steps between the two snapshots."""
    late: bool = False
    """Whether the stager's thread begins only after the step."""
    patience_ms: int = -1
    """How long a wait for a stream that the schedule holds lasts; -1: until the schedule ends."""
    mended: bool = False
    """Whether the checksums make up for it: to read them, the stager waits for everything on the side stream."""
    also: tuple[str, str] | None = None
    """Another line that is changed with it, and what it becomes."""

    @contextmanager
    def made(self) -> Iterator[None]:
        right = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self._wrong(right))
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)

    def _wrong(self, right: Callable[..., object]) -> object:
        source = textwrap.dedent(inspect.getsource(right))
        for line, instead in ((self.line, self.instead), *([self.also] if self.also else [])):
            assert source.count(line) == 1, f"{line!r} stands {source.count(line)} times in {self.name}"
            source = source.replace(line, instead)
        source = "from __future__ import annotations\n" + source
        home = self.owner if isinstance(self.owner, ModuleType) else inspect.getmodule(self.owner)
        found: dict[str, object] = {}
        exec(compile(source, f"<{self.name} with a mistake>", "exec"), vars(home), found)
        return found[self.name]


AHEAD, BEHIND = "copies ahead", "compute ahead"
STAGING: dict[str, Mistake] = {
    "the step does not wait for the copy": Mistake(
        DeviceSnapshot,
        "fence",
        "torch.accelerator.current_stream(self.device).wait_event(self._copied)",
        "pass",
        BEHIND,
        gathered=False,
    ),
    "the step does not wait until the copies are queued": Mistake(
        DeviceSnapshot, "fence", "self.queue()", "pass", BEHIND, gathered=False, late=True
    ),
    "the copy does not wait for the computation": Mistake(
        DeviceSnapshot, "_queue_copies", "side.wait_event(saved)", "pass", AHEAD
    ),
    "the copy waits for the computation, but not for the clones": Mistake(
        DeviceSnapshot,
        "save",
        "    self._saved = torch.Event(self.device)\n    self._saved.record(compute)",
        "    self._saved = early",
        AHEAD,
        also=(
            "    if last is not None:",
            "    early = torch.Event(self.device)\n    early.record(compute)\n    if last is not None:",
        ),
    ),
    "the clones are freed before they are copied": Mistake(
        DeviceSnapshot,
        "_queue_copies",
        "self._copied = self._recorded()",
        "self._copied, self._sources = self._recorded(), []",
        BEHIND,
        gathered=False,
    ),
    "buffers are not cloned": Mistake(
        device_snapshot, "cloned", "source = bits(tensor.detach()).clone()", "pass", BEHIND, gathered=False
    ),
    "the snapshot is called whole before its copies are done": Mistake(
        DeviceSnapshot, "synchronize", "self._wait_for(self._copied)", "pass", BEHIND, lingers=True, mended=True
    ),
    "the event is recorded before the copies": Mistake(
        DeviceSnapshot,
        "_queue_copies",
        "self._copied = self._recorded()",
        "self._copied = early",
        BEHIND,
        gathered=False,
        also=(
            "        self._copy_direct(urgent=False)",
            "        early = self._recorded()\n        self._copy_direct(urgent=False)",
        ),
    ),
    "the scratch memory is filled again before it is copied": Mistake(
        DeviceSnapshot, "let_scratch_go", "compute.wait_event(last)", "pass", BEHIND, steps=False
    ),
    "the scratch memory is filled again before its copy is queued": Mistake(
        DeviceSnapshot, "let_scratch_go", "self.queue()", "pass", BEHIND, late=True, steps=False
    ),
    "the arena is not pinned": Mistake(
        Slot,
        "pin",
        "self._pinning, self._pinned_on = pinning, torch.accelerator.current_device_index()",
        "pinning.unregister(self.buffer.ctypes.data)",
        BEHIND,
        patience_ms=100,
    ),
}
LOADING: dict[str, Mistake] = {
    "the copies do not wait for what the caller had queued": Mistake(
        DeviceUploads, "_grow", "self._side.wait_stream(self._caller)", "pass", AHEAD
    ),
    "the copies run on the stream of the thread that reads": Mistake(
        DeviceUploads, "_copy_piece", "with devices.on_stream(self._side), torch.no_grad():", "with torch.no_grad():", AHEAD
    ),
    "nothing waits for the copies": Mistake(
        DeviceUploads,
        "_finish",
        "self._caller.wait_stream(self._side)\n        self._side.synchronize()",
        "pass",
        BEHIND,
    ),
    "the load returns before it knows of errors": Mistake(DeviceUploads, "_finish", "self._side.synchronize()", "pass", BEHIND),
    "a block is filled again before its copies are done": Mistake(
        DeviceUploads, "_reuse", "event.synchronize()", "pass", BEHIND
    ),
    "the event of a block is recorded on the caller's stream": Mistake(
        DeviceUploads, "_record", "event.record(self._side)", "event.record(self._caller)", BEHIND
    ),
    "blocks are unpinned before their copies are done": Mistake(
        DeviceUploads, "end", "self._finish()", "[block.free() for block in self._blocks], self._finish()", BEHIND
    ),
    "device memory for strided tensors is made on another stream": Mistake(
        uploads,
        "_queue",
        "row = empty(part.shape, part.dtype, part.device)",
        "with devices.on_stream(torch.Stream(part.device)): row = empty(part.shape, part.dtype, part.device)",
        BEHIND,
    ),
    "memory that is not pinned is copied as if it were": Mistake(
        DeviceUploads, "_copy_piece", "non_blocking=block.is_pinned", "non_blocking=True", BEHIND
    ),
}
