"""The simulator against closed forms and lower bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control.simulator import Plan, Task, critical_path, simulate
from engine.errors import UsageError


def pipeline(items: int, stages: tuple[float, ...]) -> Plan:
    plan = Plan()
    for item in range(items):
        after: tuple[int, ...] = ()
        for stage, seconds in enumerate(stages):
            after = (plan.add(f"{item}.{stage}", f"lane{stage}", seconds, after),)
    return plan


@pytest.mark.parametrize("stages", [(1.0,), (1.0, 2.0, 0.5), (3.0, 1.0, 3.0, 2.0)])
@pytest.mark.parametrize("items", [1, 2, 7])
def test_a_pipeline_fills_then_runs_at_its_slowest_stage(items: int, stages: tuple[float, ...]):
    schedule = simulate(pipeline(items, stages).tasks)
    assert schedule.makespan == pytest.approx(sum(stages) + (items - 1) * max(stages))
    assert schedule.busy() == pytest.approx({f"lane{i}": items * seconds for i, seconds in enumerate(stages)})


@pytest.mark.parametrize(("load", "compute"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_a_double_buffer_hides_the_shorter_of_load_and_compute(load: float, compute: float):
    """Loading layer i waits for the buffer of layer i-2: the first load, the slower of both each time, the last."""
    plan, layers = Plan(), 9
    computed: list[int] = []
    for layer in range(layers):
        loaded = plan.add("load", "link", load, computed[layer - 2 : layer - 1] if layer > 1 else ())
        computed.append(plan.add("compute", "gpu", compute, [loaded, *computed[-1:]]))
    assert simulate(plan.tasks).makespan == pytest.approx(load + (layers - 1) * max(load, compute) + compute)


def test_a_single_buffer_hides_nothing():
    plan, before = Plan(), ()
    for _ in range(4):
        loaded = plan.add("load", "link", 2.0, before)
        before = (plan.add("compute", "gpu", 1.0, [loaded]),)
    assert simulate(plan.tasks).makespan == pytest.approx(12)


def test_lanes_take_the_lowest_priority_first_and_never_interrupt():
    plan = Plan()
    first = plan.add("running", "link", 2.0, priority=9)
    trigger = plan.add("trigger", "gpu", 1.0)
    late = plan.add("late", "link", 1.0, [trigger], priority=5)
    urgent = plan.add("urgent", "link", 1.0, [trigger], priority=0)
    schedule = simulate(plan.tasks)
    assert (schedule.start[first], schedule.start[urgent], schedule.start[late]) == (0, 2, 3)


def test_tasks_that_become_ready_together_keep_their_order():
    plan = Plan()
    gate = [plan.add("gate", lane, 1.0) for lane in ("a", "b")]
    order = [plan.add(str(i), "c", 1.0, [gate[1 - i % 2]]) for i in range(4)]
    schedule = simulate(plan.tasks)
    assert [schedule.start[number] for number in order] == [1, 2, 3, 4]


def test_busy_counts_only_what_lies_inside_the_window():
    schedule = simulate(pipeline(2, (2.0, 3.0)).tasks)  # lane0: 0-4; lane1: 2-8
    assert schedule.busy(3, 6) == pytest.approx({"lane0": 1, "lane1": 3})


def test_nothing_takes_no_time():
    assert simulate([]).makespan == 0
    assert simulate([Task("a", "gpu", 0.0), Task("b", "gpu", 0.0, (0,))]).makespan == 0


def test_what_cannot_run_is_refused():
    with pytest.raises(UsageError, match="not added before"):
        Plan().add("a", "gpu", 1.0, [0])
    with pytest.raises(UsageError, match="circle"):
        simulate([Task("a", "gpu", 1.0, (1,)), Task("b", "cpu", 1.0, (0,))])
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="not negative"):
            Task("a", "gpu", seconds)


@st.composite
def plans(draw: st.DrawFn) -> list[Task]:
    tasks = []
    for number in range(draw(st.integers(1, 30))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        seconds, lane = draw(st.floats(0, 10)), draw(st.sampled_from(("gpu", "cpu", "link", "disk")))
        tasks.append(Task(str(number), lane, seconds, tuple(after), draw(st.integers(0, 3))))
    return tasks


@settings(max_examples=150, deadline=None)
@given(plans())
def test_no_schedule_beats_its_bounds_or_breaks_a_rule(tasks: list[Task]):
    schedule = simulate(tasks)
    lanes = {task.lane for task in tasks}
    work = {lane: sum(task.seconds for task in tasks if task.lane == lane) for lane in lanes}
    assert schedule.makespan >= max(critical_path(tasks), *work.values()) - 1e-9
    assert schedule.makespan <= sum(work.values()) + 1e-9  # some lane always works
    for number, task in enumerate(tasks):
        assert schedule.end[number] == pytest.approx(schedule.start[number] + task.seconds)
        assert all(schedule.start[number] >= schedule.end[before] for before in task.after)
    for lane in lanes:
        spans = sorted((schedule.start[i], schedule.end[i]) for i, task in enumerate(tasks) if task.lane == lane)
        assert all(later[0] >= earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_lane_is_idle_only_while_nothing_on_it_is_ready(tasks: list[Task]):
    schedule = simulate(tasks)
    for number, task in enumerate(tasks):
        ready = max((schedule.end[before] for before in task.after), default=0.0)
        waited = schedule.start[number] - ready
        assert schedule.busy(ready, schedule.start[number])[task.lane] == pytest.approx(waited, abs=1e-9)
