"""Selects the tensors of an export, and their names: a part of the state, and one copy of tensors equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from checkpointd.errors import FormatError, NotFoundError, UsageError
from checkpointd.layout.boxes import whole
from checkpointd.layout.manifest import Alias, Index, TensorEntry
from checkpointd.layout.strides import check_alias, contiguous_stride, end_of
from checkpointd.phrases import listed
from checkpointd.pipeline.read.checkpoint_view import CheckpointView

MODEL, MASTERS = "model", "master"
"""The parts of a state with a model's parameters, and with the fp32 masters of them that mixed precision keeps, named alike."""


@dataclass(frozen=True, slots=True)
class StoredSourceTensor:
    """A stored tensor: a global one (`rank` None), or that rank's own."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    rank: int | None


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a source: `stride` and `offset` count elements in its row-major order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in the source."""
        return 0 in self.shape or self.stride == contiguous_stride(self.shape)

    @property
    def span(self) -> range:
        """The shortest run of the source that has all elements."""
        return range(self.offset, end_of(self.shape, self.stride, self.offset))


def whole_view(shape: tuple[int, ...]) -> View:
    """All of a source of `shape`."""
    return View(shape, contiguous_stride(shape), 0)


def alias_view(alias: Alias, shape: tuple[int, ...]) -> View:
    """What `alias` has of its owner, a source of `shape`; FormatError where it lies outside."""
    check_alias(alias, shape)
    return View(alias.shape, alias.stride, alias.offset)


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor under the name that it gets outside; `fqn` is the one that it has in the checkpoint."""

    name: str
    fqn: str
    source: StoredSourceTensor
    view: View

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape


@dataclass(frozen=True, slots=True)
class Selection:
    """All names that leave, and what they are."""

    names: tuple[Exported, ...]

    @property
    def untied(self) -> tuple[list[Exported], dict[str, str]]:
        """Each tensor once, under the name that it is stored by where that is among them; and other names -> that name."""
        groups: dict[tuple[StoredSourceTensor, View], list[Exported]] = {}
        for tensor in self.names:
            groups.setdefault((tensor.source, tensor.view), []).append(tensor)
        kept, tied = [], {}
        for group in groups.values():
            first = next((t for t in group if t.fqn == t.source.fqn), group[0])
            kept.append(first)
            tied.update({t.name: first.name for t in group if t is not first})
        return kept, tied


def select(world: CheckpointView, only: str | None = None, rank: int | None = None) -> Selection:
    """The tensors below `only` in the state, that prefix stripped; all of them, by their FQNs, where it is None.

    A tensor that several ranks stored as their own leaves once, where it is the same on all of them. Where it is not, `rank`
    says whose is meant; without it UsageError names the tensor. NotFoundError where nothing is left, UsageError where there is
    no such rank.
    """
    selection, differing = select_all(world, only, rank)
    for error in differing.values():
        raise error
    return selection


def select_all(
    world: CheckpointView, only: str | None = None, rank: int | None = None
) -> tuple[Selection, dict[str, UsageError]]:
    """As `select`; what is not the same on all ranks is selected as the first of them has it, with the error that says so."""
    if rank is not None and rank not in world.indexes:
        raise UsageError(f"there is no rank {rank}: {world.checkpoint.tag} was saved by {len(world.indexes)} ranks")
    found: dict[str, _FoundName] = {}
    for index in world.indexes.values():
        for fqn, source, view, content in _of_rank(world, index, rank):
            name = _stripped(fqn, only)
            if name is not None:
                found.setdefault(name, _FoundName(fqn, source, view)).add(index.rank, content)
    if not found:
        raise _nothing(world, only)
    differing = {name: one.differs() for name, one in found.items() if len(one.contents) > 1}
    return Selection(tuple(Exported(name, f.fqn, f.source, f.view) for name, f in found.items())), differing


@dataclass(slots=True)
class _FoundName:
    """One name, and every content that it has, with the first rank that has it."""

    fqn: str
    source: StoredSourceTensor
    view: View
    contents: dict[object, int] = field(default_factory=dict)

    def add(self, rank: int, content: object) -> None:
        self.contents.setdefault(content, rank)

    def differs(self) -> UsageError:
        one, two, *_ = self.contents.values()
        return UsageError(
            f"{self.fqn} is not the same on ranks {one} and {two}, which stored one each: export the part of the state that is "
            "asked for (such as only='model'), or say whose is meant (such as rank=0)"
        )


def _of_rank(world: CheckpointView, index: Index, rank: int | None) -> Iterator[tuple[str, StoredSourceTensor, View, object]]:
    """What `index` offers: FQN, where it lies, and what tells whether another rank's is the same."""
    entries: dict[str, TensorEntry] = {}
    for entry in index.tensors:
        if entry.scope == "global" or rank in (None, index.rank):
            entries[entry.fqn] = entry
            yield entry.fqn, _source(entry, index.rank), whole_view(entry.shape), _content(entry, whole_view(entry.shape))
    for alias in index.aliases:
        owner = entries.get(alias.owner) or _global_part(world, alias.owner)
        if owner is not None:
            view = alias_view(alias, owner.shape)
            yield alias.fqn, _source(owner, index.rank), view, _content(owner, view)


