"""A session whose engine is on another machine, over a network that breaks and is slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from fake_engine import FakeLoader
from lent import TOKEN, Wire, lent, wait_until
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from engine import events as ev
from engine.config import EngineConfig, GenerationConfig, KnobBlock, LinkConfig
from engine.errors import RemoteError
from engine.serve import remote_run
from engine.serve.client import find_engine, remote_loader
from engine.serve.lag import Lag
from engine.serve.remote import Remote
from engine.serve.runs import Run, RunSettings
from engine.serve.server import START_BYTES, Offer
from engine.serve.session import Session


@pytest.fixture
def wire(session) -> Iterator[Wire]:
    """The network to an engine of `session`; nothing may be left of either."""
    before = threading.active_count()
    with lent(session) as port:
        wire = Wire(port)
        yield wire
        wire.close()
        session.close()
    wait_until(lambda: threading.active_count() <= before)


@pytest.fixture
def page(wire) -> Iterator[Session]:
    """A page's session: its engine is at the other end of the wire."""
    session = Session(remote_loader(Remote(f"ws://127.0.0.1:{wire.port}", TOKEN)), viewer_ttl=60)
    yield session
    session.close()


def start(session: Session, tokens: int = 5, **more) -> Run:
    return session.start(RunSettings(("Once",), generation=GenerationConfig(max_new_tokens=tokens), **more))


def events(run: Run, kind: str | None = None) -> list[dict]:
    told = [json.loads(line) for line in run.hub.lines()]
    return [event for event in told if kind in (None, event["kind"])]


def ended(session: Session, run: Run) -> ev.RunEnd:
    assert session.wait_idle(20) and run.hub.end is not None
    return run.hub.end


def indices(run: Run) -> list[int]:
    """Of the tokens that arrived; the fake engine counts them."""
    return [token["id"] for event in events(run, "round") for token in event["tokens"]]


def test_a_run_arrives_whole_with_the_load_that_came_before_it(page, loader):
    run = start(page, tokens=30, engine=EngineConfig(model="my model", dtype="bfloat16"))
    end = ended(page, run)
    assert (end.status, end.summary[0]["new_tokens"]) == ("finished", 30) and indices(run) == list(range(30))
    kinds = [event["kind"] for event in events(run)]
    assert kinds.index("load") < kinds.index("run_start") and "connection" not in kinds
    assert events(run, "load")[-1]["done_bytes"] == 50
    (engine,) = loader.engines
    # The model is the other machine's; what the page chooses is the page's.
    assert engine.config.model == "their model" and engine.config.dtype == "bfloat16"
    assert engine.threads == {"engine"}
    start(page, engine=EngineConfig(model="my model", dtype="bfloat16"))
    assert page.wait_idle(10) and len(loader.engines) == 1


def test_knobs_go_there_and_come_back_under_the_version_that_the_page_was_told(page):
    run = start(page, tokens=4000, knobs={"k": 2})
    wait_until(lambda: events(run, "round"))
    versions = [run.set_knob("k", value) for value in (1, 5, 3)] + [run.set_knob("slots", 2)]
    wait_until(lambda: len({event["name"] for event in events(run, "knob")}) == 2)
    run.stop()
    assert ended(page, run).status == "stopped"
    changes = {event["name"]: event for event in events(run, "knob")}
    assert (changes["k"]["new"], changes["k"]["version"]) == (3, versions[2])
    assert (changes["slots"]["new"], changes["slots"]["version"]) == (2, versions[3])
    assert events(run, "run_start")[0]["config"]["k"] == 2


def test_a_stop_reaches_the_engine_and_the_next_run_works(page, loader):
    run = start(page, tokens=4000)
    wait_until(lambda: events(run, "round"))
    run.stop()
    end = ended(page, run)
    assert end.status == "stopped" and end.summary and loader.engines[0].rounds_done < 4000
    assert ended(page, start(page)).status == "finished"


def test_a_lost_connection_resumes_without_a_gap(page, wire):
    run = start(page, tokens=300)
    for count in (20, 120):
        wait_until(lambda n=count: len(indices(run)) >= n)
        wire.cut()
    end = ended(page, run)
    assert end.status == "finished" and indices(run) == list(range(300))
    states = [event["connected"] for event in events(run, "connection")]
    assert states == [False, True, False, True] and wire.connections >= 4  # one of them asked for the engine's info
    assert [event["seq"] for event in events(run)] == list(range(1, len(events(run)) + 1))


