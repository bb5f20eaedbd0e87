"""A against B: both sides' settings, their order, and equal memory."""

from __future__ import annotations

import asyncio
import json

import gradio as gr
import pytest

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.errors import UsageError
from engine.events import RunStart
from engine.serve.runs import RunSettings
from specviz.compare import AS_SET, create_side, running_order, with_memory_of
from specviz.ui import handlers
from specviz.ui.compare import VARIED, Comparisons, create_compare
from specviz.ui.controls import create_controls, create_prompt

BASE = RunSettings(
    ("Once",),
    EngineConfig(cache=CacheBudget(slots=4)),
    GenerationConfig(max_new_tokens=5, seed=3),
    {"k": "auto", "prefetch": "auto", "policy": "lookahead", "slots": 4},
)


def started(draft: int, cache: int, slots: int, experts: int = 16) -> RunStart:
    memory = {"shared": 1, "draft": draft, "cache": cache, "kv": 1, "total": draft + cache + 2}
    return RunStart(0, 1, {"experts": experts}, {}, {}, {}, memory, slots, [], 0.0)


def test_a_side_changes_only_what_it_says():
    side = create_side("B", BASE, {"k": 0, "draft": "none", "slots": 7, "policy": AS_SET, "prefetch": None})
    assert side.settings.engine.draft == "none" and side.settings.engine.cache == CacheBudget(slots=7)
    assert side.settings.knobs == {**BASE.knobs, "k": 0, "slots": 7} and side.settings.generation.k == 0
    assert side.settings.generation.seed == 3 and side.settings.prompts == BASE.prompts
    assert create_side("A", BASE, {}).settings == BASE


def test_what_is_out_of_range_is_refused():
    with pytest.raises(UsageError, match="out of range"):
        create_side("A", BASE, {"k": 17})
    with pytest.raises(UsageError, match="unknown draft"):
        create_side("A", BASE, {"draft": "nobody"})


def test_the_side_that_drafts_runs_first_only_for_equal_memory():
    a, b = create_side("A", BASE, {"draft": "none"}), create_side("B", BASE, {})
    assert [side.name for side in running_order([a, b], False)] == ["A", "B"]
    assert [side.name for side in running_order([a, b], True)] == ["B", "A"]
    assert [side.name for side in running_order([b, a], True)] == ["B", "A"]


@pytest.mark.parametrize(
    ("draft", "slots"),
    [(0, 4), (49, 4), (51, 5), (100, 5), (340, 7), (100_000, 16)],  # a slot in every layer takes 400 / 4 = 100 bytes
)
def test_the_drafts_bytes_become_the_nearest_number_of_slots(draft, slots):
    plain = with_memory_of(create_side("B", BASE, {"draft": "none"}), started(draft, 400, 4))
    assert plain.settings.knobs["slots"] == slots == plain.settings.engine.cache.slots
    assert plain.more_slots == slots - 4
    drafting = create_side("A", BASE, {})
    assert with_memory_of(drafting, started(draft, 400, 4)) == drafting


def run(session, changes: dict[str, dict], equal: bool, during=None, comparisons=None) -> list[dict]:
    with gr.Blocks():
        controls = create_controls("some/model", create_prompt())
        versus = create_compare(controls)
    values = [component.value for component in controls.components]
    fields = [changes.get(side, {}).get(name, AS_SET) for side in "AB" for name in VARIED]
    assert len(fields) == len(versus.fields)

    async def follow() -> list[dict]:
        messages = []
        async for text, ref in (comparisons or Comparisons(session)).begin(controls, values, [*fields, equal]):
            messages.append(json.loads(text))
            if during and during(messages[-1], ref):
                break
        return messages

    return asyncio.run(follow())


def test_both_sides_run_in_turn_through_the_sessions_line(session, loader):
    messages = run(session, {"B": {"k": 0, "draft": "none", "slots": 1}}, equal=True)
    told = [
        (message["op"], message["compare"]["side"], message["compare"]["first"])
        for message in messages
        if message["op"] != "feed"
    ]
    assert told == [("attach", "A", True), ("end", "A", True), ("attach", "B", False), ("end", "B", False)]
    assert [message["status"] for message in messages if message["op"] == "end"] == ["finished"] * 2
    assert [engine.config.draft for engine in loader.engines] == ["self-int4", "none"]
    # The fake engine's draft takes as much as its two slots hold in all: two slots more.
    assert "3 slots (2 of them for equal memory)" in messages[-1]["compare"]["label"]


def test_a_side_that_is_stopped_ends_the_comparison(session, loader):
    def stop(message: dict, ref) -> None:
        if message["op"] == "attach":
            session.find(*ref).stop()

    messages = run(session, {}, equal=False, during=stop)
    assert [message["op"] for message in messages if message["op"] != "feed"] == ["attach", "end"]
    assert messages[-1]["status"] == "stopped"


def test_a_refused_side_is_said_before_anything_runs(session, loader):
    with pytest.raises(gr.Error, match="out of range"):
        run(session, {"B": {"k": 40}}, equal=False)
    assert not loader.engines


def test_a_page_that_was_reloaded_goes_on_with_both_sides(session, loader):
    """It leaves in the middle of the first side, and comes back to it; then once more in the second."""
    comparisons = Comparisons(session)
    stored: list[str] = []

    def leave(message: dict, ref) -> bool:
        stored.append(json.dumps({"key": "k" * 30, "run": ref[0], "token": ref[1]}))
        return True

    async def come_back(until: str) -> list[dict]:
        messages = []
        async for text, _, _ in handlers.rejoin(session, stored[-1], comparisons.go_on):
            message = json.loads(text)
            messages.append(message)
            if message["op"] == "attach" and message["compare"]["side"] == until:
                stored.append(json.dumps({"run": message["run"], "token": message["token"]}))
                break
        return messages

    run(session, {"A": {"k": 0}, "B": {"k": 3}}, equal=False, during=leave, comparisons=comparisons)
    messages = asyncio.run(come_back("B"))
    assert [(m["op"], m["compare"]["side"]) for m in messages if m["op"] != "feed"] == [
        ("attach", "A"), ("end", "A"), ("attach", "B"),
    ]  # fmt: skip
    assert messages[0]["key"] == "k" * 30 and "key" not in messages[-1]
    again = asyncio.run(come_back("nobody"))
    assert [(m["op"], m["compare"]["side"]) for m in again if m["op"] != "feed"] == [("attach", "B"), ("end", "B")]
    (before,) = again[0]["compare"]["before"]
    assert (before["run"], before["side"]) == (messages[0]["run"], "A")
    assert session.registry.find(before["run"], before["token"]).end.status == "finished"
    assert len(session.registry) == 2  # no side ran twice
