from __future__ import annotations

import asyncio
import json
import threading

import pytest

from engine.config import CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.errors import CheckpointError, UsageError
from engine.serve.runs import RunSettings
from engine.serve.session import Session, SessionFull

LONG = GenerationConfig(max_new_tokens=4000)


def settings(prompt: str = "Once", tokens: int = 5, **more) -> RunSettings:
    return RunSettings((prompt,), generation=GenerationConfig(max_new_tokens=tokens), **more)


def events(run) -> list[dict]:
    return [json.loads(line) for line in run.hub.lines()]


def of_kind(run, kind: str) -> list[dict]:
    return [event for event in events(run) if event["kind"] == kind]


def wait_for(run, kind: str, count: int = 1) -> None:
    """Sleep until the run has told `count` events of this kind (watching, as a page would)."""

    async def watch() -> None:
        viewer = run.hub.attach(1, "websocket")
        while len(of_kind(run, kind)) < count:
            viewer.cursor = run.hub.last_seq + 1
            if len(of_kind(run, kind)) < count:
                assert await viewer.wait(10), f"no {kind} event"
        run.hub.detach(viewer)

    asyncio.run(watch())


def test_a_run_is_queued_loaded_generated_and_ended(session, loader):
    run = session.start(settings())
    assert session.wait_idle(10)
    kinds = [event["kind"] for event in events(run)]
    assert kinds[0] == "phase" and kinds.index("load") < kinds.index("run_start") and kinds[-1] == "run_end"
    assert len(of_kind(run, "round")) == 5
    assert of_kind(run, "load")[-1]["done_bytes"] == 50 and of_kind(run, "load")[-1]["total_bytes"] == 100
    assert run.hub.end.status == "finished" and run.hub.end.summary[0]["new_tokens"] == 5
    assert session.health()["engine"] == "idle"


def test_stop_ends_a_running_run_and_the_next_one_works(session, loader):
    run = session.start(RunSettings(("Once",), generation=LONG))
    wait_for(run, "round", 3)
    run.stop()
    assert session.wait_idle(5)
    assert run.hub.end.status == "stopped" and run.hub.end.summary
    done = loader.engines[0].rounds_done
    after = session.start(settings())
    assert session.wait_idle(10) and after.hub.end.status == "finished"
    assert done < 4000 and len(loader.engines) == 1
    assert loader.engines[0].threads == {"engine"}


def test_stopping_a_waiting_run_takes_it_out_of_the_line_at_once(session):
    first = session.start(RunSettings(("Once",), generation=LONG))
    second, third = session.start(settings("Two")), session.start(settings("Three"))
    assert of_kind(third, "phase")[0]["detail"] == "2 ahead"
    second.stop()
    assert second.hub.end.status == "stopped" and first.hub.end is None
    first.stop()
    assert session.wait_idle(10)
    assert third.hub.end.status == "finished" and not of_kind(second, "run_start")


def test_a_full_line_says_so():
    loading, release = threading.Event(), threading.Event()

    def load(config, progress, cancelled):
        loading.set()
        release.wait(10)
        raise CheckpointError("gone")

    session = Session(load, max_waiting=2)
    try:
        runs = [session.start(settings())]
        assert loading.wait(10) and session.health()["engine"] == "loading"
        runs += [session.start(settings()) for _ in range(2)]
        with pytest.raises(SessionFull, match="2 runs are waiting"):
            session.start(settings())
        runs[1].stop()
        session.start(settings())
    finally:
        release.set()
        session.close()


def test_a_failed_run_says_why_in_one_line_and_the_next_one_works(session, loader):
    loader.options["fail_at"] = 2
    run = session.start(settings())
    assert session.wait_idle(10)
    assert run.hub.end.status == "failed" and run.hub.end.error == "the disk went away: check the cable"
    assert len(of_kind(run, "run_end")) == 1
    loader.engines[0].fail_at = None
    after = session.start(settings())
    assert session.wait_idle(10) and after.hub.end.status == "finished" and len(loader.engines) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("shard 2 is cut off: download it again"), "shard 2 is cut off: download it again"),
        (ValueError("first\nsecond"), "ValueError: first"),
    ],
)
def test_a_failed_load_ends_the_run_and_the_next_one_loads(session, loader, error, message):
    loader.error = error
    run = session.start(settings())
    assert session.wait_idle(10)
    assert (run.hub.end.status, run.hub.end.error) == ("failed", message)
    loader.error = None
    after = session.start(settings())
    assert session.wait_idle(10) and after.hub.end.status == "finished"


def test_an_unexpected_error_discards_the_engine(session, loader):
    session.start(settings())
    assert session.wait_idle(10)
    broken = loader.engines[0]
    broken.generate = lambda *args, **kwargs: 1 / 0
    run = session.start(settings())
    assert session.wait_idle(10)
    assert run.hub.end.error.startswith("ZeroDivisionError") and broken.closed
    after = session.start(settings())
    assert session.wait_idle(10) and after.hub.end.status == "finished" and len(loader.engines) == 2


