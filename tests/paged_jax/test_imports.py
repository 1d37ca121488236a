"""What may import what, and that `import paged_jax` is light and does not mind its neighbours."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in the file; `from a import b` gives a.b."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("pallas_kernels", {"paged_jax", "models", "scripts", "tests"}),
        ("paged_jax", {"models", "scripts", "tests", "flax", "tokenizers", "gguf"}),
        ("models", {"scripts", "tests"}),
        ("scripts", {"tests"}),
    ],
)
def test_imports_point_downwards(package: str, forbidden: set[str]) -> None:
    for path in files(package):
        wrong = [name for name in imports(path) if name.split(".")[0] in forbidden]
        assert not wrong, f"{path} imports {wrong}"


def test_kernels_need_jax_and_numpy_only() -> None:
    allowed = {"jax", "numpy", "jaxtyping", "pallas_kernels", *sys.stdlib_module_names}
    for path in files("pallas_kernels"):
        wrong = [name for name in imports(path) if name.split(".")[0] not in allowed]
        assert not wrong, f"{path} imports {wrong}"


def test_implementations_do_not_import_one_another() -> None:
    for name in IMPLEMENTATIONS:
        others = [f"pallas_kernels.{other}" for other in IMPLEMENTATIONS if other != name]
        for path in [ROOT / f"pallas_kernels/{name}.py", *(ROOT / "pallas_kernels" / name).rglob("*.py")]:
            if path.exists():
                wrong = [found for found in imports(path) if found.startswith(tuple(others))]
                assert not wrong, f"{path} imports {wrong}"


def test_the_import_reader_reads_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import a.b", "from c import d as e", "def f():", " from .g import h", " from . import i, j"]
    path = tmp_path / "top" / "sub" / "file.py"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(imports(path)) == ["a.b", "c.d", "top.sub.g.h", "top.sub.i", "top.sub.j"]


def run(code: str, folder: Path) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_paged_jax_is_light_and_ignores_foreign_folders(tmp_path: Path) -> None:
    """Neither flax nor a tokenizer is loaded, in a folder that has models, scripts and tests of its own."""
    for name in ("models", "scripts", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a foreign package was imported')\n")
    heavy = ("flax", "tokenizers", "gguf", "huggingface_hub", "safetensors", "jinja2", "models", "scripts", "tests")
    code = f"import paged_jax, sys; print(paged_jax.__file__, [name for name in {heavy} if name in sys.modules])"
    assert run(code, tmp_path) == f"{ROOT / 'paged_jax' / '__init__.py'} []"
    seen = run("\ntry:\n    import models\nexcept ImportError as error:\n    print(error)", tmp_path)
    assert seen == "a foreign package was imported", "the foreign folder should come first, or the test shows nothing"


def test_all_names_exist() -> None:
    import paged_jax

    assert sorted(paged_jax.__all__) == sorted(set(paged_jax.__all__))
    for name in paged_jax.__all__:
        assert hasattr(paged_jax, name)
