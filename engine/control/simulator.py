"""A discrete-event simulator: tasks with a duration and dependencies, on lanes that do one task at a time.

SpecMoEOff (section 5.3) estimates an iteration like this: a DAG of events (the experts of a layer wait for its
attention and for its weights), laid over the resources that execute them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import UsageError

#: Pauses shorter than one part in so many of what is looked at cannot be seen.
PICTURE = 600


@dataclass(frozen=True)
class Task:
    """One piece of work: `seconds` on `lane`, once all tasks numbered in `after` have ended.

    Of the tasks that are ready when a lane falls free, the one of lowest `priority` runs first, and of those the
    one that was added first. Nothing is interrupted.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[int, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise UsageError(
                f"task {self.name!r} takes {self.seconds} seconds: give a finite time that is not negative"
            )


class Plan:
    """Tasks in the making; each may wait only for tasks added before it, so there is never a circle."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, lane: str, seconds: float, after: Sequence[int] = (), priority: int = 0) -> int:
        """Append a task and return its number. Raises UsageError when `after` names one that is not there yet."""
        unknown = [number for number in after if not 0 <= number < len(self.tasks)]
        if unknown:
            raise UsageError(f"task {name!r} waits for task {unknown[0]}, which was not added before it")
        self.tasks.append(Task(name, lane, seconds, tuple(after), priority))
        return len(self.tasks) - 1


@dataclass(frozen=True)
class Span:
    """A stretch of one lane, in seconds from the start of what is looked at, `work` of them with work."""

    lane: str
    name: str
    start: float
    end: float
    work: float


@dataclass(frozen=True)
class Schedule:
    """When each task of a plan ran, in seconds from the start."""

    tasks: tuple[Task, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last task ended; 0 without any."""
        return max(self.end, default=0.0)

    def busy(self, begin: float = 0.0, until: float | None = None) -> dict[str, float]:
        """Seconds that each lane worked between `begin` and `until` (the end of all, unless given)."""
        until = self.makespan if until is None else until
        worked: dict[str, float] = {}
        for task, start, end in zip(self.tasks, self.start, self.end, strict=True):
            inside = max(0.0, min(end, until) - max(start, begin))
            worked[task.lane] = worked.get(task.lane, 0.0) + inside
        return worked

    def spans(self, begin: float = 0.0, until: float | None = None) -> tuple[Span, ...]:
        """What each lane did between `begin` and `until`, seen from `begin`, in the order of time.

        Tasks of one name between which a lane hardly pauses are one span: a picture shows no more.
        """
        until = self.makespan if until is None else until
        gap = (until - begin) / PICTURE
        order = sorted(range(len(self.tasks)), key=lambda number: self.start[number])
        open_spans: dict[str, Span] = {}
        done: list[Span] = []
        for number in order:
            start, end = max(self.start[number], begin) - begin, min(self.end[number], until) - begin
            if end <= start:
                continue
            task = self.tasks[number]
            last = open_spans.get(task.lane)
            if last is not None and last.name == task.name and start - last.end <= gap:
                open_spans[task.lane] = Span(last.lane, last.name, last.start, end, last.work + end - start)
                continue
            if last is not None:
                done.append(last)
            open_spans[task.lane] = Span(task.lane, task.name, start, end, end - start)
        return tuple(sorted([*done, *open_spans.values()], key=lambda span: span.start))


def simulate(tasks: Sequence[Task]) -> Schedule:
    """Run the tasks: every lane always works while it has a task that is ready.

    Tasks are numbered by their position. Raises UsageError when some can never start (they wait for each other).
    """
    waiting = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    start, end = [0.0] * len(tasks), [0.0] * len(tasks)
    ready: dict[str, list[tuple[int, int]]] = {task.lane: [] for task in tasks}
    working: set[str] = set()
    running: list[tuple[float, int]] = []
    for number, task in enumerate(tasks):
        if not waiting[number]:
            heapq.heappush(ready[task.lane], (task.priority, number))
    now, done = 0.0, 0
    while True:
        for lane, queue in ready.items():
            if queue and lane not in working:
                _, number = heapq.heappop(queue)
                start[number], end[number] = now, now + tasks[number].seconds
                heapq.heappush(running, (end[number], number))
                working.add(lane)
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:  # all that end now, before anything starts: priorities see them all
            _, number = heapq.heappop(running)
            done += 1
            working.discard(tasks[number].lane)
            for follower in followers[number]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready[tasks[follower].lane], (tasks[follower].priority, follower))
    if done < len(tasks):
        stuck = next(task.name for number, task in enumerate(tasks) if waiting[number])
        raise UsageError(f"task {stuck!r} waits for something that waits for it: remove the circle")
    return Schedule(tuple(tasks), tuple(start), tuple(end))


def critical_path(tasks: Sequence[Task]) -> float:
    """Seconds of the longest chain of dependencies: no number of lanes is faster. `after` must point back."""
    longest: list[float] = []
    for task in tasks:
        longest.append(task.seconds + max((longest[before] for before in task.after), default=0.0))
    return max(longest, default=0.0)
