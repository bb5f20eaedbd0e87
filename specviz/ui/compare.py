"""The controls of a comparison, and the handler that runs its two sides one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from engine.config import K_LIMIT, KNOBS
from engine.serve.session import Session
from specviz.compare import AS_SET, VARIED, create_side, running_order, with_memory_of
from specviz.ui.controls import Controls, model_limits
from specviz.ui.handlers import RunRef, refusals, stand_by, start

NAMES = ("A", "B")
#: What the page proposes: the settings as they are, against plain decoding.
PROPOSED: dict[str, dict[str, int | str]] = {"A": {}, "B": {"k": 0, "draft": "none"}}
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class CompareControls:
    """One dropdown a setting and side, in the order of NAMES and VARIED, then the box for equal memory."""

    fields: list[gr.Dropdown]
    equal: gr.Checkbox
    go: gr.Button

    @property
    def components(self) -> list[gr.components.Component]:
        return [*self.fields, self.equal]


def create_compare(model: str, controls: Controls) -> CompareControls:
    """The accordion below the controls."""
    most = model_limits(model).get("slots", SLOTS[-1])
    choices: dict[str, list[Any]] = {
        "k": ["auto", *range(K_LIMIT + 1)],
        "draft": [value for _, value in controls.draft.choices],
        "prefetch": list(KNOBS["prefetch"].choices),
        "policy": list(KNOBS["policy"].choices),
        "slots": [slots for slots in SLOTS if slots <= most],
    }
    labels = {"k": "draft length", "draft": "draft", "prefetch": "prefetch", "policy": "eviction", "slots": "slots"}
    made: dict[tuple[str, str], gr.Dropdown] = {}
    with gr.Accordion("Compare A with B", open=False, elem_id="sv-compare"):
        gr.Markdown("The same prompt and seed twice, one run after the other. All else is as set above.")
        for name in VARIED:
            with gr.Row():
                for side in NAMES:
                    made[side, name] = gr.Dropdown(
                        [AS_SET, *choices[name]], value=PROPOSED[side].get(name, AS_SET), min_width=100,
                        label=f"{side}: {labels[name]}", elem_id=f"sv-compare-{side.lower()}-{name}",
                    )  # fmt: skip
        equal = gr.Checkbox(
            True, label="Equal memory", elem_id="sv-compare-equal",
            info="Where only one side has a draft, the other gets its bytes as cache slots.",
        )  # fmt: skip
        go = gr.Button("Compare", elem_id="sv-compare-go")
    return CompareControls([made[side, name] for side in NAMES for name in VARIED], equal, go)


async def compare(
    session: Session, controls: Controls, values: Sequence[Any], fields: Sequence[Any], key: str = ""
) -> AsyncIterator[tuple[str, RunRef]]:
    """Run one side, then the other; messages as of `handlers.generate`, with the side. Ends when one is stopped."""
    *chosen, equal = fields
    with refusals():
        base = controls.settings(values)
        halves = chosen[: len(VARIED)], chosen[len(VARIED) :]
        sides = [
            create_side(name, base, dict(zip(VARIED, half, strict=True)))
            for name, half in zip(NAMES, halves, strict=True)
        ]
    equal = equal and sides[0].drafts != sides[1].drafts
    first = None
    for number, side in enumerate(running_order(sides, equal)):
        if first is not None and equal and first.start is not None:
            side = with_memory_of(side, first.start)
        with refusals():
            run = start(session, side.settings, key)
        told = {"side": side.name, "label": side.label, "first": number == 0}
        async with aclosing(stand_by(run, {"compare": told})) as messages:
            async for message in messages:
                yield message
        first = run.hub
        if first.end is None or first.end.status != "finished":
            return
