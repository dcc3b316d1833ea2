"""Selects the tensors of an export and their names: a part of the state, with tensors that are equal on all ranks only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from checkpointd.errors import FormatError, NotFoundError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Alias, Index, TensorEntry
from checkpointd.layout.strides import check_alias, contiguous_stride, end_of
from checkpointd.phrases import listed
from checkpointd.pipeline.read.checkpoint_view import CheckpointView

MODEL, MASTERS = "model", "master"
"""The parts of a state for a model's parameters and for their fp32 masters in mixed precision, under the same names."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = "module."
METADATA = "_metadata"
"""The attribute of a module's state_dict() with the versions of its parts."""


@dataclass(frozen=True, slots=True)
class StoredSourceTensor:
    """A stored tensor: a global one if `rank` is None, otherwise one of that rank's own."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    rank: int | None


@dataclass(frozen=True, slots=True)
class View:
    """A view of a source: `stride` and `offset` count elements in the source's row-major order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie next to each other in the source, in order."""
        return 0 in self.shape or self.stride == contiguous_stride(self.shape)

    @property
    def span(self) -> range:
        """The shortest run of the source that contains all elements of the view."""
        return range(self.offset, end_of(self.shape, self.stride, self.offset))


def whole_view(shape: tuple[int, ...]) -> View:
    """The view of a whole source of `shape`."""
    return View(shape, contiguous_stride(shape), 0)


