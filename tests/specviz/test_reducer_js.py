"""The browser's reducer gives the same JSON as the Python one, at every point of every golden run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from specviz.metrics import Metrics

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node: apt-get install nodejs")

SCRIPT = """
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
const [module, file, every] = process.argv.slice(2);
const { Metrics } = await import(pathToFileURL(module));
const metrics = new Metrics();
const lines = readFileSync(file, "utf-8").trimEnd().split("\\n");
lines.forEach((line, i) => {
  metrics.add(JSON.parse(line));
  if ((i + 1) % Number(every) === 0 || i === lines.length - 1) console.log(JSON.stringify(metrics));
});
"""


def javascript(script: str, *arguments: str | Path) -> str:
    command = [NODE, "--input-type=module", "-", *map(str, arguments)]
    done = subprocess.run(command, input=script, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.ndjson")), ids=lambda path: path.stem)
def test_same_figures(path):
    every = 25
    ours, metrics = [], Metrics()
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        metrics.add(json.loads(line))
        if (i + 1) % every == 0 or i == len(lines) - 1:
            ours.append(json.loads(json.dumps(metrics.to_json())))
    output = javascript(SCRIPT, ROOT / "specviz" / "static" / "reducer.js", path, str(every))
    theirs = [json.loads(line) for line in output.splitlines()]
    assert theirs == ours


def test_same_limits():
    from engine import overlap
    from specviz import experts, reducers

    script = """
    const base = process.argv[2];
    const parts = await Promise.all(["overlap", "reducers", "experts"].map((name) => import(`file://${base}/${name}.js`)));
    console.log(JSON.stringify(Object.assign({}, ...parts)));
    """
    limits = json.loads(javascript(script, ROOT / "specviz" / "static"))
    for module in (experts, overlap, reducers):
        for name in ("BUSY_LIMIT", "WINDOW_ROUNDS", "WINDOW_NS", "SERIES_LIMIT", "POINTS_LIMIT", "HEAT_KEEP"):
            if hasattr(module, name):
                assert limits[name] == getattr(module, name)
