from __future__ import annotations

import gzip
import json

import plotly.offline
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from engine.config import GenerationConfig
from engine.serve import conversation, rooms
from engine.serve.runs import RunSettings
from specviz.assets import Recording, StaticFiles
from specviz.server import create_routes


@pytest.fixture
def files(tmp_path):
    (tmp_path / "static" / "views").mkdir(parents=True)
    (tmp_path / "static" / "specviz.js").write_text("export {};")
    (tmp_path / "static" / "views" / "strip.js").write_text("// strip")
    (tmp_path / "static" / "notes.txt").write_text("not served")
    (tmp_path / "secret.js").write_text("outside")
    (tmp_path / "static" / "link.js").symlink_to(tmp_path / "secret.js")
    return tmp_path


@pytest.fixture
def client(session, files):
    routes = create_routes(session, static=StaticFiles(files / "static"), recording=Recording(files / "recordings"))
    with TestClient(Starlette(routes=routes)) as client:
        yield client


def start(session, tokens: int = 5):
    return session.start(RunSettings(("Once",), generation=GenerationConfig(max_new_tokens=tokens)))


def hello(run, start: object = 1, **more) -> str:
    return json.dumps({"op": "hello", "run": run.id, "token": run.token, "from": start, **more})


def frames_until_end(socket) -> list[dict]:
    events = []
    while not events or events[-1]["kind"] != "run_end":
        frame = json.loads(socket.receive_text())
        assert frame["v"] == 1 and frame["lost"] == 0
        assert [event["seq"] for event in frame["events"]] == list(range(frame["from"], frame["to"] + 1))
        events += frame["events"]
    return events


def closed_with(socket) -> tuple[int, str | None]:
    """The close code, and the error message that came before it."""
    message = None
    while True:
        try:
            frame = json.loads(socket.receive_text())
        except WebSocketDisconnect as closed:
            return closed.code, message
        if frame.get("op") == "error":
            message = frame["message"]


def test_a_page_sees_the_whole_run_and_can_resume(client, session):
    run = start(session, tokens=30)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run))
        events = frames_until_end(socket)
        assert closed_with(socket)[0] == 1000
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert sum(event["kind"] == "round" for event in events) == 30
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run, 20))
        assert frames_until_end(socket) == events[19:]


def test_knobs_stop_and_ping_over_the_socket(client, session):
    run = start(session, tokens=4000)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run))
        for message in (
            {"op": "ping"},
            {"op": "set", "name": "k", "value": 3},
            {"op": "set", "name": "k", "value": 77},
        ):
            socket.send_text(json.dumps(message))
        replies, knob = [], None
        while len(replies) < 3 or knob is None:
            frame = json.loads(socket.receive_text())
            if "op" in frame:
                replies.append(frame)
            else:
                knob = next((event for event in frame["events"] if event["kind"] == "knob"), knob)
        socket.send_text('{"op":"stop"}')
        assert frames_until_end_loosely(socket)["status"] == "stopped"
    assert replies[0] == {"v": 1, "op": "pong"}
    assert replies[1] == {"v": 1, "op": "ack", "name": "k", "value": 3, "version": 1}
    assert replies[2]["op"] == "error" and "out of range" in replies[2]["message"]
    assert (knob["new"], knob["version"]) == (3, 1)


def frames_until_end_loosely(socket) -> dict:
    while True:
        for event in json.loads(socket.receive_text()).get("events", []):
            if event["kind"] == "run_end":
                return event


@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "http://testserver.evil.test", "http://testserver:81", "https://"]
)
def test_pages_of_other_sites_are_refused(client, session, origin):
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/specviz/ws", headers={"origin": origin}) as socket,
    ):
        socket.receive_text()


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://testserver"},
        {"origin": "http://testserver", "host": "testserver:80"},
        {"origin": "https://demo.share.test", "host": "10.0.0.3:7860", "x-forwarded-host": "demo.share.test"},
    ],
)
def test_pages_of_this_site_are_served(client, session, headers):
    run = start(session)
    with client.websocket_connect("/specviz/ws", headers=headers) as socket:
        socket.send_text(hello(run))
        assert frames_until_end(socket)


