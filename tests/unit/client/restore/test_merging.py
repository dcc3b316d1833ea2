"""One tree out of those of all ranks: what is equal is kept, what differs is left and named, and lists go as a whole."""

from __future__ import annotations

import msgspec
import pytest

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd_client.restore.merging import Merging


def _dict(**items: tree.Node) -> tree.Dict:
    return tree.Dict("dict", tuple(items.items()))


def _list(*items: tree.Node) -> tree.Sequence:
    return tree.Sequence("list", items)


def _root(client: tree.Node = None, **state: tree.Node) -> tree.Dict:
    return tree.Dict("dict", (("state", _dict(**state)), ("client_state", client)))


def _merged(merging: Merging, *roots: tree.Node) -> tree.Dict:
    root = merging.merged([((rank,), root) for rank, root in enumerate(roots)])
    assert isinstance(root, tree.Dict)
    state = dict(root.items)["state"]
    assert isinstance(state, tree.Dict)
    return state


def _alike(rank: int, fqn: str) -> object:
    del rank
    return fqn


def _apart(rank: int, fqn: str) -> object:
    return rank, fqn


def test_what_is_equal_stays_and_what_differs_is_left() -> None:
    merging = Merging(_alike)
    state = _merged(merging, _root(step=4, at=1, nan=float("nan")), _root(step=4, at=2, nan=float("nan")))
    assert [key for key, _ in state.items] == ["step", "nan"]
    assert merging.left == ["at"]


def test_one_is_not_true() -> None:
    merging = Merging(_alike)
    assert not _merged(merging, _root(x=1), _root(x=True)).items
    assert merging.left == ["x"]


def test_dicts_are_merged_key_by_key_and_what_only_some_have_is_noted() -> None:
    merging = Merging(_alike)
    state = _merged(merging, _root(d=_dict(a=1, b=2)), _root(d=_dict(a=1, c=3)))
    assert dict(state.items)["d"] == _dict(a=1, b=2, c=3)
    assert merging.partial == {"d.b", "d.c"}
    assert not merging.left


def test_a_list_is_left_as_a_whole() -> None:
    merging = Merging(_alike)
    state = _merged(merging, _root(l=_list(1, _dict(a=2)), same=_list(1)), _root(l=_list(1, _dict(a=3)), same=_list(1)))
    assert [key for key, _ in state.items] == ["same"]
    assert merging.left == ["l"]


def test_lists_of_other_lengths_and_other_kinds_differ() -> None:
    merging = Merging(_alike)
    assert not _merged(merging, _root(a=_list(1), b=_list(1)), _root(a=_list(1, 2), b=tree.Sequence("tuple", (1,)))).items
    assert merging.left == ["a", "b"]


def test_the_parameters_of_an_optimizers_groups_are_put_together() -> None:
    groups = [_list(_dict(lr=0.1, params=_list(*names))) for names in (("m.a", "m.b"), ("m.b", "m.c"))]
    merging = Merging(_alike)
    state = _merged(merging, *(_root(opt=_dict(param_groups=found)) for found in groups))
    opt = dict(state.items)["opt"]
    assert opt == _dict(param_groups=_list(_dict(lr=0.1, params=_list("m.a", "m.b", "m.c"))))
    assert not merging.left


def _group(*names: str, **settings: tree.Node) -> tree.Dict:
    return _dict(**settings, params=_list(*names))


def _groups(merging: Merging, *ranks: list[tree.Node]) -> list[tree.Node]:
    """The param groups of one optimizer out of those of all ranks."""
    opt = dict(_merged(merging, *(_root(opt=_dict(param_groups=_list(*groups))) for groups in ranks)).items)["opt"]
    assert isinstance(opt, tree.Dict)
    groups = dict(opt.items).get("param_groups", _list())
    assert isinstance(groups, tree.Sequence)
    return list(groups.items)


def test_groups_of_the_same_settings_become_one_and_any_other_stays() -> None:
    def decays(name: str) -> tree.Node:
        return _group(name, decay=0.1)

    def stays(name: str) -> tree.Node:
        return _group(name, decay=0.0)

    merging = Merging(_alike)
    both = [_group("a", "c", decay=0.1), _group("b", "d", decay=0.0)]
    assert _groups(merging, [decays("a"), stays("b")], [decays("c"), stays("d")]) == both
    assert _groups(merging, [decays("a"), stays("b")], [stays("d")], [decays("c")]) == both
    assert _groups(merging, [stays("b")], [decays("a"), stays("d")], [decays("c")]) == both
    assert _groups(merging, [decays("a")], [stays("b")]) == [decays("a"), stays("b")]
    # Of one rank, groups of the same settings stay as they are: a scheduler may change them apart.
    layers = [_group("a", "c", decay=0.1), decays("b")]
    assert _groups(merging, [decays("a"), decays("b")], [decays("c")]) == layers
    assert not merging.left


def test_the_names_that_torch_notes_beside_them_are_left_out_where_nobody_had_that_group() -> None:
    def named(name: str) -> tree.Node:
        return _dict(lr=0.1, params=_list(f"m.{name}"), param_names=_list(name))

    assert _groups(Merging(_alike), [named("a")], [named("b")]) == [_group("m.a", "m.b", lr=0.1)]
    assert _groups(Merging(_alike), [named("a")], [named("a")]) == [named("a")]


