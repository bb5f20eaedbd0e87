from __future__ import annotations

import asyncio
import json
import math
import threading

import pytest

from engine import events as ev
from engine.serve import rooms
from engine.serve.hub import HubRegistry, RunHub
from engine.serve.wire import encode

FACTS = ({}, {}, {}, {}, {}, 1, [], 0.0)


def start_event() -> ev.RunStart:
    return ev.RunStart(0, ev.SCHEMA_VERSION, *FACTS)


def seqs(texts) -> list[int]:
    return [json.loads(text)["seq"] for text in texts]


def test_every_event_arrives_once_and_in_order_whatever_the_frame_size():
    hub = RunHub()
    threads = [
        threading.Thread(target=lambda n=n: [hub.publish(ev.Phase(i, f"thread {n}")) for i in range(300)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    cursor, seen = 1, []
    while len(seen) < 1200:
        batch = hub.read(cursor, max_bytes=700)
        if batch is None:
            continue
        frame = json.loads(batch.to_json())
        assert frame["from"] == cursor and frame["lost"] == 0 and frame["run"] == hub.id and frame["v"] == 1
        assert frame["to"] == frame["events"][-1]["seq"]
        seen += frame["events"]
        cursor = frame["to"] + 1
    for thread in threads:
        thread.join()
    assert [event["seq"] for event in seen] == list(range(1, 1201))
    for n in range(4):  # each thread's own order survives
        assert [event["t"] for event in seen if event["phase"] == f"thread {n}"] == list(range(300))


def test_text_of_an_event_is_its_json_with_seq():
    token = ev.Token(3, "a\u202e</script>\ud83d", "accepted", 0, 0.25, 0.5, [["b", 0.1]], [[1, 2], [3, 4]])
    event = ev.Round(9, 1, 0, 4, 4, 1, 1, [token], [ev.Rejected(4, "é", 1, True)], 1, 2, 3, 4, 5)
    assert json.loads(encode(7, event)) == {"seq": 7, **event.to_json()}


def test_numbers_that_json_lacks_become_null():
    event = ev.GovernorChoice(1, 0, 2, True, False, "", [1.0, math.nan], [math.inf, 2.0], [])
    decoded = json.loads(encode(1, event), parse_constant=lambda text: pytest.fail(text))
    assert decoded["expected_tokens"] == [1.0, None] and decoded["predicted_seconds"] == [None, 2.0]


def test_ring_forgets_the_oldest_but_never_the_run_start():
    hub = RunHub(capacity=10)
    hub.publish(ev.Phase(0, "queued"))
    hub.publish(start_event())
    for i in range(48):
        hub.publish(ev.Phase(i, "decode"))
    batch = hub.read(1)
    assert seqs(batch.events) == [2, *range(41, 51)]
    assert (batch.start, batch.end, batch.lost) == (1, 50, 39)  # 50 published, 11 delivered
    assert hub.read(3).lost == 38 and seqs(hub.read(3).events) == list(range(41, 51))
    assert hub.read(45).lost == 0
    assert seqs(hub.lines()) == [2, *range(41, 51)]
    assert seqs(hub.lines(44)) == list(range(44, 51))
    assert hub.read(51) is None


def test_an_event_longer_than_a_frame_still_travels():
    hub = RunHub()
    for size in (5000, 10, 5000):
        hub.publish(ev.Phase(0, "x" * size))
    assert seqs(hub.read(1, max_bytes=100).events) == [1]
    assert seqs(hub.read(2, max_bytes=100).events) == [2]


def test_nothing_follows_the_end():
    hub = RunHub()
    hub.publish(ev.RunEnd(5, "finished", None, []))
    assert hub.publish(ev.Phase(6, "decode")) == 1 and hub.last_seq == 1
    hub.publish(ev.RunEnd(7, "failed", "late", []))
    assert hub.end.status == "finished"


def test_viewers_are_woken_from_other_threads_and_a_slow_one_blocks_nobody():
    hub = RunHub(capacity=50)

    async def main() -> None:
        quick, slow = hub.attach(1, "websocket"), hub.attach(1, "websocket")
        assert not await quick.wait(0.01)
        producer = threading.Thread(target=lambda: [hub.publish(ev.Phase(i, "decode")) for i in range(200)])
        producer.start()
        seen = 0
        while quick.cursor <= 200:
            assert await quick.wait(5)
            while (batch := quick.take(max_bytes=300)) is not None:
                seen += len(batch.events) + batch.lost
        producer.join()
        assert seen == 200
        batch = slow.take()
        assert batch.lost == 150 and seqs(batch.events) == list(range(151, 201))

    asyncio.run(main())


def test_a_viewer_whose_loop_is_gone_is_dropped():
    hub = RunHub()

    async def leave_without_a_word() -> None:
        hub.arm(hub.attach(1, "websocket"))

    asyncio.run(leave_without_a_word())
    assert hub.watched_by("websocket") == 1
    hub.publish(ev.Phase(0, "decode"))
    assert hub.watched_by("websocket") == 0


def test_lonely_time_counts_from_the_last_viewer():
    now = [100.0]
    hub = RunHub(clock=lambda: now[0])
    now[0] = 105.0
    assert hub.lonely_for() == 5

    async def watch() -> None:
        first, second = hub.attach(1, "websocket"), hub.attach(1, "generator")
        hub.detach(first)
        now[0] = 120.0
        assert hub.lonely_for() == 0
        hub.detach(second)
        hub.detach(second)

    asyncio.run(watch())
    now[0] = 127.0
    assert hub.lonely_for() == 7


def test_tokens_open_their_own_run_only():
    registry = HubRegistry()
    one, two = registry.create(), registry.create()
    assert registry.find(one.id, one.token) is one
    for token in (two.token, "", None, 3, "é\ud83d", one.token[:-1]):
        assert registry.find(one.id, token) is None
    for run in ("nobody", None, ["x"], {}):
        assert registry.find(run, one.token) is None


def test_finished_runs_are_forgotten_by_number_and_age():
    now = [0.0]
    registry = HubRegistry(finished_kept=3, ttl_s=60, clock=lambda: now[0])
    live = registry.create()
    hubs = []
    for _ in range(300):
        now[0] += 1
        hubs.append(registry.create())
        hubs[-1].publish(ev.RunEnd(0, "finished", None, []))
    assert len(registry) <= 4
    assert registry.find(live.id, live.token) is live
    assert registry.find(hubs[-1].id, hubs[-1].token) is hubs[-1]
    assert registry.find(hubs[0].id, hubs[0].token) is None
    now[0] += 100
    registry.create()
    assert registry.find(hubs[-1].id, hubs[-1].token) is None


def test_a_room_shows_the_run_that_is_on_and_nobody_else_s():
    registry = HubRegistry()
    assert registry.latest("r") is None
    first, second = registry.create("r"), registry.create("r")
    registry.create("s")
    registry.create()
    assert registry.latest("r") is first  # the second still waits behind it
    first.publish(start_event())
    first.publish(ev.RunEnd(0, "finished", None, []))
    assert registry.latest("r") is first
    second.publish(start_event())
    assert registry.latest("r") is second


def test_a_room_s_name_follows_from_its_key_and_is_no_key():
    key = rooms.new_key()
    name = rooms.room_of(key)
    assert name == rooms.room_of(key) != rooms.room_of(rooms.new_key())
    assert rooms.is_key(key) and rooms.is_room(name) and rooms.room_of(name) != name
    for text in ("", "a", None, 3, key + "!", "x" * 65):
        assert not rooms.is_key(text)
