"""A deterministic event loop: virtual time, a seeded choice among ready callbacks, and processes that can be killed and paused.

Invariants
  SIMLOOP-1  The same seed and the same coroutine run the same callbacks in the same order, without a clock, socket or thread.
  SIMLOOP-2  Time moves only when no callback is ready, and then to the next timer: a run never sleeps.
  SIMLOOP-3  Any ready callback may be next. asyncio promises first-in first-out order; code that relies on it fails here, on
      purpose.
  SIMLOOP-4  A killed process runs no further callback. A paused one runs none until it is resumed; its timers may then be
      overdue.
  SIMLOOP-5  A run always ends: in a deadlock, or past its bounds of virtual time and callbacks, it raises StuckError.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
import threading
from asyncio import events
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TIME_MAX_S = 7 * 24 * 3600.0
CALLBACKS_MAX = 5_000_000
EXECUTOR_DELAY_S_MAX = 0.005
_UNWIND_ROUNDS_MAX = 100
_TASKS_KEPT_MAX = 1000


class StuckError(AssertionError):
    """A simulated run cannot end; the message names the seed and the waiting tasks."""


class ProcessState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """A group of tasks that live and die together. Made by `SimLoop.process`."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self._loop = loop
        self._parked: list[_Callback] = []
        self._on_death: list[Callable[[], None]] = []

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `coro`, and every task that it starts, as part of this process."""
        context = copy_context()
        context.run(_PROCESS.set, self)
        return self._loop.create_task(coro, name=f"{self.name}: {name or getattr(coro, '__name__', 'task')}", context=context)

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call `callback` when this process is killed. It stands for the kernel's cleaning up."""
        self._on_death.append(callback)

    def kill(self) -> None:
        """SIGKILL: none of its callbacks runs any more. Its tasks stay pending until the loop ends."""
        if self.state is ProcessState.DEAD:
            return
        self.state = ProcessState.DEAD
        for callback in self._on_death:
            callback()

    def pause(self) -> None:
        """SIGSTOP."""
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.PAUSED

    def resume(self) -> None:
        """SIGCONT."""
        if self.state is ProcessState.PAUSED:
            self.state = ProcessState.RUNNING
            self.release()

    def park(self, callback: _Callback) -> None:
        self._parked.append(callback)

    def release(self) -> None:
        """Give the parked callbacks back to the loop."""
        parked, self._parked = self._parked, []
        for callback in parked:
            self._loop.ready(callback)


class _Callback(asyncio.TimerHandle):
    """A call of `function`, when its turn or its time has come, and the process to which it belongs. It has all that the loop
    needs of a handle, without asyncio's: a run makes ten thousand.
    """

    __slots__ = ("arguments", "at", "function", "inside", "is_cancelled", "process")

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...], inside: Context, at: float = 0.0) -> None:
        self.function, self.arguments, self.inside, self.at = function, arguments, inside, at
        self.process = inside.get(_PROCESS)
        self.is_cancelled = False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Answer(NamedTuple, Generic[T]):
    """What `future` gets when its time comes."""

    future: asyncio.Future[T]
    result: T


