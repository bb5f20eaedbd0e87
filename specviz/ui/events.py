"""What the buttons beside Generate do: the baseline, A against B, presets, and links with all settings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from engine.serve.session import Session
from specviz.ui import handlers
from specviz.ui.compare import CompareControls, Comparisons
from specviz.ui.controls import Controls
from specviz.ui.presets import PRESETS, PresetControls, schema

#: Live events must neither cover the page with a progress overlay nor wait in a queue behind a run.
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def named(name: str) -> dict[str, Any]:
    """For an event that stays in the browser."""
    return {**QUIET, "api_name": name.split(".")[0]}


def run_event(session: Session, inputs: list[gr.components.Component]) -> dict[str, Any]:
    """What all events that start runs have in common: the session keeps their line, Gradio only follows.

    Gradio cannot read a slider whose number box is empty, so the page fills in what the slider began with.
    """
    first = json.dumps([component.value for component in inputs])
    return {
        "show_progress": "hidden",
        "trigger_mode": "once",
        "concurrency_id": "engine",
        "concurrency_limit": session.max_waiting + 2,
        "js": f"async (...values) => (await window.specvizBridge?.clicked(values, {first})) ?? values",
    }


def bind_more_runs(
    session: Session,
    controls: Controls,
    plain: gr.Button,
    versus: CompareControls,
    comparisons: Comparisons,
    outputs: list[gr.components.Component],
    key: gr.State,
) -> None:
    """The baseline, and A against B: runs in the same line as all others."""

    async def baseline(*values: Any) -> AsyncIterator[tuple[str, Any]]:
        """The same request decoded plainly; messages as of generate."""
        async for message in handlers.generate(session, controls, list(values[:-1]), values[-1], k=0):
            yield message

    async def both(*values: Any) -> AsyncIterator[tuple[str, Any]]:
        """One request with two sets of settings, one after the other; messages as of generate, with the side."""
        count = len(controls.components)
        async for message in comparisons.begin(controls, values[:count], values[count:-1], values[-1]):
            yield message

    private: dict[str, Any] = {"api_visibility": "private"}
    inputs, wider = [*controls.components, key], [*controls.components, *versus.components, key]
    plain.click(baseline, inputs, outputs, api_name="baseline", **run_event(session, inputs), **private)
    versus.go.click(both, wider, outputs, api_name="compare", **run_event(session, wider), **private)


def bind_settings(demo: gr.Blocks, controls: Controls, presets: PresetControls, link: gr.Button) -> None:
    """Presets, the tour's settings, and links; all in the browser, and none of them starts a run."""
    inputs, described = controls.components, json.dumps(schema(controls))

    def bind(event: Any, name: str, call: str) -> None:
        # The page may be built before our scripts have arrived.
        js = (
            "async (...values) => { for (let i = 0; i < 100 && !window.specvizBridge; i++)"
            " await new Promise((resolve) => setTimeout(resolve, 50));"
            f" const known = {described}; return {call} ?? values; }}"
        )
        event(None, inputs, inputs, js=js, **named(name))

    carrier = gr.Button(visible="hidden", elem_id="sv-apply")
    bind(carrier.click, "apply", "window.specvizBridge?.applied(values, known)")
    bind(demo.load, "opened", "window.specvizBridge?.opened(values, known)")
    for preset in PRESETS:
        apply = f"window.specvizBridge?.apply({json.dumps(preset.settings)})"
        js = f"() => {{ {apply}; return {json.dumps(preset.teaches)}; }}"
        presets.buttons[preset.name].click(None, None, presets.words, js=js, **named(f"preset_{preset.name}"))
    js = f"(...values) => {{ window.specvizBridge?.link(values, {described}); }}"
    link.click(None, inputs, js=js, **named("link"))
