"""The what-if panel's answers: those of the simulator, for what a page may ask."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from starlette.applications import Starlette

from engine.control.hardware_profile import load_hardware
from engine.control.model_profile import load_model
from engine.control.operators import Workload
from engine.control.policies import batch_that_fits, on_demand
from engine.control.routing import UniformRouting
from engine.errors import UsageError
from specviz.whatif import LIMITS, choices, papers, simulate, whatif_routes


def policy(report: dict, name: str) -> dict:
    return next(row for row in report["policies"] if row["policy"] == name)


def test_the_figures_are_the_simulators():
    hardware, model = load_hardware("a100-40gb"), load_model("phi-3.5-moe")
    report = simulate({"hardware": "a100-40gb", "model": "phi-3.5-moe", "k": "3", "acceptance": "0.9"})
    expected = on_demand(hardware, model, Workload(1, 3, 512, 128, 0.9), UniformRouting(model.experts, model.top_k))
    assert policy(report, "on demand")["tokens_per_second"] == expected.tokens_per_second
    assert report["workload"]["tokens_per_round"] == pytest.approx(1 + 0.9 + 0.9**2 + 0.9**3)


def test_spans_fill_their_lanes_as_busy_says():
    for batch in ("1", "64"):
        report = simulate({"hardware": "rtx4090", "model": "qwen3-30b-a3b", "batch": batch})
        for row in report["policies"]:
            for lane, share in row["busy"].items():
                spans = [span for span in row["spans"] if span[0] == lane]
                assert sum(span[4] for span in spans) == pytest.approx(share * row["iteration_s"], rel=1e-6)
                assert all(a[3] <= b[2] + 1e-12 for a, b in zip(spans, spans[1:], strict=False))
            assert max(span[3] for span in row["spans"]) <= row["iteration_s"] + 1e-9


def test_memory_can_be_changed_and_decides():
    """MoE-SpeQ's quantized copy of Mixtral does not fit into 24 GiB, but into 80."""
    ask = {"hardware": "a30", "model": "mixtral-8x7b"}
    assert "does not fit" in policy(simulate(ask), "MoE-SpeQ")["reason"]
    roomy = policy(simulate({**ask, "fast_gib": "80"}), "MoE-SpeQ")
    assert roomy["tokens_per_second"] > 0 and roomy["slots"] >= 1
    slower = simulate({**ask, "host_gib": "448", "batch": "max"})
    assert slower["workload"]["batch"] > simulate({**ask, "host_gib": "200", "batch": "max"})["workload"]["batch"]


def test_the_largest_batch_is_the_one_that_host_memory_holds():
    work = Workload(1, 8, 512, 128, 0.95)
    expected = batch_that_fits(load_hardware("a30"), load_model("mixtral-8x7b"), work)
    assert simulate({"hardware": "a30", "model": "mixtral-8x7b", "batch": "max"})["workload"]["batch"] == expected


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"hardware": "../../etc/x.json"}, "unknown hardware"),
        ({"model": "/tmp/own.json"}, "unknown model"),
        ({"k": "17"}, "out of range"),
        ({"k": "1.5"}, "whole numbers"),
        ({"batch": "many"}, "not a number"),
        ({"acceptance": "nan"}, "out of range"),
        ({"speed": "1"}, "unknown setting"),
    ],
)
def test_what_no_simulator_should_see_is_refused(query, message):
    with pytest.raises(UsageError, match=message):
        simulate(query)


def test_choices_cover_profiles_and_limits():
    offered = choices()
    assert {"rtx4090", "a30"} <= {item["name"] for item in offered["hardware"]}
    assert {"mixtral-8x7b", "deepseek-v3"} <= {item["name"] for item in offered["models"]}
    assert offered["limits"].keys() == LIMITS.keys()
    rates = {row["policy"]: row["tokens_per_second"] for row in simulate(offered["defaults"])["policies"]}
    assert rates["MoE-SpeQ"] > rates["on demand"]  # the panel opens on a case in which speculation pays


def test_papers_are_the_commands_rows():
    from engine.simulate.reports import reproduce

    assert papers() == reproduce()


def get(path: str) -> tuple[int, dict]:
    """One GET, without a server."""
    app, sent = Starlette(routes=whatif_routes()), []
    name, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": name, "query_string": query.encode(), "headers": []}

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_routes_answer_and_refuse_in_one_line():
    assert get("/specviz/whatif/simulate?hardware=a30&model=mixtral-8x7b")[1]["model"] == "Mixtral-8x7B"
    status, body = get("/specviz/whatif/simulate?k=99")
    assert status == 400 and body["error"].count("\n") == 0 and "0 to 16" in body["error"]
    assert get("/specviz/whatif/choices")[0] == 200
    assert get("/specviz/whatif/anything")[0] == 404


def test_the_heaviest_setting_is_no_thousand_times_the_lightest():
    """A second a setting is the budget; what grows with batch and k must stay in proportion to the layers."""

    def took(**query: str) -> float:
        start = time.perf_counter()
        simulate(query)
        return time.perf_counter() - start

    light = min(took(hardware="a30", model="olmoe-1b-7b", k="0") for _ in range(3))
    heavy = min(took(hardware="h200", model="deepseek-v3", k="16", batch="256") for _ in range(3))
    assert heavy < 300 * light
