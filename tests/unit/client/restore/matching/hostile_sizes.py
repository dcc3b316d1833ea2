"""Loads trees whose composite tensors claim sizes that nobody has memory for; run with a limit on the memory of this process.

Prints a line for each case: its name and the error.
"""

from __future__ import annotations

import resource
from typing import Any

import msgspec
import torch

from checkpointd.errors import CheckpointdError
from checkpointd.layout import tree
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from tests.unit.client.capture_and_fill import Saved, save
from tests.unit.client.composite_tensors import KINDS, OWN, halves, made, quietly

HUGE = 1 << 40
MORE_BYTES = 256 << 20
CLASSES = TensorClasses.of(OWN)


def node_of(saved: Saved) -> tree.Composite:
    parts: Any = dict(saved.tree.items)  # type: ignore[union-attr]  # the tree of a state
    found: tree.Composite = dict(parts["state"].items)["x"]
    return found


def with_node(saved: Saved, node: tree.Composite, entries: dict[str, tuple[str, tuple[int, ...]]]) -> Saved:
    state = tree.Dict("dict", (("x", node),))
    return Saved(saved.data, entries, (), tree.Dict("dict", (("state", state), ("client_state", None))), ())


def tried(name: str, saved: Saved, target: dict[str, Any], *, cast: bool = False) -> None:
    try:
        quietly(lambda: saved.load(target, classes=CLASSES, cast=cast))
    except CheckpointdError as error:
        print(name, type(error).__name__, str(error).splitlines()[0][:200], sep="\t")
    else:
        print(name, "loaded", sep="\t")


def main() -> None:
    stored = {kind: quietly(lambda kind=kind: save({"x": made(kind)})) for kind in KINDS}
    stored["own class"] = save({"x": halves()}, classes=CLASSES)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
    for kind, saved in stored.items():
        node = node_of(saved)
        if node.shape:
            shape = (HUGE, *node.shape[1:])
            tried(f"shape of {kind}", with_node(saved, msgspec.structs.replace(node, shape=shape), saved.entries), {})
        for fqn, (dtype, shape) in saved.entries.items():
            entries = {**saved.entries, fqn: (dtype, (HUGE, *shape[1:]))}
            tried(f"{fqn} of {kind}", with_node(saved, node, entries), {})
            if node.shape:
                plain = {"x": torch.zeros(node.shape)}
                tried(f"{fqn} of {kind}, converted", with_node(saved, node, entries), plain, cast=True)


if __name__ == "__main__":
    main()
