"""Which tensors leave a checkpoint, under which names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from msgspec import structs

from checkpointd.config import LoadConfig
from checkpointd.errors import FormatError, NotFoundError, UsageError
from checkpointd.export.selection import (
    Exported,
    Selection,
    StoredSourceTensor,
    View,
    check_ordinary,
    select,
    whole_view,
    with_plain_names,
)
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, read_view
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from tests.builders import Arrays, Piece, save_checkpoint

EMBED = np.arange(12, dtype=np.float32).reshape(4, 3)
HEAD = Alias("model.head", "model.embed", (4, 3), (3, 1), 0)
PAD = Alias("model.pad", "model.embed", (3,), (1,), 9)


async def world(
    own: Mapping[int, Arrays], *, aliases: tuple[Alias, ...] = (), split: bool = False, fqn: str = "model.embed"
) -> CheckpointView:
    """Ranks with tensors of their own, and one that they hold together by rows where `split`."""
    store = MemoryStore()
    rows = np.array_split(np.arange(4), len(own))

    def pieces(rank: int) -> list[Piece]:
        box = Box((int(rows[rank][0]), 0), (len(rows[rank]), 3))
        return [Piece.part(fqn, EMBED, box)] if split else []

    await save_checkpoint(store, world_size=len(own), tensors=lambda rank: own[rank], pieces=pieces, aliases=aliases)
    return await read_view(store, await root_view.find(store, "global_step1"), LoadConfig())


def names(selection: Selection) -> dict[str, tuple[str, int | None]]:
    return {tensor.name: (tensor.source.fqn, tensor.source.rank) for tensor in selection.names}


async def test_all_tensors_leave_under_their_fqns() -> None:
    found = select(await world({0: {"model.w": EMBED, "optimizer.m": EMBED}}))
    assert names(found) == {"model.w": ("model.w", 0), "optimizer.m": ("optimizer.m", 0)}


async def test_a_part_of_the_state_leaves_without_its_name() -> None:
    made = await world({0: {"model.a.w": EMBED, "model.b": EMBED, "models.c": EMBED, "optimizer.m": EMBED}})
    assert list(names(select(made, "model"))) == ["a.w", "b"]
    assert list(names(select(made, "model.a"))) == ["w"]
    assert list(names(select(made, "model.b"))) == ["model.b"]


async def test_what_is_not_there_is_answered_with_what_is() -> None:
    made = await world({0: {"model.w": EMBED, "optimizer.m": EMBED}})
    with pytest.raises(NotFoundError, match=r"global_step1 holds no tensor below 'modle'; its parts are: model, optimizer$"):
        select(made, "modle")
    with pytest.raises(NotFoundError, match=r"holds no tensors$"):
        select(await world({0: {}}))


async def test_ranks_that_hold_different_tensors_give_all_of_them() -> None:
    found = select(await world({0: {"model.a": EMBED}, 1: {"model.b": EMBED}}, split=True))
    assert names(found) == {"model.a": ("model.a", 0), "model.embed": ("model.embed", None), "model.b": ("model.b", 1)}


async def test_what_all_ranks_hold_alike_leaves_once() -> None:
    found = select(await world({rank: {"model.w": EMBED} for rank in range(3)}))
    assert names(found) == {"model.w": ("model.w", 0)}


@pytest.mark.parametrize("other", [EMBED + 1, EMBED.T.copy(), EMBED.astype(np.float64), EMBED.view(np.int32)])
async def test_what_differs_from_rank_to_rank_is_named_unless_one_is_meant(other: np.ndarray) -> None:  # type: ignore[type-arg]
    made = await world({0: {"rng.state": EMBED}, 1: {"rng.state": EMBED}, 2: {"rng.state": other}})
    with pytest.raises(UsageError, match=r"rng\.state is not the same on ranks 0 and 2"):
        select(made)
    assert names(select(made, rank=2)) == {"rng.state": ("rng.state", 2)}
    with pytest.raises(UsageError, match="there is no rank 3: global_step1 was saved by 3 ranks"):
        select(made, rank=3)


async def test_one_ranks_tensors_and_what_all_hold_together() -> None:
    made = await world({0: {"rng.a": EMBED}, 1: {"rng.a": EMBED + 1, "rng.b": EMBED}}, split=True)
    assert names(select(made, rank=0)) == {"rng.a": ("rng.a", 0), "model.embed": ("model.embed", None)}


@pytest.mark.parametrize("split", [False, True])
async def test_tied_names_are_one_tensor(split: bool) -> None:
    own: dict[int, Arrays] = {rank: {} if split else {"model.embed": EMBED} for rank in range(2)}
    found = select(await world(own, aliases=(HEAD, PAD), split=split), "model")
    assert list(names(found)) == ["embed", "head", "pad"]
    kept, tied = found.untied
    assert [tensor.name for tensor in kept] == ["embed", "pad"]
    assert tied == {"head": "embed"}
    assert kept[1].view == View((3,), (1,), 9)


async def test_a_name_whose_owner_stays_behind_leaves_by_itself() -> None:
    aliases = (Alias("ema.a", "model.embed", (4, 3), (3, 1), 0), Alias("ema.b", "model.embed", (4, 3), (3, 1), 0))
    found = select(await world({0: {"model.embed": EMBED}}, aliases=aliases), "ema")
    assert [tensor.name for tensor in found.untied[0]] == ["a"]
    assert found.untied[1] == {"b": "a"}
    assert names(found) == {"a": ("model.embed", 0), "b": ("model.embed", 0)}


async def test_a_name_that_is_tied_on_one_rank_and_stored_on_another_is_one_where_they_agree() -> None:
    tied = await world({0: {"model.embed": EMBED}}, aliases=(HEAD,))
    apart = await world({0: {"model.head": EMBED}})
    both = CheckpointView(tied.checkpoint, {0: tied.indexes[0], 1: structs.replace(apart.indexes[0], rank=1)})
    assert names(select(both)) == {"model.embed": ("model.embed", 0), "model.head": ("model.embed", 0)}
    other = await world({0: {"model.head": EMBED + 1}})
    with pytest.raises(UsageError, match=r"model.head is not the same on ranks 0 and 1"):
        select(CheckpointView(tied.checkpoint, {0: tied.indexes[0], 1: structs.replace(other.indexes[0], rank=1)}))


@pytest.mark.parametrize(
    "alias",
    [
        Alias("model.x", "model.embed", (4, 3), (3, 1), 1),
        Alias("model.x", "model.embed", (13,), (1,), 0),
        Alias("model.x", "model.embed", (2,), (-1,), 5),
        Alias("model.x", "model.embed", (2, 2), (1,), 0),
    ],
)
async def test_a_name_that_reaches_outside_its_owner_is_refused(alias: Alias) -> None:
    with pytest.raises(FormatError, match=r"model\.x shares memory outside model.embed"):
        select(await world({0: {"model.embed": EMBED}}, aliases=(alias,)))


@pytest.mark.parametrize(
    ("view", "contiguous", "span"),
    [
        (View((4, 3), (3, 1), 0), True, range(12)),
        (View((), (), 5), True, range(5, 6)),
        (View((3, 4), (1, 3), 0), False, range(12)),
        (View((2,), (6,), 1), False, range(1, 8)),
        (View((0, 3), (9, 9), 2), True, range(2, 2)),
        (View((2, 3), (0, 1), 4), False, range(4, 7)),
    ],
)
def test_views(view: View, contiguous: bool, span: range) -> None:
    assert (view.contiguous, view.span) == (contiguous, span)


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["_orig_mod.layers.0.weight", "_orig_mod.norm"], ["layers.0.weight", "norm"]),
        (["module.a", "module.module.b"], ["a", "module.b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["layers.0._checkpoint_wrapped_module.w", "_fsdp_wrapped_module.layers.1._orig_mod.w"], ["layers.0.w", "layers.1.w"]),
        (["a._original", "model.embed"], ["a._original", "model.embed"]),
    ],
)
def test_plain_names_are_those_of_the_bare_model(names: list[str], plain: list[str]) -> None:
    assert [tensor.name for tensor in with_plain_names(named(*names)).names] == plain


def test_two_tensors_with_one_plain_name_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"model._orig_mod.a and model.a would both be exported as 'a'"):
        with_plain_names(named("_orig_mod.a", "a"))


def named(*names: str) -> Selection:
    view = whole_view((2,))
    return Selection(
        tuple(Exported(n, f"model.{n}", StoredSourceTensor(f"model.{n}", "float32", (2,), None), view) for n in names)
    )


async def test_parts_of_composite_tensors_do_not_leave() -> None:
    inner = tuple((name, tree.Tensor(f"model.w.{name}")) for name in ("qdata", "scale"))
    composite = tree.Composite("torchao.quantization:Int8Tensor", (4, 3), "float32", inner)
    state = tree.Dict("dict", (("model", tree.Dict("dict", (("w", composite),))), ("other", tree.Tensor("other"))))
    store = MemoryStore()
    tensors = {"model.w.qdata": EMBED, "model.w.scale": EMBED, "other": EMBED}
    await save_checkpoint(store, world_size=1, tensors=lambda _: tensors, values={"state": state})
    view = await read_view(store, await root_view.find(store, "global_step1"), LoadConfig())
    with pytest.raises(
        UsageError, match=r"^global_step1 has composite tensors.*: model.w.qdata \(torchao.quantization:Int8Tensor\), mod"
    ):
        check_ordinary(view, select(view))
    with pytest.raises(UsageError, match="load the checkpoint with cast=True"):
        check_ordinary(view, select(view, "model"))
    check_ordinary(view, select(view, "other"))