def test_a_knob_that_was_moved_while_nothing_got_through_arrives_later(page, wire):
    run = start(page, tokens=4000)
    wait_until(lambda: events(run, "round"))
    wire.down = True
    wire.cut()
    wait_until(lambda: events(run, "connection"))
    version = run.set_knob("k", 7)
    wire.down = False
    wait_until(lambda: events(run, "knob"))
    assert events(run, "knob")[0]["version"] == version
    run.stop()
    assert ended(page, run).status == "stopped"


def test_a_connection_that_breaks_right_after_the_start_starts_nothing_twice(session, wire, loader):
    greeting = {"op": "start", "token": TOKEN, "request": "same", "settings": RunSettings(("a",)).to_json()}
    answers = []
    for _ in range(2):
        with connect(f"ws://127.0.0.1:{wire.port}") as socket:
            socket.send(json.dumps(greeting))
            answers.append(json.loads(socket.recv(10)))
    assert answers[0] == answers[1] and answers[0]["op"] == "attach"
    session.close()
    assert len(session.registry) == 1


def test_an_engine_that_stays_away_is_given_up_in_one_line_and_stop_works_meanwhile(page, wire, monkeypatch):
    monkeypatch.setattr(remote_run, "GIVE_UP_S", 60.0)
    run = start(page, tokens=4000)
    wait_until(lambda: events(run, "round"))
    wire.down = True
    wire.cut()
    wait_until(lambda: events(run, "connection"))
    run.stop()
    assert ended(page, run).status == "stopped"
    knobs = KnobBlock()
    there = Remote(f"ws://127.0.0.1:{wire.port}", TOKEN)
    lost = remote_run.RemoteRun(there, RunSettings(("a",)), knobs, lambda e: None, threading.Event(), give_up_s=0.3)
    with pytest.raises(RemoteError, match="out of reach for 0 s") as refusal:
        lost.follow()
    assert "\n" not in str(refusal.value)


def test_an_engine_that_was_restarted_meanwhile_says_that_it_forgot_the_run(page, wire, session):
    run = start(page, tokens=4000)
    wait_until(lambda: events(run, "round"))
    for hub in list(session.registry._runs):
        del session.registry._runs[hub]
    wire.cut()
    end = ended(page, run)
    assert end.status == "failed" and "unknown run or wrong token" in end.error
    session.close()


def test_wrong_tokens_and_addresses_are_refused_in_one_line(wire):
    address = f"ws://127.0.0.1:{wire.port}"
    for url, token, why in [
        (address, "wrong", "the token is wrong"),
        (address, "", "the token is wrong"),
        ("ws://127.0.0.1:1", TOKEN, "no engine answers at ws://127.0.0.1:1"),
        ("http://127.0.0.1:1", TOKEN, "use ws://HOST:PORT"),
    ]:
        with pytest.raises(RemoteError, match=why) as refusal:
            find_engine(url, token, "m")
        assert "\n" not in str(refusal.value)
    model, _, traits = find_engine(address, TOKEN, "m")
    assert model == "their model" and traits.limits == {} and traits.chat


def test_a_start_needs_the_token_and_settings_that_make_sense(wire):
    whole = RunSettings(("a",)).to_json()
    for greeting, why in [
        ({"op": "start", "token": "wrong", "settings": whole}, "token is wrong"),
        ({"op": "start", "token": TOKEN, "settings": {**whole, "prompts": [" "]}}, "prompt is empty"),
        ({"op": "start", "token": TOKEN, "settings": {**whole, "knobs": {"k": 99}}}, "out of range"),
        ({"op": "start", "token": TOKEN, "settings": {"prompts": ["a"]}}, "no settings of a run"),
        ({"op": "start", "token": TOKEN, "settings": {**whole, "engine": {"speed": 9}}}, "no settings of a run"),
        ({"op": "dance", "token": TOKEN}, "first message must be"),
        ({"op": "hello", "run": "x", "token": TOKEN}, "unknown run"),
    ]:
        with connect(f"ws://127.0.0.1:{wire.port}") as socket:
            socket.send(json.dumps(greeting))
            answer = json.loads(socket.recv(10))
            assert answer["op"] == "error" and why in answer["message"], greeting
            with pytest.raises(ConnectionClosed):
                socket.recv(10)