def test_a_wrong_token_opens_nothing(client, session):
    run, other = start(session), start(session)
    for text in (
        json.dumps({"op": "hello", "run": run.id, "token": other.token}),
        json.dumps({"op": "hello", "run": "nobody", "token": run.token}),
        json.dumps({"op": "hello", "run": run.id}),
        json.dumps({"op": "hello", "run": [run.id], "token": {}}),
    ):
        with client.websocket_connect("/specviz/ws") as socket:
            socket.send_text(text)
            assert closed_with(socket) == (1008, "unknown run or wrong token")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("x" * 4097, 1009, "message too long"),
        ("é" * 2100, 1009, "message too long"),
        ("{", 1008, "not JSON"),
        ("[" * 4000, 1008, "not JSON"),
        ("[]", 1008, "a message is a JSON object"),
        ('{"op":"ping"}', 1008, "the first message must be hello"),
    ],
)
def test_malformed_hellos_close_the_socket(client, text, code, message):
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(text)
        assert closed_with(socket) == (code, message)


@pytest.mark.parametrize("cursor", ["1", 1.5, True, None])
def test_a_cursor_is_a_whole_number(client, session, cursor):
    run = start(session)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run, cursor))
        assert closed_with(socket) == (1008, "from must be a whole number")


def test_binary_frames_and_floods_close_the_socket(client, session):
    run = start(session, tokens=4000)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_bytes(b"{}")
        assert closed_with(socket) == (1008, "send text frames")
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run))
        for _ in range(conversation.BURST + 100):
            socket.send_text('{"op":"ping"}')
        assert closed_with(socket) == (1008, "too many messages")
    run.stop()


def test_silence_instead_of_hello_closes_the_socket(client, monkeypatch):
    monkeypatch.setattr(conversation, "HELLO_TIMEOUT_S", 0.05)
    with client.websocket_connect("/specviz/ws") as socket:
        assert closed_with(socket)[0] == 1008


def test_a_viewer_that_leaves_is_forgotten(client, session):
    run = start(session, tokens=4000)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run))
        socket.receive_text()
        assert run.hub.watched_by("websocket") == 1
    assert run.hub.watched_by("websocket") == 0
    run.stop()


