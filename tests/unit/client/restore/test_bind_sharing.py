"""BINDING-1 to BINDING-3 of bind.py: memory that was shared when saved, shared or apart when loading, and
never filled with two things.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpointd.errors import MismatchError
from checkpointd_client.capture.aliasing import MemoryRegion, contiguous_stride, overlapping, overlapping_pairs
from tests.unit.client.capture_and_fill import bytes_of, same, save


def tied_model(*, tied: bool) -> Any:
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    if tied:
        model["head"].weight = model["embedding"].weight
    return model


def test_tied_weights_stay_tied() -> None:
    source, target = tied_model(tied=True), tied_model(tied=True)
    saved = save({"m": source})
    assert len(saved.prepare({"m": target}).targets) == 1
    saved.load({"m": target})
    assert same(target["head"].weight, source["head"].weight)
    assert target["head"].weight is target["embedding"].weight


def test_only_tensors_that_share_memory_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.Tensor] = []
    of = MemoryRegion.of

    def counted(tensor: torch.Tensor) -> MemoryRegion:
        looked.append(tensor)
        return of(tensor)

    state = {"m": {f"layers.{n}": torch.full((3,), float(n)) for n in range(100)} | {"tied": torch.zeros(3)}}
    state["m"]["layers.0"] = state["m"]["tied"]
    saved = save(state)
    monkeypatch.setattr(MemoryRegion, "of", counted)
    live = {fqn: torch.zeros(3) for fqn in state["m"]}
    live["layers.0"] = live["tied"]
    assert len(saved.prepare({"m": live}).targets) == 100
    assert {tensor.data_ptr() for tensor in looked} == {live["tied"].data_ptr()}


def test_tied_when_saved_and_apart_now_fills_both() -> None:
    source, target = tied_model(tied=True), tied_model(tied=False)
    save({"m": source}).load({"m": target})
    assert same(target["head"].weight, source["head"].weight)
    assert same(target["embedding"].weight, source["head"].weight)
    assert target["head"].weight.data_ptr() != target["embedding"].weight.data_ptr()


def test_apart_when_saved_and_tied_now_is_a_mismatch() -> None:
    saved = save({"m": tied_model(tied=False)})
    target = tied_model(tied=True)
    before = bytes_of(target["head"].weight)
    with pytest.raises(MismatchError, match=r"m\.embedding\.weight and m\.head\.weight share memory now"):
        saved.prepare({"m": target})
    restoration = saved.prepare({"m": target}, strict=False)
    assert not restoration.targets
    assert len(restoration.mismatched) == 1
    restoration.finish()
    assert bytes_of(target["head"].weight) == before


def test_new_memory_is_tied_as_it_was() -> None:
    flat = torch.arange(12.0)
    source: dict[str, Any] = {
        "flat": flat,
        "part": flat[2:6].view(2, 2),
        "turned": flat.view(3, 4).t(),
        "row": flat[3:4].expand(5),
    }
    target: dict[str, Any] = dict.fromkeys(source)
    save(source).load(target)
    assert same(target, source)
    target["flat"].zero_()
    assert not any(view.any() for view in target.values())


def test_new_memory_is_tied_to_a_live_parameter() -> None:
    model = nn.Linear(2, 2)
    saved = save({"before": {"w": model.weight.detach()}, "model": model})
    other = nn.Linear(2, 2)
    target: dict[str, Any] = {"before": {}, "model": other}
    assert saved.entries.keys() == {"before.w", "model.bias"}
    saved.load(target)
    assert target["before"]["w"].data_ptr() == other.weight.data_ptr()
    assert same(other.weight, model.weight)


def test_new_memory_is_tied_to_live_memory_of_any_layout() -> None:
    numbers = torch.arange(6.0).view(2, 3)
    saved = save({"whole": numbers, "again": numbers.view(2, 3), "part": numbers[:, 1]})
    turned: dict[str, Any] = {"whole": torch.zeros(3, 2).t(), "again": None, "part": None}
    saved.load(turned)
    assert turned["again"].data_ptr() == turned["whole"].data_ptr()
    assert same([turned["again"], turned["part"]], [numbers, numbers[:, 1].contiguous()])
    inside: dict[str, Any] = {"whole": torch.zeros(20)[7:13].view(2, 3), "again": None, "part": None}
    saved.load(inside)
    assert inside["part"].data_ptr() == inside["whole"][:, 1].data_ptr()
    assert same(inside["part"], numbers[:, 1])


def test_one_transposed_tensor_under_two_names_is_stored_once() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    saved = save({"one": turned, "two": turned.detach()})
    assert saved.entries.keys() == {"one"}
    target: dict[str, Any] = {"one": None, "two": None}
    saved.load(target)
    assert target["one"].data_ptr() == target["two"].data_ptr()
    assert same(target["two"], turned)


def test_views_of_a_flat_buffer_in_place_apart_and_alone() -> None:
    def objects(*, shared: bool) -> dict[str, Any]:
        flat = torch.zeros(6)
        views = {"head": flat[:2], "turned": flat[2:].view(2, 2).t()}
        return {"flat": flat, **(views if shared else {name: view.clone() for name, view in views.items()})}

    source = objects(shared=True)
    source["flat"].copy_(torch.arange(6.0))
    saved = save(source)
    for shared in (True, False):
        target = objects(shared=shared)
        held = {name: value.data_ptr() for name, value in target.items()}
        saved.load(target)
        assert same(target, source)
        assert {name: value.data_ptr() for name, value in target.items()} == held
    alone = {"turned": torch.zeros(2, 2)}
    restoration = saved.prepare(alone, strict=False)
    assert [t.fqn for t in restoration.targets] == ["flat"]
    saved.fill(restoration)
    restoration.finish()
    assert same(alone["turned"], source["turned"].contiguous())


def test_an_alias_alone_is_read_straight_into_place() -> None:
    weight = torch.arange(4.0)
    saved = save({"a": weight, "b": weight.view(4)})
    target = {"b": torch.zeros(4)}
    restoration = saved.prepare(target, strict=False)
    assert [(t.fqn, t.tensor.data_ptr()) for t in restoration.targets] == [("a", target["b"].data_ptr())]


def test_tied_in_another_way_is_a_mismatch() -> None:
    square = torch.arange(4.0).view(2, 2)
    saved = save({"a": square, "b": square.t()})
    with pytest.raises(MismatchError, match="a and b share memory now"):
        saved.prepare({"a": square, "b": square})


def overlapping_views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "low": base[:6],
        "high": base[4:],
        "bits": base[:2].view(torch.int64),
        "windows": base.unfold(0, 3, 1),
        "expanded": torch.full((2, 1), float(base[0])).expand(2, 3),
    }


def test_views_that_overlap_as_they_did_are_filled_in_place() -> None:
    source, target = (
        overlapping_views(torch.arange(10.0, dtype=torch.float64)),
        overlapping_views(torch.zeros(10, dtype=torch.float64)),
    )
    saved = save(source)
    saved.load(target)
    assert save(target).data == saved.data
    anew: dict[str, Any] = dict.fromkeys(source)
    saved.load(anew)
    assert {name: bytes_of(value) for name, value in anew.items()} == saved.data


def test_views_that_overlap_in_another_way_are_a_mismatch() -> None:
    base = torch.arange(10.0)
    saved = save({"low": base[:6], "high": base[4:]})
    with pytest.raises(MismatchError, match="low and high share memory now"):
        saved.prepare({"low": base[:6], "high": base[3:9]})
    saved.prepare({"low": torch.zeros(6), "high": torch.zeros(6)})


def test_an_expanded_tensor_is_filled_only_with_what_was_expanded_alike() -> None:
    target = torch.zeros(2, 1).expand(2, 3)
    with pytest.raises(MismatchError, match="its elements share memory now"):
        save({"x": torch.arange(6.0).view(2, 3)}).prepare({"x": target})
    with pytest.raises(MismatchError, match="its elements share memory now"):
        save({"x": torch.arange(3.0).expand(2, 3)}).prepare({"x": target})
    save({"x": torch.tensor([[1.0], [2.0]]).expand(2, 3)}).load({"x": target})
    assert target.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_interleaved_columns_do_not_count_as_sharing() -> None:
    saved = save({"q": torch.ones(3, 2), "k": torch.zeros(3, 4)})
    fused = torch.empty(3, 6)
    saved.load({"q": fused[:, :2], "k": fused[:, 2:]})
    assert fused.tolist() == [[1, 1, 0, 0, 0, 0]] * 3


def test_conjugate_and_negative_views_are_filled_through_their_bits() -> None:
    def objects(values: Any) -> dict[str, Any]:
        base = torch.tensor(values, dtype=torch.complex64)
        alone = base.clone()
        return {"z": base, "conjugate": base.conj(), "alone": alone.conj(), "negative": alone.clone().conj().imag}

    source, target = objects([1 + 2j, -0.0 - 0.0j]), objects([5j, 6])
    saved = save(source)
    saved.load(target)
    assert save(target).data == saved.data
    with pytest.raises(MismatchError, match="share memory now"):
        save({"z": torch.ones(2, dtype=torch.complex64), "conjugate": torch.ones(2, dtype=torch.complex64)}).prepare(
            {"z": target["z"], "conjugate": target["conjugate"]}
        )


def test_arrays_and_tensors_on_one_memory_stay_so() -> None:
    array = np.arange(4.0)
    wide = np.arange(4, dtype=">i2")
    source = {"array": array, "tensor": torch.from_numpy(array), "wide": wide, "part": wide[1:3]}
    saved = save(source)
    assert saved.entries.keys() == {"array", "wide"}
    target: dict[str, Any] = dict.fromkeys(source)
    saved.load(target)
    assert same(target, source)
    target["tensor"].zero_()
    target["wide"][:] = 0
    assert not target["array"].any()
    assert not target["part"].any()


def test_a_state_tensor_that_shares_memory_by_chance_is_replaced() -> None:
    """An optimizer hands over its state by load_state_dict, so nothing forces its old tensors to be filled."""
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    source, target = torch.optim.SGD(weights, momentum=0.9), torch.optim.SGD(weights, momentum=0.9)
    for i, weight in enumerate(weights):
        source.state[weight]["momentum_buffer"] = torch.full((2,), float(i))
    shared = torch.zeros(2)
    for weight in weights:
        target.state[weight]["momentum_buffer"] = shared
    saved = save({"o": source})
    saved.load({"o": target})
    assert save({"o": target}).data == saved.data


def test_an_expanded_state_tensor_is_replaced() -> None:
    weight = nn.Parameter(torch.ones(2))
    source, target = torch.optim.SGD([weight]), torch.optim.SGD([weight])
    source.state[weight]["momentum_buffer"] = torch.arange(2.0)
    target.state[weight]["momentum_buffer"] = torch.zeros(1).expand(2)
    save({"o": source}).load({"o": target})
    assert target.state[weight]["momentum_buffer"].tolist() == [0, 1]


def test_tensors_of_the_optimizer_tied_to_a_parameter_stay_tied() -> None:
    weight = nn.Parameter(torch.ones(2))
    source = torch.optim.SGD([weight])
    source.state[weight]["anchor"] = weight.detach()
    saved = save({"w": weight, "o": source})
    other = nn.Parameter(torch.zeros(2))
    target = torch.optim.SGD([other])
    saved.load({"w": other, "o": target})
    assert target.state[other]["anchor"].data_ptr() == other.data_ptr()
    assert other.tolist() == [1, 1]


# --- the arithmetic of addresses ---------------------------------------------------------------------------------------


def test_groups_of_intervals() -> None:
    starts, ends = [100, 0, 150, 300, 20, 300, 10], [200, 10, 160, 400, 30, 300, 20]
    assert overlapping(starts, ends) == [[0, 2]]
    assert overlapping([0, 5, 12, 8], [6, 9, 13, 12]) == [[0, 1, 3]]
    assert overlapping([], []) == []


def test_pairs_that_share_memory_match_a_search_by_element() -> None:
    base = torch.zeros(24)
    views = [base[:6], base[5:9], base[::4], base[1::4], base.view(4, 6)[:, :3], base.view(4, 6)[:, 3:], base[10:12], base[0:0]]
    addresses = [{base[i : i + 1].data_ptr() for i in view.storage_offset() + _offsets(view)} for view in views]
    expected = {(i, j) for i in range(len(views)) for j in range(i) if addresses[i] & addresses[j]}
    found = {tuple(sorted(pair, reverse=True)) for pair in overlapping_pairs([MemoryRegion.of(view) for view in views])}
    assert found == expected


def _offsets(view: torch.Tensor) -> Any:
    grid = np.indices(view.shape).reshape(view.ndim, -1)
    return (grid * np.array(view.stride()).reshape(-1, 1)).sum(axis=0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 4), (1, 5, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()
