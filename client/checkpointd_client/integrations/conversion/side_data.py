"""The data that DCP needs beside the state: one entry of the client state.

`objects` are the values that are not plain, as torch.save wrote them. `paths` are the paths of names that cannot be told from
the shape of the state. Usually both are empty, and then there is no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpointd.layout import tree
from checkpointd_client.capture.flatten import CLIENT_STATE
from checkpointd_client.capture.scalars import decode_key, key_text
from checkpointd_client.integrations.conversion.objects import holds_tensors
from checkpointd_client.integrations.conversion.paths import Path
from checkpointd_client.restore.stored import by_name

KEY = "torch.distributed.checkpoint"
_OBJECTS, _PATHS = "objects", "paths"


@dataclass(frozen=True, slots=True)
class SideData:
    """Objects and paths, by name."""

    objects: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    def items(self) -> tuple[tuple[tree.Node, tree.Node], ...]:
        """The entry of the client state that holds them."""
        if not self.objects and not self.paths:
            return ()
        objects = tree.Dict("dict", tuple((name, tree.Bytes(data)) for name, data in self.objects.items()))
        paths = tree.Dict("dict", tuple((name, tree.Sequence("tuple", path)) for name, path in self.paths.items()))
        return ((KEY, tree.Dict("dict", ((_OBJECTS, objects), (_PATHS, paths)))),)


def root_node(state: tree.Node, side_data: SideData, client_items: tuple[tuple[tree.Node, tree.Node], ...] = ()) -> tree.Node:
    """The whole tree of a rank; `client_items` are the client state that a user gave."""
    client = tree.Dict("dict", (*client_items, *side_data.items()))
    return tree.Dict("dict", (("state", state), (CLIENT_STATE, client)))


def plain_client_state(root: tree.Node) -> tuple[tree.Dict, tuple[str, ...]]:
    """The client state that a user gave, without the values that hold tensors; and the FQNs of these."""
    client = by_name(root).get(CLIENT_STATE)
    items = [item for item in tree.items(client) if item[0] != KEY]
    plain = tuple(item for item in items if not holds_tensors(item[1]))
    left = tuple(f"{CLIENT_STATE}.{key_text(decode_key(key, stand_in=True))}" for key, child in items if holds_tensors(child))
    return tree.Dict("dict", plain), left


def parts(root: tree.Node) -> tuple[tree.Node, SideData]:
    """The state in `root`, and its side data; an entry of another form than ours is ignored."""
    found = by_name(root)
    said = by_name(by_name(found.get(CLIENT_STATE)).get(KEY))
    objects = {name: node.data for name, node in by_name(said.get(_OBJECTS)).items() if isinstance(node, tree.Bytes)}
    paths = {name: path for name, node in by_name(said.get(_PATHS)).items() if (path := _path(node))}
    return found.get("state"), SideData(objects, paths)


def _path(node: tree.Node) -> Path:
    return tuple(key for key in tree.elements(node) if isinstance(key, str | int))
