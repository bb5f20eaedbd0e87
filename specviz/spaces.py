"""What Hugging Face Spaces must be told."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import UsageError


def check_hardware(environ: Mapping[str, str]) -> None:
    """Raises UsageError on ZeroGPU.

    It lends a GPU to single calls of functions, each in a process of its own: no knob would reach a run, and experts
    would have to be loaded anew for each.
    """
    if environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true"):
        raise UsageError(
            "this Space runs on ZeroGPU, which lends a GPU to one function call at a time, and a live engine needs it "
            "for as long as it runs: choose CPU basic or a GPU of its own in the Space's settings"
        )
