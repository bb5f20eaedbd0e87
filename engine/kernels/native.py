"""The compiled kernels of csrc/: built at first use, chosen for this machine, or absent with a reason."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass

import torch

from engine.errors import UsageError
from engine.kernels.build import BuildError, build

log = logging.getLogger(__name__)

#: Forces a variant, or `off`; `auto` takes the best that this machine supports.
VARIABLE = "SPECVIZ_KERNELS"
OFF, AUTO = "off", "auto"


@dataclass(frozen=True)
class Native:
    """The loaded library: its operators are in `torch.ops.specviz`. `variants` are those that run here, best last."""

    library: ctypes.CDLL
    path: str
    variants: tuple[str, ...]

    @property
    def compiled(self) -> tuple[str, ...]:
        """All variants that the compiler made, those that this machine lacks included, best last."""
        names, index = [], 0
        while (name := self.library.specviz_variant(index)) is not None:
            names.append(name.decode())
            index += 1
        return tuple(names)

    @property
    def variant(self) -> str:
        """The variant in use."""
        return self.library.specviz_current().decode()

    def use(self, variant: str) -> None:
        """Compute with `variant` from now on, in the whole process. Raises UsageError if it cannot run here."""
        if not self.library.specviz_use(variant.encode()):
            raise UsageError(
                f"no kernel variant {variant!r} runs on this machine: use one of {', '.join(self.variants)}"
            )

    @property
    def threads(self) -> int:
        """How many threads compute."""
        return int(self.library.specviz_threads())

    def set_threads(self, threads: int) -> None:
        """How many threads the kernels share, the caller's included."""
        self.library.specviz_set_threads(threads)


@dataclass(frozen=True)
class Absent:
    """No compiled kernels, and why; torch computes everything."""

    reason: str


def native() -> Native | Absent:
    """The compiled kernels as the environment wants them; builds them on the first call of a machine.

    Raises UsageError when the environment names a variant that cannot run here.
    """
    wanted = os.environ.get(VARIABLE, AUTO) or AUTO
    if wanted == OFF:
        return Absent(f"switched off ({VARIABLE}=off)")
    found = _load()
    if isinstance(found, Native):
        found.use(found.variants[-1] if wanted == AUTO else wanted)
    elif wanted != AUTO:
        raise UsageError(f"{VARIABLE}={wanted} needs the compiled kernels, but {found.reason}")
    return found


@functools.cache
def _load() -> Native | Absent:
    try:
        path = str(build())
        torch.ops.load_library(path)
        library = ctypes.CDLL(path)
    except (BuildError, OSError) as error:
        reason = " ".join(str(error).split())
        log.warning("no compiled kernels, torch computes instead (slower, same text): %s", reason)
        return Absent(reason)
    library.specviz_variant.restype = ctypes.c_char_p
    library.specviz_current.restype = ctypes.c_char_p
    names, index = [], 0
    while (name := library.specviz_variant(index)) is not None:
        if library.specviz_supported(index):
            names.append(name.decode())
        index += 1
    return Native(library, path, tuple(names))