_PROCESS: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def current_process() -> Process | None:
    """The process that the running task belongs to."""
    return _PROCESS.get()


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one simulated run. Calls that need threads, sockets or signals raise NotImplementedError."""

    def __init__(self, seed: int, *, time_max_s: float = TIME_MAX_S, callbacks_max: int = CALLBACKS_MAX) -> None:
        self.seed = seed
        self.rng = random.Random(f"loop {seed}")
        self._random = self.rng.random
        self.closing = False
        """True while the remaining tasks are cancelled: the run is over, and must have no more effects."""
        self.faults: list[dict[str, Any]] = []
        """Errors that no task awaited, as the exception handler received them."""
        self._time = 0.0
        self._time_max_s = time_max_s
        self._callbacks_left = callbacks_max
        self._ready: list[_Callback] = []
        self._timers: list[tuple[float, int, _Callback | _Answer[Any]]] = []
        self._timers_made = 0
        # Strong references: only this set refers to the tasks of a dead process, and they must not be collected.
        self._tasks: list[asyncio.Task[Any]] = []
        self._on_threads: set[asyncio.Future[Any]] = set()
        """The work that was given to threads. That of a killed process never ends by itself."""
        self._processes: list[Process] = []
        self._thread = threading.get_ident()
        self._running = False
        self._closed = False

    # --- processes ---------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """A new process. It may have the name of a dead one."""
        if any(p.name == name and p.state is not ProcessState.DEAD for p in self._processes):
            raise ValueError(f"process {name!r} is still alive")
        process = Process(name, self)
        self._processes.append(process)
        return process

    # --- scheduling --------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._time

    def ready(self, callback: _Callback) -> None:
        self._ready.append(callback)

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        handle = _Callback(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a simulated run has one thread: use run_in_executor, which runs inline here")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Callback(callback, args, copy_context() if context is None else context, when)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def answer_later(self, delay: float, future: asyncio.Future[T], result: T) -> asyncio.Future[T]:
        """Give `future` its result after `delay` seconds, unless it is done by then. It belongs to no process."""
        self._timers_made += 1
        heapq.heappush(self._timers, (self._time + delay, self._timers_made, _Answer(future, result)))
        return future

    def elapse(self, delay: float) -> asyncio.Future[None]:
        """As `asyncio.sleep`, in fewer steps: whoever awaits this is ready at once when the time comes."""
        return self.answer_later(delay, self.create_future(), None)

    def _advance(self) -> bool:
        """Move the time to the next timer, make due callbacks ready and give due answers; False if there is no timer. A
        cancelled timer is dropped when its time comes.
        """
        timers, ready = self._timers, self._ready
        while timers and not ready:
            when, _, timer = heapq.heappop(timers)
            if isinstance(timer, _Callback):
                if timer.is_cancelled or (timer.process is not None and timer.process.state is ProcessState.DEAD):
                    continue
            elif timer.future.done():
                continue
            self._time = max(self._time, when)
            self._due(timer)
            while timers and timers[0][0] <= self._time:
                self._due(heapq.heappop(timers)[2])
        return bool(ready)

    def _due(self, timer: _Callback | _Answer[Any]) -> None:
        if isinstance(timer, _Callback):
            self._ready.append(timer)
        elif not timer.future.done():
            timer.future.set_result(timer.result)

    def _run_one(self) -> None:
        ready = self._ready
        if len(ready) > 1:
            chosen = int(self._random() * len(ready))
            ready[chosen], ready[-1] = ready[-1], ready[chosen]
        callback = ready.pop()
        if callback.is_cancelled:
            return
        process = callback.process
        if process is not None and process.state is not ProcessState.RUNNING and not self.closing:
            process.park(callback)
            return
        self._callbacks_left -= 1
        try:
            callback.inside.run(callback.function, *callback.arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"an error in {callback.function!r}", "exception": error})

    # --- running -----------------------------------------------------------------------------------------------

    def run_main(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until `main` is done. StuckError if that is impossible."""
        with self._entered():
            task = self.create_task(main, name="main")
            while not task.done():
                self._check_bounds()
                self._run_one()
            return task.result()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if events._get_running_loop() is not None:
            raise RuntimeError("a simulated run cannot start inside a running event loop: make the test a plain function")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        events._set_running_loop(self)
        self._running = True
        try:
            yield
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(_aclose(generator), name="close an abandoned generator")

    def _check_bounds(self) -> None:
        if not self._ready and not self._advance():
            raise StuckError(self._stuck("nothing is ready and no timer is set"))
        if self._time > self._time_max_s:
            raise StuckError(self._stuck(f"virtual time passed {self._time_max_s:g} s"))
        if self._callbacks_left <= 0:
            raise StuckError(self._stuck("the bound on callbacks is used up"))

    def _stuck(self, why: str) -> str:
        waiting = "\n".join(f"  {task.get_name()}: {_where(task)}" for task in self.pending()) or "  no task"
        stopped = ", ".join(f"{p.name} {p.state}" for p in self._processes if p.state is not ProcessState.RUNNING)
        where = f"seed {self.seed}, at {self._time:.6f} s: {why}"
        return f"{where}; processes not running: {stopped or 'none'}; waiting:\n{waiting}"

    def pending(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done, in the order of their creation."""
        return [task for task in self._tasks if not task.done()]

    def close(self) -> None:
        """Cancel the remaining tasks, let them unwind, and refuse further work."""
        self.closing = True
        with self._entered():
            for _ in range(_UNWIND_ROUNDS_MAX):
                self._unwind()
                if not self.pending():
                    break
        self._closed = True
        if self.pending():
            raise StuckError(self._stuck(f"tasks go on after {_UNWIND_ROUNDS_MAX} cancellations"))
        # weakref.finalize, with this loop as its argument, would keep alive what the loop still holds.
        self._timers.clear()
        self._tasks.clear()

    def _unwind(self) -> None:
        for process in self._processes:
            process.release()
        for waiting in (*self.pending(), *self._on_threads):
            waiting.cancel()
        while self._ready:
            self._run_one()

    # --- the interface of asyncio ---------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # typeshed allows generators as well, for versions before this one
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if len(self._tasks) > _TASKS_KEPT_MAX:
            self.forget_done()
        self._tasks.append(task)
        return task

    def forget_done(self) -> None:
        """Drop finished tasks. A task reports an error now if no other task awaited it."""
        self._tasks = self.pending()

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` inline after a seeded delay. Like the work of a thread, it runs even if no task waits for it any more."""
        future: asyncio.Future[T] = asyncio.Future(loop=self)
        self._on_threads.add(future)
        future.add_done_callback(self._on_threads.discard)
        self.call_later(self.rng.random() * EXECUTOR_DELAY_S_MAX, _run_inline, future, func, args)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.closing:
            self.faults.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed


def run(seed: int, main: Coroutine[Any, Any, T], *, time_max_s: float = TIME_MAX_S, callbacks_max: int = CALLBACKS_MAX) -> T:
    """The result of `main` on a SimLoop of `seed`. Errors have the seed as a note, also those that no task awaited."""
    loop = SimLoop(seed, time_max_s=time_max_s, callbacks_max=callbacks_max)  # type: ignore[abstract]  # no sockets: see the class
    try:
        result = loop.run_main(main)
        loop.forget_done()
        if loop.faults:
            raise _unawaited(loop.faults[0])
    except BaseException as error:
        error.add_note(f"simulated run, seed {seed}, ended at {loop.time():.6f} s")
        raise
    finally:
        loop.close()
    return result


def _unawaited(fault: dict[str, Any]) -> BaseException:
    error = fault.get("exception")
    if not isinstance(error, BaseException):
        return AssertionError(f"a background fault: {fault.get('message')}")
    error.add_note(f"nobody awaited it: {fault.get('message')}")
    return error


async def _aclose(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _run_inline(future: asyncio.Future[T], func: Callable[[*Ts], T], args: tuple[*Ts]) -> None:
    try:
        result = func(*args)
    except BaseException as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not started"
