"""What the simulated disk and the simulated bucket have in common: the processes that use them, and the effects that they have.

`simdisk.py` and `simbucket.py` state what may happen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from checkpointd.testing.simloop import Process, SimLoop


class Effect(NamedTuple):
    """One change of the storage: number from 1, virtual time in seconds, process, kind, path or key, and `size` in bytes."""

    number: int
    time_s: float
    process: str
    kind: str
    path: str
    size: int = 0

    def __str__(self) -> str:
        size = f" {self.size} B" if self.size else ""
        return f"{self.number:5d} {self.time_s:11.6f} s  {self.process:12} {self.kind:9} {self.path}{size}"


class SimStorage:
    """The storage of one simulated run, shared by its processes. Made inside the run, on its SimLoop."""

    def __init__(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimLoop):
            raise RuntimeError(f"a simulated {name} lives on a SimLoop: use simloop.run")
        self.loop = loop
        self.rng = random.Random(f"{name} {loop.seed}")
        self.trace: list[Effect | str] = []
        self.effects = 0
        self.after: Callable[[Effect, bool], None] = lambda _effect, _done: None
        """Called just after each effect with the effect and whether it changed anything."""
        self._alive: dict[str, Process] = {}

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.note(f"kill {name}")
        self._alive.pop(name).kill()

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self.note(f"pause {name}")
        self._alive[name].pause()

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.note(f"resume {name}")
        self._alive[name].resume()

    def alive(self) -> list[str]:
        """The processes that were not killed, in the order of their start."""
        return list(self._alive)

    def power_cut(self) -> None:
        """Kill all processes."""
        self.note("power cut")
        for process in self._alive.values():
            process.kill()
        self._alive.clear()

    def lost_s(self, name: str) -> float:
        """How much of its time the process `name` has lost to repetitions of its calls."""
        return 0.0

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"      {self.loop.time():11.6f} s  -- {text}")

    def story(self, lines_max: int = 200) -> str:
        """The end of the trace, for the message of a failure."""
        return "\n".join(str(line) for line in self.trace[-lines_max:])

    def record(self, process: str, kind: str, path: str, size: int) -> Effect:
        self.effects += 1
        effect = Effect(self.effects, self.loop.time(), process, kind, path, size)
        self.trace.append(effect)
        return effect

    def _new_process(self, name: str) -> Process:
        """A new process. It may take the name of a dead one."""
        self._alive[name] = process = self.loop.process(name)
        return process