def test_static_files_are_served_with_types_and_etags(client):
    first = client.get("/specviz/static/specviz.js")
    assert first.text == "export {};" and first.headers["content-type"] == "text/javascript; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache" and first.headers["content-encoding"] == "gzip"
    again = client.get("/specviz/static/specviz.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert client.get("/specviz/static/views/strip.js").text == "// strip"
    plain = client.get("/specviz/static/specviz.js", headers={"accept-encoding": "identity"})
    assert plain.text == first.text and "content-encoding" not in plain.headers


@pytest.mark.parametrize(
    "path",
    [
        "../secret.js", "..%2fsecret.js", "%2e%2e/secret.js", "views/../../secret.js", "views/..%2f..%2fsecret.js",
        "/etc/passwd", "link.js", "notes.txt", "views", "", "missing.js", "a%00b.js", "x" * 500 + ".js",
    ],
)  # fmt: skip
def test_nothing_outside_the_folder_is_served(client, path):
    response = client.get(f"/specviz/static/{path}")
    assert response.status_code == 404 and "outside" not in response.text


def test_plotly_comes_from_the_installed_wheel_and_may_be_kept(client):
    response = client.get("/specviz/plotly.min.js")
    assert response.text == plotly.offline.get_plotlyjs()
    assert "immutable" in response.headers["cache-control"] and response.headers["content-encoding"] == "gzip"
    assert int(response.headers["content-length"]) < 2_000_000


def test_the_recording_is_served_packed_or_said_to_be_missing(client, files):
    assert client.get("/specviz/recording.ndjson").status_code == 404
    (files / "recordings").mkdir()
    (files / "recordings" / "a.ndjson.gz").write_bytes(gzip.compress(b'{"seq":1}\n'))
    response = client.get("/specviz/recording.ndjson")
    assert response.json() == {"seq": 1} and response.headers["content-encoding"] == "gzip"


def test_health_says_what_the_engine_does(client, session):
    assert client.get("/specviz/healthz").json() == {"status": "ok", "engine": "idle", "waiting": 0, "model": None}
    run = start(session, tokens=4000)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(hello(run))
        while not any(event["kind"] == "round" for event in json.loads(socket.receive_text())["events"]):
            pass
        assert client.get("/specviz/healthz").json()["engine"] == "running"
        run.stop()
    assert session.wait_idle(5)
    assert client.get("/specviz/healthz").json()["engine"] == "idle"


def test_exports_need_the_token_and_hold_the_run(client, session):
    run, other = start(session), start(session)
    assert session.wait_idle(10)
    base = f"/specviz/export/{run.id}/{run.token}"
    response = client.get(f"{base}/events.ndjson")
    lines = response.text.splitlines()
    assert lines == run.hub.lines() and "attachment" in response.headers["content-disposition"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get(f"{base}/events.ndjson?from=4").text.splitlines() == lines[3:]
    assert client.get(f"{base}/events.ndjson?from=x").text.splitlines() == lines
    trace = client.get(f"{base}/trace.json").json()
    assert sum(event["ph"] == "X" and event["tid"] == 400 for event in trace["traceEvents"]) == 5
    summary = client.get(f"{base}/summary.json").json()
    assert summary["status"] == "finished" and summary["results"][0]["new_tokens"] == 5
    for path in (f"/specviz/export/{run.id}/{other.token}/events.ndjson", f"{base}/other.json"):
        assert client.get(path).status_code == 404


def test_who_watches_a_room_may_save_its_runs_and_no_others(client, session):
    room, elsewhere = (rooms.room_of(rooms.new_key()) for _ in range(2))
    settings = RunSettings(("Once",), generation=GenerationConfig(max_new_tokens=5))
    seen, other, alone = (session.start(settings, where) for where in (room, elsewhere, None))
    assert session.wait_idle(10)
    assert client.get(f"/specviz/export/{seen.id}/{room}/events.ndjson").text.splitlines() == seen.hub.lines()
    assert client.get(f"/specviz/export/{seen.id}/{room}/trace.json").json()["traceEvents"]
    for run in (other, alone):
        assert client.get(f"/specviz/export/{run.id}/{room}/events.ndjson").status_code == 404
    assert client.get(f"/specviz/export/{alone.id}/None/events.ndjson").status_code == 404


def test_watchers_see_one_run_after_the_other_and_change_nothing(client, session):
    room = rooms.room_of(rooms.new_key())

    def begin(tokens: int):
        return session.start(RunSettings(("Once",), generation=GenerationConfig(max_new_tokens=tokens)), room)

    first = begin(4000)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(json.dumps({"op": "watch", "room": room}))
        assert json.loads(socket.receive_text()) == {"v": 1, "op": "attach", "run": first.id}
        for command in ({"op": "stop"}, {"op": "set", "name": "k", "value": 3}):
            socket.send_text(json.dumps(command))
        refusals = 0
        while refusals < 2:
            refusals += "you are watching" in json.loads(socket.receive_text()).get("message", "")
        assert not first.stopping.is_set() and not first.over
        begin(3)
        first.stop()
        seen = []
        while len(seen) < 2:
            message = json.loads(socket.receive_text())
            assert first.token not in json.dumps(message)
            seen += [event for event in message.get("events", []) if event["kind"] == "run_end"]
        assert [end["status"] for end in seen] == ["stopped", "finished"]


def test_a_watcher_resumes_and_a_wrong_link_is_refused(client, session):
    key = rooms.new_key()
    run = session.start(RunSettings(("Once",), generation=GenerationConfig(max_new_tokens=30)), rooms.room_of(key))
    assert session.wait_idle(10)
    with client.websocket_connect("/specviz/ws") as socket:
        socket.send_text(json.dumps({"op": "watch", "room": rooms.room_of(key), "run": run.id, "from": 20}))
        assert json.loads(socket.receive_text())["op"] == "attach"
        assert [event["seq"] for event in frames_until_end(socket)] == list(range(20, run.hub.last_seq + 1))
    for room in (key, "", None, "../" + "a" * 29, run.token):
        with client.websocket_connect("/specviz/ws") as socket:
            socket.send_text(json.dumps({"op": "watch", "room": room}))
            assert closed_with(socket)[0] == 1008
