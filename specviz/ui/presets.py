"""Settings that arrive from elsewhere than a person's hands: presets, the tour, and links to the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from specviz.ui.controls import CUSTOM_LINK, DEFAULT_LINK, MOST_SEQUENCES, Controls


@dataclass(frozen=True)
class Preset:
    """Settings by their names in `schema`, named for what they teach."""

    name: str
    label: str
    teaches: str
    settings: dict[str, Any]


PRESETS = (
    Preset(
        "hiding", "What prefetch hides",
        "The draft tells which experts come; they cross the link while it still computes.",
        {"link": DEFAULT_LINK, "draft": "self-int4", "k": 4, "prefetch": "draft", "policy": "lookahead", "slots": 4,
         "sequences": 1},
    ),
    Preset(
        "stalls", "Why a miss stalls",
        "No draft and no prefetch on a slow link: every missed expert is waited for.",
        {"link": "emulated:mixtral-a30", "draft": "none", "k": 0, "prefetch": "none", "policy": "lru", "slots": 2,
         "sequences": 1},
    ),
    Preset(
        "loss", "When it does not pay",
        "A poor draft (one resident expert a token) guesses eight tokens, the disk is fast: measured, half as fast.",
        {"link": "disk", "draft": "sparse-1", "k": 8, "prefetch": "none", "policy": "lookahead", "slots": 4,
         "sequences": 1},
    ),
    Preset(
        "governor", "Let the governor decide",
        "Draft length and prefetch are chosen each round by what was measured.",
        {"link": "emulated:qwen3-30b-4090", "draft": "self-int4", "k": "auto", "k_max": 16, "prefetch": "auto",
         "policy": "lookahead", "slots": 4, "sequences": 1},
    ),
)  # fmt: skip


def schema(controls: Controls) -> list[dict[str, Any]]:
    """One entry a component, in their order: its name, and what it may be set to.

    "part" is "auto" for the checkbox of an "auto or a number" knob, whose name it shares.
    """
    entries: list[dict[str, Any]] = [
        {"name": "prompt", "kind": "text", "most": 4000},
        {"name": "link", "kind": "choice", "choices": [value for _, value in controls.link.choices]},
        {"name": "draft", "kind": "choice", "choices": [value for _, value in controls.draft.choices]},
        {"name": "dtype", "kind": "choice", "choices": [value for _, value in controls.dtype.choices]},
        {"name": "chat", "kind": "bool"},
        {"name": "sequences", "kind": "number", "min": 1, "max": MOST_SEQUENCES, "whole": True},
    ]
    for name, control in controls.knobs.items():
        knob = control.knob
        if control.auto is not None:
            entries.append({"name": name, "kind": "auto", "part": "auto"})
        if knob.kind == "choice":
            entries.append({"name": name, "kind": "choice", "choices": list(knob.choices)})
            continue
        top = control.value.maximum if isinstance(control.value, gr.Slider) else knob.maximum
        whole = knob.kind != "float"
        entries.append({"name": name, "kind": "number", "min": knob.minimum, "max": top, "whole": whole})
    for entry in entries:
        if entry["name"] in ("link_gbps", "link_latency_us"):
            entry["only"] = {"link": CUSTOM_LINK}
        elif entry["name"] in controls.knobs:
            entry["live"] = controls.knobs[entry["name"]].knob.live
    return entries


@dataclass(frozen=True)
class PresetControls:
    """A button for each preset, and the line below them that says what the last one pressed teaches."""

    buttons: dict[str, gr.Button]
    words: gr.Textbox


def create_presets() -> PresetControls:
    """The presets, above all other controls."""
    buttons = {}
    with gr.Accordion("Presets", open=True, elem_id="sv-presets"):
        for pair in (PRESETS[:2], PRESETS[2:]):
            with gr.Row():
                for preset in pair:
                    buttons[preset.name] = gr.Button(
                        preset.label, size="sm", min_width=120, elem_id=f"sv-preset-{preset.name}"
                    )
        words = gr.Textbox(
            "Each sets the controls below; then press Generate.", label="What it teaches", lines=2, max_lines=4,
            interactive=False, elem_id="sv-preset-words",
        )  # fmt: skip
    return PresetControls(buttons, words)
