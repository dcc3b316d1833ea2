"""The simulated device: importing this module builds it once and registers it with torch as `torch.device("sim")`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch.utils import cpp_extension

SOURCES = sorted((Path(__file__).parent / "device").iterdir())
DEVICES = 2


def _built() -> Path:
    """The folder of this build: another one for each torch, checkout and version of the sources, which would be built anew."""
    content = hashlib.sha256(f"{torch.__version__} {torch.__file__} {__file__}".encode())
    for path in SOURCES:
        content.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "checkpointd-tests" / f"sim-{content.hexdigest()[:16]}"


def _load() -> None:
    folder = _built()
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "sim_device",
        [str(path) for path in SOURCES if path.suffix == ".cpp"],
        build_directory=str(folder),
        extra_cflags=["-O1", "-g0", "-Wno-attributes"],
        is_python_module=False,
    )


class _Module(ModuleType):
    """torch.sim: what torch asks of a backend's module."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    device_count = staticmethod(lambda: DEVICES)
    current_device = staticmethod(lambda: torch.accelerator.current_device_index())
    set_device = staticmethod(lambda device: torch.accelerator.set_device_index(device))
    Stream = staticmethod(lambda device=None, priority=0: torch.Stream(torch.device(device or "sim"), priority=priority))
    Event = staticmethod(lambda: torch.Event(torch.device("sim")))
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(device))
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize(device))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        """The current stream in this block. (`with stream` does the same from torch 2.7 on.)"""
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    def get_rng_state(device: int | str | torch.device = "sim") -> torch.Tensor:
        return _generator(device).get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: int | str | torch.device = "sim") -> None:
        _generator(device).set_state(state)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(DEVICES):
            _generator(index).manual_seed(seed)


def _generator(device: int | str | torch.device) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.ops.sim.generator(torch.accelerator.current_device_index() if index is None else index)


_load()
torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _Module("torch.sim"))
torch.utils.generate_methods_for_privateuse1_backend()
_ops = torch.ops.sim


# --- schedules --------------------------------------------------------------------------------------------------------

_EAGER, _ONLY, _OTHERS, _CHAOS = range(4)


@contextlib.contextmanager
def _let(mode: int, streams: list[int], patience_ms: int, seed: int = 0) -> Iterator[None]:
    _ops.let(mode, streams, patience_ms, seed)
    try:
        yield
    finally:
        _ops.let(_EAGER, [], -1, 0)


def stalled(*streams: torch.Stream, patience_ms: int = -1) -> contextlib.AbstractContextManager[None]:
    """These streams do not move until the block ends or this thread waits for them. Another thread that waits for them blocks
    until the block ends, or for `patience_ms`.
    """
    return _let(_ONLY, [stream.stream_id for stream in streams], patience_ms)


def only(*streams: torch.Stream, patience_ms: int = -1) -> contextlib.AbstractContextManager[None]:
    """Only these streams move, on every device; the others as `stalled` says."""
    return _let(_OTHERS, [stream.stream_id for stream in streams], patience_ms)


def chaos(seed: int, patience_ms: int = 0) -> contextlib.AbstractContextManager[None]:
    """Streams move at random, while one of them may stand still for long. The same seed gives the same order if one host thread
    enqueues. Another thread that waits for a stream lets this one go on for `patience_ms` before it moves streams itself.
    """
    return _let(_CHAOS, [], patience_ms, seed)


# --- what happened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What the devices have done since the process began; see `since`."""

    launches: int
    """Kernels and copies."""
    read_bytes: int
    """By kernels; copies are not counted."""
    copies_down: int
    bytes_down: int
    copies_up: int
    bytes_up: int
    unpinned: int
    """Copies that were to be asynchronous and could not be, since the host's memory was not pinned."""
    forced: int
    """How often this host thread waited for a stream that was held."""
    pending: int
    """Work that is queued now."""
    in_use: int
    """Bytes of device memory now."""
    peak: int
    pinned: int
    """Bytes of host memory that are pinned now."""
    launched_here: int
    """Launches by the calling thread."""

    def since(self, before: Counts) -> Counts:
        """The difference, but for what is now: `pending`, `in_use`, `peak` and `pinned`."""
        now = {"pending", "in_use", "peak", "pinned"}
        return Counts(**{k: v if k in now else v - getattr(before, k) for k, v in vars(self).items()})


def counts() -> Counts:
    return Counts(*_ops.counts())


@contextlib.contextmanager
def races() -> Iterator[list[str]]:
    """Check every access in this block, and collect the races."""
    found: list[str] = []
    _ops.check_races(True)
    try:
        yield found
    finally:
        found.extend(_ops.races())
        _ops.check_races(False)


def host_touches(tensor: torch.Tensor, *, writes: bool, what: str) -> None:
    """Tell the check that the host reads or writes this host tensor now: it cannot see that by itself."""
    _ops.host_touches(tensor.data_ptr(), tensor.nbytes, writes, what)


def spare_freed_memory() -> None:
    """From now on freed memory is filled with 0xDB when it is taken again, not when it is freed.

    FSDP2 needs this. It frees gradients, which belong to a stream of its own, while another stream still reads them, and lets
    its stream wait before it allocates again.
    """
    _ops.spare_freed(True)


# --- faults and bounds ------------------------------------------------------------------------------------------------

Fault = Literal["copy", "half_copy", "kernel", "allocation"]


@contextlib.contextmanager
def failing(what: Fault, after: int = 0) -> Iterator[None]:
    """The next one, or the one after so many, fails: a "copy" and an "allocation" at the call, a "half_copy" (after half of its
    bytes) and a "kernel" when the stream gets there, which shows at the host's next wait.
    """
    _ops.fault(what, after)
    try:
        yield
    finally:
        _ops.fault(what, -1)


_NO_LIMIT = (1 << 63) - 1


@contextlib.contextmanager
def limited(*, device_bytes: int = _NO_LIMIT, pinned_bytes: int = _NO_LIMIT) -> Iterator[None]:
    """Bound the memory of each kind in this block."""
    _ops.limit(device_bytes, pinned_bytes)
    try:
        yield
    finally:
        _ops.limit(_NO_LIMIT, _NO_LIMIT)


def host_register(address: int, nbytes: int) -> int:
    """Pin host memory, as cudaHostRegister does; 0 where that worked."""
    try:
        _ops.host_register(address, nbytes)
    except RuntimeError:
        return 2
    return 0


def host_unregister(address: int) -> int:
    _ops.host_unregister(address)
    return 0
