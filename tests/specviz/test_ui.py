from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import gradio as gr
import pytest

from engine.config import KNOBS, CacheBudget, GenerationConfig, LinkConfig
from engine.control.presets import PRESETS
from engine.errors import UsageError
from engine.serve.session import Session
from engine.serve.traits import Traits
from specviz.ui import build, handlers, launch_kwargs
from specviz.ui.controls import create_controls, create_prompt

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(session) -> gr.Blocks:
    return build(session)


@pytest.fixture
def controls():
    with gr.Blocks():
        return create_controls("some/model", create_prompt())


def values_of(controls) -> list:
    return [component.value for component in controls.components]


# What Gradio is told


def test_live_events_neither_wait_in_a_queue_nor_cover_the_page(demo):
    functions = {fn.api_name: fn for fn in demo.fns.values()}
    live = [name for name in functions if name.startswith("set_") or name in ("stop", "receive")]
    assert len(live) >= 2 + sum(knob.live for knob in KNOBS.values())
    for name in live:
        assert functions[name].queue is False and functions[name].show_progress == "hidden", name
    for name, fn in functions.items():
        if name.startswith("set_"):
            assert fn.trigger_mode == "always_last"
    for name in ("generate", "baseline", "compare"):
        assert functions[name].queue is not False and functions[name].show_progress == "hidden"
        assert functions[name].trigger_mode == "once"


def test_nothing_shares_the_run_s_concurrency_group_and_the_session_says_when_it_is_full(demo, session):
    groups = {fn.api_name: (fn.concurrency_id, fn.concurrency_limit) for fn in demo.fns.values()}
    assert [name for name, (group, _) in groups.items() if group == "engine"] == ["generate", "baseline", "compare"]
    assert all(limit > session.max_waiting + 1 for group, limit in groups.values() if group == "engine")


def test_every_event_has_a_name_of_its_own_and_only_generate_is_offered(demo):
    names = [fn.api_name for fn in demo.fns.values()]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z_]+", name) for name in names)
    assert [fn.api_name for fn in demo.fns.values() if fn.api_visibility == "public"] == ["generate"]


def test_knobs_answer_to_keys_as_well_as_the_mouse(demo):
    """A slider's release event comes from the pointer alone."""
    for fn in demo.fns.values():
        if fn.api_name.startswith("set_"):
            events = {event for _, event in fn.targets}
            assert events & {"input", "submit"} and "release" not in events, fn.api_name


def test_no_plot_and_no_template_ever_receives_a_value_of_a_run(demo):
    components = {c["id"]: c["type"] for c in demo.config["components"]}
    assert "plot" not in components.values()
    outputs = {components[id] for d in demo.config["dependencies"] for id in d["outputs"]}
    assert not outputs & {"html", "markdown", "plot", "json"}
    (host,) = [c for c in demo.config["components"] if c["props"].get("elem_id") == "specviz-host"]
    assert 'id="specviz-root"' in host["props"]["value"]


def test_launch_keeps_the_websocket_reachable_and_the_page_to_itself(session):
    kwargs = launch_kwargs(session)
    assert kwargs["ssr_mode"] is False and kwargs["run_history"] is False
    paths = {route.path for route in kwargs["app_kwargs"]["routes"]}
    assert "/specviz/ws" in paths and all(path.startswith("/specviz/") for path in paths)
    addresses = re.findall(r'(?:src|href)="([^"]+)"', kwargs["head"])
    assert len(addresses) >= 4 and all(address.startswith("specviz/") for address in addresses)
    assert kwargs["theme"]._stylesheets == []
    fonts = json.dumps([str(font) for font in (*kwargs["theme"]._font, *kwargs["theme"]._font_mono)])
    assert "http" not in fonts and "url(" not in fonts


# Controls


def test_there_is_a_control_for_each_knob_and_no_other(controls):
    assert controls.knobs.keys() == KNOBS.keys()
    for name, control in controls.knobs.items():
        assert ("live" if KNOBS[name].live else "next run") in control.value.label
        assert (control.auto is not None) == (KNOBS[name].kind == "auto_int")


def test_untouched_controls_ask_for_the_engine_s_defaults(controls):
    settings = controls.settings(values_of(controls))
    defaults = {name: knob.default for name, knob in KNOBS.items()}
    assert dict(settings.knobs) == {name: value for name, value in defaults.items() if KNOBS[name].live}
    assert settings.generation == GenerationConfig(
        **{name: defaults[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "k", "k_max")}
    )
    assert settings.engine.model == "some/model"
    assert settings.engine.link == LinkConfig("emulated", preset="deepseek-lite-a100")


