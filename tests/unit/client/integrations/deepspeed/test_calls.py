"""save_checkpoint and load_checkpoint on a Checkpointer, as users of DeepSpeed call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpointd.errors import MismatchError, NotFoundError, StateError, UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.errors import UnsafeObjectError
from checkpointd_client.integrations.deepspeed import load_checkpoint, save_checkpoint


def objects(fill: float) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    nn.init.constant_(model.weight, fill)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(int(fill)):
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("calls") / "root"
    with Checkpointer(place) as ckpt:
        assert load_checkpoint(ckpt, place, **objects(0.0)) == (None, None)
        assert save_checkpoint(ckpt, place, None, {"epoch": 3}, step=2, **objects(2.0))
        save_checkpoint(ckpt, place, "step9", save_latest=False, **objects(5.0))
        ckpt.wait()
        assert ckpt.latest() == "global_step2"
        assert [found.step for found in ckpt.list()] == [9, 2]
    return place


def test_both_give_back_what_deepspeeds_do(root: Path) -> None:
    live, saved = objects(0.0), objects(2.0)
    with Checkpointer(root) as ckpt:
        assert load_checkpoint(ckpt, root, "global_step2", **live) == (str(root / "global_step2"), {"epoch": 3})
    assert torch.equal(live["model"].weight, saved["model"].weight)
    assert live["optimizer"].state_dict()["state"][0]["step"].item() == 2
    assert live["lr_scheduler"].last_epoch == 2


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        ({"load_optimizer_states": False}, {"model", "lr_scheduler"}),
        ({"load_lr_scheduler_states": False}, {"model", "optimizer"}),
        ({"load_module_only": True}, {"model"}),
    ],
)
def test_parts_that_are_not_asked_for_stay(root: Path, flags: dict[str, bool], loaded: set[str]) -> None:
    live = objects(0.0)
    with Checkpointer(root) as ckpt:
        load_checkpoint(ckpt, root, "step9", **flags, **live)
    assert live["model"].weight[0, 0].item() != 0.0
    assert bool(live["optimizer"].state_dict()["state"]) == ("optimizer" in loaded)
    assert live["lr_scheduler"].last_epoch == (5 if "lr_scheduler" in loaded else 0)


def test_a_module_that_differs_is_refused_or_filled_as_far_as_it_goes(root: Path) -> None:
    with Checkpointer(root) as ckpt:
        for flags in ({}, {"load_module_only": True}):
            live = objects(0.0) | {"model": nn.Linear(3, 2, bias=False)}
            with pytest.raises(MismatchError, match=r"model\.bias"):
                load_checkpoint(ckpt, root, "step9", **flags, **live)
        assert not live["optimizer"].state_dict()["state"]
        load_checkpoint(ckpt, root, "step9", load_module_strict=False, load_module_only=True, **live)
    assert torch.equal(live["model"].weight, objects(5.0)["model"].weight)


def test_what_cannot_work_is_said(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root) as ckpt:
        with pytest.raises(UsageError, match="root is"):
            save_checkpoint(ckpt, tmp_path, step=1, **objects(1.0))
        with pytest.raises(UsageError, match="which step"):
            save_checkpoint(ckpt, root, "best", **objects(1.0))
        with pytest.raises(UsageError, match="nothing to work on"):
            save_checkpoint(ckpt, root, step=1)
        with pytest.raises(UsageError, match="start is of type int"):
            load_checkpoint(ckpt, root, start=3)
        with pytest.raises(NotFoundError):
            load_checkpoint(ckpt, root, "step1", **objects(1.0))


# --- objects that only code can load ---------------------------------------------------------------------------------


class Vocabulary:
    """Something of the user's own."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


class Stubborn:
    """Which does not pickle."""

    def __reduce__(self) -> str:
        raise TypeError("I stay here")


class Lost:
    """Which cannot be built again."""

    def __setstate__(self, state: object) -> None:
        raise KeyError("words")


def client_state() -> dict[str, Any]:
    return {"epoch": 3, "vocabulary": Vocabulary(["a", "b"]), "where": Path("/data"), "mean": torch.tensor([1.5, 2.5])}


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pickled") / "root"
    with Checkpointer(place, pickle_client_state=True) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, client_state=client_state()).wait(60)
    return place


def test_objects_in_client_state_are_refused_by_name(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "root")
    with pytest.raises(StateError, match=r"client_state\.vocabulary: .*Vocabulary"):
        ckpt.save(1, {"w": torch.ones(2)}, client_state=client_state())
    ckpt.close()  # which does not raise it again


def test_objects_come_back_where_both_sides_ask_for_it(pickled: Path) -> None:
    with Checkpointer(pickled, pickle_client_state=True) as ckpt:
        loaded = ckpt.load({"w": torch.zeros(2)})
    assert loaded is not None
    found = loaded.client_state
    assert (found["epoch"], found["where"], vars(found["vocabulary"])) == (3, Path("/data"), {"words": ["a", "b"]})
    assert torch.equal(found["mean"], torch.tensor([1.5, 2.5]))  # type: ignore[arg-type]  # any object


def test_nothing_is_unpickled_where_it_was_not_asked_for(pickled: Path) -> None:
    live = torch.zeros(2)
    with Checkpointer(pickled) as ckpt:
        with pytest.raises(
            UnsafeObjectError, match=r"client_state\.vocabulary, of class .*Vocabulary.*pickle_client_state=True"
        ):
            ckpt.load({"w": live})
        assert torch.equal(live, torch.zeros(2)), "something was loaded all the same"


@pytest.mark.parametrize(("value", "said"), [(Stubborn(), "I stay here"), (lambda: 0, "lambda")])
def test_what_does_not_pickle_is_named(tmp_path: Path, value: object, said: str) -> None:
    with Checkpointer(tmp_path / "root", pickle_client_state=True) as ckpt:
        with pytest.raises(StateError, match=rf"client_state\.it: .* cannot be pickled: .*{said}"):
            ckpt.save(1, {"w": torch.ones(2)}, client_state={"it": value})
        ckpt.save(2, {"w": torch.ones(2)}, client_state={"it": 1}).wait(60)


def test_what_cannot_be_unpickled_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    lost, live = Lost(), torch.zeros(2)
    lost.words = 1  # type: ignore[attr-defined]  # a state, so that __setstate__ is called
    with Checkpointer(tmp_path / "root", pickle_client_state=True) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, client_state={"it": lost}).wait(60)
        with pytest.raises(StateError, match=r"client_state\.it: .*Lost cannot be unpickled here: KeyError"):
            ckpt.load({"w": live})
    assert torch.equal(live, torch.zeros(2))