def test_the_engine_is_loaded_anew_only_when_its_configuration_needs_it(session, loader):
    same = [
        EngineConfig(),
        EngineConfig(policy="lru", prefetch="none", cache=CacheBudget(slots=2)),  # live knobs
    ]
    for config in same:
        session.start(settings(engine=config))
    assert session.wait_idle(10) and len(loader.engines) == 1
    for count, config in enumerate([EngineConfig(dtype="bfloat16"), EngineConfig(draft="none")], start=2):
        session.start(settings(engine=config))
        assert session.wait_idle(10) and len(loader.engines) == count
        assert [engine.closed for engine in loader.engines] == [True] * (count - 1) + [False]
    for gbps in (1.0, 2.0):
        session.start(settings(engine=EngineConfig(link=LinkConfig("emulated", gbps=gbps))))
    assert session.wait_idle(10) and len(loader.engines) == 4


def test_a_preset_link_runs_at_the_pace_that_the_engine_measured(session):
    preset = EngineConfig(link=LinkConfig("emulated", preset="mixtral-a30"))
    custom = EngineConfig(link=LinkConfig("emulated", gbps=3.0))
    runs = [
        session.start(settings(engine=config, knobs={"link_gbps": 3.0})) for config in (preset, preset, custom, preset)
    ]
    assert session.wait_idle(10)
    assert [of_kind(run, "run_start")[0]["config"]["link_gbps"] for run in runs] == [0.125, 0.125, 3.0, 0.125]


def test_knobs_are_acknowledged_with_their_version_and_last_of_a_burst_wins(session):
    run = session.start(RunSettings(("Once",), generation=LONG, knobs={"k": 2, "slots": 3}))
    wait_for(run, "round", 2)
    versions = [run.set_knob("k", value) for value in [1, 2, 3, 4, 5] * 10]
    wait_for(run, "knob")
    with pytest.raises(UsageError, match="out of range"):
        run.set_knob("k", 99)
    with pytest.raises(UsageError, match="unknown knob"):
        run.set_knob("kk", 1)
    with pytest.raises(UsageError, match="next run"):
        run.set_knob("seed", 1)
    round_of_last = len(of_kind(run, "round"))
    wait_for(run, "round", round_of_last + 3)
    run.stop()
    assert session.wait_idle(10)
    changes = of_kind(run, "knob")
    assert changes[0]["old"] == 2 and changes[-1]["new"] == 5 and changes[-1]["version"] == versions[-1]
    assert of_kind(run, "run_start")[0]["config"]["slots"] == 3
    with pytest.raises(UsageError, match="over"):
        run.set_knob("k", 1)


def test_two_visitors_never_touch_each_other(session):
    one = session.start(settings("Alpha", 40, knobs={"slots": 1}))
    two = session.start(settings("Beta", 40, knobs={"slots": 2}))
    assert session.find(one.id, two.token) is None and session.find(one.id, one.token) is one
    two.set_knob("slots", 9)
    assert session.wait_idle(10)
    for run, text, slots in ((one, "Alph", 1), (two, "Beta", 2)):
        tokens = [token["text"] for event in of_kind(run, "round") for token in event["tokens"]]
        assert len(tokens) == 40 and all(token.startswith(text) for token in tokens)
        assert of_kind(run, "run_start")[0]["config"]["slots"] == slots
    assert not of_kind(one, "knob")
    assert [change["new"] for change in of_kind(two, "knob")] == [9]


def test_a_run_that_nobody_watches_is_stopped(loader):
    session = Session(loader, viewer_ttl=0.05)
    try:
        run = session.start(RunSettings(("Once",), generation=LONG))
        assert session.wait_idle(10)
        assert run.hub.end.status == "stopped" and loader.engines[0].rounds_done < 4000
    finally:
        session.close()


def test_a_run_that_is_watched_is_not_stopped(loader):
    session = Session(loader, viewer_ttl=0.05)

    async def watch() -> None:
        run = session.start(settings(tokens=100))
        viewer = run.hub.attach(1, "websocket")
        while run.hub.end is None:
            await viewer.wait(5)
            viewer.take()
        assert run.hub.end.status == "finished"

    try:
        asyncio.run(watch())
    finally:
        session.close()


def test_close_stops_everything_and_ends_the_thread(loader):
    session = Session(loader)
    running, waiting = session.start(RunSettings(("Once",), generation=LONG)), session.start(settings())
    session.close()
    assert running.hub.end.status == waiting.hub.end.status == "stopped"
    assert loader.engines == [] or loader.engines[0].closed
    assert not any(thread.name == "engine" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(SessionFull):
        session.start(settings())


def test_settings_refuse_what_no_engine_should_see():
    with pytest.raises(UsageError, match="prompt is empty"):
        RunSettings(("  ",))
    with pytest.raises(UsageError, match="out of range"):
        RunSettings(("a",), knobs={"k": 17})
    with pytest.raises(UsageError, match="unknown knob"):
        RunSettings(("a",), knobs={"speed": 1})