def set_value(controls, values: list, component, value) -> None:
    values[controls.components.index(component)] = value


def test_changed_controls_reach_the_engine(controls):
    values = values_of(controls)
    knobs = controls.knobs
    for component, value in [
        (knobs["k"].auto, False), (knobs["k"].value, 3), (knobs["slots"].value, 2), (knobs["policy"].value, "lru"),
        (controls.link, "emulated"), (knobs["link_gbps"].value, 0.05), (knobs["seed"].value, 7),
    ]:  # fmt: skip
        set_value(controls, values, component, value)
    settings = controls.settings(values)
    assert settings.generation.k == 3 == settings.knobs["k"] and settings.generation.seed == 7
    assert settings.engine.cache == CacheBudget(slots=2) and settings.engine.policy == "lru"
    assert settings.engine.link == LinkConfig("emulated", gbps=0.05, latency_us=0.0)
    for name in PRESETS:
        set_value(controls, values, controls.link, f"emulated:{name}")
        assert controls.settings(values).engine.link.preset == name
    assert {value for _, value in controls.link.choices} == {"disk", "emulated", *(f"emulated:{n}" for n in PRESETS)}


@pytest.mark.parametrize("prompt", ["Tom had a red kite.", "Something else"])
def test_further_sequences_get_beginnings_of_their_own(controls, prompt):
    values = values_of(controls)
    set_value(controls, values, controls.prompt, prompt)
    for count in (1, 2, 16):
        set_value(controls, values, controls.sequences, count)
        prompts = controls.settings(values).prompts
        assert prompts[0] == prompt and len(prompts) == len(set(prompts)) == count
    set_value(controls, values, controls.sequences, 17)
    with pytest.raises(UsageError, match="use 1 to 16"):
        controls.settings(values)


@pytest.mark.parametrize(("name", "value"), [("slots", 0), ("seed", 1.5), ("policy", "best"), ("top_p", None)])
def test_values_that_no_control_can_hold_are_refused(controls, name, value):
    values = values_of(controls)
    set_value(controls, values, controls.knobs[name].value, value)
    with pytest.raises(UsageError, match=name):
        controls.settings(values)


@pytest.mark.parametrize(("name", "value"), [("seed", -3), ("link_gbps", 0), ("link_latency_us", 1e9)])
def test_a_number_out_of_range_is_refused_by_the_knob_s_name(controls, name, value):
    values = values_of(controls)
    set_value(controls, values, controls.link, "emulated")
    # What the field hands on: had Gradio the bounds, its message would name no field.
    set_value(controls, values, controls.knobs[name].value, controls.knobs[name].value.preprocess(value))
    with pytest.raises(UsageError, match=f"{name} .* is out of range"):
        controls.settings(values)


def test_a_field_that_is_hidden_cannot_stand_in_the_way(controls):
    values = values_of(controls)
    set_value(controls, values, controls.knobs["link_gbps"].value, 0)
    assert controls.settings(values).engine.link.preset is not None
    set_value(controls, values, controls.link, "emulated")
    with pytest.raises(UsageError, match="link_gbps"):
        controls.settings(values)


def test_sliders_end_where_the_model_does(tmp_path):
    (tmp_path / "config.json").write_text('{"num_experts": 60, "num_hidden_layers": 24, "max_position_embeddings": 0}')
    assert Traits.of(str(tmp_path)) == Traits({"slots": 60, "prefetch_depth": 24}, chat=False)
    assert Traits.of("some/model") == Traits.of("no id: at all") == Traits({}, chat=True)
    with gr.Blocks():
        near = create_controls(str(tmp_path), create_prompt())
        # A model that only another machine has: what that one told.
        far = create_controls("there/only", create_prompt(), traits=Traits({"slots": 8}, chat=False))
    assert near.knobs["slots"].value.maximum == 60 and far.knobs["slots"].value.maximum == 8
    assert not near.chat.visible and not far.chat.visible


@pytest.mark.parametrize("record", [None, [], {"limits": [1]}, {"limits": {"slots": True, "k": -1}, "chat": "yes"}])
def test_what_another_machine_says_of_its_model_is_not_trusted(record):
    assert Traits.from_json(record) == Traits({}, chat=True)
    assert Traits.from_json(json.loads(json.dumps(Traits({"slots": 4}, False).to_json()))) == Traits(
        {"slots": 4}, False
    )


