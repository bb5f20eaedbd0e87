"""The rules of the house: who may import whom, no mutable globals, nothing too big, requirements that hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("specviz/**/*.py"), ROOT / "app.py"])

#: From the ground up. A module belongs to the longest prefix that fits and imports from its own layer or below.
LAYERS = (
    ("engine.config", "engine.events", "engine.errors", "engine.intervals"),
    ("engine.control", "engine.kernels"),
    ("engine.model",),
    ("engine.offload",),
    ("engine.speculation",),
    ("engine",),  # engine.engine, its parts, and the command line
    ("specviz",),
    ("app",),
)

#: Libraries that come with another one, which must be among the requirements.
BROUGHT_BY = {
    "huggingface_hub": "transformers",
    "numpy": "transformers",
    "psutil": "accelerate",
    "safetensors": "transformers",
    "starlette": "gradio",
    "tokenizers": "transformers",
    "tqdm": "transformers",
    "uvicorn": "gradio",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Dotted names that `path` imports anywhere, but for annotations only; `from a import b` gives both a and a.b."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the layer"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer(name: str) -> int | None:
    fits = [(len(prefix), level) for level, group in enumerate(LAYERS) for prefix in group if within(name, prefix)]
    return max(fits)[1] if fits else None


def reachable(path: Path) -> set[str]:
    """Everything that importing `path` may import, through our own modules and their packages."""
    ours = {module_name(source): source for source in SOURCES}
    seen: set[str] = set()
    waiting = [module_name(path)]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in ours:
            waiting += imported(ours[name])
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return seen


def test_layers_are_found():
    assert len(SOURCES) > 20
    assert layer("engine.config") == 0
    assert layer("engine.offload.cache") == 3
    assert layer("engine.engine") == 5
    assert layer("torch") is None


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_down(path):
    own = layer(module_name(path))
    upward = {name for name in imported(path) if (other := layer(name)) is not None and other > own}
    # `from engine import events` names the package too, which itself imports nothing.
    assert upward <= {"engine"}


def test_packages_of_the_engine_import_nothing():
    """Else importing the ground floor would bring in the roof."""
    assert not list(imported(ROOT / "engine" / "__init__.py"))


@pytest.mark.parametrize("path", [p for p in SOURCES if module_name(p).startswith("engine")], ids=module_name)
def test_engine_knows_nothing_of_the_page(path):
    assert not [name for name in imported(path) if name.split(".")[0] in ("gradio", "plotly", "specviz")]


@pytest.mark.parametrize("path", [p for p in SOURCES if module_name(p).startswith("specviz")], ids=module_name)
def test_page_knows_only_the_face_of_the_engine(path):
    inner = ("engine.model", "engine.offload", "engine.speculation", "engine.kernels")
    assert not [name for name in imported(path) if any(within(name, prefix) for prefix in inner)]


@pytest.mark.parametrize("path", ["specviz/metrics.py", "specviz/trace.py", "engine/serve/hub.py"])
def test_reducers_need_neither_torch_nor_gradio(path):
    found = {other.split(".")[0] for other in reachable(ROOT / path)}
    assert "engine" in found or path == "specviz/metrics.py"
    assert not found & {"torch", "gradio", "transformers"}


def test_reducers_load_without_torch_and_gradio():
    """The same, asked of Python itself."""
    script = (
        "import sys, specviz.metrics, specviz.trace, engine.serve.hub\n"
        "sys.exit(', '.join({'torch', 'gradio'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_the_ui_and_the_door_import_gradio():
    users = {module_name(path) for path in SOURCES if any(within(name, "gradio") for name in imported(path))}
    assert users
    assert not [name for name in users if not within(name, "specviz.ui") and name != "app"]


def mutable_globals(tree: ast.Module) -> list[str]:
    """Lower-case names to which a module assigns a list, dict or set, and names that functions declare global."""
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        call = node.value.func if isinstance(node.value, ast.Call) else None
        made = call is not None and ast.unparse(call).split(".")[-1] in (
            "list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter",
        )  # fmt: skip
        if not made and not isinstance(node.value, containers):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        found += [name for name in names if name != name.upper() and not name.startswith("__")]
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("runs = {}", ["runs"]),
        ("_seen: set[int] = set()", ["_seen"]),
        ("def f():\n    global n\n    n = 1", ["n"]),
        ("NAMES = ['a']\n__all__ = ['f']\nlimit = 3", []),
    ],
)
def test_mutable_globals_are_found(source, expected):
    assert mutable_globals(ast.parse(source)) == expected


@pytest.mark.parametrize("path", [p for p in SOURCES if module_name(p).startswith("specviz")], ids=module_name)
def test_page_has_no_mutable_globals(path):
    assert mutable_globals(ast.parse(path.read_text())) == []


def test_no_tracked_file_reaches_ten_megabytes():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to it")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert ROOT / "Makefile" in files
    assert [path for path in files if path.is_file() and path.stat().st_size >= 10 * 10**6] == []


def requirements(name: str) -> dict[str, str]:
    """Library → version bounds, of a requirements file."""
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    matches = [re.fullmatch(r"([A-Za-z0-9_.-]+)\s*([<>=!~].*)?", line) for line in lines if line]
    return {match[1].lower().replace("-", "_"): match[2] or "" for match in matches}


def test_requirements_are_bounded():
    app = requirements("requirements.txt")
    for name in ("torch", "gradio"):  # extensions are compiled against one; the page was measured on the other
        assert re.fullmatch(r"==\d+\.\d+\.\d+", app[name])
    for name in ("transformers", "plotly"):  # their inner interfaces change with minor versions
        assert re.fullmatch(r"==\d+\.\d+\.\*", app[name])
    assert all(app.values())
    development = requirements("requirements-dev.txt")
    assert re.fullmatch(r"==\d+\.\d+\.\d+", development.pop("clang_format"))  # each version formats otherwise
    assert all(bound.startswith(">=") for bound in development.values())


def test_every_library_that_is_imported_is_required():
    required = requirements("requirements.txt")
    used = {name.split(".")[0] for path in SOURCES for name in imported(path)}
    foreign = used - set(sys.stdlib_module_names) - {"engine", "specviz", "app"}
    assert "torch" in foreign
    assert {name for name in foreign if BROUGHT_BY.get(name, name) not in required} == set()
