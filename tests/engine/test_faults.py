"""Faults at every place of a short run: one clear message, nothing leaked, and the next run's text is right.

Each test counts the calls of a run that nothing disturbs, then lets the fault strike at each of them in turn. Which
reads there are depends a little on timing, so a fault may find nothing to strike; most must.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from fault_injection import NthCall, check_idle, nothing_left, raising, tensors
from recorded_runs import Recording, record
from tiny_models import PROMPTS, greedy

from engine import events
from engine.config import EngineConfig, LinkConfig
from engine.engine import Engine
from engine.errors import BudgetError, CheckpointError, TransferError, UsageError
from engine.model.kv_cache import KVCache
from engine.offload import slots as slots_module
from engine.trace_file import TraceFile

PROMPT = PROMPTS[10]
TOKENS, K = 5, 2
DISK, EMULATED = "disk", "emulated:100"
NOTHING = raising(AssertionError("nothing should strike"))


@pytest.fixture(scope="module")
def reference(tiny_model) -> list[int]:
    """Transformers' own output."""
    model = tiny_model("qwen3_moe")
    return greedy(model.reference(), model.directory, (PROMPT,), TOKENS)[0]


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[dict[str, Engine]]:
    directory = str(tiny_model("qwen3_moe").directory)
    engines = {
        link: Engine.load(EngineConfig(model=directory, link=LinkConfig.parse(link))) for link in (DISK, EMULATED)
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=(DISK, EMULATED))
def engine(request, engines) -> Engine:
    return engines[request.param]


@pytest.fixture
def disk(engines) -> Engine:
    return engines[DISK]


@pytest.fixture
def emulated(engines) -> Engine:
    return engines[EMULATED]


def run(engine: Engine, into: Recording | None = None, **more) -> Recording:
    """A short run that starts without a single slot, so that it has everything to allocate and to move."""
    engine.cache.reset()
    engine.cache.close()
    return record(engine, [PROMPT], into=into, max_new_tokens=TOKENS, k=K, **more)


class Sweep:
    """The runs of one fault, each struck at another call."""

    def __init__(self, engine: Engine, reference: list[int], monkeypatch) -> None:
        self._engine, self._reference, self._monkeypatch = engine, reference, monkeypatch

    def __call__(
        self,
        owner: object,
        name: str,
        fault: Callable[[], object],
        error: type[BaseException] | None = None,
        after: Callable[[], object] = lambda: None,
    ) -> list[Recording]:
        """Let `fault` strike each call of `owner.name`; `error` is what may come of it, `after` mends what it broke.

        Returns the recordings of those runs that were struck.
        """
        _, counted = self._once(owner, name, None, NOTHING, None)
        assert counted.calls
        struck = []
        for n in range(counted.calls):
            with nothing_left():
                recording, wrapped = self._once(owner, name, n, fault, error)
                check_idle(self._engine)
                after()
                assert run(self._engine).ids == [self._reference], f"the run after call {n}"
                check_idle(self._engine)
            if wrapped.struck:
                struck.append(recording)
        assert len(struck) >= counted.calls // 2
        return struck

    def _once(self, owner, name, n, fault, error) -> tuple[Recording, NthCall]:
        recording = Recording()
        wrapped = NthCall(getattr(owner, name), n, fault)
        with self._monkeypatch.context() as patch:
            patch.setattr(owner, name, wrapped)
            try:
                run(self._engine, recording)
            except BaseException as caught:
                assert error is not None and isinstance(caught, error), f"call {n}: {caught!r}"
        (end,) = recording.of(events.RunEnd)
        assert recording.events[-1] is end
        if end.status == "finished":
            assert recording.ids == [self._reference]
        else:
            emitted = [token.id for event in recording.of(events.Round) for token in event.tokens]
            assert emitted == self._reference[: len(emitted)]
        return recording, wrapped


@pytest.fixture
def sweep(engine, reference, monkeypatch) -> Sweep:
    return Sweep(engine, reference, monkeypatch)


def messages(recordings: list[Recording]) -> list[str]:
    """What the runs that failed told; one line each."""
    told = [recording.events[-1].error for recording in recordings if recording.events[-1].status == "failed"]
    assert not any("\n" in message for message in told)
    return told


def test_a_read_fails(engine, sweep):
    told = messages(
        sweep(engine.loaded.link.source, "read", raising(OSError(errno.EIO, "the disk broke")), TransferError)
    )
    assert len(told) > 10  # the others struck a prefetch that was read again, or never needed
    assert all("the disk broke" in message and "expert" in message and "Check the disk" in message for message in told)


def test_a_read_is_slow(disk, reference, monkeypatch):
    slow = partial(time.sleep, 0.01)
    struck = Sweep(disk, reference, monkeypatch)(disk.loaded.link.source, "read", slow)
    assert {recording.events[-1].status for recording in struck} == {"finished"}