# The generator


def run_generator(session: Session, controls, values: list, during=None) -> list[dict]:
    async def collect() -> list[dict]:
        messages = []
        async for text, ref in handlers.generate(session, controls, values):
            messages.append(json.loads(text))
            # Later messages leave alone which run the page has: it may be the next one by then.
            first = len(messages) == 1
            assert ref == ((messages[0]["run"], messages[0]["token"]) if first else gr.skip())
            if len(messages) == 1 and during is not None:
                during(messages[0])
        return messages

    return asyncio.run(collect())


def with_tokens(controls, count: int) -> list:
    values = values_of(controls)
    set_value(controls, values, controls.knobs["max_new_tokens"].value, count)
    return values


def test_without_a_websocket_every_event_comes_once_and_in_order(session, controls, monkeypatch):
    monkeypatch.setattr(handlers, "GRACE_S", 0.2)
    monkeypatch.setattr(handlers, "TURN_BYTES", 4000)
    monkeypatch.setattr(handlers, "TURN_S", 0.01)
    messages = run_generator(session, controls, with_tokens(controls, 200))
    assert messages[0]["op"] == "attach" and messages[-1]["op"] == "end"
    batches = [message["batch"] for message in messages[1:-1]]
    assert len(batches) > 5 and all(batch["lost"] == 0 for batch in batches)
    events = [event for batch in batches for event in batch["events"]]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert sum(event["kind"] == "round" for event in events) == 200 and events[-1]["kind"] == "run_end"
    assert messages[-1]["status"] == "finished" and messages[-1]["results"][0]["new_tokens"] == 200


def test_with_a_websocket_the_generator_sends_no_events(session, controls, monkeypatch):
    monkeypatch.setattr(handlers, "GRACE_S", 0.05)
    viewers = []

    def open_websocket(attach: dict) -> None:
        hub = session.registry.find(attach["run"], attach["token"])
        viewer = hub.attach(1, "websocket")

        async def read() -> None:
            while hub.end is None or viewer.cursor <= hub.last_seq:
                await viewer.wait(5)
                viewer.take()
            hub.detach(viewer)

        viewers.append(asyncio.get_running_loop().create_task(read()))

    messages = run_generator(session, controls, with_tokens(controls, 150), open_websocket)
    assert [message["op"] for message in messages] == ["attach", "end"] and viewers


def test_after_a_websocket_broke_the_generator_goes_on_where_it_was(session, controls, monkeypatch):
    monkeypatch.setattr(handlers, "GRACE_S", 0.05)
    seen, tasks = [], []

    def open_and_break(attach: dict) -> None:
        hub = session.registry.find(attach["run"], attach["token"])
        viewer = hub.attach(1, "websocket")

        async def read() -> None:
            while len(seen) < 30:
                await viewer.wait(5)
                seen.extend(viewer.take(max_bytes=500).events)
            hub.detach(viewer)

        tasks.append(asyncio.get_running_loop().create_task(read()))

    messages = run_generator(session, controls, with_tokens(controls, 300), open_and_break)
    first = next(message["batch"] for message in messages if message["op"] == "feed")
    assert first["from"] == json.loads(seen[-1])["seq"] + 1


def test_what_cannot_run_is_said_and_not_queued(session, controls):
    values = values_of(controls)
    set_value(controls, values, controls.prompt, "   ")
    with pytest.raises(gr.Error, match="prompt is empty"):
        run_generator(session, controls, values)
    session.close()
    with pytest.raises(gr.Error, match="shutting down"):
        run_generator(session, controls, values_of(controls))


def test_a_generator_that_is_closed_leaves_the_run_without_a_viewer(session, controls):
    async def leave() -> None:
        messages = handlers.generate(session, controls, with_tokens(controls, 1024))
        attach = json.loads((await messages.__anext__())[0])
        run = session.find(attach["run"], attach["token"])
        assert run.hub.watched_by("generator") == 1
        await messages.aclose()
        assert run.hub.watched_by("generator") == 0
        run.stop()

    asyncio.run(leave())


