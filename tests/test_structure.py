"""The shape of the package: who may import whom, a light import, exported and documented names, no grab-bag files."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(importlib.import_module("rlsample").__file__).parent
# package -> what its files may import from rlsample, beside themselves
BASE = {"errors", "settings", "tree", "sample_batch", "next_obs", "torch_view", "nursery", "changes"}
ALLOWED = {
    "engine": BASE,
    "env": BASE,
    "policy": BASE,
    "evaluation": BASE | {"engine", "env", "policy"},
    "optimizers": BASE | {"engine", "policy", "evaluation"},
    "serving": BASE | {"engine", "env", "policy", "evaluation"},
    "offline": BASE | {"env", "policy", "evaluation"},
    "algorithms": BASE | {"engine", "env", "policy", "evaluation", "optimizers", "offline", "serving"},
    "bench": BASE | {"engine", "env", "policy", "evaluation", "optimizers", "algorithms", "serving"},
    "testing": BASE | {"engine", "env", "policy", "evaluation", "optimizers"},
}
PACKAGES = ["rlsample", *(f"rlsample.{p.name}" for p in sorted(ROOT.iterdir()) if (p / "__init__.py").exists())]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlsample."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rlsample.")}
    return found


@pytest.mark.parametrize("package", sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()))
def test_import_directions(package: str):
    """cli sees everything; every other package only what its line in ALLOWED names."""
    if package == "cli":
        return
    for path in sorted((ROOT / package).rglob("*.py")):
        extra = imported(path) - ALLOWED[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_the_base_modules_import_only_each_other():
    for name in sorted(BASE):
        extra = imported(ROOT / f"{name}.py") - BASE
        assert not extra, f"{name} imports {sorted(extra)}"


@pytest.mark.parametrize("statement", ["import rlsample", "import rlsample.env", "import rlsample.evaluation"])
def test_imports_are_light(statement: str):
    code = f"{statement}; import sys; print([m for m in ('torch', 'ray', 'ale_py', 'matplotlib') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_are_documented(package: str):
    module = importlib.import_module(package)
    assert module.__doc__ or package == "rlsample.cli", f"{package} has no docstring"
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{package}.{name} has no docstring"
            for attribute, member in vars(value).items() if inspect.isclass(value) else []:
                if not attribute.startswith("_") and inspect.isfunction(member):
                    assert inspect.getdoc(getattr(value, attribute)), f"{package}.{name}.{attribute} has no docstring"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_each_module_names_what_it_exports(path: Path):
    """``__all__`` lists only names the module has, and no public class or function of it is missing."""
    tree = ast.parse(path.read_text())
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        and isinstance(node.value, ast.List)
    ]
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    }
    if path.name in ("__init__.py", "__main__.py") or not defined:
        return
    assert listed, f"{path.relative_to(ROOT)} has no __all__"
    assert defined <= set(listed[0]), f"not in __all__: {sorted(defined - set(listed[0]))}"


def test_files_functions_and_constructors_stay_small():
    too_big = []
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        name = str(path.relative_to(ROOT))
        if path.stem in ("utils", "common", "misc", "helpers"):
            too_big.append(f"{name}: a name that says nothing")
        if source.count("\n") > 430:
            too_big.append(f"{name}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > 60:
                too_big.append(f"{name}: {node.name} has {lines} lines")
            if node.name == "__init__" and len(node.args.args) + len(node.args.kwonlyargs) - 1 > 8:
                too_big.append(f"{name}: a constructor with more than 8 parameters")
    assert not too_big, "\n".join(too_big)