def test_a_read_never_returns(disk, reference, monkeypatch):
    """Its worker is given up and replaced; the next run works while it still hangs."""
    patience = disk.cache.pool.timeout_s
    released = threading.Event()

    def hang() -> None:
        disk.cache.pool.timeout_s = 0.03
        released.clear()
        assert released.wait(60)

    def mend() -> None:
        disk.cache.pool.timeout_s = patience
        assert run(disk).ids == [reference]
        released.set()

    source = disk.loaded.link.source
    told = messages(Sweep(disk, reference, monkeypatch)(source, "read", hang, TransferError, mend))
    assert told and all("nothing arrived for 0.03 s" in message for message in told)


def test_a_worker_dies_in_a_read(engine, sweep):
    told = messages(sweep(engine.loaded.link.source, "read", raising(SystemExit("killed")), TransferError))
    assert told and all("killed" in message for message in told)


def test_a_worker_dies_between_reads(disk, reference, monkeypatch):
    """The link's own bookkeeping fails: all that is on the link ends, and the next request gets a new worker."""
    told = messages(
        Sweep(disk, reference, monkeypatch)(disk.loaded.link, "_cut", raising(MemoryError("no room")), TransferError)
    )
    assert told and all("a worker of the link died (MemoryError: no room)" in message for message in told)


def test_a_file_is_cut_off(disk, reference, monkeypatch):
    """Cut by somebody while the engine runs, and put right again; the engine keeps its file open."""
    path = disk.loaded.source.path(0, 0)
    whole = path.read_bytes()
    cut, mend = partial(os.truncate, path, 100), partial(path.write_bytes, whole)
    source = disk.loaded.link.source
    told = messages(Sweep(disk, reference, monkeypatch)(source, "read", cut, TransferError, mend))
    assert len(told) > 10 and all("is cut off" in m and "Fetch the model again" in m for m in told)


def test_no_memory_for_a_slot(engine, sweep):
    told = messages(
        sweep(slots_module, "allocate", raising(OSError(errno.ENOMEM, "Cannot allocate memory")), BudgetError)
    )
    assert len(told) >= 4 and all("use a smaller --cache" in message for message in told)


def test_no_memory_for_keys_and_values(emulated, reference, monkeypatch):
    """A real refusal of the allocator: 2^42 tokens."""
    recording = Recording()
    with nothing_left(), monkeypatch.context() as patch:
        layers = emulated.loaded.runner.config.num_hidden_layers
        patch.setattr(emulated.loaded.runner, "new_cache", lambda sequences, length: KVCache(layers, sequences, 2**42))
        with pytest.raises(BudgetError, match="keys and values of 1 × 4398046511104 tokens.*fewer new tokens"):
            run(emulated, recording)
    assert len(messages([recording])) == 1
    check_idle(emulated)
    assert run(emulated).ids == [reference]


