"""The browser's reducer gives the same JSON as the Python one, at every point of every golden run."""

from __future__ import annotations

import json

import pytest
from node import GOLDEN, STATIC, javascript, needs_node

from specviz.metrics import Metrics

pytestmark = needs_node

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


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.ndjson")), ids=lambda path: path.stem)
def test_same_figures(path):
    every = 25
    ours, metrics = [], Metrics()
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        metrics.add(json.loads(line))
        if (i + 1) % every == 0 or i == len(lines) - 1:
            ours.append(json.loads(json.dumps(metrics.to_json())))
    output = javascript(SCRIPT, STATIC / "reducer.js", path, str(every))
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
    limits = json.loads(javascript(script, STATIC))
    for module in (experts, overlap, reducers):
        for name in ("BUSY_LIMIT", "WINDOW_ROUNDS", "WINDOW_NS", "SERIES_LIMIT", "POINTS_LIMIT", "HEAT_KEEP"):
            if hasattr(module, name):
                assert limits[name] == getattr(module, name)