def _global_part(world: CheckpointView, fqn: str) -> TensorEntry | None:
    """Any part of the global tensor `fqn`: the rank that names it need not have written one."""
    tensor = world.tensors.get(fqn)
    return tensor.parts[0].entry if tensor else None


def _source(entry: TensorEntry, rank: int) -> StoredSourceTensor:
    if entry.scope == "rank" and entry.box != whole(entry.shape):
        raise FormatError(f"rank {rank} holds {entry.fqn} for itself, and only a part of it", fqn=entry.fqn, rank=rank)
    return StoredSourceTensor(entry.fqn, entry.dtype, entry.shape, None if entry.scope == "global" else rank)


def _content(entry: TensorEntry, view: View) -> object:
    """Equal for equal bytes in equal chunks."""
    if entry.scope == "global":
        return entry.fqn, view
    return entry.dtype, entry.shape, view, tuple((chunk.raw, chunk.digest) for chunk in entry.chunks)


def of_masters(world: CheckpointView, selection: Selection) -> Selection:
    """The same names, with the fp32 masters in the place of the parameters that have one, under any of their names."""
    entries = [(entry, index.rank) for index in world.indexes.values() for entry in index.tensors]
    masters = {entry.fqn: _source(entry, rank) for entry, rank in entries if entry.fqn.startswith(f"{MASTERS}.")}
    found: dict[tuple[StoredSourceTensor, View], StoredSourceTensor] = {}
    for tensor in selection.names:
        for fqn in (tensor.fqn, tensor.source.fqn):
            master = masters.get(f"{MASTERS}.{_stripped(fqn, MODEL)}")
            if master is not None and (master.dtype, master.shape) == ("float32", tensor.source.shape):
                found[tensor.source, whole_view(master.shape)] = master
    # Of names that are tied the owner comes first, whose name is kept.
    ordered = sorted(selection.names, key=lambda tensor: tensor.fqn != tensor.source.fqn)
    return Selection(tuple(replace(t, source=found.get((t.source, t.view), t.source)) for t in ordered))


def _stripped(fqn: str, only: str | None) -> str | None:
    """The name that `fqn` leaves under; None where it does not leave. A tensor that is asked for by its own FQN keeps it."""
    if only is None or fqn == only:
        return fqn
    return fqn.removeprefix(f"{only}.") if fqn.startswith(f"{only}.") else None


def _nothing(world: CheckpointView, only: str | None) -> NotFoundError:
    tag = world.checkpoint.tag
    if only is None:
        return NotFoundError(f"{tag} holds no tensors")
    parts = list(dict.fromkeys(e.fqn.partition(".")[0] for i in world.indexes.values() for e in i.tensors))
    return NotFoundError(f"{tag} holds no tensor below {only!r}; its parts are: {listed(parts) or 'none'}")
