"""Optimizer state of another shape than its parameter, on simulated ranks: how it lies when it was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from checkpointd.layout import tree
from checkpointd_client.capture.state import Captured, capture
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import LoadOptions, Restoration, prepare
from tests.unit.client.simulated_ranks import rank_of

ROWS, COLUMNS = 8, 6


@pytest.fixture(autouse=True)
def second_of_four() -> Iterator[None]:
    with rank_of(1, 4):
        yield


class Rowwise(torch.optim.Optimizer):
    """A scale for each row and one for each column; `asks`: with a look at a value, which a trial step cannot have."""

    def __init__(self, params: Any, *, asks: bool = False, plain: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.asks, self.plain, self.seen = asks, plain, []  # type: ignore[var-annotated]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for p in self.param_groups[0]["params"]:
            self.seen.append(p)
            assert not self.asks or p.grad.to_local().sum().item() >= 0
            grad = p.grad.to_local() if self.plain else p.grad
            self.state[p]["scales"] = [_whole(grad.abs().amax(dim=1)), _whole(grad.abs().mean(dim=0))]
            self.state[p]["step"] = torch.zeros(())


def _whole(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def on(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> DTensor:
    local = torch.ones(shape)
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(i), placement.dim)[0].clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.ones(shape).stride()
    )


def job(mesh: DeviceMesh, *placements: Any, **options: bool) -> dict[str, Any]:
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    model.weight = nn.Parameter(on(mesh, *placements))
    return {"model": model, "optimizer": Rowwise(model.parameters(), **options)}


def saved(state: dict[str, Any], rows: Any, columns: Any) -> Captured:
    state["optimizer"].state[state["model"].weight] = {"scales": [rows, columns], "step": torch.ones(())}
    return capture(state, None, exclude_frozen_parameters=False)


def loaded(captured: Captured, state: dict[str, Any]) -> list[Any]:
    """The scales after a load, whose values nobody has filled in."""
    restoration = matched(captured, state)
    restoration.finish()
    return list(state["optimizer"].state[state["model"].weight]["scales"])


def matched(captured: Captured, state: dict[str, Any]) -> Restoration:
    entries = {
        leaf.fqn: (leaf.dtype, tuple(leaf.tensor.shape) if leaf.part is None else leaf.part.shape) for leaf in captured.leaves
    }
    entries.setdefault("optimizer.state.model.weight.step", ("float32", ()))  # another rank writes it
    assert not isinstance(captured.tree, tree.FilesNode)
    root = tree.decode(tree.encode(captured.tree))
    owners = {leaf.fqn: 0 for leaf in captured.leaves if leaf.part is None}
    content = RankContent(root=root, entries=entries, owners=owners, aliases=captured.aliases, excluded=())
    return prepare(state, content, LoadOptions())


def row(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


def of_fsdp() -> Captured:
    mesh = row(0, 1, 2, 3)
    return saved(job(mesh, Shard(0)), on(mesh, Shard(0), shape=(ROWS,)), on(mesh, Replicate(), shape=(COLUMNS,)))


def test_it_has_the_placements_that_it_was_saved_with_on_a_mesh_of_another_size() -> None:
    mesh = row(0, 1)
    rows, columns = loaded(of_fsdp(), job(mesh, Shard(0), asks=True))
    assert (rows.placements, rows._local_tensor.shape, rows.device_mesh) == ((Shard(0),), (ROWS // 2,), mesh)
    assert (columns.placements, columns.shape) == ((Replicate(),), (COLUMNS,))
    assert not rows.is_meta


def test_on_a_mesh_of_other_dimensions_it_is_as_the_first_step_makes_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = job(mesh, Shard(0), Shard(1))
    rows, columns = loaded(of_fsdp(), state)
    assert rows.placements == (Shard(0), Replicate())
    assert columns.placements == (Replicate(), Shard(0))
    assert (rows._local_tensor.shape, columns._local_tensor.shape) == ((ROWS // 2,), (COLUMNS // 2,))
    assert state["optimizer"].seen == []  # the trial was nobody's


def test_what_was_saved_by_one_process_is_as_the_first_step_makes_it() -> None:
    plain = {"model": nn.Linear(COLUMNS, ROWS, bias=False)}
    plain["optimizer"] = Rowwise(plain["model"].parameters())  # type: ignore[assignment]
    rows, columns = loaded(saved(plain, torch.ones(ROWS), torch.ones(COLUMNS)), job(row(0, 1), Shard(1)))
    assert rows.placements == (Replicate(),)
    assert columns.placements == (Shard(0),)


def test_where_no_step_can_be_tried_every_rank_has_all_of_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = loaded(of_fsdp(), job(mesh, Shard(0), Shard(1), asks=True))
    assert rows.placements == columns.placements == (Replicate(), Replicate())
    assert rows._local_tensor.shape == (ROWS,)


def test_a_ranks_own_scales_stay_its_own() -> None:
    """An optimizer that works on this rank's part alone, and one that cannot tell."""
    for options in ({"plain": True}, {"asks": True}):
        captured = saved(job(row(0, 1), Shard(0)), torch.ones(ROWS // 2), torch.ones(COLUMNS))
        rows, columns = loaded(captured, job(row(0, 1), Shard(0), **options))
        assert type(rows) is type(columns) is torch.Tensor
        assert rows.shape == (ROWS // 2,)


class Counting(Rowwise):
    """It counts its steps in its attributes and in its group, and keeps an average as large as its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = [torch.zeros(())]
        self.stats = {"calls": self.calls[0], "deep": ([np.zeros(1)], {"calls": torch.zeros(1)})}
        self.average = {"all": torch.zeros(64, 64)}
        self.param_groups[0]["calls"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        self.calls[0].add_(1)
        assert self.stats["calls"] == 1  # it is the same tensor
        self.stats["deep"][0][0] += 1
        self.stats["deep"][1]["calls"] += 1
        self.average["all"].add_(1)
        self.param_groups[0]["calls"].add_(1)
        super().step()


def test_the_trial_of_a_step_changes_nothing_of_the_users_at_any_depth() -> None:
    state = {"model": nn.Linear(COLUMNS, ROWS, bias=False)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state["model"].weight = nn.Parameter(on(mesh, Shard(0), Shard(1)))
    optimizer = Counting(state["model"].parameters())
    rows, _ = loaded(of_fsdp(), {**state, "optimizer": optimizer})
    assert rows.placements == (Shard(0), Replicate())  # a step was tried
    counts = [optimizer.calls[0], *optimizer.stats["deep"][0], optimizer.stats["deep"][1]["calls"], optimizer.average["all"]]
    assert [float(count.sum()) for count in (*counts, optimizer.param_groups[0]["calls"])] == [0] * 5
    assert optimizer.stats["calls"] is optimizer.calls[0]


SIZE = 4


def square(weight: torch.Tensor, **entries: torch.Tensor) -> dict[str, Any]:
    model = nn.Linear(SIZE, SIZE, bias=False)
    model.weight = nn.Parameter(weight)
    optimizer = Rowwise(model.parameters())
    if entries:
        optimizer.state[model.weight] = dict(entries)
    return {"model": model, "optimizer": optimizer}


def entry_of(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer"].state[state["model"].weight]  # type: ignore[no-any-return]


def test_a_plain_tensor_beside_a_dtensor_of_the_same_shape_stays_plain() -> None:
    """As the statistics of the rows of a square parameter, which every rank keeps, or each its own."""
    sharded = on(row(0, 1), Shard(0), shape=(SIZE, SIZE))
    captured = capture(
        square(sharded, exp_avg=sharded.clone(), rows=torch.ones(SIZE, SIZE)), None, exclude_frozen_parameters=False
    )
    state = square(on(row(0, 1), Shard(0), shape=(SIZE, SIZE)))
    matched(captured, state).finish()
    assert type(entry_of(state)["rows"]) is torch.Tensor
    assert entry_of(state)["exp_avg"].placements == (Shard(0),)


def test_state_of_a_plain_parameter_is_sharded_as_the_parameter_is_now() -> None:
    plain = square(torch.ones(SIZE, SIZE), exp_avg=torch.ones(SIZE, SIZE))
    captured = capture(plain, None, exclude_frozen_parameters=False)
    state = square(on(row(0, 1), Shard(0), shape=(SIZE, SIZE)))
    matched(captured, state).finish()
    assert entry_of(state)["exp_avg"].placements == (Shard(0),)


def test_a_step_count_stays_plain() -> None:
    state = job(row(0, 1), Shard(0))
    loaded(of_fsdp(), state)
    assert type(state["optimizer"].state[state["model"].weight]["step"]) is torch.Tensor


def test_only_what_its_parameter_does_not_explain_is_stored_with_placements() -> None:
    state = job(row(0, 1), Shard(0))
    state["optimizer"].state[state["model"].weight] = {
        "exp_avg": on(row(0, 1), Shard(0)),
        "rows": on(row(0, 1), Shard(0), shape=(ROWS,)),
    }
    root = capture(state, None, exclude_frozen_parameters=False).tree
    assert isinstance(root, tree.Dict)
    found = {type(node).__name__: node.fqn for node in _tensors(root)}
    assert found == {
        "Tensor": "optimizer.state.model.weight.exp_avg",
        "MeshTensor": "optimizer.state.model.weight.rows",
    }


def _tensors(node: tree.Node) -> Iterator[tree.Tensor]:
    if isinstance(node, tree.Tensor) and "optimizer" in node.fqn:
        yield node
    for child in tree.children(node):
        yield from _tensors(child)


@pytest.mark.parametrize("placements", [((9, 1),), ((0, 0),), ((0, 7),), ((-1, 1),), (None, None), ()])
def test_placements_that_cannot_be_are_not_followed(placements: tuple[Any, ...]) -> None:
    captured = of_fsdp()

    def forged(node: Any) -> Any:
        if isinstance(node, tree.MeshTensor):
            return tree.MeshTensor(node.fqn, node.requires_grad, node.device, None, None, node.mesh, placements)
        if isinstance(node, tree.Dict):
            return tree.Dict(node.kind, tuple((key, forged(child)) for key, child in node.items))
        return tree.Sequence(node.kind, tuple(map(forged, node.items))) if isinstance(node, tree.Sequence) else node

    bent = Captured(captured.leaves, captured.aliases, forged(captured.tree), captured.excluded)
    rows, _ = loaded(bent, job(row(0, 1), Shard(0), asks=True))
    assert rows.placements == (Replicate(),)


# --- objects that hand out DTensors -----------------------------------------------------------------------------------


class App:
    """An object that takes back DTensors alone."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.asked = weight, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"weight": self.weight, "lr": 0.1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["weight"]) is type(self.weight)
        self.weight, self.lr = state["weight"], state["lr"]


def test_an_object_that_hands_out_dtensors_gets_them_back_as_its_own_lie() -> None:
    captured = capture({"app": App(on(row(0, 1, 2, 3), Shard(0)))}, None, exclude_frozen_parameters=False)
    again = App(on(row(0, 1), Shard(1)))
    before = again.weight
    restoration = matched(captured, {"app": again})
    [target] = restoration.targets
    assert target.held is not None
    assert target.tensor.data_ptr() == before._local_tensor.data_ptr()
    restoration.finish()
    assert again.weight is before
    assert again.lr == 0.1


def test_an_object_without_weights_is_not_asked() -> None:
    captured = capture({"app": App(torch.tensor(3))}, None, exclude_frozen_parameters=False)
    again = App(torch.tensor(1))
    matched(captured, {"app": again}).finish()
    assert again.asked == 0
