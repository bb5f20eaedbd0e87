"""The thread pool: right results from many callers, after a fork and after a change of its size; no work, no CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_cases import QuantizedExperts, choice, random, same_bits

from engine.kernels.native import Native

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def threads(library: Native) -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, 4 to begin with; the former number comes back."""
    before = library.library.specviz_threads()
    library.set_threads(4)
    yield library.set_threads
    library.set_threads(before)


def experts_run(seed: int) -> Callable[[], torch.Tensor]:
    """A call large enough for several tasks."""
    experts, index = QuantizedExperts.random(0, 4, 3, 512, 384), choice(seed, 20, 2, 3)
    x, weights = random(seed, 20, 512), random(seed + 1, 20, 2)
    return lambda: experts.run(x, index, weights)


def test_many_callers_at_once(threads: Callable[[int], None]) -> None:
    jobs = [experts_run(seed) for seed in range(6)]
    expected = [job() for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for _ in range(20):
            found = pool.map(lambda job: job(), jobs)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_the_number_changes_while_others_compute(threads: Callable[[int], None], library: Native) -> None:
    job, stop = experts_run(0), threading.Event()
    expected, wrong = job(), []

    def compute() -> None:
        while not stop.is_set():
            if not same_bits(job(), expected):
                wrong.append(True)

    callers = [threading.Thread(target=compute) for _ in range(2)]
    for caller in callers:
        caller.start()
    for number in (1, 4, 1, 2, 7, 1, 3) * 4:
        threads(number)
        assert library.library.specviz_threads() == number
        assert same_bits(job(), expected)
    stop.set()
    for caller in callers:
        caller.join(60)
    assert not wrong


def test_a_number_below_one_is_one(threads: Callable[[int], None], library: Native) -> None:
    for number in (0, -3):
        threads(number)
        assert library.library.specviz_threads() == 1


def test_an_idle_pool_takes_no_cpu(threads: Callable[[int], None]) -> None:
    experts_run(0)()
    threading.Event().wait(0.05)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.25  # four spinning threads would take half a second of each core


def run_alone(script: str, library: Native) -> None:
    """Runs a script in a process of its own, which finds the library already built."""
    environment = {**os.environ, "SPECVIZ_KERNELS": "auto", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


FORK = """
import os, signal, threading
import torch
from test_kernel_threads import experts_run
from kernel_cases import same_bits
from engine.kernels.native import native

signal.alarm(100)
library = native()
library.set_threads(4)
job, stop = experts_run(0), threading.Event()
expected = job()

def compute():
    while not stop.is_set():
        job()

others = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
for other in others:
    other.start()
for number in range(20):
    child = os.fork()
    if not child:  # The workers are gone, and one of them may have held a lock.
        signal.alarm(30)
        good = library.library.specviz_threads() == 1 and same_bits(job(), expected)
        library.set_threads(2)
        os._exit(0 if good and same_bits(job(), expected) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for other in others:
    other.join()
"""

CROWDED = """
import resource
import torch
from test_kernel_threads import experts_run
from kernel_cases import same_bits
from engine.kernels.native import native

library, job = native(), experts_run(0)
expected = job()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
library.set_threads(1000)
assert 1 <= library.library.specviz_threads() < 1000
assert same_bits(job(), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_computes(library: Native) -> None:
    run_alone(FORK, library)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_threads_that_the_system_refuses_are_done_without(library: Native) -> None:
    run_alone(CROWDED, library)
