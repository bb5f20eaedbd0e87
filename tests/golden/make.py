"""Writes the golden event streams, and the metrics that belong to them.

    python tests/golden/make.py                        rewrites the golden files beside this script
    python tests/golden/make.py --out F --tokens 300   one long stream, e.g. to try the page with

`hand.ndjson` is written by hand: its numbers can be checked on paper (tests/specviz/test_metrics.py does).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from player import Player, Scenario  # noqa: E402

SCENARIOS = {
    "plain": Scenario(seed=1, k=0, tokens=12, kernels="torch (switched off (SPECVIZ_KERNELS=off))"),
    "draft4": Scenario(seed=2, k=4, tokens=32, slots=3),
    "knob": Scenario(seed=3, k=[2, 2, 2, 6], tokens=24, knobs={3: ("k", 2, 6)}),
    "eos": Scenario(seed=4, k=4, tokens=100, eos_round=4),
    "batch2": Scenario(seed=5, k=3, tokens=14, sequences=2, slots=5),
    "stopped": Scenario(seed=6, k=4, tokens=100, stop_round=8, hostile=True),
}


def stream(scenario: Scenario) -> list[dict[str, Any]]:
    """The scenario's events as JSON objects with seq, in the order in which the engine would emit them."""
    return Player(scenario).play()


def write(path: Path, events: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events), encoding="utf-8")


def write_golden() -> None:
    """Rewrite the generated streams, and the metrics of every stream in this folder."""
    from specviz.metrics import reduce

    for name, scenario in SCENARIOS.items():
        write(HERE / f"{name}.ndjson", stream(scenario))
    for path in sorted(HERE.glob("*.ndjson")):
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        text = json.dumps(reduce(events).to_json(), separators=(",", ":"))
        path.with_suffix(".metrics.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write one long stream here instead")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--hostile", action="store_true", help="with texts that try to break out of the page")
    arguments = parser.parse_args()
    if arguments.out is None:
        write_golden()
    else:
        lengths = [1, 2, 3, 4, 4, 4, 6, 4, 4, 4, 5, 4, 0, 4, 4]
        write(
            arguments.out,
            stream(
                Scenario(
                    seed=7, k=lengths * 40, tokens=arguments.tokens, layers=8, experts=16, slots=10, auto=True,
                    accept=0.85, foresight=0.97, transfer_ms=0.22, hostile=arguments.hostile,
                    knobs={24: ("policy", "lru", "lookahead"), 40: ("slots", 8, 10)},
                )
            ),
        )  # fmt: skip
