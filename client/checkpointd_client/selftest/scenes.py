"""Scenes in which a missing wait would show, and how checkpointd itself plays them.

A scene changes a module right before and right after its snapshot, as training does, while some of the queued work runs late.
The snapshot must be of the moment of the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from checkpointd.errors import CheckpointdError
from checkpointd_client import Checkpointer, SaveHandle, devices

Values = dict[str, torch.Tensor]
SMALL = 1024
"""Elements of a tensor that checkpointd gathers with other small ones."""

SPARES = 6
"""Blocks that a scene allocates for each buffer: a clone in each of two snapshots, and two after each."""


class Net(torch.nn.Module):
    """`weight` and `bias` change in `optimizer.step()`, `seen` and `count` in the forward pass."""

    seen: torch.Tensor
    count: torch.Tensor

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        large = max(nbytes // 4, 1)
        self.weight = torch.nn.Parameter(torch.ones(large, device=device))
        self.bias = torch.nn.Parameter(torch.ones(SMALL, device=device))
        self.register_buffer("seen", torch.ones(large, device=device))
        self.register_buffer("count", torch.ones(SMALL, device=device))


class SnapshotTaker(Protocol):
    """Takes snapshots of a Net."""

    def take(self) -> None:
        """Begin a snapshot; it is of this moment."""
        ...

    def before_step(self) -> None:
        """Make the current stream wait until the parameters may change."""
        ...

    def taken(self) -> list[Values]:
        """What the snapshots since the last call hold, in host memory. Waits until they are whole."""
        ...


class Training:
    """A Net and its optimizer on `device`, with large tensors of `nbytes` each."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.nbytes = device, nbytes
        self.net = Net(nbytes, device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)

    @property
    def state(self) -> dict[str, Any]:
        """For `Checkpointer.save` and `load`."""
        return {"net": self.net, "optimizer": self.optimizer}

    def snapshots(self, taker: SnapshotTaker, late: AbstractContextManager[float]) -> str:
        """Take two snapshots while some work is late. Returns what is wrong with them, or "" if each is of its moment."""
        every = list(self.net.state_dict().values())
        with torch.no_grad():
            for tensor in every:
                tensor.fill_(1)
            self._spare_memory()
        torch.accelerator.synchronize(self.device)
        with late, torch.no_grad():
            for tensor in every:
                tensor.mul_(5)
            taker.take()
            others = self._forward()
            taker.take()
            others += self._forward()
            taker.before_step()
            self.optimizer.step()
            try:
                first, second = taker.taken()
            except CheckpointdError as error:
                return f"a save failed: {error}"
            finally:
                del others
        wrong = [_wrong(f"{name} of the first snapshot", tensor, 5) for name, tensor in first.items()]
        expected = {"weight": 5, "bias": 5, "seen": 15, "count": 15}
        wrong += [_wrong(f"{name} of the second snapshot", tensor, expected[name]) for name, tensor in second.items()]
        return next(filter(None, wrong), "")

    def _spare_memory(self) -> None:
        """Leave memory in the allocator's cache: new memory from the driver could make streams wait for each other.

        It holds bytes that a clone shows if it is made too late.
        """
        buffers = [self.net.seen, self.net.count]
        spare = [torch.full_like(buffer, 7.0) for buffer in buffers for _ in range(SPARES)]
        del spare

    def changed_unseen(self, checkpointer: Checkpointer, late: AbstractContextManager[float]) -> str:
        """Save, and change a parameter before its late copy by a way that torch does not count.

        Returns "thrown away" if the save failed for it, "right" if the copy came first, and otherwise what is wrong.
        """
        checkpointer.save(0, self.state).wait()  # the first save makes the arena
        with torch.no_grad():
            self.net.weight.fill_(5)
        torch.accelerator.synchronize(self.device)
        with late:
            handle = checkpointer.save(1, self.state)
            self.net.weight.data.mul_(3)
            try:
                handle.wait()
            except CheckpointdError as error:
                named = "net.weight" in str(error) and "thrown away" in str(error)
                return "thrown away" if named else f"the save failed: {error}"
        found = Training(self.nbytes, torch.device("cpu"))
        checkpointer.load(found.state, tag=handle.tag)
        return _wrong("weight", found.net.weight.detach(), 5) or "right"

    def _forward(self) -> list[torch.Tensor]:
        """Change the buffers and allocate, as a forward pass does. Returns the new memory."""
        self.net.seen.mul_(3)
        self.net.count.mul_(3)
        return [torch.full_like(tensor, 9.0) for tensor in (self.net.seen, self.net.count) for _ in range(2)]


