"""The controls of a comparison, and the handler that runs its two sides one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from engine.config import K_LIMIT, KNOBS
from engine.serve.runs import Run
from engine.serve.session import Session
from specviz.compare import AS_SET, VARIED, Side, create_side, running_order, with_memory_of
from specviz.ui.controls import Controls
from specviz.ui.handlers import refusals, stand_by, start

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


def create_compare(controls: Controls) -> CompareControls:
    """The accordion below the controls."""
    most = controls.traits.limits.get("slots", SLOTS[-1])
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


class Comparison:
    """Two sides, one after the other. It outlives the page's connection: a page that was reloaded goes on with it."""

    def __init__(self, sides: Sequence[Side], equal: bool, key: str) -> None:
        self._equal = equal and sides[0].drafts != sides[1].drafts
        self._order = running_order(sides, self._equal)
        self._key = key
        self._runs: list[Run] = []

    def after(self, run: Run | None, session: Session) -> Run | None:
        """The run after `run` (None: the first), started only once, whoever asks; None when there is none to come.

        Raises EngineError when the session refuses it.
        """
        number = 0 if run is None else self._runs.index(run) + 1
        if number < len(self._runs):
            return self._runs[number]
        if number == len(self._order) or (run is not None and (not run.hub.end or run.hub.end.status != "finished")):
            return None
        side = self._order[number]
        if run is not None and self._equal and run.hub.start is not None:
            side = self._order[number] = with_memory_of(side, run.hub.start)
        self._runs.append(start(session, side.settings, self._key))
        return self._runs[-1]

    def told(self, run: Run) -> dict[str, Any]:
        """What a page must know of a run: its side, and the runs `before` it."""
        number = self._runs.index(run)
        before = [{"run": old.id, "token": old.token, **self._named(at)} for at, old in enumerate(self._runs[:number])]
        return {**self._named(number), "first": number == 0, "before": before}

    def _named(self, number: int) -> dict[str, str]:
        return {"side": self._order[number].name, "label": self._order[number].label}


class Comparisons:
    """Those that may be on, by their runs' ids."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, tuple[Run, Comparison]] = {}

    async def begin(
        self, controls: Controls, values: Sequence[Any], fields: Sequence[Any], key: str = ""
    ) -> AsyncIterator[tuple[str, Any]]:
        """Run one side, then the other; messages as of `handlers.generate`, with the side. Ends when one is stopped."""
        *chosen, equal = fields
        with refusals():
            base = controls.settings(values)
            halves = chosen[: len(VARIED)], chosen[len(VARIED) :]
            sides = [
                create_side(name, base, dict(zip(VARIED, half, strict=True)))
                for name, half in zip(NAMES, halves, strict=True)
            ]
            comparison = Comparison(sides, equal, key)
            run = comparison.after(None, self._session)
        async with aclosing(self._follow(comparison, run, {})) as messages:
            async for message in messages:
                yield message

    def go_on(self, run: Run, more: dict[str, Any]) -> AsyncGenerator[tuple[str, Any], None]:
        """Stand by a run that a page had before it was reloaded, and by those that come after it."""
        _, comparison = self._known.get(run.id, (run, None))
        return stand_by(run, more) if comparison is None else self._follow(comparison, run, more)

    async def _follow(
        self, comparison: Comparison, run: Run | None, more: dict[str, Any]
    ) -> AsyncGenerator[tuple[str, Any], None]:
        while run is not None:
            self._known = {id: known for id, known in self._known.items() if not known[0].over}
            self._known[run.id] = (run, comparison)
            async with aclosing(stand_by(run, {**more, "compare": comparison.told(run)})) as messages:
                async for message in messages:
                    yield message
            more = {}
            with refusals():
                run = comparison.after(run, self._session)
