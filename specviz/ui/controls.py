"""The controls beside the panels: a prompt, what to load, and the engine's own knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from engine.bench.prompts import many_prompts
from engine.config import (
    DRAFTS,
    DTYPES,
    KNOBS,
    MODEL_DRAFT,
    CacheBudget,
    EngineConfig,
    GenerationConfig,
    Knob,
    LinkConfig,
)
from engine.control.presets import PRESETS
from engine.errors import UsageError
from engine.serve.runs import RunSettings
from engine.serve.traits import Traits

#: Openings by their kind of text.
OPENINGS = {
    "A story": "Once upon a time, there was a little girl named Lily who",
    "One sentence": "Tom had a red kite.",
    "A dialogue": '"Can I play with you?" asked Ben. "Yes," said Mia. "But',
    "Repetition, for ngram": "The frog said hop. The cat said hop. The dog said hop. The frog said hop. The cat",
}
EXAMPLES = tuple(OPENINGS.values())
CUSTOM_LINK = "emulated"
LINKS = [
    ("This machine's disk", "disk"),
    *[(f"Emulated: {machine.label}", f"emulated:{name}") for name, machine in PRESETS.items()],
    ("Emulated: bandwidth and latency below", CUSTOM_LINK),
]
#: With the embedded model on a disk nothing takes long enough to be seen; this one shows waiting and hiding alike.
DEFAULT_LINK = "emulated:deepseek-lite-a100"
DRAFT_LABELS = {
    "sparse": "sparse (resident experts)",
    "sparse-1": "sparse-1 (one resident expert a token)",
    "ngram": "ngram (what the text said before)",
    "none": "none (plain decoding)",
}
LINK_KNOBS = ("link_gbps", "link_latency_us")
#: Sequences of one run at most: with sixteen nearly every expert is wanted in every pass.
MOST_SEQUENCES = 16
#: A slider cannot be set finely over more steps than a screen has pixels; such knobs are number fields.
SLIDER_STEPS = 5000


@dataclass(frozen=True)
class KnobControl:
    """A knob's component; `auto` is the checkbox of an "auto or a number" knob."""

    knob: Knob
    value: gr.Slider | gr.Number | gr.Radio
    auto: gr.Checkbox | None = None

    @property
    def components(self) -> list[gr.components.Component]:
        return [self.value] if self.auto is None else [self.auto, self.value]

    def setting(self, values: Sequence[Any]) -> Any:
        """The knob's value from those of `components`."""
        return "auto" if self.auto is not None and values[0] else values[-1]


@dataclass(frozen=True)
class Controls:
    """All inputs of a run. `settings` reads them in the order of `components`."""

    model: str
    traits: Traits
    prompt: gr.Textbox
    link: gr.Dropdown
    draft: gr.Dropdown
    dtype: gr.Radio
    chat: gr.Checkbox
    sequences: gr.Slider
    knobs: dict[str, KnobControl]

    @property
    def components(self) -> list[gr.components.Component]:
        knobs = [component for control in self.knobs.values() for component in control.components]
        return [self.prompt, self.link, self.draft, self.dtype, self.chat, self.sequences, *knobs]

    def settings(self, values: Sequence[Any]) -> RunSettings:
        """What the page asks for. Raises UsageError for what is out of range."""
        prompt, link, draft, dtype, chat, sequences, *rest = values
        chosen: dict[str, Any] = {}
        for name, control in self.knobs.items():
            count = len(control.components)
            value, rest = control.setting(rest[:count]), rest[count:]
            # The fields of a link that is not chosen are hidden: nobody could mend them.
            hidden = name in LINK_KNOBS and link != CUSTOM_LINK
            chosen[name] = control.knob.default if hidden else control.knob.check(value)
        live = {name: value for name, value in chosen.items() if KNOBS[name].live}
        request = {name: value for name, value in chosen.items() if not KNOBS[name].live}
        return RunSettings(
            prompts=with_others(prompt or "", int(sequences or 1)),
            engine=EngineConfig(
                model=self.model,
                dtype=dtype,
                draft=draft,
                policy=chosen["policy"],
                prefetch=chosen["prefetch"],
                cache=CacheBudget(slots=chosen["slots"]),
                link=_link(link, chosen),
            ),
            generation=GenerationConfig(**request, chat=bool(chat), k=chosen["k"], k_max=chosen["k_max"]),
            knobs=live,
        )


def with_others(prompt: str, count: int) -> tuple[str, ...]:
    """`prompt` and further beginnings, `count` in all. Raises UsageError."""
    if not 1 <= count <= MOST_SEQUENCES:
        raise UsageError(f"{count} sequences at once are out of range: use 1 to {MOST_SEQUENCES}")
    others = [other for other in many_prompts(count) if other != prompt]
    return (prompt, *others[: count - 1])


def _small_model(draft_model: str | None) -> list[tuple[str, str]]:
    return [(f"{Path(draft_model).name} (a small model)", f"{MODEL_DRAFT}{draft_model}")] if draft_model else []