@pytest.mark.parametrize("keep", [None, 1])
def test_ranks_that_had_other_settings_for_one_parameter_contradict_each_other_unless_one_is_kept(keep: int | None) -> None:
    merging = Merging(_alike, keep)
    first, second = (
        _root(opt=_dict(param_groups=_list(group))) for group in (_group("m.a", "m.b", lr=0.1), _group("m.b", "m.c", lr=0.2))
    )
    made = merging.merged([((0,), first), ((1,), second)] if keep is None else [((1,), second), ((0,), first)])
    kept = _list(_group("m.b", "m.c", lr=0.2), _group("m.a", lr=0.1))
    assert made == _root(opt=_dict() if keep is None else _dict(param_groups=kept))
    assert merging.left == (["opt.param_groups"] if keep is None else [])


def test_a_group_whose_settings_hold_tensors_goes_with_those_of_the_same_values() -> None:
    first = [_group("m.w", lr=tree.Tensor("lr")), _group("m.b", lr=tree.Tensor("lr1"))]
    second = [_group("n.w", lr=tree.Tensor("lr"))]
    merging = Merging(_alike)
    assert _groups(merging, first, second) == [_group("m.w", "n.w", lr=tree.Tensor("lr")), first[1]]
    assert merging.chosen == {"lr": 0, "lr1": 0}
    merging = Merging(_apart)
    assert not _groups(merging, first, second)  # both values would be stored under one name
    assert merging.left == ["opt.param_groups"]


@pytest.mark.parametrize("kind", [tree.Tensor, lambda fqn: tree.Array(fqn, "<f4")])
def test_tensors_are_equal_where_what_they_hold_is(kind: type[tree.Tensor]) -> None:
    roots = [_root(w=kind("w")), _root(w=kind("w"))]
    same, apart = Merging(_alike), Merging(_apart)
    assert len(_merged(same, *roots).items) == 1
    assert same.chosen == {"w": 0}
    assert not _merged(apart, *roots).items
    assert apart.left == ["w"]


def test_parameters_that_one_rank_had_in_one_group_stay_together_and_others_apart() -> None:
    """All groups have the same settings, so only the ranks that know both parameters of a pair can tell."""
    apart = [_group("a"), _group("b")]
    assert _groups(Merging(_alike), apart, [_group("b", "c")]) == [_group("a"), _group("b", "c")]
    assert _groups(Merging(_alike), apart, [_group("b"), _group("c")]) == [_group("a", "c"), _group("b")]


def test_the_same_tree_on_two_ranks_is_not_the_same_tensor() -> None:
    merging = Merging(_apart)
    merging.merged([((0, 1), _root(w=tree.Tensor("w")))])
    assert merging.left == ["w"]


def test_the_rank_that_is_kept_wins_where_it_has_something() -> None:
    merging = Merging(_apart, keep=0)
    state = _merged(merging, _root(at=1, w=tree.Tensor("w")), _root(at=2, w=tree.Tensor("w"), more=tree.Tensor("more")))
    assert dict(state.items) == {"at": 1, "w": tree.Tensor("w"), "more": tree.Tensor("more")}
    assert merging.chosen == {"w": 0, "more": 1}
    assert not merging.left


def test_client_state_is_merged_like_the_state_under_its_name() -> None:
    merging = Merging(_alike)
    root = merging.merged([((0,), _root(_dict(start=1, at=0))), ((1,), _root(_dict(start=1, at=5)))])
    assert isinstance(root, tree.Dict)
    assert dict(root.items)["client_state"] == _dict(start=1)
    assert merging.left == ["client_state.at"]


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(FormatError, match="does not hold a state"):
        Merging(_alike).merged([((0,), _root()), ((1,), None)])


PAIR = tree.NamedTuple("namedtuple", (1, 2), "job", "Pair", ("x", "y"))
DEQUE = tree.Deque("deque", (1, 2), 5)
MEMBER = tree.Member("gone", "Phase", "MAIN", 2)


@pytest.mark.parametrize("node", [PAIR, DEQUE, MEMBER, tree.Dict("Namespace", (("lr", 0.5),))])
def test_a_value_that_is_equal_stays_what_it_is(node: tree.Node) -> None:
    merging = Merging(_alike)
    assert dict(_merged(merging, _root(v=node), _root(v=node)).items) == {"v": node}
    assert merging.left == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PAIR, msgspec.structs.replace(PAIR, qualname="Other")),
        (PAIR, msgspec.structs.replace(PAIR, fields=("x", "z"))),
        (PAIR, tree.Sequence("tuple", (1, 2))),
        (DEQUE, msgspec.structs.replace(DEQUE, maxlen=6)),
        (DEQUE, msgspec.structs.replace(DEQUE, items=(1, 3))),
        (MEMBER, tree.Member("gone", "Phase", "WARMUP", 1)),
        (_dict(lr=0.5), tree.Dict("SimpleNamespace", (("lr", 0.5),))),
    ],
)
def test_values_of_other_classes_differ(one: tree.Node, other: tree.Node) -> None:
    merging = Merging(_alike)
    assert _merged(merging, _root(v=one), _root(v=other)).items == ()
    assert merging.left == ["v"]


def test_a_key_whose_class_is_gone_has_a_name() -> None:
    merging = Merging(_alike)
    one, other = (tree.Dict("dict", ((MEMBER, value),)) for value in (1, 2))
    _merged(merging, _root(v=one), _root(v=other))
    assert merging.left == ["v.Phase.MAIN"]