class Product:
    """checkpointd as the taker: it saves below `root`, and loads what it saved into host memory.

    It saves without checksums, so that wrong bytes come to light here and not as saves that fail.
    """

    def __init__(self, root: str | os.PathLike[str], training: Training) -> None:
        self.training = training
        self.checkpointer = Checkpointer(
            root, compression="none", retention=2, read_back=False, on_no_progress="ignore", device_checksums=False
        )
        self._step = 0
        self._handles: list[SaveHandle] = []
        for _ in range(2):
            self.take()  # the first saves make the arena
        self.taken()

    def take(self) -> None:
        """Save."""
        self._step += 1
        self._handles.append(self.checkpointer.save(self._step, self.training.state))

    def before_step(self) -> None:
        """Nothing: the optimizer's step calls checkpointd by itself."""

    def taken(self) -> list[Values]:
        """The checkpoints."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        return [self._loaded(handle.tag) for handle in handles]

    def _loaded(self, tag: str) -> Values:
        found = Training(self.training.nbytes, torch.device("cpu"))
        self.checkpointer.load(found.state, tag=tag)
        return found.net.state_dict()

    def close(self) -> None:
        """End it. Failed saves were reported already."""
        self.checkpointer.__exit__(RuntimeError, None, None)


class Loading:
    """Tensors to load, `nbytes` each: contiguous, strided, and of another dtype than they are stored in."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        side = max(int((nbytes // 4) ** 0.5), 1)
        self.values = torch.arange(side * side, dtype=torch.float32).view(side, side) + 1
        self.stored = {name: self.values.to(device) for name in ("contiguous", "strided", "converted")}
        made = {name: torch.zeros_like(tensor) for name, tensor in self.stored.items()}
        self.targets = {**made, "strided": made["strided"].t(), "converted": made["converted"].double()}

    def save(self, checkpointer: Checkpointer) -> None:
        """Save each tensor as a checkpoint of its own: what is converted is loaded in another way than the others."""
        for step, (name, tensor) in enumerate(self.stored.items()):
            checkpointer.save(step, {name: tensor}).wait()

    def load(self, checkpointer: Checkpointer) -> None:
        """Load all of them."""
        for step, (name, target) in enumerate(self.targets.items()):
            checkpointer.load({name: target}, tag=f"global_step{step}", cast=name == "converted")

    def loaded(self, load: Callable[[], object], late: AbstractContextManager[float]) -> str:
        """Call `load` between other work on the targets, some of which is late. Returns what is wrong with them, or "".

        The caller's stream is not the default one, since a load must follow that stream.
        """
        stream = torch.Stream(self.device)
        with devices.on_stream(stream):
            spare = [tensor * 1 for tensor in self.targets.values()]  # leaves memory in the allocator's cache
            del spare
            torch.accelerator.synchronize(self.device)
            with late:
                for tensor in self.targets.values():
                    tensor.fill_(0.5)
                load()
                read = {name: tensor * 1 for name, tensor in self.targets.items()}
            torch.accelerator.synchronize(self.device)
            found = [_wrong(name, tensor.cpu(), self.values) for name, tensor in self.targets.items()]
            found += [
                _wrong(f"what was read of {name} after the load", tensor.cpu(), self.values) for name, tensor in read.items()
            ]
        return next(filter(None, found), "")


def _wrong(name: str, found: torch.Tensor, value: float | torch.Tensor) -> str:
    count = int((found != value).sum())
    return f"{name} has {count} of {found.numel()} elements of another moment" if count else ""