def _link(choice: str, chosen: dict[str, Any]) -> LinkConfig:
    if choice == CUSTOM_LINK:
        return LinkConfig("emulated", gbps=chosen["link_gbps"], latency_us=chosen["link_latency_us"])
    return LinkConfig.parse(choice)


def create_prompt() -> gr.Textbox:
    """The prompt and openings to click on."""
    prompt = gr.Textbox(EXAMPLES[0], label="Prompt", lines=3, max_lines=8, elem_id="sv-prompt")
    gr.Examples(
        [[text] for text in EXAMPLES],
        [prompt],
        example_labels=list(OPENINGS),
        label="Openings",
        api_name="load_example",
    )
    return prompt


def create_controls(
    model: str, prompt: gr.Textbox, draft_model: str | None = None, traits: Traits | None = None
) -> Controls:
    """Everything but the prompt, generated from the engine's knobs. `model` is the one the page runs; its `traits`
    are read here where nobody else (an engine on another machine) tells them.

    A visitor may not name a `draft_model`: it would be loaded from wherever they say.
    """
    traits = traits or Traits.of(model)
    knobs: dict[str, KnobControl] = {}

    def add(*names: str) -> None:
        knobs.update({name: create_knob(KNOBS[name], traits.limits.get(name)) for name in names})

    with gr.Accordion("Draft", open=True):
        add("k", "k_max")
        draft = gr.Dropdown(
            [*[(DRAFT_LABELS.get(name, name), name) for name in DRAFTS], *_small_model(draft_model)],
            value="self-int4", label="Draft · next run",
            info="Who guesses: a quantized copy of the experts, the experts that are resident, or the text so far.",
            elem_id="sv-draft",
        )  # fmt: skip
    with gr.Accordion("Experts", open=True):
        add("slots", "policy", "prefetch")
        sequences = gr.Slider(
            1, MOST_SEQUENCES, 1, step=1, label="Sequences at once · next run", elem_id="sv-sequences",
            info="Further beginnings are written beside yours: an expert that was moved works for all of them.",
        )  # fmt: skip
    with gr.Accordion("Link", open=True):
        link = gr.Dropdown(
            LINKS, value=DEFAULT_LINK, label="Slow tier · next run", elem_id="sv-link",
            info="An emulated link is paced so that this machine waits as the named one would.",
        )  # fmt: skip
        with gr.Column(visible=False) as custom:
            add(*LINK_KNOBS)
        link.change(
            lambda choice: gr.update(visible=choice == CUSTOM_LINK), link, custom,
            queue=False, show_progress="hidden", api_name="show_link", api_visibility="private",
        )  # fmt: skip
    with gr.Accordion("Length, sampling and more", open=False):
        add("max_new_tokens", "temperature", "top_k", "top_p", "seed", "prefetch_depth")
        dtype = gr.Radio(list(DTYPES), value="float32", label="Precision · next run", elem_id="sv-dtype")
        chat = gr.Checkbox(
            False, label="Chat · next run", elem_id="sv-chat", visible=traits.chat,
            info="The prompt is a message to answer, put into the model's chat template.",
        )  # fmt: skip
    missing = KNOBS.keys() - knobs.keys()
    if missing:
        with gr.Accordion("More", open=False):
            add(*sorted(missing))
    ordered = {name: knobs[name] for name in KNOBS}
    return Controls(model, traits, prompt, link, draft, dtype, chat, sequences, ordered)


def create_knob(knob: Knob, maximum: float | None = None) -> KnobControl:
    """The component that fits the knob's kind; `maximum` narrows its range to what the model has."""
    said = f"{knob.label} {knob.help}".lower()
    unit = f", {knob.unit}" if knob.unit and knob.unit not in said else ""
    label = f"{knob.label}{unit} · {'live' if knob.live else 'next run'}"
    common: dict[str, Any] = {"label": label, "info": knob.help, "elem_id": f"sv-{knob.name}", "interactive": True}
    if knob.kind == "choice":
        return KnobControl(knob, gr.Radio(list(knob.choices), value=knob.default, **common))
    top = min(knob.maximum, maximum or knob.maximum)
    if knob.kind == "auto_int":
        auto = gr.Checkbox(knob.default == "auto", label=f"{knob.label}: auto · live", elem_id=f"sv-{knob.name}-auto")
        start = knob.minimum if knob.default == "auto" else knob.default
        return KnobControl(knob, gr.Slider(knob.minimum, top, max(start, 4), step=1, **common), auto)
    step = 1 if knob.kind == "int" else knob.step
    if (top - knob.minimum) / step > SLIDER_STEPS:
        precision = 0 if knob.kind == "int" else None
        # The bounds are the knob's: Gradio's own message would not say which field it means.
        number = gr.Number(knob.default, step=step, precision=precision, **common)
        return KnobControl(knob, number)
    return KnobControl(knob, gr.Slider(knob.minimum, top, min(knob.default, top), step=step, **common))
