"""Times of work on a device: by the device's own events where torch can time them, otherwise by the host's clock."""

from __future__ import annotations

import threading
import time

import torch


class Mark:
    """A moment on a stream."""

    def __init__(self, event: torch.Event, timed: bool) -> None:
        self.event = event
        self._thread: threading.Thread | None = None
        self.at = time.perf_counter()
        """When the stream got there, by the host's clock. Final after `wait`."""
        if not timed and not event.query():
            self._thread = threading.Thread(target=self._watch, name="checkpointd-mark", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        self.event.synchronize()
        self.at = time.perf_counter()

    def wait(self) -> None:
        """Return when the stream has got there."""
        self.event.synchronize()
        if self._thread is not None:
            self._thread.join()


class Clock:
    """Measures time on the streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timed = _can_time(device)

    @property
    def name(self) -> str:
        """How it measures, in words."""
        return "events of the device" if self._timed else "the host's clock"

    def mark(self) -> Mark:
        """A mark behind everything that is queued on the current stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return Mark(event, self._timed)

    def seconds(self, first: Mark, last: Mark) -> float:
        """The time from one mark to the other, above zero. Waits until the device has reached both."""
        first.wait()
        last.wait()
        if self._timed:
            return max(float(first.event.elapsed_time(last.event)) / 1e3, 1e-9)
        return max(last.at - first.at, 1e-9)


def _can_time(device: torch.device) -> bool:
    stream = torch.accelerator.current_stream(device)
    try:
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record(stream)
        last.record(stream)
        last.synchronize()
        first.elapsed_time(last)
    except (RuntimeError, NotImplementedError):
        return False
    return True
