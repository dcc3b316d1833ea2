"""What is read of DeepSpeed's files without DeepSpeed, from files that were made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StateError, UnreadableError, UsageError
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd_client import Checkpointer, open_checkpoint
from checkpointd_client.integrations.deepspeed.offline import fp32_files
from checkpointd_client.integrations.deepspeed.offline.file_names import pointed
from checkpointd_client.integrations.deepspeed.offline.fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from checkpointd_client.integrations.deepspeed.offline.importing import import_deepspeed
from checkpointd_client.reader import OpenCheckpoint
from tests.unit.client.capture_and_fill import same
from tests.unit.client.integrations.deepspeed.offline.handmade_zero import GROUPS, SHARED, Made, make

KINDS = [(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3, 4)]


def expected(made: Made, *, frozen: bool = True) -> dict[str, torch.Tensor]:
    weights = {name: value.float() if value.is_floating_point() else value for name, value in made.buffers.items()}
    weights |= (made.frozen if frozen else {}) | made.weights
    return weights | {name: weights[owner] for name, owner in SHARED.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("stage", "ranks"), KINDS)
def test_weights_are_put_together(tmp_path: Path, stage: int, ranks: int) -> None:
    made = make(tmp_path / "step5", stage, ranks, torch.bfloat16)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert_same(found, expected(made))
    assert found["tied.weight"] is found["a.weight"]
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step5", True), expected(made, frozen=False))
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy["tied.weight"] is lazy["a.weight"]
    assert_same({name: tensor.contiguous() for name, tensor in lazy.items()}, expected(made))


@pytest.mark.parametrize(("stage", "ranks"), [(1, 3), (3, 3)])
def test_files_for_other_programs(tmp_path: Path, stage: int, ranks: int) -> None:
    made = make(tmp_path / "step5", stage, ranks, torch.bfloat16)
    wanted = {name: value.float() if value.is_floating_point() else value for name, value in expected(made).items()}
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, max_shard_size=100)
    index = json.loads((out / "pytorch_model.bin.index.json").read_text())["weight_map"]
    files = {name: torch.load(out / name, weights_only=True) for name in set(index.values())}
    assert sorted(p.name for p in out.iterdir()) == sorted([*files, "config.json", "pytorch_model.bin.index.json"])
    for name, value in wanted.items():
        assert torch.equal(files[index[name]][name], value), name
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, safe_serialization=True)
    safe = load_file(out / "model.safetensors")
    assert safe.keys() == wanted.keys() - SHARED.keys()
    assert all(torch.equal(safe[name], wanted[name]) for name in safe)


def test_a_model_is_filled(tmp_path: Path) -> None:
    made = make(tmp_path / "step5", 2, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 7, bias=False)
            self.b = nn.LayerNorm(5, bias=False)
            self.other = nn.Linear(1, 1)

    model = Model()
    other = model.other.weight.item()
    assert load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert torch.equal(model.a.weight, made.weights["a.weight"])
    assert torch.equal(model.b.weight, made.weights["b.weight"])
    assert model.other.weight.item() == other
    model.a = nn.Linear(4, 7)
    with pytest.raises(RuntimeError, match=r"a\.weight: \[7, 4\] in the model, \[7, 3\] in the checkpoint"):
        load_state_dict_from_zero_checkpoint(model, tmp_path)


@pytest.mark.parametrize(("zenflow", "refused"), [({"topk_ratio": 0.1}, True), (None, False)])
def test_masters_that_zenflow_left_behind_are_not_taken_for_the_weights(tmp_path: Path, zenflow: Any, refused: bool) -> None:
    made = make(tmp_path / "step5", 3, 2)
    for path in made.directory.glob("*_optim_states.pt"):
        settings = {"zero_optimization": {"stage": 3, "zenflow": zenflow}}
        torch.save({**torch.load(path, weights_only=False), "ds_config": settings}, path)
    if refused:
        with pytest.raises(UsageError, match=r"with ZenFlow: its fp32 masters lack .* use engine.save_16bit_model"):
            get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    else:
        assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected(made))


class Evil:
    """Makes a directory where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, (str(self.place),)


def test_nothing_that_is_pickled_runs(tmp_path: Path) -> None:
    make(tmp_path / "step5", 2, 2, evil=Evil(tmp_path / "evil"))
    get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(StateError, match=r"client_state\.evil .*cannot be stored"):
        import_deepspeed(tmp_path, tmp_path / "root")
    done = import_deepspeed(tmp_path, tmp_path / "root", leave_out=True)
    assert [text.partition(" ")[0] for text in done.left_out] == ["client_state.evil"]
    assert not (tmp_path / "evil").exists()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_a_buffer_and_its_conjugate(tmp_path: Path) -> None:
    make(tmp_path / "step5", 1, 1)
    plain = torch.tensor([1 + 2j])

    def change(content: dict[str, Any]) -> None:
        content["module"] |= {"plain": plain, "conjugate": plain.conj()}
        content["buffer_names"] += ["plain", "conjugate"]

    edit(tmp_path / "step5" / "mp_rank_00_model_states.pt", change)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert (found["plain"].item(), found["conjugate"].item()) == (1 + 2j, 1 - 2j)


def optim(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def shorten(key: str) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        edit(directory / optim(1), lambda c: c["optimizer_state_dict"][key].__setitem__(0, torch.zeros(3)))

    return act


def cut(directory: Path) -> None:
    path = directory / optim(1)
    path.write_bytes(path.read_bytes()[:-700])


def dangle(directory: Path) -> None:
    """A file that is a link to one that was removed."""
    (directory / optim(1)).unlink()
    (directory / optim(1)).symlink_to("gone")


def pipe(directory: Path) -> None:
    (directory / optim(1)).unlink()
    os.mkfifo(directory / optim(1))


FAULTS: list[tuple[int, Callable[[Path], None], type[CheckpointdError], str]] = [
    (2, lambda d: (d / optim(1)).unlink(), DamagedError, r"rank_0.*was saved by 2 ranks.*has the files of rank 0:"),
    (2, lambda d: (d / optim(0)).rename(d / optim(7)), DamagedError, r"rank_1.*ranks 1, 7: files are missing, or left over"),
    (2, lambda d: (d / optim(1)).rename(d / optim(1).replace("mp_rank_00", "mp_rank_01")), UsageError, "model-parallel"),
    (2, lambda d: (d / f"bf16_{optim(1)}").write_bytes(b""), DamagedError, "both of rank 1"),
    (2, lambda d: (d / "layer_1_expert_0_mp_rank_00_model_states.pt").write_bytes(b""), UsageError, "experts"),
    (2, cut, DamagedError, r"rank_1_mp_rank_00_optim_states.pt cannot be read"),
    (2, lambda d: (d / optim(1)).write_bytes(b"\x80\x02."), DamagedError, r"rank_1.*cannot be read"),
    (2, lambda d: (d / "mp_rank_00_model_states.pt").unlink(), NotFoundError, "has no file"),
    (2, lambda d: [(d / optim(r)).unlink() for r in (0, 1)], NotFoundError, "has no file"),  # type: ignore[func-returns-value]
    (2, pipe, UnreadableError, r"rank_1.*not a regular file"),
    (2, dangle, NotFoundError, r"rank_1.* does not exist"),
    (2, shorten("single_partition_of_fp32_groups"), DamagedError, "elements of group 0"),
    (3, shorten("fp32_flat_groups"), DamagedError, "rank_1.*sub-groups"),
    (3, lambda d: (d / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(), NotFoundError, "model states of rank 1"),
    (
        3,
        lambda d: edit(d / optim(0), lambda c: c["optimizer_state_dict"].update(zero_stage=7)),
        DamagedError,
        "zero_stage is 7",
    ),
    (3, lambda d: edit(d / optim(0), lambda c: c.clear()), DamagedError, "optimizer_state_dict is a NoneType"),
]


@pytest.mark.parametrize(("stage", "spoil", "kind", "words"), FAULTS)
def test_what_does_not_belong_together_is_named(
    tmp_path: Path, stage: int, spoil: Callable[[Path], None], kind: type[CheckpointdError], words: str
) -> None:
    directory = make(tmp_path / "step5", stage, 2).directory
    spoil(directory)
    with pytest.raises(kind, match=words):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="name a tag"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(NotFoundError, match="no directory"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step7")


LATEST: list[Callable[[Path], object]] = [
    lambda p: p.symlink_to(p.name),
    lambda p: p.mkdir(),
    os.mkfifo,
    lambda p: p.symlink_to("/dev/null"),
    lambda p: p.write_text("step5" * 1000),
]

ODD: list[tuple[dict[str, Any], str]] = [
    ({"shared_params": 7}, "shared_params is a int"),
    ({"shared_params": torch.ones(2)}, "shared_params is a Tensor"),
    ({"shared_params": [("a", "b", "c")]}, "not pairs of names"),
    ({"shared_params": [("a", 7)]}, "not pairs of names"),
    ({"shared_params": ["ab"]}, "a pair of shared_params is a str"),
    ({"buffer_names": 7}, "buffer_names is a int"),
    ({"buffer_names": [[]]}, "a name in buffer_names is a list"),
    ({"ds_autoep_layers": [1 << 20_000]}, "a number of more than 255 bytes"),
    ({"global_steps": 1 << 20_000}, "a number of more than 255 bytes"),
]


@pytest.mark.parametrize(("changes", "words"), ODD)
@pytest.mark.parametrize("read", [get_fp32_state_dict_from_zero_checkpoint, lambda p: import_deepspeed(p, p / "root")])
def test_values_that_deepspeed_does_not_save_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str, read: Callable[[Path], object]
) -> None:
    directory = make(tmp_path / "step5", 2, 2).directory
    edit(directory / "mp_rank_00_model_states.pt", lambda content: content.update(changes))
    with pytest.raises((DamagedError, UsageError), match=words):
        read(tmp_path)


@pytest.mark.parametrize("text", ["/etc", "../step5", "step5/..", "a\0b", "a\nb", ""])
def test_a_pointer_does_not_lead_elsewhere(tmp_path: Path, text: str) -> None:
    make(tmp_path / "step5", 2, 2)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(DamagedError, match="does not hold a tag"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("put", LATEST, ids=["loop", "directory", "pipe", "device", "long"])
def test_a_pointer_that_tells_nothing_is_named(tmp_path: Path, put: Callable[[Path], object]) -> None:
    make(tmp_path / "step5", 2, 2)
    (tmp_path / "latest").unlink()
    put(tmp_path / "latest")
    with pytest.raises(UnreadableError, match=r"latest cannot be read.*name a tag"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step5")
    assert pointed(str(tmp_path)) is None


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_import_has_everything_by_name(tmp_path: Path, stage: int, ranks: int, dtype: torch.dtype) -> None:
    made = make(tmp_path / "src" / "step5", stage, ranks, dtype, mine={"epoch": 3, "order": torch.arange(4)})
    done = import_deepspeed(tmp_path / "src", tmp_path / "root")
    assert (done.tag, done.step, done.stage, done.ranks, done.left_out) == ("step5", 5, stage, ranks, ())
    parts = ("model", "optimizer", "scheduler", "deepspeed", *(["master"] if dtype != torch.float32 else []))
    state: dict[str, Any] = dict.fromkeys(parts)
    with Checkpointer(tmp_path / "root") as ckpt:
        loaded = ckpt.load(state)
    assert loaded is not None
    assert loaded.client_state["mine"]["epoch"] == 3  # type: ignore[index]
    assert torch.equal(loaded.client_state["mine"]["order"], torch.arange(4))  # type: ignore[index]
    for name, weight in made.weights.items():
        assert torch.equal(state["model"][name], weight.to(dtype)), name
        if dtype != torch.float32:
            assert torch.equal(state["master"][name], weight), name
        kept = state["optimizer"]["state"][f"model.{name}"]
        assert kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert kept["step"].item() == 5.0
        assert all(torch.equal(kept[key], value) for key, value in made.states[name].items()), name
    for name, value in (made.frozen | made.buffers).items():
        assert torch.equal(state["model"][name], value), name
    assert state["model"]["tied.weight"].data_ptr() == state["model"]["a.weight"].data_ptr()
    groups = state["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [[f"model.{name}" for name in group] for group in GROUPS]
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert state["scheduler"] == {"last_batch_iteration": 4}
    assert (state["deepspeed"]["global_steps"], state["deepspeed"]["skipped_steps"]) == (5, 1)
    assert_same(
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "root"), get_fp32_state_dict_from_zero_checkpoint(tmp_path / "src")
    )


def test_an_import_keeps_the_classes_of_dicts(tmp_path: Path) -> None:
    """MultiStepLR keeps its milestones in a Counter and calls its methods."""
    wanted = {"counter": Counter({3: 1, 7: 2}), "ordered": OrderedDict(b=1, a=2), "plain": {"b": 1}}
    make(tmp_path / "src" / "step5", 1, 1, mine=wanted)
    import_deepspeed(tmp_path / "src", tmp_path / "root")
    with open_checkpoint(tmp_path / "root") as opened:
        found: Any = opened.client_state["mine"]
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]


def test_weights_of_our_own_format_are_read_once_when_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WEIGHTFILE-1"""
    model = torch.nn.Linear(64, 8)
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": model}).wait()
    sizes: list[int] = []
    read = OpenCheckpoint.read

    def counted(self: OpenCheckpoint, wants: Sequence[BoxRequest]) -> None:
        sizes.append(sum(want.box.numel() for want in wants))
        read(self, wants)

    monkeypatch.setattr(OpenCheckpoint, "read", counted)
    monkeypatch.setattr(fp32_files, "SLAB_BYTES", 400)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "root", tmp_path / "out")
    assert same(torch.load(tmp_path / "out" / "pytorch_model.bin"), dict(model.state_dict()))
    assert max(sizes) == 100
    assert sum(sizes) == 64 * 8 + 8


@pytest.mark.nightly
def test_deepspeed_is_not_needed(tmp_path: Path) -> None:
    make(tmp_path / "step5", 3, 2)
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from checkpointd_client.integrations.deepspeed import get_fp32_state_dict_from_zero_checkpoint as get\n"
        "print(len(get(sys.argv[1])))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "8\n", done.stderr