def alias_view(alias: Alias, shape: tuple[int, ...]) -> View:
    """The view of `alias` into its owner, a source of `shape`. FormatError if the view exceeds the owner."""
    check_alias(alias, shape)
    return View(alias.shape, alias.stride, alias.offset)


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor under its name in the export; `fqn` is its name in the checkpoint."""

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
    """All names in the export, with their tensors. `versions`: what state_dict() noted of the parts of modules, by their paths
    in the export (`_metadata`): a module needs it to read older or newer tensors rightly.
    """

    names: tuple[Exported, ...]
    versions: Mapping[str, tree.Node] = field(default_factory=dict)

    @property
    def untied(self) -> tuple[list[Exported], dict[str, str]]:
        """Each tensor once, if possible under the name by which it is stored; and a map from its other names to that name."""
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
    """The tensors below `only` in the state, without that prefix; if `only` is None, all tensors, by their FQNs.

    A per-rank tensor that is equal on all ranks is exported once. If it differs, `rank` chooses one; without `rank`, a
    UsageError names the tensor. NotFoundError if no tensor is selected, UsageError if there is no such rank.
    """
    selection, differing = select_all(world, only, rank)
    for error in differing.values():
        raise error
    return selection


def select_all(
    world: CheckpointView, only: str | None = None, rank: int | None = None
) -> tuple[Selection, dict[str, UsageError]]:
    """As `select`, but a tensor that differs between ranks is taken from the first rank, and its error is returned by name."""
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
    names = tuple(Exported(name, f.fqn, f.source, f.view) for name, f in found.items())
    return Selection(names, _versions(world, only)), differing


def _versions(world: CheckpointView, only: str | None) -> dict[str, tree.Node]:
    """What is stored of the versions of modules, by their paths below `only`. Of several ranks, the first one counts."""
    found: dict[str, tree.Node] = {}
    for data in dict.fromkeys(bytes(index.tree) for index in world.indexes.values() if tree.files_of(index.tree) is None):
        states = [child for key, child in tree.items(tree.decode(data)) if key == "state"]
        for path, version in chain.from_iterable(_noted_in(state, "") for state in states):
            below = "" if path == only else _stripped(path, only)
            if below is not None:
                found.setdefault(below, version)
    return found


def _noted_in(node: tree.Node, fqn: str) -> Iterator[tuple[str, tree.Node]]:
    """The entries of every `_metadata` at or below `node`, by the FQN of the module that each is about."""
    if not isinstance(node, tree.Dict):
        return
    noted = next((child for key, child in tree.items(node.attributes) if key == METADATA), None)
    for path, version in tree.items(noted):
        yield ".".join(part for part in (fqn, str(path)) if part), version
    for key, child in node.items:
        yield from _noted_in(child, f"{fqn}.{key}" if fqn else str(key))


@dataclass(slots=True)
class _FoundName:
    """One name, and its different contents, each with the first rank that has it."""

    fqn: str
    source: StoredSourceTensor
    view: View
    contents: dict[object, int] = field(default_factory=dict)

    def add(self, rank: int, content: object) -> None:
        self.contents.setdefault(content, rank)

    def differs(self) -> UsageError:
        one, two, *_ = self.contents.values()
        return UsageError(
            f"{self.fqn} is not the same on ranks {one} and {two}, which stored one each: export only a part of the state "
            "(such as only='model'), or choose a rank (such as rank=0)"
        )


def _of_rank(world: CheckpointView, index: Index, rank: int | None) -> Iterator[tuple[str, StoredSourceTensor, View, object]]:
    """The tensors in `index`: FQN, source, view, and a key that is equal for equal content on another rank."""
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
    """Any part of the global tensor `fqn`. The rank whose alias names the tensor may have written no part of it."""
    tensor = world.tensors.get(fqn)
    return tensor.parts[0].entry if tensor else None


def _source(entry: TensorEntry, rank: int) -> StoredSourceTensor:
    if entry.scope == "rank" and entry.box != whole(entry.shape):
        raise FormatError(
            f"rank {rank} stored only a part of {entry.fqn}, which is a tensor of its own", fqn=entry.fqn, rank=rank
        )
    return StoredSourceTensor(entry.fqn, entry.dtype, entry.shape, None if entry.scope == "global" else rank)


def _content(entry: TensorEntry, view: View) -> object:
    """A key that is equal for equal bytes in equal chunks."""
    if entry.scope == "global":
        return entry.fqn, view
    return entry.dtype, entry.shape, view, tuple((chunk.raw, chunk.digest) for chunk in entry.chunks)


def of_masters(world: CheckpointView, selection: Selection) -> Selection:
    """The same names, but with fp32 masters in place of the parameters. A master may go by any name of its parameter."""
    entries = [(entry, index.rank) for index in world.indexes.values() for entry in index.tensors]
    masters = {entry.fqn: _source(entry, rank) for entry, rank in entries if entry.fqn.startswith(f"{MASTERS}.")}
    found: dict[tuple[StoredSourceTensor, View], StoredSourceTensor] = {}
    for tensor in selection.names:
        for fqn in (tensor.fqn, tensor.source.fqn):
            master = masters.get(f"{MASTERS}.{_stripped(fqn, MODEL)}")
            if master is not None and (master.dtype, master.shape) == ("float32", tensor.source.shape):
                found[tensor.source, whole_view(master.shape)] = master
    # Owners come before the names tied to them, since the first name is kept.
    ordered = sorted(selection.names, key=lambda tensor: tensor.fqn != tensor.source.fqn)
    return replace(selection, names=tuple(replace(t, source=found.get((t.source, t.view), t.source)) for t in ordered))


def is_of_module(world: CheckpointView, only: str | None) -> bool:
    """Whether the part `only` was saved as a module, and not as a state dict. A module is stored under the names of the bare
    model, without what DistributedDataParallel adds. It is known by its parameters: they require gradients, and the tensors of
    a state dict do not.
    """
    trees = (tree.decode(index.tree) for index in world.indexes.values() if tree.files_of(index.tree) is None)
    parts = (_part(root, ["state", *(only.split(".") if only else ())]) for root in trees)
    items = (node for part in parts if part is not None and part.kind == "OrderedDict" for _, node in part.items)
    return any(getattr(node, "requires_grad", False) for node in items)


def _part(node: tree.Node, path: Sequence[str]) -> tree.Dict | None:
    """The innermost dict of the state at `path`: that of a module for any name in the module."""
    found = None
    while isinstance(node, tree.Dict):
        found = node
        node = next((value for key, value in node.items if path and key == path[0]), None)
        path = path[1:]
    return found


def check_ordinary(world: CheckpointView, selection: Selection) -> None:
    """UsageError if inner tensors of composite tensors are selected. Alone, they are not the values of any tensor."""
    exported = {tensor.fqn for tensor in selection.names}
    found: dict[str, str] = {}
    for data in {bytes(index.tree) for index in world.indexes.values()}:
        level: list[tree.Node] = [tree.decode(data)]
        while level:
            composite = [node for node in level if isinstance(node, tree.Composite)]
            found |= {fqn: node.kind for node in composite for fqn in tree.fqns(node) if fqn in exported}
            level = [child for node in level for child in tree.children(node) if not isinstance(node, tree.Composite)]
    if found:
        names = listed([f"{fqn} ({kind})" for fqn, kind in sorted(found.items())])
        raise UsageError(
            f"{world.checkpoint.tag} has composite tensors, whose inner tensors are not ordinary values: {names}. To export "
            "ordinary values, load the checkpoint with cast=True into a model without such tensors, save that model, and "
            "export it. To export only a part of the state, name it (such as only='model')"
        )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def with_plain_names(selection: Selection, *, is_of_module: bool = False) -> Selection:
    """The tensors under the names that they have in the bare model: without what torch.compile, FSDP, activation checkpointing
    and DistributedDataParallel put into the names of a wrapped one. UsageError if two names become one. `is_of_module`: whether
    a `module` in front of all names is the model's own.
    """
    names, versions = ([_bare(name) for name in found] for found in ([t.name for t in selection.names], selection.versions))
    if not is_of_module and all(name.startswith(_PARALLEL) for name in names):
        names, versions = ([f"{name}.".removeprefix(_PARALLEL)[:-1] for name in found] for found in (names, versions))
    found: dict[str, Exported] = {}
    for name, tensor in zip(names, selection.names, strict=True):
        other = found.setdefault(name, replace(tensor, name=name))
        if other.fqn != tensor.fqn:
            raise UsageError(
                f"{other.fqn} and {tensor.fqn} would both be exported as {name!r}: export a part of the state with one model"
            )
    return Selection(tuple(found.values()), dict(zip(versions, selection.versions.values(), strict=True)))


def _stripped(fqn: str, only: str | None) -> str | None:
    """The name of `fqn` in the export; None if it is not exported. If `only` is the FQN of a tensor, the tensor keeps it."""
    if only is None or fqn == only:
        return fqn
    return fqn.removeprefix(f"{only}.") if fqn.startswith(f"{only}.") else None


def _nothing(world: CheckpointView, only: str | None) -> NotFoundError:
    tag = world.checkpoint.tag
    if only is None:
        return NotFoundError(f"{tag} holds no tensors")
    parts = list(dict.fromkeys(e.fqn.partition(".")[0] for i in world.indexes.values() for e in i.tensors))
    return NotFoundError(f"{tag} holds no tensor below {only!r}; its parts are: {listed(parts) or 'none'}")
