"""The digests of what a rank stored beside its boxes: equal exactly for ranks that a load may take for each other."""

from __future__ import annotations

from typing import Any

import pytest

from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Alias, Chunk, Index, TensorEntry
from checkpointd.layout.manifest import StoredContent
from checkpointd.pipeline.read import contents
from checkpointd.pipeline.read.contents import content_of


def chunk(value: int, nbytes: int = 16) -> Chunk:
    return Chunk(0, value * 16, nbytes, nbytes, "raw", None, bytes([value]) * 16)


def shared(fqn: str, value: int, row: int = 0) -> TensorEntry:
    return TensorEntry(fqn, "float32", (8,), Box((4 * row,), (4,)), "global", (chunk(value),))


def own(fqn: str, value: int) -> TensorEntry:
    return TensorEntry(fqn, "float32", (4,), whole((4,)), "rank", (chunk(value),))


def mapping(**items: tree.Node) -> tree.Dict:
    return tree.Dict("dict", tuple(items.items()))


def index(*tensors: TensorEntry, aliases: tuple[Alias, ...] = (), client: tree.Node = None, **state: tree.Node) -> Index:
    root = mapping(state=mapping(**state), client_state=client)
    facts: dict[str, Any] = {"tag": "t", "attempt": "00000001-0", "rank": 0, "world_size": 2, "step": 1, "objects": ()}
    return Index(**facts, tensors=tensors, aliases=aliases, excluded=(), tree=tree.encode(root))


MODEL = mapping(weight=tree.Tensor("model.weight"), scale=tree.Tensor("model.scale"))


def saved(*, row: int = 0, box: int = 1, scale: int = 2, seed: int = 3, step: int = 4, **more: Any) -> StoredContent:
    tensors = shared("model.weight", box, row), own("model.scale", scale), own("rng.torch", seed)
    rng = mapping(torch=tree.Tensor("rng.torch"), step=step)
    return content_of(index(*tensors, model=more.pop("model", MODEL), rng=rng, **more))


def test_boxes_of_global_tensors_do_not_count() -> None:
    assert saved() == saved(row=1, box=9)
    assert saved().own_values.keys() == {"rng.torch", "rng.step"}


def test_values_in_a_part_without_global_tensors_count_one_by_one() -> None:
    one, two = saved(), saved(seed=9)
    assert one.frame == two.frame
    assert {fqn for fqn in one.own_values if one.own_values[fqn] != two.own_values[fqn]} == {"rng.torch"}


@pytest.mark.parametrize(
    "other",
    [
        saved(scale=9),
        saved(model=mapping(weight=tree.Tensor("model.weight"))),
        saved(client=mapping(start=1)),
        saved(extra=mapping(list=tree.Sequence("list", (mapping(a=1),)))),
        saved(extra=mapping()),
        saved(model=tree.Dict("dict", MODEL.items, mapping(_metadata=1))),
        saved(extra=tree.Dict("OrderedDict", (("a", 1),), mapping(_metadata=1))),
    ],
    ids=[
        *("own tensor beside a global one", "tree", "client state", "list with a dict", "empty dict"),
        *("attributes beside a global tensor", "attributes"),
    ],
)
def test_all_else_is_the_frame(other: StoredContent) -> None:
    assert (other.frame, other.own_values.keys()) != (saved().frame, saved().own_values.keys())


def test_a_value_that_another_name_shares_is_in_the_frame_as_well() -> None:
    def tied(value: int) -> StoredContent:
        alias = Alias("model.view", "seed", (2,), (1,), 0)
        state = {"model": mapping(w=tree.Tensor("model.w"), view=tree.Tensor("model.view")), "seed": tree.Tensor("seed")}
        return content_of(index(shared("model.w", 1), own("seed", value), aliases=(alias,), **state))

    assert tied(1).frame != tied(2).frame


def test_an_own_value_and_a_whole_view_of_it_are_equal() -> None:
    plain = content_of(index(own("seed", 1), seed=tree.Tensor("seed")))
    alias = Alias("seed", "first", (4,), (1,), 0)
    viewed = content_of(index(own("first", 1), aliases=(alias,), seed=tree.Tensor("seed")))
    assert plain.own_values == viewed.own_values


def test_where_many_values_are_own_all_are_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "OWN_VALUES_MAX", 1)
    assert saved().own_values == {}
    assert saved().frame != saved(seed=9).frame


@pytest.mark.parametrize("data", [b"\xc0", b"\x93\xa1D\xa4dict\x90", b"\x93\xa1D", tree.encode(mapping(state=1))])
def test_any_tree_has_digests(data: bytes) -> None:
    found = index(own("a", 1))
    first = content_of(Index(**{name: getattr(found, name) for name in found.__struct_fields__} | {"tree": data}))
    assert len(first.frame) == 32
