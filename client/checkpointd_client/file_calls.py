"""The calls of a Checkpointer whose checkpoints are files that other programs read, beside the root."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout.files import check_names, check_place
from checkpointd.layout.keys import SERVICE, AttemptId
from checkpointd.pipeline.showing import abandoned
from checkpointd.store.base import Store
from checkpointd_client.handle import SaveHandle
from checkpointd_client.loading import LOOK_S
from checkpointd_client.saving import Saver, asked
from checkpointd_client.start import Begun
from checkpointd_client.writer import Writer


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A directory that is filled beside a save, at `path`; the save knows it by `name`."""

    name: str
    path: str


class _Checkpointer(Protocol):
    _store: Store
    _writer: Writer
    _saver: Saver
    _epoch: Begun

    def _check_open(self, call: str) -> None: ...


class FileCalls:
    """Saving files, and looking at what became of their directories."""

    def save_files(
        self: _Checkpointer,
        step: int,
        files: Mapping[str, object],
        *,
        tag: str | None = None,
        at: str | None = None,
        save_latest: bool = True,
        stepped: Collection[int] = (),
        metrics: Mapping[str, float] | None = None,
        unfinished: str = "",
    ) -> SaveHandle:
        """Snapshot the objects in `files`, by file name, and return. The root must be a directory `.checkpointd`. Once the
        save has committed, the directory `at` beside the root holds these files as torch.save writes them, uncompressed. `at`
        is a relative path, by default the tag. Its parent directory must exist; removing the parent removes the checkpoint.

        Call it on every rank, each with its own file names, or with none. `stepped`: addresses of storages that only optimizer
        steps change; all others are copied before this returns. `unfinished`: the name of what `fill` gave, which was filled on
        every rank: it gets its place when the files are shown, with them in it. Raises as `save` does.
        """
        self._check_open("save")
        request = asked(step, tag, save_latest, metrics, unfinished=unfinished)
        if self._store.plain_files is None:
            raise UsageError(
                f"files are shown beside the root, which must be a directory named {SERVICE}: {self._store.url} is not"
            )
        at = request.tag if at is None else at
        try:
            check_place(at)
            check_names(files.keys())
        except FormatError as error:
            raise UsageError(str(error)) from error
        return self._saver.save_files(request, at, files, stepped)

    def fill(self: _Checkpointer, folder: str) -> Unfinished:
        """A directory to be filled on every rank, which gets the place `folder` (relative, as `at`) when the files of the save
        it belongs to are shown; where that aborts, it goes. Call it on every rank, before each such save.
        """
        self._check_open("fill")
        plain = self._store.plain_files
        if plain is None:
            raise UsageError(f"directories are filled for a root named {SERVICE}: {self._store.url} is not")
        try:
            check_place(folder)
        except FormatError as error:
            raise UsageError(str(error)) from error
        name = str(AttemptId(self._epoch.number, next(self._saver.fillings)))
        return Unfinished(name, plain.unfinished.path(name, folder))

    def removed(self: _Checkpointer) -> frozenset[str]:
        """The checkpoints (`<tag>/<attempt>`) whose directory somebody has removed since it was shown: they go with it, and
        none of them is damaged. Raises StoreError if the storage does not let it find out.
        """
        self._check_open("removed")
        return frozenset(self._writer.call(abandoned(self._store), LOOK_S))
