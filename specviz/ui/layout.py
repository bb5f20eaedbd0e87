"""The page: controls on the left, the host of all panels on the right, and what ties them to the session."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from engine.config import EMBEDDED_MODEL
from engine.serve.session import Session
from engine.serve.traits import Traits
from specviz.assets import PlotlyScript
from specviz.server import create_routes
from specviz.ui import handlers
from specviz.ui.compare import Comparisons, create_compare
from specviz.ui.controls import Controls, KnobControl, create_controls, create_prompt
from specviz.ui.events import QUIET, bind_more_runs, bind_settings, named, run_event
from specviz.ui.panels import create_host, head
from specviz.ui.presets import create_presets
from specviz.ui.theme import create_theme

TITLE = "SpecViz"
INTRO = (
    "# SpecViz\n"
    "Each layer of a Mixture-of-Experts model holds many small networks, its **experts**, and sends every token to a "
    "few of them. They do not all fit in fast memory: fetching one over a slow link stalls the model. With "
    "**speculative decoding** a cheap draft guesses the next tokens and tells which experts come; the model then "
    "checks all guesses in one pass, so that the text stays its own.\n\n"
    "Press **Generate**, then move a knob and watch what it does; or take the **Tour**."
)
#: Button → what it says and does.
EXPORTS = {
    "trace": ("Perfetto trace", "download('trace.json')"),
    "events": ("Events", "download('events.ndjson')"),
    "summary": ("Summary, JSON", "download('summary.json')"),
    "csv": ("Summary, CSV", "download('summary.csv')"),
    "svg": ("Figures, SVG", "picture('svg')"),
    "png": ("Figures, PNG", "picture('png')"),
    "open": ("Open a saved run", "open()"),
}
#: A phone shows the panels first and the knobs on demand.
FOLD_ON_PHONES = """() => {
    if (window.innerWidth < 700) document.querySelectorAll("#sv-controls .label-wrap.open").forEach((b) => b.click());
}"""
#: The bridge may load later than Gradio; what was meant for it must not be lost.
RECEIVE = """async (message) => {
    for (let i = 0; i < 200 && !window.specvizBridge; i++) await new Promise((resolve) => setTimeout(resolve, 50));
    window.specvizBridge?.receive(message);
}"""
#: What bridge.js kept in this tab; a browser may refuse to keep anything.
STORED = """() => {
    try { return sessionStorage.getItem("specviz") ?? ""; } catch { return ""; }
}"""
QUEUE_SIZE = 64


def build(
    session: Session, model: str = str(EMBEDDED_MODEL), draft_model: str | None = None, traits: Traits | None = None
) -> gr.Blocks:
    """The whole page for one engine session: `model` is what its runs load; `draft_model`, a small one, may draft;
    `traits` are the model's where it lies on another machine.
    """
    comparisons = Comparisons(session)
    with gr.Blocks(title=TITLE, fill_width=True, analytics_enabled=False) as demo:
        run_ref = gr.State(None)
        key = gr.State("")
        # "hidden" keeps it in the page, so that its change event fires; False would leave it out.
        wire = gr.Textbox(visible="hidden", elem_id="sv-wire", label="events")
        with gr.Row(elem_id="sv-page", equal_height=False):
            with gr.Column(scale=1, min_width=300, elem_id="sv-controls"):
                gr.Markdown(INTRO, elem_id="sv-intro")
                prompt = create_prompt()
                with gr.Row(elem_id="sv-actions"):
                    go = gr.Button("Generate", variant="primary", min_width=120, elem_id="sv-generate")
                    halt = gr.Button("Stop", variant="stop", min_width=80, elem_id="sv-stop")
                    share = gr.Button("Let others watch", size="sm", min_width=240, elem_id="sv-share")
                    share.click(None, js="() => window.specvizBridge?.share()", **named("share"))
                presets = create_presets()
                plain = gr.Button("Measure the baseline (k = 0)", size="sm", elem_id="sv-baseline")
                controls = create_controls(model, prompt, draft_model, traits)
                versus = create_compare(controls)
                link = gr.Button("Link to these settings", size="sm", elem_id="sv-link-button")
                _create_downloads()
            with gr.Column(scale=4, min_width=320, elem_id="sv-panels"):
                create_host()
        _bind_run(session, controls, go, halt, wire, run_ref, key)
        bind_more_runs(session, controls, plain, versus, comparisons, [wire, run_ref], key)
        for control in controls.knobs.values():
            if control.knob.live:
                _bind_knob(session, control, run_ref)
        bind_settings(demo, controls, presets, link)
        demo.load(None, js=FOLD_ON_PHONES, **named("fold"))
        _bind_reload(session, comparisons, demo, wire, run_ref, key)
    # The session keeps the line of runs and says when it is full; this bound only guards the server's memory.
    return demo.queue(max_size=QUEUE_SIZE)


def _create_downloads() -> None:
    with gr.Accordion("Save this run, open another", open=False, elem_id="sv-downloads"):
        gr.Markdown(
            "Open the trace at ui.perfetto.dev, or in any viewer of Chrome traces. Saved **events** (.ndjson or "
            ".ndjson.gz) play here again, with no model and without leaving your browser."
        )
        with gr.Row():
            for name, (label, action) in EXPORTS.items():
                button = gr.Button(label, size="sm", min_width=120, elem_id=f"sv-download-{name}")
                button.click(None, js=f"() => window.specvizBridge?.{action}", **named(f"download_{name}"))


def _bind_run(
    session: Session, controls: Controls, go: gr.Button, halt: gr.Button, wire: gr.Textbox, run_ref: gr.State,
    key: gr.State,
) -> None:  # fmt: skip
    async def generate(*values: Any) -> AsyncIterator[tuple[str, Any]]:
        """Generate text; yields JSON messages: attach (run and token), feed (events), end (status and results)."""
        async for message in handlers.generate(session, controls, list(values[:-1]), values[-1]):
            yield message

    def stop(ref: handlers.RunRef) -> None:
        handlers.stop(session, ref)

    inputs = [*controls.components, key]
    go.click(generate, inputs, [wire, run_ref], api_name="generate", **run_event(session, inputs))
    wire.change(None, wire, js=RECEIVE, **named("receive"))
    halt.click(stop, run_ref, api_name="stop", trigger_mode="multiple", **QUIET)


def _bind_reload(
    session: Session, comparisons: Comparisons, demo: gr.Blocks, wire: gr.Textbox, run_ref: gr.State, key: gr.State
) -> None:
    async def rejoin(stored: str) -> AsyncIterator[tuple[str, Any, str]]:
        async for message in handlers.rejoin(session, stored, comparisons.go_on):
            yield message

    demo.load(
        rejoin, wire, [wire, run_ref, key], js=STORED, api_name="rejoin", api_visibility="private",
        show_progress="hidden", concurrency_limit=None,
    )  # fmt: skip


def _bind_knob(session: Session, control: KnobControl, run_ref: gr.State) -> None:
    """Tell the run about each move of a live knob, whether by mouse, keys or its number box."""
    knob, auto, value = control.knob, control.auto, control.value

    def moved(ref: handlers.RunRef, setting: Any) -> None:
        handlers.move_knob(session, knob, ref, setting)

    def fixed(ref: handlers.RunRef, setting: Any) -> bool:
        """Whoever moves the slider wants its number, so "auto" ends."""
        moved(ref, setting)
        return False

    def switched(ref: handlers.RunRef, on: bool, setting: Any) -> None:
        moved(ref, "auto" if on else setting)

    always_last: dict[str, Any] = {"trigger_mode": "always_last", **QUIET}
    number = f"window.specvizBridge?.number({knob.name!r}, value, {json.dumps(value.value)}) ?? value"
    if auto is not None:
        js = f"(ref, value) => [ref, {number}]"
        value.input(fixed, [run_ref, value], auto, js=js, api_name=f"set_{knob.name}", **always_last)
        js = f"(ref, auto, value) => [ref, auto, {number}]"
        auto.input(switched, [run_ref, auto, value], js=js, api_name=f"set_{knob.name}_auto", **always_last)
    elif isinstance(value, gr.Number):
        # Not .input: halfway through typing 0.05 stands 0, which is out of range.
        gr.on([value.submit, value.blur], moved, [run_ref, value], api_name=f"set_{knob.name}", **always_last)
    elif isinstance(value, gr.Slider):
        js = f"(ref, value) => [ref, {number}]"
        value.input(moved, [run_ref, value], js=js, api_name=f"set_{knob.name}", **always_last)
    else:
        value.input(moved, [run_ref, value], api_name=f"set_{knob.name}", **always_last)


def launch_kwargs(session: Session) -> dict[str, Any]:
    """Arguments for `launch` that the page cannot do without.

    `ssr_mode` must be off: the Node server in front of the page would refuse the websocket.
    """
    plotly = PlotlyScript()
    kwargs: dict[str, Any] = {
        "ssr_mode": False,
        "app_kwargs": {"routes": create_routes(session, plotly=plotly)},
        "theme": create_theme(),
        "head": head(plotly.digest),
        "footer_links": ["api", "settings"],
        "show_error": True,
    }
    if "run_history" in inspect.signature(gr.Blocks.launch).parameters:  # since gradio 6.24
        kwargs["run_history"] = False
    return kwargs
