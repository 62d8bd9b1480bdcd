"""The layout: which module may import which, and where kernels are known by name."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import parzen
from parzen.kernels import KERNELS

PACKAGE = Path(parzen.__file__).parent
# Each layer may import the layers before it, and itself.
LAYERS = [
    {"parzen.kernels", "parzen.rewire", "parzen.store"},
    {"parzen.call"},
    {"parzen.backends"},
    {"parzen.attention"},
    {f"parzen.{name}" for name in ("losses", "convert", "nn", "memory", "regression", "view", "testing")},
    {"parzen.models"},
    {"parzen.integrations"},
    {"parzen.lab"},
    {"parzen.cli"},
]


# The rooms of the lab: the same, below it.
ROOMS = [
    {f"parzen.lab.{name}" for name in ("arguments", "errors", "files", "console", "statistics")},
    {"parzen.lab.data"},
    {"parzen.lab.tasks"},
    {"parzen.lab.run"},
    {"parzen.lab.experiments"},
    {f"parzen.lab.{name}" for name in ("reports", "bench", "export", "regress")},
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def layer(module):
    """Of the library, then of the lab; None if it has none."""
    if module in ("parzen", "parzen.__main__", "parzen.lab"):
        return None
    top = place(LAYERS, module, 2)
    return top, place(ROOMS, module, 3) if module.startswith("parzen.lab.") else 0


def place(table, module, depth):
    top = ".".join(module.split(".")[:depth])
    found = [i for i, names in enumerate(table) if top in names]
    assert found, f"{module} belongs to no layer: add it to LAYERS or ROOMS, or to the right place"
    return found[0]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = dict(modules())
            for full in (f"{node.module}.{a.name}" for a in node.names):
                yield full if full in names else node.module or ""


@pytest.mark.parametrize(
    ("name", "path"), list(modules()), ids=lambda x: str(x) if isinstance(x, str) else ""
)
def test_imports_go_one_way(name, path):
    mine = layer(name)
    for other in imported(path):
        if not other.startswith("parzen.") or mine is None:
            continue
        if other == "parzen.lab" or ".".join(other.split(".")[:2]) not in set().union(*LAYERS):
            continue  # a public name of the package itself
        assert layer(other) <= mine, f"{name} imports {other}, which lies above it"


def test_no_circle():
    """A function that imports when it is called counts too."""
    paths = {name: path for name, path in modules() if layer(name)}
    TopologicalSorter({name: set(imported(path)) & paths.keys() for name, path in paths.items()}).prepare()


def test_the_library_needs_torch_and_numpy_only():
    code = (
        "import sys, parzen, parzen.nn, parzen.testing, parzen.models.mosaic; "
        "extra = {'matplotlib', 'rich', 'tokenizers', 'safetensors', 'scipy', 'sklearn', 'pandas', "
        "'transformers', 'parzen.lab'}; "
        "print(sorted(extra & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_import_brings_no_compiler():
    """Modules are imported when they are asked for, and dynamo, sympy and Triton by who compiles."""
    code = (
        "import sys, torch; before = set(sys.modules); import parzen; "
        "after = {'.'.join(n.split('.')[:2]) for n in set(sys.modules) - before}; "
        "print(sorted(n for n in after if n.split('.')[0] not in ('parzen', 'ctypes', '_ctypes'))); "
        "assert 'nn' in dir(parzen) and callable(parzen.nn.convert) and callable(parzen.testing.check_kernel)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extra = out.stdout.strip()
    assert not re.search(r"_dynamo|_inductor|sympy|triton|distributed|onnx|'torch\.nn'", extra), extra


def test_nothing_needs_the_integrations_but_the_export_to_one():
    """The command line imports that when it is told to."""
    for name, path in modules():
        if not name.startswith("parzen.integrations") and name != "parzen.lab.export":
            assert not [other for other in imported(path) if other.startswith("parzen.integrations")], name


def test_no_backend_knows_a_kernel_by_name():
    names = {n for key, row in KERNELS.items() for n in (key, *row.aliases)}
    names -= {"uniform"}  # an everyday word
    for path in [*PACKAGE.glob("backends/**/*.py"), PACKAGE / "call.py", *PACKAGE.glob("csrc/*")]:
        if path.is_dir() or path.stem == "selftest":
            continue
        text = path.read_text(encoding="utf-8")
        for literal in re.findall(r"[\"']([a-z_0-9]+)[\"']", text):
            assert literal not in names, f"{path.name} names the kernel {literal}"


def test_every_public_name_is_documented():
    for name in parzen.__all__:
        thing = getattr(parzen, name)
        assert callable(thing) is False or (thing.__doc__ or "").strip(), name
