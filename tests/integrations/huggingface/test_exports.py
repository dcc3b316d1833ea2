"""From training to `from_pretrained`: a sidecar exports what FSDP2 ranks save, is killed on the way, and the model is right."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.daemon.query import StatusClient
from checkpointd.export.progress import ExportProgress
from checkpointd.store import open_store
from tests.faults.daemons import Daemon
from tests.servers.fixtures import Place, root_at

pytest.importorskip("transformers", reason="needs transformers: make test-all installs it")

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]


def run(script: str, *arguments: object, ranks: int = 0) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def files_for(folder: Path, kind: str) -> Path:
    place = folder / "files"
    place.mkdir()
    code = "import sys; from tests.integrations.huggingface.export_ranks import put_beside; put_beside(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, str(place), kind], check=True, env=ENVIRONMENT, timeout=120)
    return place


def configured(folder: Path, **rule: object) -> str:
    """A configuration file with one rule for `folder/root`; returns its path."""
    (folder / "root").mkdir(exist_ok=True)
    rule = {"root": str(folder / "root"), "poll_s": 0.1, **rule}
    lines = [f"{name} = {value!r}" if isinstance(value, str) else f"{name} = {value}" for name, value in rule.items()]
    (folder / "serve.toml").write_text("\n".join(["[serve]", "[[serve.exports]]", *lines, ""]))
    return str(folder / "serve.toml")


def awaited(daemon: Daemon, is_so: Callable[[ExportProgress], bool]) -> ExportProgress:
    """The progress of the one export, once it is so."""
    with StatusClient(str(daemon.socket)) as client:
        while not is_so(found := client.status().exports[0]):
            assert daemon.process.poll() is None, daemon.said()
            assert found.state != "over", found.problem
    return found


def test_export_2_a_killed_sidecar_leaves_nothing_half_and_the_next_one_goes_on(tmp_path: Path) -> None:
    files, to = files_for(tmp_path, "llama"), tmp_path / "models"
    rule = {"to": str(to), "files": str(files), "max_shard_size": "20KB", "every_steps": 2}
    slow = configured(tmp_path, **rule, limit_bps=1)
    with Daemon(tmp_path, "--config", slow) as daemon:
        run("export_ranks.py", tmp_path / "root", tmp_path, "llama", daemon.socket, ranks=2)
        awaited(daemon, lambda one: one.total_bytes > 0)
        daemon.kill()
        assert [name for name in os.listdir(to) if not name.startswith(".")] == []
        assert any(name.startswith(".global_step2.export-") for name in os.listdir(to))
        configured(tmp_path, **rule)
        daemon.start_again()
        found = awaited(daemon, lambda one: one.state == "up to date")
        assert (found.exported, found.newest_tag, found.newest_step) == (1, "global_step2", 2)
        assert daemon.terminate() == 0
    assert sorted(os.listdir(to)) == [".checkpointd", "global_step2"]
    names = os.listdir(to / "global_step2")
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json", "checkpointd.json"} <= {*names}
    assert sum(name.startswith("model-") for name in names) > 3
    assert "tensors are equal" in run("export_load.py", to / "global_step2", tmp_path / "step2.pt")


def test_tied_weights_in_bf16_through_a_bucket(tmp_path: Path, s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_for(tmp_path, "gpt2")
    url = root_at(Place(s3_place.server, s3_place.bucket, f"{s3_place.prefix}/models".lstrip("/")), monkeypatch)
    rule = configured(tmp_path, to=url, files=str(files), dtype="bf16", max_shard_size="20KB")
    with Daemon(tmp_path, "--config", rule) as daemon:
        run("export_ranks.py", tmp_path / "root", tmp_path, "gpt2", daemon.socket, ranks=2)
        awaited(daemon, lambda one: one.state == "up to date" and one.newest_step == 2)
        assert daemon.terminate() == 0
    (tmp_path / "fetched").mkdir()
    asyncio.run(fetched(url, "global_step2", tmp_path / "fetched"))
    assert "tensors are equal" in run("export_load.py", tmp_path / "fetched", tmp_path / "step2.pt", "bfloat16")


async def fetched(url: str, tag: str, folder: Path) -> None:
    """The export of `tag` in a bucket, as a tool that copies buckets brings it to this machine."""
    async with open_store(url) as store:
        for entry in await store.list(tag):
            (folder / entry.name).write_bytes(await store.get(f"{tag}/{entry.name}"))


def test_a_model_that_was_compiled_loads_as_it_was_trained(tmp_path: Path) -> None:
    """In one process: trained, saved, exported with the files beside it by the function, and loaded."""
    assert "the model is the same" in run("export_alone.py", tmp_path)
