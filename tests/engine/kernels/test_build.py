"""Building csrc/, falling back to torch, choosing a variant, and keeping the variants apart."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.kernels.build import FLAGS, SOURCES, X86_VARIANTS, compiler, variant_flags
from engine.kernels.native import Absent, Native, native

ROOT = Path(__file__).resolve().parents[3]

# What `native()` finds, and whether it computes. Not optimized: the building is what is tested.
REPORT = """
import functools, json, logging, sys, torch
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
from engine.kernels import native
native.build = functools.partial(native.build, extra=("-O0",))
found = native.native()
good = None
if hasattr(found, "path"):
    x, weight = torch.randn(9, 100), torch.randn(70, 100)
    good = torch.allclose(torch.ops.specviz.linear(x, weight, None), x @ weight.t(), atol=1e-4)
print(json.dumps({"path": getattr(found, "path", None), "reason": getattr(found, "reason", None), "good": good}))
"""


def environment(cache: Path, **changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "SPECVIZ_KERNELS")}
    return {**kept, "PYTHONPATH": str(ROOT), "SPECVIZ_CACHE": str(cache), **changes}


def start(cache: Path, **changes: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", REPORT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment(cache, **changes), **pipes)


def report(process: subprocess.Popen[str]) -> tuple[dict, str]:
    """What the process printed, and its log."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def only_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A PATH with nothing on it but g++ and the assembler and linker that it calls, and a file with its calls."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    directory = tmp_path_factory.mktemp("bin")
    calls = directory / "calls"
    for tool in ("as", "ld"):
        (directory / tool).symlink_to(str(shutil.which(tool)))
    wrapper = directory / "g++"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >>"{calls}"\nexec "{shutil.which("g++")}" "$@"\n')
    wrapper.chmod(0o755)
    return str(directory), calls


def test_it_builds_with_a_compiler_alone_and_once(tmp_path: Path, only_compiler: tuple[str, Path]) -> None:
    """Two processes at once, then a third: whoever came first, there is one good library and nothing else."""
    path, calls = only_compiler
    first, second = start(tmp_path, PATH=path), start(tmp_path, PATH=path)
    for process in (first, second):
        found, log = report(process)
        assert found["good"], log
        assert Path(found["path"]).parent.parent == tmp_path / "kernels"
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == ["libspecviz.so"]
    assert len(list((tmp_path / "kernels").iterdir())) == 1

    assert " -c " in calls.read_text()
    calls.write_text("")
    found, log = report(start(tmp_path, PATH=path))
    assert found["good"], log
    assert " -c " not in calls.read_text() and "-shared" not in calls.read_text()


def test_without_a_library_torch_computes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    cases = {
        "there is no C++ compiler": start(tmp_path / "a", PATH=str(tmp_path / "empty")),
        "false failed": start(tmp_path / "b", CXX="/bin/false"),
        "cannot write": start(tmp_path / "file" / "below"),
    }
    for reason, process in cases.items():
        found, log = report(process)
        assert found["path"] is None
        assert reason in found["reason"] and "\n" not in found["reason"]
        assert f"WARNING no compiled kernels, torch computes instead (slower, same text): {found['reason']}" in log
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("*.so"))


def test_the_engine_writes_the_same_text_without_a_compiler(tmp_path: Path, library: Native) -> None:
    command = [sys.executable, "-m", "engine", "generate", "--prompt", "Once upon a time", "--max-new-tokens", "6"]
    command += ["--dtype", "float32", "--json"]
    cache = Path(os.environ["SPECVIZ_CACHE"])
    runs = [environment(cache), environment(tmp_path, CXX="/bin/false")]
    started = [subprocess.Popen(command, env=e, stdout=subprocess.PIPE, text=True, cwd=ROOT) for e in runs]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    with_kernels, without = (json.loads(output) for output in outputs)
    assert with_kernels["token_ids"] == without["token_ids"] and len(without["token_ids"]) == 6


def test_off_is_absent(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    assert native() == Absent("switched off (SPECVIZ_KERNELS=off)")


@pytest.mark.parametrize("value", ["auto", ""])
def test_the_best_variant_is_taken_by_itself(value: str, library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECVIZ_KERNELS", value)
    library.use("portable")
    found = native()
    assert isinstance(found, Native) and found.variant == library.variants[-1]


def test_each_variant_can_be_forced(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in library.variants:
        monkeypatch.setenv("SPECVIZ_KERNELS", variant)
        found = native()
        assert isinstance(found, Native) and found.variant == variant
    library.use(library.variants[-1])


def test_a_variant_that_cannot_run_is_refused_and_not_used(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    while (name := library.library.specviz_variant(len(compiled))) is not None:
        compiled.append(name.decode())
    supported = [name for i, name in enumerate(compiled) if library.library.specviz_supported(i)]
    assert tuple(supported) == library.variants and compiled[0] == "portable"
    before = library.variant
    for name in {"sse9", *X86_VARIANTS} - set(supported):
        assert library.library.specviz_use(name.encode()) == 0
        monkeypatch.setenv("SPECVIZ_KERNELS", name)
        with pytest.raises(UsageError, match=f"no kernel variant '{name}' runs .* use one of {', '.join(supported)}"):
            native()
        assert library.variant == before
    assert library.library.specviz_variant(-1) is None and not library.library.specviz_supported(99)


@pytest.mark.parametrize("variant", ["portable", *X86_VARIANTS])
def test_variants_share_no_code(variant: str, tmp_path: Path, library: Native) -> None:
    """A function that two objects define by one name is merged by the linker: an older machine would run the AVX-512
    copy of it. So a variant defines its table, and nothing weak; and takes nothing from the standard library's
    templates, which another object would define. Less optimization inlines less, and so hides less."""
    if variant not in variant_flags():
        pytest.skip(f"the compiler does not know {variant}")
    symbols = compiled_symbols(compiler(), variant_flags()[variant], variant, tmp_path)
    defined = {name: kind for kind, name in symbols if kind in "TDBRVWuSC"}
    assert defined == {f"specviz::kernels_{variant}": defined.get(f"specviz::kernels_{variant}")}
    assert defined[f"specviz::kernels_{variant}"] in "DR"
    assert not [name for kind, name in symbols if kind == "U" and "std::" in name and "<" in name]


def test_it_compiles_for_arm(tmp_path: Path) -> None:
    cross = shutil.which("aarch64-linux-gnu-g++")
    if platform.machine() == "aarch64" or cross is None:
        pytest.skip("no aarch64-linux-gnu-g++ here (apt-get install g++-aarch64-linux-gnu)")
    assert ("D", "specviz::kernels_portable") in compiled_symbols(cross, (), "portable", tmp_path)
    for source in ("dispatch", "parallel"):
        compile_with(cross, (), f"{source}.cpp", tmp_path / f"{source}.o")


def compiled_symbols(compiler: str, flags: tuple[str, ...], variant: str, work: Path) -> list[tuple[str, str]]:
    """(kind, name) of the external symbols of a variant's object, as `nm` gives them."""
    target = work / f"{variant}.o"
    compile_with(compiler, (*flags, f"-DSPECVIZ_VARIANT={variant}"), "variant.cpp", target)
    listed = subprocess.run(["nm", "-gC", str(target)], check=True, capture_output=True, text=True, timeout=60).stdout
    return [(line[17], line[19:]) for line in listed.splitlines()]


def compile_with(compiler: str, flags: tuple[str, ...], source: str, target: Path) -> None:
    command = [compiler, *FLAGS, *flags, "-O1", "-c", str(SOURCES / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
