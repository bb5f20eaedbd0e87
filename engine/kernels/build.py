"""Compiling csrc/ into one shared library, once for each version of its sources, outside of the source tree."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.config import cache_directory

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
TIMEOUT_S = 300

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast")
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--exclude-libs,ALL")
# The flags of each variant beyond `portable`, which is compiled with the compiler's own. Best last.
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
X86_VARIANTS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


class BuildError(Exception):
    """There is no compiler, or it failed; the text says which in one line."""


def library_path(extra: Sequence[str] = ()) -> Path:
    """Where the library for these sources, this compiler and this torch lies, or will lie once `build` is through."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.*")):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + source.read_bytes())
    for part in (_compiler_version(), torch.__version__, platform.machine(), *FLAGS, *LINK_FLAGS, *extra):
        digest.update(part.encode())
    return cache_directory() / "kernels" / digest.hexdigest()[:16] / "libspecviz.so"


def build(extra: Sequence[str] = ()) -> Path:
    """The compiled library; compiles it when it is not there yet, in parallel and without leaving a half-written one.

    `extra` flags are passed to every compilation and to the linker (sanitizers, say). Raises BuildError.
    """
    library = library_path(extra)
    if library.is_file():
        return library
    work = library.with_name(f"{library.parent.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        work.mkdir(parents=True)
        _compile(work, extra)
        # Two processes may have built it at once; either result is good.
        os.replace(work / library.name, library)
    except OSError as error:
        raise BuildError(f"cannot write {library.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return library


def compiler() -> str:
    """The C++ compiler: $CXX, else g++, else c++. Raises BuildError when there is none."""
    if named := os.environ.get("CXX"):
        if found := shutil.which(named):
            return found
        raise BuildError(f"there is no compiler {named} (CXX names it)")
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise BuildError("there is no C++ compiler: install g++ (apt-get install g++)")
    return found


def variant_flags() -> dict[str, tuple[str, ...]]:
    """The flags of each variant that the compiler knows for this machine's architecture."""
    known = X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {}
    return {"portable": (), **{name: flags for name, flags in known.items() if _accepts(flags)}}


def _compile(work: Path, extra: Sequence[str]) -> None:
    torch_root = Path(torch.__file__).parent
    variants = variant_flags()
    compiled = tuple(f"-DSPECVIZ_WITH_{name}" for name in variants)
    jobs = [("variant.cpp", f"{name}.o", (*flags, f"-DSPECVIZ_VARIANT={name}")) for name, flags in variants.items()]
    jobs += [
        ("ops.cpp", "ops.o", (f"-I{torch_root / 'include'}", "-O2")),
        ("dispatch.cpp", "dispatch.o", compiled),
        ("parallel.cpp", "parallel.o", ()),
        ("roof.cpp", "roof.o", ()),
    ]

    def compile_one(job: tuple[str, str, tuple[str, ...]]) -> str:
        source, output, flags = job
        _run([compiler(), *FLAGS, *flags, *extra, "-c", str(SOURCES / source), "-o", str(work / output)])
        return str(work / output)

    # The heaviest first.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, reversed(jobs)))
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([compiler(), *LINK_FLAGS, *extra, *objects, "-o", str(work / "libspecviz.so"), *libraries])


def _run(command: list[str]) -> None:
    done = _call(command)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {errors[0] if errors else f'exit status {done.returncode}'}")


def _accepts(flags: Sequence[str]) -> bool:
    return _call([compiler(), *flags, "-x", "c++", "-fsyntax-only", os.devnull]).returncode == 0


def _compiler_version() -> str:
    return _call([compiler(), "--version"]).stdout


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_S} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} could not run: {error.strerror}") from error