def test_browsers_and_long_messages_are_refused(wire):
    address = f"ws://127.0.0.1:{wire.port}"
    with pytest.raises(InvalidHandshake):
        connect(address, origin="http://127.0.0.1")
    with connect(address) as socket:
        socket.send("x" * (START_BYTES + 1))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(10)
        assert closed.value.rcvd.code == 1009


def test_the_offer_overrides_what_belongs_to_the_machine():
    ours = EngineConfig(model="big", device="cpu", threads=3, kernels=(), pack=False)
    asked = RunSettings(("a",), EngineConfig(model="small", draft="none", link=LinkConfig("emulated", gbps=2.0)))
    settled = Offer(ours).settle(asked).engine
    assert (settled.model, settled.threads, settled.kernels, settled.pack) == ("big", 3, (), False)
    assert (settled.draft, settled.link) == ("none", asked.engine.link)
    assert Offer(ours, LinkConfig("host")).settle(asked).engine.link == LinkConfig("host")


def test_settings_survive_the_journey():
    settings = RunSettings(
        ("a", "b"), EngineConfig(draft="none", link=LinkConfig("emulated", gbps=2.0)),
        GenerationConfig(stop=("x",), temperature=0.5), {"k": 3},
    )  # fmt: skip
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_a_slow_network_is_told_with_how_far_it_lags(wire, page, loader):
    loader.options["round_s"] = 0.01  # what its events say
    run = start(page, tokens=300)
    wait_until(lambda: len(indices(run)) > 20)
    wire.bytes_per_s = 2000
    wait_until(lambda: any(event["behind_s"] >= 0.5 for event in events(run, "connection")), 20)
    wire.bytes_per_s = None
    assert ended(page, run).status == "finished" and indices(run) == list(range(300))
    assert all(event["connected"] for event in events(run, "connection"))


def test_lag_is_what_comes_on_top_of_the_quickest_arrival():
    lag = Lag()
    assert lag.arrived(1_000_000_000, 51.25) == 0  # clocks may differ by anything
    assert lag.arrived(2_000_000_000, 53.0) == pytest.approx(0.75) and lag.noticeable
    assert lag.arrived(3_000_000_000, 53.2) == 0 and not lag.noticeable
    assert lag.arrived(4_000_000_000, 54.3) == pytest.approx(0.1)


def test_two_pages_share_the_engine_one_after_the_other(wire, session):
    address = Remote(f"ws://127.0.0.1:{wire.port}", TOKEN)
    pages = [Session(remote_loader(address), viewer_ttl=60) for _ in range(2)]
    runs = [start(page, tokens=60) for page in pages]
    try:
        for page, run in zip(pages, runs, strict=True):
            assert ended(page, run).status == "finished" and indices(run) == list(range(60))
    finally:
        for page in pages:
            page.close()


def test_the_run_ends_there_when_nobody_comes_back(loader: FakeLoader):
    session = Session(loader, viewer_ttl=0.1)
    with lent(session) as port:
        with connect(f"ws://127.0.0.1:{port}") as socket:
            settings = RunSettings(("a",), generation=GenerationConfig(max_new_tokens=4000)).to_json()
            socket.send(json.dumps({"op": "start", "token": TOKEN, "settings": settings}))
            socket.recv(10)
        assert session.wait_idle(10) and loader.engines[0].rounds_done < 4000
        session.close()


def test_events_of_every_kind_survive_the_journey():
    from engine.serve.wire import decode, encode

    token = ev.Token(1, "a", "plain", 0, 0.5, None, [["b", 0.1]], [[1, 2]])
    told = ev.Round(9, 1, 0, 4, 4, 1, 0, [token], [ev.Rejected(2, "c", 0, True)], 1, 2, 3, 4, 0)
    assert decode(json.loads(encode(1, told))) == told
    newer = {**json.loads(encode(1, ev.Phase(3, "decode"))), "mood": "good"}
    assert decode(newer) == ev.Phase(3, "decode")
    for broken in ({"kind": "dance"}, {"kind": "phase"}, {}):
        with pytest.raises(RemoteError):
            decode(broken)