def test_knobs_and_stop_reach_only_the_run_whose_token_they_bring(session, controls):
    values = with_tokens(controls, 1024)

    async def steer() -> None:
        messages = handlers.generate(session, controls, values)
        attach = json.loads((await messages.__anext__())[0])
        ref = (attach["run"], attach["token"])
        run = session.find(*ref)
        for stranger in (None, (ref[0], "x"), ("x", ref[1])):
            handlers.move_knob(session, KNOBS["k"], stranger, 5)
            handlers.stop(session, stranger)
        assert run.knobs.take() == [] and not run.stopping.is_set()
        handlers.move_knob(session, KNOBS["k"], ref, 5)
        handlers.move_knob(session, KNOBS["k"], ref, None)
        handlers.stop(session, ref)
        assert run.stopping.is_set()
        await messages.aclose()

    asyncio.run(steer())


# Files


def test_the_page_can_be_shown_before_torch_is_in_memory():
    code = "import sys, specviz.ui, engine.serve.session; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_taken_port_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "app.py", "--port", port]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"app.py: port {port} is in use: stop the other program or choose another --port"
    )
    assert "Traceback" not in result.stderr


def test_the_door_is_short():
    assert len((ROOT / "app.py").read_text().splitlines()) <= 60


def test_spaces_install_the_gradio_that_is_tested():
    """A Space takes the version in README's front matter, everybody else the one in requirements.txt."""
    front_matter = (ROOT / "README.md").read_text().split("---")[1]
    assert f"sdk_version: {gr.__version__}\n" in front_matter
    assert "app_file: app.py\n" in front_matter and "sdk: gradio\n" in front_matter
    assert f"gradio=={gr.__version__}" in (ROOT / "requirements.txt").read_text().split()


# Reloading


def rejoined(session: Session, stored: str) -> list[tuple[dict, object, str]]:
    async def collect() -> list:
        return [(json.loads(text), ref, key) async for text, ref, key in handlers.rejoin(session, stored)]

    return asyncio.run(collect())


def test_a_page_that_is_loaded_gets_a_key_and_keeps_it(session):
    ((message, ref, key),) = rejoined(session, "")
    assert message["op"] == "room" and message["key"] == key and ref is None
    ((again, _, same),) = rejoined(session, json.dumps({"key": key}))
    assert same == key and again["room"] == message["room"]


def test_a_reload_goes_on_with_the_run_and_its_controls(session, controls):
    run = session.start(controls.settings(with_tokens(controls, 100)))
    messages = rejoined(session, json.dumps({"key": "k" * 30, "run": run.id, "token": run.token}))
    first, last = messages[0], messages[-1]
    assert (first[0]["op"], first[0]["run"], first[1]) == ("attach", run.id, (run.id, run.token))
    assert last[0]["op"] == "end" and last[0]["status"] == "finished"


@pytest.mark.parametrize("stored", ["{", "[]", "null", '{"key": 3}', '{"key": "<script>"}', "[" * 5000])
def test_what_a_browser_kept_is_not_trusted(session, stored):
    ((message, ref, _),) = rejoined(session, stored)
    assert message["op"] == "room" and ref is None and "script" not in json.dumps(message)


def test_forged_and_old_tokens_rejoin_nothing(session, controls):
    run = session.start(controls.settings(with_tokens(controls, 4000)))
    other = session.start(controls.settings(with_tokens(controls, 5)))
    for token in (other.token, "", run.token[:-1], None):
        ((message, ref, _),) = rejoined(session, json.dumps({"run": run.id, "token": token}))
        assert message["op"] == "room" and ref is None
    run.stop()
    assert session.wait_idle(10)
    ((message, ref, _),) = rejoined(session, json.dumps({"run": run.id, "token": run.token}))
    assert message["op"] == "room" and ref is None


# Spaces


def test_zero_gpu_is_refused_in_one_sentence(capsys, monkeypatch):
    sys.path.insert(0, str(ROOT))
    import app

    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert app.main(["--port", "1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ZeroGPU" in error and "choose CPU basic" in error


def test_spaces_find_what_they_need():
    import yaml

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(readme.split("---")[1])
    assert front["sdk"] == "gradio" and front["app_file"] == "app.py" and (ROOT / front["app_file"]).is_file()
    assert f"gradio=={front['sdk_version']}" in (ROOT / "requirements.txt").read_text()
    assert len(front["short_description"]) <= 60 and front["license"] == "apache-2.0"
    assert "build-essential" in (ROOT / "packages.txt").read_text().split()  # the kernels' compiler
