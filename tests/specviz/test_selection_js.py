"""Linked selection, run in node: what belongs to what is chosen, counted independently from the events."""

from __future__ import annotations

import json

import pytest
from node import GOLDEN, STATIC, javascript, needs_node

pytestmark = needs_node

START = """
import { readFileSync } from "node:fs";
const [base, golden] = process.argv.slice(2);
const { Scene } = await import(`file://${base}/scene.js`);
const s = await import(`file://${base}/selection.js`);
const scene = new Scene();
for (const line of readFileSync(`${golden}/draft4.ndjson`, "utf-8").trimEnd().split("\\n")) scene.add(JSON.parse(line));
const say = (value) => console.log(JSON.stringify(value));
const ids = (what) => s.tokensOf(what, scene).map(({ id, round, state }) => [id, round, state]);
const holds = (what) => (transfer) => s.holdsTransfer(what, transfer, s.roundsOf(what, scene));
const moved = (what) => scene.transfers.filter(holds(what)).map((transfer) => transfer.id);
"""


def run(script: str):
    return json.loads(javascript(START + script, STATIC, GOLDEN))


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for line in (GOLDEN / "draft4.ndjson").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        found.setdefault(event["kind"], []).append(event)
    return found


def test_a_round_has_its_tokens_drafts_transfers_and_experts(recorded):
    out = run('const what = { kind: "round", round: 3 }; say([ids(what), moved(what), s.expertsOf(what, scene)]);')
    event = next(event for event in recorded["round"] if event["round"] == 3)
    tokens = [[token["id"], 3, token["state"]] for token in event["tokens"]]
    assert out[0] == tokens + [[token["id"], 3, "rejected"] for token in event["rejected"]]
    assert out[1] == [event["id"] for event in recorded["transfer"] if event["round"] == 3] != []
    for layer, experts in enumerate(out[2]):
        assert sorted(experts) == sorted({e for token in event["tokens"] for e in token["experts"][layer]})


def test_a_token_has_the_transfers_of_its_experts_in_its_round(recorded):
    out = run("""
    const token = scene.sequences[0].filter((t) => t.round === 2)[0];
    const what = { kind: "token", token };
    say([moved(what), s.expertsOf(what, scene), ids(what).length, [...s.roundsOf(what, scene)]]);
    """)
    token = next(event for event in recorded["round"] if event["round"] == 2)["tokens"][0]
    expected = [
        event["id"]
        for event in recorded["transfer"]
        if event["round"] == 2 and event["expert"] in token["experts"][event["layer"]]
    ]
    assert out == [expected, token["experts"], 1, [2]] and expected


def test_an_expert_has_the_tokens_that_were_routed_to_it(recorded):
    layer, expert = 1, recorded["round"][0]["tokens"][0]["experts"][1][0]
    out = run(f"""
    const what = {{ kind: "expert", layer: {layer}, expert: {expert} }};
    say([ids(what), moved(what), ids({{ ...what, round: 1 }}).every(([, round]) => round === 1)]);
    """)
    users = [
        [token["id"], event["round"], token["state"]]
        for event in recorded["round"]
        for token in event["tokens"]
        if expert in token["experts"][layer]
    ]
    assert out[0] == users
    assert out[1] == [e["id"] for e in recorded["transfer"] if (e["layer"], e["expert"]) == (layer, expert)]
    assert out[2]


def test_a_position_agrees_with_the_acceptance_panel():
    figures = json.loads((GOLDEN / "draft4.metrics.json").read_text())["acceptance"]["by_position"]
    for position, row in enumerate(figures):
        words = run(f'say(s.describe({{ kind: "position", position: {position} }}, scene));')
        assert words == f"Position {position + 1} of the draft: {row['accepted']} of {row['verified']} accepted"


def test_rounds_of_a_length_are_those_of_the_histogram():
    counts = json.loads((GOLDEN / "draft4.metrics.json").read_text())["acceptance"]["tokens_per_round"]
    out = run(
        f"say([...Array({len(counts)}).keys()].map((n) => s.roundsOf({{ kind: 'length', tokens: n }}, scene).size));"
    )
    assert out == counts


def test_looking_never_replaces_choosing_and_the_same_twice_lets_go():
    out = run("""
    const told = [];
    const store = new s.Selection();
    store.subscribe(({ current, chosen }) => told.push([current?.round ?? null, chosen]));
    const round = (n) => ({ kind: "round", round: n });
    store.look(round(1));
    store.look(round(1));
    store.choose(round(2));
    store.look(round(3));
    store.choose(round(2));
    store.look(round(4));
    store.clear();
    store.clear();
    say(told);
    """)
    assert out == [[1, False], [2, True], [None, False], [4, False], [None, False]]
