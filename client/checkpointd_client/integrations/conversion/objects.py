"""The values that DCP stores as bytes: values that are not tensors, as torch.save writes them.

Plain values become nodes of the state tree, which cannot contain code. Other values stay bytes as they came, and are only
unpickled by torch.load(weights_only=True), which refuses code.
"""

from __future__ import annotations

from typing import IO, BinaryIO

import torch

from checkpointd.errors import CheckpointdError
from checkpointd.layout import tree
from checkpointd_client.capture.flatten import Flattener
from checkpointd_client.capture.pickled import loaded
from checkpointd_client.integrations.conversion.paths import is_leaf

OPT_IN = "weights_only=False"
"""The argument of a reader that lets pickled code run."""


def save_tensor(tensor: torch.Tensor, file: BinaryIO) -> None:
    """Write `tensor` with all of its storage, as DCP's file system does."""
    torch.save(tensor, file)


def described(file: IO[bytes]) -> torch.Tensor:
    """The tensor that torch.save wrote to `file`, without its elements. Raises the errors of torch.load."""
    with torch.serialization.skip_data():  # torch before 2.12 reads the elements for "meta", too
        found = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found


class NotPlain(Exception):
    """Bytes that hold more than a plain value."""


def node_of(data: bytes, fqn: str) -> tree.Node:
    """The value in `data` as a node that is a leaf for DCP, too. NotPlain if it is not a plain value."""
    walk = Flattener(exclude_frozen_parameters=False)
    try:
        node = walk.node(loaded(data, fqn, opt_in=OPT_IN), fqn)
    except CheckpointdError as error:
        raise NotPlain(str(error)) from error
    if not is_leaf(node) or walk.tensors:
        raise NotPlain(f"{fqn} holds tensors, or is a mapping that DCP does not flatten")
    return node


def holds_tensors(node: tree.Node) -> bool:
    """Whether a tensor or an array is in `node`."""
    return isinstance(node, tree.Tensor | tree.Array) or any(map(holds_tensors, tree.children(node)))
