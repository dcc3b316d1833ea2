"""The values that DCP stores as bytes: values that are not tensors, as torch.save writes them.

Plain values become nodes of the state tree, which cannot contain code. Reading them runs nothing (`torch_file.py`). Other
values stay bytes as they came, and are only unpickled at a load, by torch.load(weights_only=True), which refuses code.
"""

from __future__ import annotations

import io
from typing import BinaryIO

import torch

from checkpointd.errors import CheckpointdError
from checkpointd.layout import tree
from checkpointd_client.capture.flatten import Flattener
from checkpointd_client.integrations.conversion.paths import is_leaf
from checkpointd_client.unpickling.records import PickleFault
from checkpointd_client.unpickling.torch_file import UntrustedTorchFile

OPT_IN = "weights_only=False"
"""The argument of a reader that lets pickled code run."""


def save_tensor(tensor: torch.Tensor, file: BinaryIO) -> None:
    """Write `tensor` with all of its storage, as DCP's file system does."""
    torch.save(tensor, file)


class NotPlain(Exception):
    """Bytes that hold more than a plain value."""


def node_of(data: bytes, fqn: str) -> tree.Node:
    """The value in `data` as a node that is a leaf for DCP, too. NotPlain if it is not a plain value."""
    walk = Flattener(exclude_frozen_parameters=False)
    try:
        node = walk.node(UntrustedTorchFile(io.BytesIO(data), lambda: bytearray(data)).value(), fqn)
    except (CheckpointdError, PickleFault) as error:
        raise NotPlain(str(error)) from error
    if not is_leaf(node) or walk.tensors:
        raise NotPlain(f"{fqn} holds tensors, or is a mapping that DCP does not flatten")
    return node


def holds_tensors(node: tree.Node) -> bool:
    """Whether a tensor or an array is in `node`."""
    return isinstance(node, tree.Tensor | tree.Array) or any(map(holds_tensors, tree.children(node)))
