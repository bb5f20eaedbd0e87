"""A recorded run whose every text is an attack, or something that programs get wrong."""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
TEXTS = (
    "${window.pwned=1}", "${", "`", "\\u12", "{{7*7}}", "<img src=x onerror=window.pwned=1>", "</script><script>",
    "</span><b>bold</b>", "&lt;b&gt;", "\u202eevil\u202c", "\u2067rtl", "\ud83d", "\ude00", "\u200d\u200b\ufeff",
    "\u0000", "\x1b[31m", "=1+1", "'\"", "😀", "\r\n", "\t", "a" * 500,
)  # fmt: skip


def hostile_run(name: str = "draft4") -> str:
    """The golden run with other words: tokens, alternatives, rejected drafts, the model's name, the link's label."""
    lines, count = [], 0

    def next_text() -> str:
        nonlocal count
        count += 1
        return TEXTS[count % len(TEXTS)]

    for line in (GOLDEN / f"{name}.ndjson").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "run_start":
            event["model"]["name"] = "".join(TEXTS[:8])
            event["machine"]["cpu"] = TEXTS[9] + TEXTS[6]
            event["link"]["label"] = "<img src=x onerror=window.pwned=1> emulated"
            event["prompts"] = [[{"id": 1, "text": text} for text in TEXTS]]
        for part in ("tokens", "rejected") if event["kind"] == "round" else ():
            for token in event[part]:
                token["text"] = next_text()
                if "alternatives" in token:
                    token["alternatives"] = [[text, 0.1] for text in TEXTS[:5]]
        if event["kind"] == "run_end":
            event["summary"] = [{"text": text} for text in TEXTS]
        if event["kind"] == "governor":
            event["reason"] = "<b>because</b> ${window.pwned=1}"
        lines.append(json.dumps(event))
    return "\n".join(lines)


def text_of(run: str) -> str:
    """Prompt and generated text."""
    events = [json.loads(line) for line in run.splitlines()]
    prompt = next(event for event in events if event["kind"] == "run_start")["prompts"][0]
    tokens = [token for event in events if event["kind"] == "round" for token in event["tokens"]]
    return "".join(token["text"] for token in [*prompt, *tokens])


def one_long_word(tokens: int = 4000) -> str:
    """A run that emits `tokens` tokens and never a space."""
    lines = (GOLDEN / "plain.ndjson").read_text(encoding="utf-8").splitlines()
    head = [json.loads(line) for line in lines if json.loads(line)["kind"] in ("run_start", "phase")]
    model = next(json.loads(line) for line in lines if json.loads(line)["kind"] == "round")
    step = model["t"] - model["start"]
    events = head
    for n in range(tokens):
        moved = {name: model[name] + n * step for name in ("t", "start", "draft_end", "verify_start", "verify_end")}
        events.append({**model, **moved, "round": n, "tokens": [{**model["tokens"][0], "text": "word"}]})
    end = next(json.loads(line) for line in lines if json.loads(line)["kind"] == "run_end")
    events.append({**end, "t": events[-1]["t"]})
    return "\n".join(json.dumps({**event, "seq": seq}) for seq, event in enumerate(events, start=1))
