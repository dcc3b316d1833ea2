"""What users install is the wheel, not the tree: it is built from the source distribution, installed and inspected."""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TORCH = "sys.modules['torch'] = None"
IMPORT_ALL = """
import importlib, pkgutil
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            frameworks = ("deepspeed", "lightning", "ray", "torchtitan")
            if error.name not in frameworks or f".{{error.name}}." not in module.name + ".":
                raise
print(*package.__path__)
"""

# One process builds, and only once.
pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("wheel")]


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """A source distribution, the wheel built from it, and the folder that the wheel was installed into."""

    sdist: Path
    wheel: Path
    target: Path

    @property
    def metadata(self) -> email.message.Message:
        (info,) = self.target.glob("*.dist-info")
        return email.parser.Parser().parsestr((info / "METADATA").read_text())

    def python(self, code: str) -> str:
        """Run `code` where the wheel comes before everything else, and neither the tree nor the user's site is seen."""
        return run(sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(self.target)!r}); {code}").strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out, target = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    # Without a kind named, `build` makes the wheel from the source distribution: both are shown to be whole.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel)
    return Built(sdist, wheel, target)


def test_wheel_is_pure_python(built: Built) -> None:
    assert built.wheel.name == "checkpointd-0.1.0-py3-none-any.whl"


def test_nothing_else_reaches_site_packages(built: Built) -> None:
    names = {path.name for path in built.target.iterdir()}
    assert names == {"checkpointd", "checkpointd_client", "checkpointd-0.1.0.dist-info", "bin"}


def test_wheel_holds_what_the_tree_holds(built: Built) -> None:
    """Every module of the tree is there, and nothing that is not in the tree."""
    folders = (ROOT / "checkpointd", ROOT / "client" / "checkpointd_client")
    tree = {path.relative_to(folder.parent).as_posix() for folder in folders for path in folder.rglob("*.py")}
    shipped = {name for name in zipfile.ZipFile(built.wheel).namelist() if name.endswith(".py")}
    assert shipped == tree


@pytest.mark.parametrize("package", ["checkpointd", "checkpointd_client"])
def test_types_are_shipped(built: Built, package: str) -> None:
    assert (built.target / package / "py.typed").is_file()


def test_metadata(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Name"] == "checkpointd"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "torch",
        "deepspeed",
        "huggingface",
        "lightning",
        "ray",
        "torchtitan",
        "integrations",
        "serve",
        "s3",
        "gs",
        "az",
        "test",
        "lint",
        "docs",
    }
    assert len(metadata.get_payload()) > 0, "the README is the long description"


def test_only_the_extras_need_torch(built: Built) -> None:
    requirements = built.metadata.get_all("Requires-Dist", [])
    assert {line for line in requirements if re.match(r"torch\b(?!-)", line)} == {
        "torch>=2.10; extra == 'torch'",
        "torch>=2.10; extra == 'deepspeed'",
    }


def test_licence_is_shipped(built: Built) -> None:
    (shipped,) = built.target.glob("*.dist-info/licenses/LICENSE")
    assert shipped.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_console_script(built: Built) -> None:
    (entry_points,) = built.target.glob("*.dist-info/entry_points.txt")
    assert entry_points.read_text().split() == ["[console_scripts]", "checkpointd", "=", "checkpointd.cli:main"]


def test_the_command_runs_without_torch(built: Built) -> None:
    """The installed script, as a shell would start it, but for the paths that find the wheel and hide torch."""
    script = built.target / "bin" / "checkpointd"
    code = f"import runpy; sys.argv = ['checkpointd', '--help']; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert "Usage: checkpointd" in built.python(f"{BLOCK_TORCH}; {code}")


def test_the_service_imports_without_torch(built: Built) -> None:
    found = built.python(BLOCK_TORCH + "\n" + IMPORT_ALL.format(package="checkpointd"))
    assert found == str(built.target / "checkpointd")


def test_the_client_imports_with_torch(built: Built) -> None:
    pytest.importorskip("torch")
    found = built.python("\n" + IMPORT_ALL.format(package="checkpointd_client"))
    assert found.splitlines()[-1] == str(built.target / "checkpointd_client")  # DeepSpeed says something as well


def test_blocking_torch_blocks_it(built: Built) -> None:
    with pytest.raises(AssertionError, match="import of torch halted"):
        built.python(f"{BLOCK_TORCH}; import torch")


def test_sdist_holds_what_a_packager_needs(built: Built) -> None:
    top = built.sdist.name.removesuffix(".tar.gz")
    with tarfile.open(built.sdist) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"}
    assert needed | {"tests/conftest.py", "tests/test_wheel.py", "checkpointd/__init__.py"} <= names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]
