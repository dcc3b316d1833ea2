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
from checkpointd_client.staging import stager
from checkpointd_client.staging.arena import Slot


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
        assert source.count(self.line) == 1, f"{self.line!r} stands {source.count(self.line)} times in {self.name}"
        source = "from __future__ import annotations\n" + source.replace(self.line, self.instead)
        home = self.owner if isinstance(self.owner, ModuleType) else inspect.getmodule(self.owner)
        found: dict[str, object] = {}
        exec(compile(source, f"<{self.name} with a mistake>", "exec"), vars(home), found)
        return found[self.name]


AHEAD, BEHIND = "copies ahead", "compute ahead"
STAGING: dict[str, Mistake] = {
    "the step does not wait for the copy": Mistake(
        stager.Staging, "fence", "torch.accelerator.current_stream(device).wait_event(event)", "pass", BEHIND
    ),
    "the copy does not wait for the computation": Mistake(
        stager.Stager, "_copy_from", "side.wait_stream(compute)", "pass", AHEAD
    ),
    "the copy waits for the computation, but not for the clones": Mistake(
        stager.Stager,
        "_copy_from",
        "compute = torch.accelerator.current_stream(where)\n"
        "    side = self._streams.setdefault(where, torch.Stream(where))\n"
        '    still = self.mode == "eager"\n'
        "    sources, waits = unchanging([(leaf.tensor, leaf.optimizer_only or still) for leaf, _ in pairs])\n"
        "    # If these were freed before the copy is done, the allocator could give their memory to the current stream.\n"
        "    staging._held.extend(sources)\n"
        "    side.wait_stream(compute)\n",
        "compute = torch.accelerator.current_stream(where)\n"
        "    side = self._streams.setdefault(where, torch.Stream(where))\n"
        "    side.wait_stream(compute)\n"
        '    still = self.mode == "eager"\n'
        "    sources, waits = unchanging([(leaf.tensor, leaf.optimizer_only or still) for leaf, _ in pairs])\n"
        "    staging._held.extend(sources)\n",
        AHEAD,
    ),
    "the clones are freed before they are copied": Mistake(
        stager.Stager, "_copy_from", "staging._held.extend(sources)", "pass", BEHIND
    ),
    "buffers are not cloned": Mistake(stager, "unchanging", "source = tensor.detach().clone()", "pass", BEHIND),
    "the snapshot is called whole before its copies are done": Mistake(
        stager.Staging, "finish", "event.synchronize()", "pass", BEHIND, linger_s=5.0
    ),
    "the event is recorded on the stream of the computation": Mistake(
        stager.Stager, "_copy_from", "event.record(side)", "event.record(compute)", BEHIND
    ),
    "the event is recorded before the copies": Mistake(
        stager.Stager,
        "_copy_from",
        "        for source, (_, target) in zip(sources, pairs, strict=True):\n"
        "            bits(target).copy_(bits(source), non_blocking=True)\n"
        "        event = torch.Event(where)\n"
        "        event.record(side)\n",
        "        event = torch.Event(where)\n"
        "        event.record(side)\n"
        "        for source, (_, target) in zip(sources, pairs, strict=True):\n"
        "            bits(target).copy_(bits(source), non_blocking=True)\n",
        BEHIND,
    ),
    "the arena is not pinned": Mistake(
        Slot, "pin", "self._pinning = pinning", "pinning.unregister(self.buffer.ctypes.data)", BEHIND
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