@pytest.mark.parametrize(
    "error", [RuntimeError("boom\nin two lines"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_pass_fails(error, emulated, reference, monkeypatch):
    struck = Sweep(emulated, reference, monkeypatch)(emulated.loaded.runner, "forward", raising(error), type(error))
    told = messages(struck)
    assert len(told) == len(struck)
    assert set(told) == {"RuntimeError: boom" if str(error) else "KeyboardInterrupt"}


class Listener:
    """Hears a run's events and does something at the n-th of them."""

    def __init__(self, n: int | None, act: Callable[[], object]) -> None:
        self._hear = NthCall(lambda event: None, n, act)

    def __call__(self, event: events.Event) -> None:
        self._hear(event)

    @property
    def count(self) -> int:
        return self._hear.calls


def test_stopped_at_every_event(engine, reference):
    """Each layer of prefill, draft and verification tells of itself, and so does each transfer, in its own thread."""
    quiet = Listener(None, NOTHING)
    run(engine, on_event=quiet)
    assert quiet.count > 50
    statuses = []
    for n in range(quiet.count):
        stop = threading.Event()
        with nothing_left():
            recording = run(engine, cancel=stop, on_event=Listener(n, stop.set))
            check_idle(engine)
        (end,) = recording.of(events.RunEnd)
        statuses.append(end.status)
        (ids,) = recording.ids
        assert ids == reference[: len(ids)] and (end.status, end.error) in (("stopped", None), ("finished", None))
        assert recording.results[0]["finish_reason"] == ("cancelled" if end.status == "stopped" else "length")
        settled = [event.id for event in recording.of(events.Settled)]
        assert sorted(settled) == sorted(event.id for event in recording.of(events.Transfer))
    assert statuses.count("stopped") > 0.8 * len(statuses)
    assert run(engine).ids == [reference]


def test_stopped_at_every_read(engine, reference, monkeypatch):
    struck = 0
    for n in range(20):
        stop = threading.Event()
        with nothing_left(), monkeypatch.context() as patch:
            read = NthCall(engine.loaded.link.source.read, n, stop.set)
            patch.setattr(engine.loaded.link.source, "read", read)
            recording = run(engine, cancel=stop)
            check_idle(engine)
        struck += recording.of(events.RunEnd)[0].status == "stopped"
        (ids,) = recording.ids
        assert ids == reference[: len(ids)]
    assert struck > 15
    assert run(engine).ids == [reference]


@pytest.mark.parametrize("error", [BrokenPipeError("nobody listens"), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_a_listener_fails_at_every_event(error, emulated, reference):
    """In the engine's thread or a link's, with or without the cache's lock: the run ends, and says so."""
    quiet = Listener(None, NOTHING)
    run(emulated, on_event=quiet)
    for n in range(quiet.count - 1):
        recording = Recording()
        listener = Listener(n, raising(error))
        with nothing_left():
            try:
                run(emulated, recording, on_event=listener)
            except type(error) as caught:
                assert caught is error
            else:
                assert listener.count <= n, f"event {n} failed and nobody said so"
            check_idle(emulated)
        (end,) = recording.of(events.RunEnd)
        if listener.count > n + 1:
            assert end.status == "failed" and type(error).__name__ in end.error
    assert run(emulated).ids == [reference]


def test_a_listener_that_fails_at_the_end(emulated, reference):
    def deaf(event: events.Event) -> None:
        if isinstance(event, events.RunEnd):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(emulated, on_event=deaf)
    assert run(emulated).ids == [reference]


@pytest.mark.parametrize("room", [0, 3000, 10**9])
def test_a_disk_that_does_not_take_the_trace(room: int, emulated, reference, tmp_path):
    """A real refusal of the system: files may not grow beyond `room` bytes. The trace is whole or not there."""
    path, before = tmp_path / "run.ndjson", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with nothing_left(), TraceFile(str(path)) as trace:
            run(emulated, on_event=trace.write)
    except UsageError as error:
        assert str(error) == f"cannot write the trace to {path}: File too large" and room < 10**9
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in tmp_path.iterdir()] == (["run.ndjson"] if room == 10**9 else [])
    check_idle(emulated)
    assert run(emulated).ids == [reference]


def test_two_hundred_runs_leave_nothing(disk, reference):
    """After a few runs in which caches fill, nothing grows any more: threads, files, tensors, slots."""
    for _ in range(5):
        assert run(disk).ids == [reference]
    alive, held = tensors(), disk.cache.nbytes
    with nothing_left():
        for n in range(200):
            stop = threading.Event()
            if n % 4 == 1:
                stop.set()
            record(disk, [PROMPT], cancel=stop, max_new_tokens=1 + n % 3, k=n % 3)
    check_idle(disk)
    assert tensors() <= alive
    assert disk.cache.nbytes <= max(held, disk.cache.capacity_nbytes)
    assert run(disk).ids == [reference]


def test_loading_fails_at_any_read(tiny_model, reference, tmp_path, monkeypatch):
    """While the pack is built, and while the draft is quantized from it; the next load goes on and is right."""
    config = EngineConfig(model=str(tiny_model("qwen3_moe").directory))
    honest = os.preadv

    def load(name: str, n: int | None) -> int:
        monkeypatch.setenv("SPECVIZ_CACHE", str(tmp_path / name))
        read = NthCall(honest, n, raising(OSError(errno.EIO, "Input/output error")))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read)
            Engine.load(config).close()
        return read.calls

    calls = load("whole", None)
    for n in (0, 1, calls // 3, calls // 2, calls - 2, calls - 1):
        with nothing_left():
            with pytest.raises(
                CheckpointError, match=r"cannot be read at byte \d+: Input/output error \(check the disk"
            ):
                load(str(n), n)
            engine = Engine.load(config)
            assert run(engine).ids == [reference]
            engine.close()


@pytest.mark.parametrize(("link", "workers"), [(DISK, 2), (EMULATED, 1)])
def test_no_thread_can_be_started(link: str, workers: int, tiny_model, monkeypatch):
    config = EngineConfig(model=str(tiny_model("qwen3_moe").directory), link=LinkConfig.parse(link))
    honest = threading.Thread.start
    for n in range(workers):
        start = NthCall(honest, n, raising(RuntimeError("can't start new thread")))
        with nothing_left(), monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread, start=start: start(thread))
            with pytest.raises(
                TransferError, match=r"threads could not be started \(can't start new thread\): end other"
            ):
                Engine.load(config)
        assert start.calls == n + 1


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not say what is mapped")
def test_no_weight_is_a_view_of_the_file(embedded_model):
    """A weight in the stored dtype could be: then a shard that is cut off kills the process (SIGBUS)."""
    engine = Engine.load(EngineConfig(model=str(embedded_model), dtype="bfloat16", draft="none"))
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file if line.rstrip().endswith(".safetensors")]
    ranges = [tuple(int(side, 16) for side in line[0].split("-")) for line in lines]
    weights = [p for p in engine.loaded.skeleton.model.parameters() if not p.is_meta]
    engine.close()
    assert len(weights) > 50 and weights[0].dtype.itemsize == 2
    assert not [w for w in weights if any(low <= w.data_ptr() < high for low, high in ranges)]
