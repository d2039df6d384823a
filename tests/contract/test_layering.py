"""The layers of the package: who may import whom, and what importing it may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import exl3kit

ROOT = Path(exl3kit.__file__).parent
# A module imports its own part and those before it; `testing` is for tests and benchmarks only.
ORDER: list[str] = [
    "_version",
    "errors",
    "env",
    "log",
    "format",
    "checkpoint",
    "models",
    "slicing",
    "jit",
    "kernels",
    "runtime",
    "quantize",
    "evaluate",
    "integrations",
    "cli",
    "__main__",
    "testing",
]
# Where a third-party package may be imported, besides torch, numpy and safetensors.
ALLOWED = {
    "cuda": ("jit",),
    "tokenizers": ("quantize", "evaluate"),
    "jinja2": ("quantize",),
    "matplotlib": ("quantize", "evaluate"),
    "typer": ("cli",),
    "rich": ("cli",),
    "vllm": ("integrations",),
    "huggingface_hub": ("integrations",),
    "transformers": ("integrations",),
}
CORE = {"torch", "numpy", "safetensors", "exl3kit"}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports anywhere in it, type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _part(module: str) -> str | None:
    """`format` for `exl3kit.format.spec`; None for other packages and for exl3kit itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "exl3kit" and len(parts) > 1 and parts[1] in ORDER else None


def test_every_part_has_its_place() -> None:
    assert {path.parts[0].removesuffix(".py") for path in MODULES} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("module", [p for p in MODULES if p != Path("__init__.py")], ids=str)
def test_imports_point_to_the_left(module: Path) -> None:
    own = module.parts[0].removesuffix(".py")
    for name in _imports(ROOT / module):
        part = _part(name)
        if part is None or part == own:
            continue
        is_left = ORDER.index(part) < ORDER.index(own)
        assert is_left, f"{module} imports {name}, which is not to the left of {own}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_third_party_imports_stay_in_their_layer(module: Path) -> None:
    own = module.parts[0]
    for name in {imported.partition(".")[0] for imported in _imports(ROOT / module)}:
        if name in CORE or name in sys.stdlib_module_names:
            continue
        assert own in ALLOWED.get(name, ()), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_postpones_annotations_and_has_a_docstring(module: Path) -> None:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} has no docstring"
    assert "__future__.annotations" in _imports(ROOT / module)


def _loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "vllm", "transformers", "typer"}
    assert not heavy & _loaded_by("import exl3kit; dir(exl3kit)")
    assert not (heavy - {"typer"}) & _loaded_by("import exl3kit.cli.app")


def test_core_loads_no_engine() -> None:
    loaded = _loaded_by("import exl3kit; exl3kit.open_checkpoint; exl3kit.Exl3Tensor")
    assert "torch" in loaded
    assert not {"vllm", "transformers", "typer", "rich"} & loaded


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        exl3kit.nonsense  # noqa: B018


def test_entry_points_are_registered() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="exl3kit")
    assert plugin.value == "exl3kit.integrations.vllm:register"
    (script,) = entry_points(group="console_scripts", name="exl3kit")
    assert script.load().__name__ == "main"
