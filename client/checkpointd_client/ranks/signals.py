"""Notes signals at the moment they come.

Python runs a handler only when the main thread returns from C code, such as a barrier that lasts as long as another rank's
evaluation. But the interpreter writes to its wakeup descriptor at once, and a thread of ours reads it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from types import FrameType

from checkpointd.errors import UsageError

log = logging.getLogger("checkpointd")

ABANDON_S = 5.0
_END = 0
_READ_BYTES = 64


class Arrivals:
    """Calls `note(signal, time)` when one of `numbers` comes, until `close`: from the handler, and from a thread.

    `time` is from `time.monotonic`. `note` may be called several times for one signal, and must take no lock. After it, the
    thread calls `on_noted(signal)`. The handler that was installed before is called as well. Make this on the main thread.
    """

    def __init__(
        self,
        numbers: Collection[signal.Signals],
        note: Callable[[signal.Signals, float], None],
        on_noted: Callable[[signal.Signals], None],
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "preempt_signals needs Checkpointer(...) to be called on the main thread: Python allows signals only there"
            )
        self._note, self._on_noted = note, on_noted
        self._process = os.getpid()
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._reading, True)
        self._thread = threading.Thread(target=self._read, args=(frozenset(numbers),), name="checkpointd-signals", daemon=True)
        self._thread.start()
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._handle)
        _wake(self._writing)
        _leave_to_parent(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(number)]
        if os.getpid() != self._process:
            # A forked child, such as a data loader's worker: it handles the signal as if we had installed nothing.
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._note(signal.Signals(number), time.monotonic())
        self._tell(number)  # if another library has the wakeup descriptor, the thread has not read the signal
        # Python's own handler of SIGINT would raise KeyboardInterrupt, and the loop would miss its last save.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _read(self, numbers: frozenset[signal.Signals]) -> None:
        """Read signals from the descriptor; the thread runs this."""
        while heard := os.read(self._reading, _READ_BYTES):
            for number in heard:
                if number == _END:
                    return
                if number in numbers:
                    self._note(signal.Signals(number), time.monotonic())
                    self._on_noted(signal.Signals(number))

    def _tell(self, number: int) -> None:
        try:
            os.write(self._writing, bytes([number]))
        except BlockingIOError:
            log.debug("the pipe of signals is full: the thread hears of one anyway")

    def close(self) -> None:
        """Put the former handlers back, unless another library has replaced ours, and end the thread."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            _stop_waking(self._writing)
        self._tell(_END)
        self._thread.join(ABANDON_S)
        if not self._thread.is_alive():  # a living thread still tries to tell the other ranks
            os.close(self._reading)
            os.close(self._writing)

    def leave_to_parent(self) -> None:
        """In a forked child: stop writing to the wakeup descriptor, which the parent reads."""
        _stop_waking(self._writing)


def _wake(descriptor: int) -> None:
    """Let Python write every signal to `descriptor`, unless another library, such as asyncio, has set its own."""
    other = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)


def _stop_waking(descriptor: int) -> None:
    now = signal.set_wakeup_fd(-1)
    if now not in {descriptor, -1}:
        signal.set_wakeup_fd(now)


def _leave_to_parent(arrivals: Arrivals) -> None:
    method = weakref.WeakMethod(arrivals.leave_to_parent)

    def leave() -> None:
        call = method()
        if call is not None:
            call()

    os.register_at_fork(after_in_child=leave)
