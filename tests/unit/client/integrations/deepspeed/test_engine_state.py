"""What an engine keeps beside tensors, stored and set again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

import torch

from checkpointd.errors import UsageError
from checkpointd_client.integrations.deepspeed.engine_state import restore_engine
from checkpointd_client.integrations.deepspeed.load_targets import EngineTargets, LoadRequest
from checkpointd_client.integrations.deepspeed.zero_optimizer import check_supported
from checkpointd_client.restore.target_chooser import LoadTargets


class Parts(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(1, 1, bias=False))


def engine_with(*names: str, **attributes: Any) -> Any:
    return SimpleNamespace(
        module=Parts(*names),
        optimizer=None,
        seq_dp_world_size=1,
        mp_world_size=1,
        get_data_types=lambda: (torch.float32,),
        **attributes,
    )


def test_which_gradients_are_sparse_is_as_it_was_saved_and_of_new_parameters_as_it_is() -> None:
    engine = engine_with("a", "b", "new", sparse_tensor_module_names={"a.weight", "new.weight"})
    stored = {"sparse_tensor_module_names": ["b.weight", "gone.weight"]}
    restore_engine(engine, stored, {"a.weight", "b.weight", "gone.weight"})
    assert engine.sparse_tensor_module_names == {"b.weight", "new.weight"}


def test_a_release_that_does_not_keep_which_gradients_are_sparse_is_not_told() -> None:
    engine = engine_with("b")
    restore_engine(engine, {"sparse_tensor_module_names": ["b.weight"], "global_steps": 7}, {"b.weight"})
    assert engine.global_steps == 7
    assert not hasattr(engine, "sparse_tensor_module_names")


@pytest.mark.parametrize(("curriculum", "random_ltd"), [(True, False), (False, True)])
def test_an_engine_that_has_a_state_which_the_layout_would_leave_out_is_refused(curriculum: bool, random_ltd: bool) -> None:
    engine = engine_with(
        "a",
        has_moe_layers=False,
        curriculum_learning_enabled=lambda: curriculum,
        random_ltd_enabled=lambda: random_ltd,
    )
    with pytest.raises(
        UsageError, match=r"cannot store this engine: its data sampler or its random-LTD.*layout='deepspeed' can"
    ):
        check_supported(engine)


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_load_misses_what_is_frozen_and_was_not_saved(strict: bool) -> None:
    """As DeepSpeed's own files have it."""
    places = EngineTargets.__new__(EngineTargets)
    places.what, places._stored, places._places = (
        LoadRequest(strict=strict),
        {"deepspeed": {"left_out": ["a.weight"]}},
        LoadTargets({}),
    )
    for name in ("a.weight", "b.weight"):
        places._note_missing(name, None)
    expected = [
        "model.a.weight: missing from the checkpoint, which was saved with exclude_frozen_parameters=True: pass "
        "load_module_strict=False",
        "model.b.weight: missing from the checkpoint",
    ]
    assert places._places.faults == (expected if strict else [])
