"""The tensors of a checkpoint by name; each is read when you ask for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from checkpointd.errors import UsageError
from checkpointd.export.selection import Exported, Selection, StoredSourceTensor
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.regions import slices
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.plan import CARRIERS, BoxRequest, BoxSink
from checkpointd_client.capture.dtypes import DTYPES, empty
from checkpointd_client.restore import building


def metadata_of(selection: Selection) -> OrderedDict[str, Any] | None:
    """The `_metadata` of a state_dict() of these tensors; None if the checkpoint has none."""
    return OrderedDict((path, building.value_of(node)) for path, node in selection.versions.items()) or None


class StateDict(Mapping[str, torch.Tensor]):
    """Tensors on the CPU by name, read and verified on access, each time anew unless the last one is still in use.

    Pass it to load_state_dict() as it is: a dict of it has lost the versions of the module's parts. Names that shared memory
    when they were saved share it again while one of them is in use. Access raises DamagedError with object, FQN and rank if
    stored bytes have changed, NotFoundError if the checkpoint was removed, and UsageError if ranks stored different tensors
    under the name.
    """

    def __init__(
        self,
        world: CheckpointView,
        selection: Selection,
        differing: Mapping[str, UsageError],
        read: Callable[[Sequence[BoxRequest]], None],
    ) -> None:
        """`read` fills the sinks of the boxes that it gets. `differing`: the names that cannot be read, each with the error."""
        self._world, self._differing, self.read = world, differing, read
        self._tensors = {tensor.name: tensor for tensor in selection.names}
        self._metadata = metadata_of(selection)
        """What torch's load_state_dict() looks for: the versions of the parts of modules."""
        self._live: WeakValueDictionary[StoredSourceTensor, torch.Tensor] = WeakValueDictionary()

    @property
    def tag(self) -> str:
        return self._world.checkpoint.tag

    @property
    def world(self) -> CheckpointView:
        """The checkpoint that the tensors are read from."""
        return self._world

    @property
    def step(self) -> int:
        return self._world.checkpoint.commit.step

    def exported(self, name: str) -> Exported:
        """Where a tensor is read from."""
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return DTYPES[self._tensors[name].dtype]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if name in self._differing:
            raise self._differing[name]
        owner = self._live.get(tensor.source)
        if owner is None:
            owner = self._live[tensor.source] = self._whole(tensor.source)
        view = tensor.view
        if tensor.fqn == tensor.source.fqn:
            return owner
        shown = owner.as_strided(view.shape, view.stride, view.offset)
        shown._checkpointd_owner = owner  # type: ignore[attr-defined]  # keeps the owner alive while the view is in use
        return shown

    def _whole(self, source: StoredSourceTensor) -> torch.Tensor:
        made = empty(source.shape, DTYPES[source.dtype], torch.device("cpu"))
        self.read([BoxRequest(source.fqn, whole(source.shape), _filling(made), source.rank)])
        return made


def _filling(made: torch.Tensor) -> BoxSink:
    flat = made.reshape(-1).view(torch.uint8).numpy()
    array = flat.view(CARRIERS[made.itemsize]).reshape(tuple(made.shape))
    frame = whole(tuple(made.shape))

    def sink(box: Box, elements: Any) -> None:
        array[slices(frame, box)] = elements

    return sink
