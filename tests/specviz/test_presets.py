"""Settings from presets, the tour and links: they fit the controls, the engine takes them, and nothing else gets in."""

from __future__ import annotations

import json

import gradio as gr
import pytest
from node import STATIC, javascript, needs_node

from engine.config import EMBEDDED_MODEL
from specviz.ui.controls import create_controls, create_prompt
from specviz.ui.presets import PRESETS, schema
from specviz.whatif import simulate

pytestmark = needs_node


@pytest.fixture(scope="module")
def controls():
    with gr.Blocks():
        return create_controls(str(EMBEDDED_MODEL), create_prompt())


def run(script: str, **given):
    start = """
    const [base, given] = process.argv.slice(2);
    const { askedIn, merge, named, read, permalink, fromAddress } = await import(`file://${base}/settings.js`);
    const { STEPS } = await import(`file://${base}/tour.js`);
    const { values, known, settings, address } = JSON.parse(given);
    const say = (value) => console.log(JSON.stringify(value));
    """
    return json.loads(javascript(start + script, STATIC, json.dumps(given)))


def values_of(controls) -> list:
    return [component.value for component in controls.components]


def merged(controls, settings: dict) -> list:
    return run(
        "say(merge(values, settings, known));", values=values_of(controls), known=schema(controls), settings=settings
    )


def steps() -> list[dict]:
    return run("say(STEPS);")


def test_the_schema_has_an_entry_for_each_component(controls):
    entries = schema(controls)
    assert len(entries) == len(controls.components)
    for entry, component in zip(entries, controls.components, strict=True):
        value = component.value
        if entry["kind"] == "choice":
            assert value in entry["choices"]
        elif entry["kind"] == "number":
            assert entry["min"] <= value <= entry["max"]
        else:
            assert isinstance(value, str if entry["kind"] == "text" else bool)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_are_taken_whole_by_controls_and_engine(controls, preset):
    assert_taken(controls, preset.settings)


def test_the_tour_sets_up_every_step(controls):
    taken = steps()
    assert len(taken) == 8
    for step in taken:
        assert step["title"] and step["text"] and step["look"]
        if "set" in step:
            assert_taken(controls, step["set"])
        if "whatif" in step:
            report = simulate({name: str(value) for name, value in step["whatif"].items()})
            assert any(policy["tokens_per_second"] for policy in report["policies"])


def test_what_the_tour_says_of_batches_is_what_the_simulator_says():
    """At 16 sequences SpecMoEOff beats streaming without a draft, and all else; at 1 fetching on demand leads."""
    step = next(step for step in steps() if step["title"].startswith("Batch"))
    rates = [
        {p["policy"]: p["tokens_per_second"] for p in simulate({**step["whatif"], "batch": str(batch)} | {
            name: str(value) for name, value in step["whatif"].items() if name != "batch"
        })["policies"]}
        for batch in (16, 1)
    ]  # fmt: skip
    assert rates[0]["SpecMoEOff"] > 2 * rates[0]["streamed, no draft"]
    assert rates[0]["SpecMoEOff"] > rates[0]["on demand"]
    assert rates[1]["on demand"] > rates[1]["SpecMoEOff"] and rates[1]["MoE-SpeQ"] is None


def assert_taken(controls, settings: dict) -> None:
    values = merged(controls, settings)
    back = run("say(read(values, known));", values=values, known=schema(controls))
    assert {name: back[name] for name in settings} == settings
    chosen = controls.settings(values)
    for name in ("k", "prefetch", "policy", "slots"):
        if name in settings:
            assert chosen.knobs[name] == settings[name]
    assert chosen.engine.draft == settings.get("draft", chosen.engine.draft)
    assert len(set(chosen.prompts)) == settings["sequences"]


def test_a_link_brings_everything_back(controls):
    values = merged(controls, {**PRESETS[0].settings, "prompt": "Zwölf & <b>`${x}`</b>\n‮", "k": 3, "temperature": 0.7})
    address = run(
        'say(permalink("http://h:1/a/?__theme=dark&sv.k=9", read(values, known)));',
        values=values,
        known=schema(controls),
    )
    assert address.startswith("http://h:1/a/?__theme=dark&") and "sv.k=3" in address
    again = run(
        "say(merge(values, fromAddress(address, known), known));",
        values=values_of(controls), known=schema(controls), address=address,
    )  # fmt: skip
    assert again == values


@pytest.mark.parametrize(
    "query",
    [
        "sv.k=99", "sv.k=1.5", "sv.k=", "sv.slots=-1", "sv.draft=model:/etc", "sv.link=emulated:1e9", "sv.policy=x",
        "sv.seed=NaN", "sv.dtype=int8", "sv.nothing=1", "k=3", "sv.prompt=" + "a" * 5000,
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(controls, query):
    again = run(
        "say(merge(values, fromAddress(address, known), known));",
        values=values_of(controls), known=schema(controls), address=f"http://h/?{query}",
    )  # fmt: skip
    expected = values_of(controls)
    if query == "sv.k=99":  # more than there is becomes the most there is, and a number ends "auto"
        at = [entry["name"] for entry in schema(controls)].index("k")
        expected[at : at + 2] = [False, 16]
    if query.startswith("sv.k=1.5"):
        at = [entry["name"] for entry in schema(controls)].index("k")
        expected[at] = False
    assert again == expected


def test_the_last_step_begins_where_speculation_pays_and_less_acceptance_ends_it():
    asked = {name: str(value) for name, value in steps()[-1]["whatif"].items()}
    ratios = []
    for acceptance in (asked["acceptance"], "0.6"):
        report = simulate({**asked, "acceptance": acceptance})
        rates = {policy["policy"]: policy["tokens_per_second"] for policy in report["policies"]}
        ratios.append(rates["MoE-SpeQ"] / rates["on demand"])
    assert ratios[0] > 1.2 > 1 > ratios[1]


def test_a_link_holds_what_the_what_if_panel_asks():
    asked = {"hardware": "a30", "model": "mixtral-8x7b", "batch": "max", "k": "4", "acceptance": "0.8", "fast_gib": ""}
    link = run('say(permalink("http://h:1/?sv.whatif.k=9&sv.slots=2", named(settings)));', settings=asked)
    assert "sv.whatif.batch=max" in link and "fast_gib" not in link and "=9" not in link and "slots" not in link
    back = run("say(askedIn(address));", address=link)
    assert back == {name: value for name, value in asked.items() if value}
