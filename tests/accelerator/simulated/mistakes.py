"""Mistakes in staging and loading, each a change of one line of the product, and what shows them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from checkpointd_client.restore import sinks
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
    linger_s: float = 0.0
    """How long the schedule lasts after the step, for the save to end too early."""
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
        "self._copied = copied",
        "self._copied, self._sources = copied, []",
        BEHIND,
        gathered=False,
    ),
    "buffers are not cloned": Mistake(
        device_snapshot, "unchanging", "source = bits(tensor.detach()).clone()", "pass", BEHIND, gathered=False
    ),
    "the snapshot is called whole before its copies are done": Mistake(
        DeviceSnapshot, "synchronize", "self._copied.synchronize()", "pass", BEHIND, linger_s=5.0, mended=True
    ),
    "the event is recorded before the copies": Mistake(
        DeviceSnapshot,
        "_queue_copies",
        "        copied = torch.Event(self.device)\n        copied.record(side)",
        "        copied = early",
        BEHIND,
        gathered=False,
        also=(
            "        for (i, _), source in zip",
            "        early = torch.Event(self.device)\n        early.record(side)\n        for (i, _), source in zip",
        ),
    ),
    "the scratch memory is filled again before it is copied": Mistake(
        DeviceSnapshot, "let_scratch_go", "compute.wait_event(self._gathered)", "pass", BEHIND, steps=False
    ),
    "the scratch memory is filled again before its copy is queued": Mistake(
        DeviceSnapshot, "let_scratch_go", "self.queue()", "pass", BEHIND, late=True, steps=False
    ),
    "the arena is not pinned": Mistake(
        Slot, "pin", "self._pinning = pinning", "pinning.unregister(self.buffer.ctypes.data)", BEHIND, patience_ms=100
    ),
}
LOADING: dict[str, Mistake] = {
    "contiguous tensors are filled on the reader's own stream": Mistake(
        sinks, "_into_flat", "with ordered(), torch.no_grad():", "with torch.no_grad():", ""
    ),
    "strided tensors are filled on the reader's own stream": Mistake(
        sinks._Gathering, "__call__", "with self._ordered(), torch.no_grad():", "with torch.no_grad():", ""
    ),
    "parts of tensors are filled on the reader's own stream": Mistake(
        sinks, "_into_view", "with ordered(), torch.no_grad():", "with torch.no_grad():", ""
    ),
    "parts that are converted are filled on the reader's own stream": Mistake(
        sinks, "_converting", "with ordered(), torch.no_grad():", "with torch.no_grad():", ""
    ),
}
