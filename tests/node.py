"""Running the page's scripts in node, without a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "specviz" / "static"
GOLDEN = ROOT / "tests" / "golden"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node: apt-get install nodejs")


def javascript(script: str, *arguments: str | Path, flags: tuple[str, ...] = ()) -> str:
    """What `script`, a module, prints; `arguments` are its process.argv from 2 on."""
    command = [NODE, *flags, "--input-type=module", "-", *map(str, arguments)]
    done = subprocess.run(command, input=script, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
