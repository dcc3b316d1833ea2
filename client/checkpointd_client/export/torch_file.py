"""Makes the file of torch.save around placeholders: torch writes the hollow, and the bytes are put in later.

torch pickles fake tensors, which have no memory, and leaves room for their bytes (`torch.serialization.skip_data`). The file is
a zip file, whose directory says where the placeholders are. It also has a checksum of each, which is set at the end.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpointd.errors import UsageError
from checkpointd.export.consolidate import ExportRequest
from checkpointd.export.output import ExportOutput, reserve
from checkpointd.export.selection import Exported, Selection, StoredSourceTensor, whole_view
from checkpointd.export.stream import PlacedTensor
from checkpointd_client.capture.dtypes import DTYPES
from checkpointd_client.capture.torch_files import Placeholder, placeholders_of
from checkpointd_client.export.state_dict import metadata_of


class TorchFile:
    """A dict of tensors by name as torch.save writes it; names that share memory share a storage."""

    name = "torch"

    def __init__(self) -> None:
        self._placeholders: dict[str, Placeholder] = {}

    def directory(self) -> bool:
        return False

    def begin(self, selection: Selection, request: ExportRequest, output: ExportOutput) -> Sequence[PlacedTensor]:
        path = output.path("")
        stored = _sources(selection)
        dtypes = {source: request.dtype_of(tensor) for source, tensor in stored.items()}
        _write_hollow(selection, dtypes, path)
        with open(path, "rb") as file:
            placeholders = placeholders_of(file)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        # torch numbers the storages as it meets them, which is the order of the names.
        self._placeholders = {tensor.name: placeholders[number] for number, tensor in enumerate(stored.values())}
        return [
            PlacedTensor(tensor, dtypes[source], path, self._placeholders[tensor.name].offset)
            for source, tensor in stored.items()
        ]

    def finish(self, sums: Mapping[str, int], output: ExportOutput) -> None:
        """Write the checksums, which every zip reader checks."""
        descriptor = os.open(output.path(""), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for name, placeholder in self._placeholders.items():
                for at in placeholder.sums_at:
                    os.pwrite(descriptor, struct.pack("<I", sums[name]), at)
        finally:
            os.close(descriptor)


def _sources(selection: Selection) -> dict[StoredSourceTensor, Exported]:
    """The whole stored tensors, in the order in which names first need them."""
    found: dict[StoredSourceTensor, Exported] = {}
    for tensor in selection.names:
        source = tensor.source
        whole = whole_view(source.shape)
        found.setdefault(source, Exported(source.fqn, source.fqn, source, whole))
    return found


def _write_hollow(selection: Selection, dtypes: Mapping[StoredSourceTensor, str], path: str) -> None:
    missing = next((source for source, dtype in dtypes.items() if dtype not in DTYPES), None)
    if missing is not None:
        raise UsageError(f"{missing.fqn} has the dtype {dtypes[missing]}, which this torch does not have")
    with _quiet(), FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        storages = {source: torch.empty(source.shape, dtype=DTYPES[dtype]) for source, dtype in dtypes.items()}
        shown: dict[str, torch.Tensor] = {
            tensor.name: storages[tensor.source].as_strided(tensor.view.shape, tensor.view.stride, tensor.view.offset)
            for tensor in selection.names
        }
        versions = metadata_of(selection)
        if versions is not None:
            shown = OrderedDict(shown)
            shown._metadata = versions  # type: ignore[attr-defined]  # where torch looks for it
        try:
            torch.save(shown, path)
        except KeyError as error:
            names = [name for name, tensor in shown.items() if str(tensor.dtype) in str(error)]
            raise UsageError(f"{', '.join(names)} cannot be saved by this torch: {error.args[0]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warning about new complex32 tensors; nothing is computed with them here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield
