"""The files beside the weights: configuration and tokenizer, and never weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.export import beside
from checkpointd.export.beside import read_beside


def test_all_but_weights_and_hidden_files_is_copied(tmp_path: Path) -> None:
    kept = ("config.json", "merges.txt", "chat_template.jinja", "tokenizer.model", "modeling_x.py", "generation_config.json")
    weights = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "x.gguf",
    )
    for name in (*kept, *weights, ".gitattributes", "checkpointd.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "onnx").mkdir()
    assert read_beside(tmp_path) == dict.fromkeys(sorted(kept), b"{}")
    assert read_beside(None) == {}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_names_the_dtype_of_the_export(tmp_path: Path, key: str) -> None:
    config = {"model_type": "llama", key: "float32", "text_config": {"layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(read_beside(tmp_path, "bf16")["config.json"]) == {**config, key: "bfloat16"}
    assert json.loads(read_beside(tmp_path)["config.json"]) == config
    (tmp_path / "config.json").write_text('{"a":1}')
    assert read_beside(tmp_path, "fp32")["config.json"] == b'{"a":1}'


def test_what_cannot_be_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match=r"there is no directory .*/none"):
        read_beside(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be read: \[ENOTDIR\] Not a directory"):
        read_beside(tmp_path / "file")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"config.json is not a JSON object"):
        read_beside(tmp_path, "bf16")
    monkeypatch.setattr(beside, "BYTES_MAX", 1)
    with pytest.raises(UsageError, match=r"have more than 1 bytes, up to config.json"):
        read_beside(tmp_path)
