"""The stored content for one rank: a state tree and the tensors that it names, of this rank or of all ranks.

If as many ranks load as saved, every rank gets its own content. Otherwise every rank gets the values that were equal on all
ranks that had them; values that differed are not loaded, and their FQNs are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from checkpointd.errors import FormatError, MismatchError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias, TensorEntry
from checkpointd.layout.joint_plan import JointPlan
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.contents import identity
from checkpointd.pipeline.read.plan import BoxRequest, BoxSink
from checkpointd_client.capture.flatten import CLIENT_STATE
from checkpointd_client.restore.merging import Merging
from checkpointd_client.restore.stored import Entries


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContent:
    """The content that one rank loads.

    `entries`: dtype and global shape of every stored tensor. `owners`: for each tensor that ranks hold for themselves, the rank
    whose tensor is read. `stored_as`: the stored FQN of each tensor that has another name here, since another rank's tensor has
    that FQN. `left`: FQNs that had different values on the saving ranks; they are not in the tree. `elsewhere`: FQNs that only
    some of the saving ranks had, and which may belong to another rank now. `among_many`: this is the content of all saving
    ranks, and several ranks load it, so a value that has no place on one rank may have one on another. `resharded`: it was
    saved by another number of ranks. `spread`: one rank saved it, and several load it.
    """

    root: tree.Node
    entries: Entries
    owners: Mapping[str, int]
    aliases: tuple[Alias, ...]
    excluded: tuple[str, ...]
    left: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    among_many: bool = False
    resharded: bool = False
    spread: bool = False
    stored_as: Mapping[str, str] = field(default_factory=dict)

    def request(self, fqn: str, box: Box, sink: BoxSink | None = None) -> BoxRequest:
        """The request that reads `box` of the tensor `fqn` of `entries`."""
        return BoxRequest(self.stored_as.get(fqn, fqn), box, sink, self.owners.get(fqn))


def own_content(world: CheckpointView, rank: int, plan: JointPlan | None = None) -> RankContent:
    """The content that `rank` itself saved. `plan` names the tensors of all ranks; without it, `world` is whole."""
    index, own = world.indexes[rank], world.own(rank)
    tensors = world.tensors if plan is None else plan.tensors
    shared = {fqn: (tensor.dtype, tensor.shape) for fqn, tensor in tensors.items()}
    return RankContent(
        root=tree.decode(index.tree),
        entries=shared | _described(own.values()),
        owners=dict.fromkeys(own, rank),
        aliases=index.aliases,
        excluded=index.excluded,
    )


def merged_content(world: CheckpointView, *, keep: int | None, alone: bool, plan: JointPlan | None = None) -> RankContent:
    """The content that all ranks saved. Where values differ, those of rank `keep` are taken, if it has any.

    `alone`: only one rank loads it, so a value that has no place there has no place anywhere. `plan`: tells which ranks are
    twins, so that `world` needs the index of one of them only, and that of `keep`. Without it, `world` is whole.
    """
    tensors = world.tensors if plan is None else plan.tensors
    ranks = world.indexes.keys() if plan is None else {*plan.twins} | ({keep} if keep is not None else set())
    aliases = {rank: {alias.fqn: alias for alias in world.indexes[rank].aliases} for rank in ranks}

    def identity_of(rank: int, fqn: str) -> object:
        try:
            return identity(fqn, world.own(rank), aliases[rank], tensors)
        except KeyError:
            raise FormatError(f"rank {rank} names {fqn}, which no rank stored", fqn=fqn, rank=rank) from None

    merging = Merging(identity_of, keep, frozenset() if plan is None else plan.differing)
    root = merging.merged(_grouped(world, ranks, keep))
    entries = {fqn: (tensor.dtype, tensor.shape) for fqn, tensor in tensors.items()}
    owners: dict[str, int] = {}
    stored_as: dict[str, str] = {}
    found: dict[str, Alias] = {}
    names: dict[tuple[str, object], str] = {}
    # Tensors of the tree come before those that only aliases name: the name in `entries` of a tensor of the tree is its FQN.
    for fqn, rank in sorted(merging.chosen.items(), key=lambda item: item[0] in aliases[item[1]]):
        alias = aliases[rank].get(fqn)
        name = owner = fqn if alias is None else alias.owner
        entry = world.own(rank).get(owner)
        if entry is not None:
            free = owner if owner not in entries else f"{owner} of rank {rank}"
            name = names.setdefault((owner, identity_of(rank, owner)), free)
            if name not in entries:
                entries[name], owners[name] = (entry.dtype, entry.shape), rank
                if name != owner:
                    stored_as[name] = owner
        if alias is not None:
            found[fqn] = msgspec.structs.replace(alias, owner=name)
    return RankContent(
        root=root,
        entries=entries,
        owners=owners,
        stored_as=stored_as,
        aliases=tuple(found.values()),
        excluded=tuple(sorted({fqn for rank in ranks for fqn in world.indexes[rank].excluded})),
        left=frozenset(merging.left),
        elsewhere=frozenset() if alone else frozenset(merging.partial),
        among_many=not alone,
        resharded=keep is None,
        spread=not alone and world.checkpoint.commit.world_size == 1,
    )


def part_of(content: RankContent, names: Collection[str], *, client_state: bool) -> RankContent:
    """`content` reduced to the parts `names` of the state, and to the client state if `client_state` is set."""
    if not isinstance(content.root, tree.Dict):
        return content
    kept: list[tuple[tree.Node, tree.Node]] = []
    for key, child in content.root.items:
        if key == CLIENT_STATE:
            kept.append((key, child if client_state else None))
        elif isinstance(child, tree.Dict):
            kept.append((key, msgspec.structs.replace(child, items=tuple(item for item in child.items if item[0] in names))))
    inside = (*names, CLIENT_STATE) if client_state else tuple(names)
    left = (fqn for fqn in content.left if any(fqn == name or fqn.startswith(f"{name}.") for name in inside))
    return replace(content, root=msgspec.structs.replace(content.root, items=tuple(kept)), left=frozenset(left))


Givers = Callable[[BoxRequest], Iterable[tuple[int, bytes]]]
"""The ranks from which a wanted box is read, each with its state tree as it is stored."""


def check_contexts(content: RankContent, wanted: Iterable[BoxRequest], givers: Givers) -> None:
    """MismatchError if elements in `wanted` belong to a composite tensor for which their rank had another context.

    Without `strict`, too, since the match has ended by then and cannot leave out that tensor alone.
    """
    shared = [want for want in wanted if want.rank is None]
    ours = _inner_tensors(content.root) if shared else {}
    seen, wrong = dict[bytes, Mapping[str, _Inner]](), dict[str, None]()
    for want in (want for want in shared if want.fqn in ours):
        for rank, stored in givers(want):
            if stored not in seen:
                seen[stored] = _inner_tensors(tree.decode(stored))
            if seen[stored].get(want.fqn) != ours[want.fqn]:
                wrong[f"{ours[want.fqn].fqn}: its elements for this rank are from rank {rank}"] = None
    if wrong:
        raise MismatchError(
            "the ranks that saved these tensors kept different contexts for them, and an element can only be read with that of "
            "its rank; nothing was loaded. Load them with as many ranks as saved them, into DTensors with the mesh and the "
            "placements that they were saved with:\n  " + "\n  ".join(wrong),
            tuple(wrong),
        )


@dataclass(frozen=True, slots=True)
class _Inner:
    """What a state tree says of an inner tensor: the composite tensor at `fqn`, with those around it, without inner tensors."""

    fqn: str
    heads: tuple[bytes, ...]


def _inner_tensors(root: tree.Node) -> dict[str, _Inner]:
    """The inner tensors of all composite tensors in a state tree, by FQN."""
    return dict(_below(root, ()))


def _below(node: tree.Node, heads: tuple[bytes, ...]) -> Iterator[tuple[str, _Inner]]:
    if not isinstance(node, tree.Composite):
        for child in (*(value for _, value in tree.items(node)), *tree.elements(node)):
            yield from _below(child, ())
        return
    heads = (*heads, tree.encode(msgspec.structs.replace(node, inner=(), requires_grad=False)))
    for name, child in node.inner:
        if isinstance(child, tree.Tensor):
            yield child.fqn, _Inner(child.fqn.removesuffix(f".{name}"), heads)
        else:
            yield from _below(child, heads)


def parts_of(content: RankContent) -> list[str]:
    """The names of the parts of the state."""
    items = content.root.items if isinstance(content.root, tree.Dict) else ()
    states = [child for key, child in items if key != CLIENT_STATE and isinstance(child, tree.Dict)]
    return [str(name) for state in states for name, _ in state.items]


def _described(entries: Iterable[TensorEntry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {entry.fqn: (entry.dtype, entry.shape) for entry in entries}


def _grouped(world: CheckpointView, ranks: Iterable[int], keep: int | None) -> list[tuple[tuple[int, ...], tree.Node]]:
    """The different trees, each with those of `ranks` that have it; that of rank `keep` first."""
    having: dict[bytes, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (rank != keep, rank)):
        having.setdefault(world.indexes[rank].tree, []).append(rank)
    return [(tuple(found), tree.decode(data)) for data, found in having.items()]
