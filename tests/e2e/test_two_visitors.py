"""Two people at once, each with a prompt, a seed and knobs of their own: neither has anything of the other's."""

from __future__ import annotations

import json

from test_latency import MOVE
from test_page import RUN, choose_slow_link, wait_for_status, wait_for_tokens

PROMPTS = ("Tom had a red kite.", "The little frog was")
SETTINGS = ({"seed": 11, "k_max": 5, "slots": 5}, {"seed": 22, "k_max": 7, "slots": 9})
EVENTS = """async () => {
    const { run, token } = JSON.parse(sessionStorage.specviz);
    const text = await (await fetch(`specviz/export/${run}/${token}/events.ndjson`)).text();
    return text.trim().split("\\n").map((line) => JSON.parse(line));
}"""
#: All that the page shows, in words and in the data of its plots.
SHOWN = """() => document.querySelector('.sv').textContent +
    JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map((plot) => plot.data))"""
#: What a stranger who knows the number of a run gets: what the websocket said, and its close code.
FORGE = """async ([run, token]) => {
    const socket = new WebSocket(new URL("specviz/ws", location.href).href.replace("http", "ws"));
    const heard = [];
    return new Promise((resolve) => {
        socket.onopen = () => {
            socket.send(JSON.stringify({ op: "hello", run, token, from: 1 }));
            socket.send(JSON.stringify({ op: "stop" }));
        };
        socket.onmessage = ({ data }) => heard.push(JSON.parse(data));
        socket.onclose = ({ code }) => resolve([heard.map((message) => message.op), code]);
    });
}"""


def kept(page) -> dict:
    return json.loads(page.evaluate("sessionStorage.specviz"))


def prepare(page, prompt: str, settings: dict) -> None:
    choose_slow_link(page)
    page.get_by_text("Length, sampling and more").click()
    page.fill("#sv-prompt textarea", prompt)
    for name, value in settings.items():
        page.fill(f"#sv-{name} input[type=number]", str(value))
        page.keyboard.press("Tab")
    page.click("#sv-generate")


def check_own(page, mine: int) -> None:
    """The page's run and all that the page shows are of one visitor alone."""
    events = page.evaluate(EVENTS)
    start = next(event for event in events if event["kind"] == "run_start")
    assert "".join(token["text"] for token in start["prompts"][0]).strip() == PROMPTS[mine]
    assert start["config"]["seed"] == SETTINGS[mine]["seed"] and start["slots_per_layer"] == SETTINGS[mine]["slots"]
    assert page.evaluate("specviz.state.run") == kept(page)["run"]
    assert page.evaluate("specviz.state.metrics.facts.config") == start["config"]
    shown = page.evaluate(SHOWN)
    assert PROMPTS[mine] in shown and PROMPTS[1 - mine] not in shown
    assert page.input_value("#sv-slots input[type=number]") == str(SETTINGS[mine]["slots"])


def test_neither_has_anything_of_the_other_s(open_page, app):
    first, second = open_page(reloads=True), open_page()
    prepare(first, PROMPTS[0], SETTINGS[0])
    app.wait_until("running", 180)  # the first run of a session compiles the kernels
    wait_for_tokens(first, 2)
    prepare(second, PROMPTS[1], SETTINGS[1])
    second.wait_for_function("document.querySelector('.sv-phase').textContent === 'queued, 1 ahead'")
    # A knob of the first is moved while the second waits.
    first.evaluate(MOVE)
    assert second.evaluate("specviz.state.scene.knobs.length") == 0
    check_own(first, 0)
    assert PROMPTS[0] not in second.evaluate(SHOWN) and second.evaluate("specviz.state.metrics.acceptance.emitted") == 0
    # Nobody reads or stops a run with the number alone, or with a token of another one.
    one, two = kept(first), kept(second)
    for run, token in ((one["run"], two["token"]), (two["run"], one["token"]), (one["run"], "x")):
        heard, code = second.evaluate(FORGE, [run, token])
        assert second.request.get(f"{app.url}/specviz/export/{run}/{token}/events.ndjson").status == 404
        assert heard == ["error"] and code == 1008
    assert first.evaluate(f"{RUN}.status") == "running"
    # The first stops; the second, which waited, begins and has nothing of it.
    first.click("#sv-stop")
    assert wait_for_status(first, "stopped") == "stopped"
    wait_for_tokens(second, 2)
    check_own(second, 1)
    assert second.evaluate("specviz.state.scene.knobs.length") == 0
    # A run that is over takes no command with its old token, and the one that goes on does not hear it.
    first.evaluate(FORGE, [one["run"], one["token"]])
    first.reload()
    first.wait_for_function("document.querySelector('.sv-badge')?.dataset.mode === 'recording'")
    assert second.evaluate(f"{RUN}.status") == "running"
    second.click("#sv-stop")
    wait_for_status(second, "stopped", "finished")  # a busy machine may be at the end before the click
