"""The stored content for one rank: a state tree and the tensors that it names, of this rank or of all ranks.

If as many ranks load as saved, every rank gets its own content. Otherwise every rank gets the values that were equal on all
ranks that had them; values that differed are not loaded, and their FQNs are reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from checkpointd.errors import FormatError
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
    saved by another number of ranks.
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
            kept.append((key, tree.Dict(child.kind, tuple(item for item in child.items if item[0] in names))))
    inside = (*names, CLIENT_STATE) if client_state else tuple(names)
    left = (fqn for fqn in content.left if any(fqn == name or fqn.startswith(f"{name}.") for name in inside))
    return replace(content, root=tree.Dict(content.root.kind, tuple(kept)), left=frozenset(left))


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
