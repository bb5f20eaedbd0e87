"""`--link host`: the same text with experts in main memory, whoever computes: the CPU, or a stand-in for CUDA."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
import torch
from fault_injection import NthCall, check_idle, nothing_left, raising
from recorded_runs import record
from stand_in_cuda import DEVICE, stand_in_cuda
from tiny_models import PROMPTS, greedy

from engine import events
from engine.config import KERNELS, MISSES, CacheBudget, EngineConfig, LinkConfig
from engine.doctor import examine, format_doctor
from engine.engine import Engine
from engine.errors import BudgetError, ModelError, TransferError, UsageError
from engine.model.device import resolve_device
from engine.offload.in_place import InPlace

TOKENS, FEW = 24, 6
PROMPT = PROMPTS[:3]


def load(model, device: str = "cpu", **more) -> Engine:
    return Engine.load(EngineConfig(model=str(model.directory), link=LinkConfig("host"), device=device, **more))


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Transformers' own output."""
    return greedy(model.reference(), model.directory, PROMPT, TOKENS)


@pytest.mark.parametrize(("misses", "kernels"), list(itertools.product(MISSES, (KERNELS, ()))))
def test_text_is_the_same_however_misses_are_served(misses: str, kernels, model, expected):
    engine = load(model, misses=misses, kernels=kernels, cache=CacheBudget(slots=2))
    recording = record(engine, list(PROMPT), max_new_tokens=TOKENS, k=3)
    counts = recording.results[0]["experts"]
    engine.close()
    assert recording.ids == expected
    assert counts["misses"] > 0 and counts["hits"] + counts["late"] + counts["misses"] == counts["requests"]
    if misses != "auto":
        assert counts["computed"] == (counts["misses"] if misses == "compute" else 0)
    assert counts["computed"] <= counts["misses"]
    assert recording.results[0]["config"]["link_label"] == "host memory to itself (no CUDA device)"


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_experts_computed_where_they_lie_are_bit_for_bit_the_same(name: str, tiny_model):
    """bfloat16, where any other order of additions would show: logits of fetched and of computed experts."""
    model = tiny_model(name)
    logits = []
    for misses in ("fetch", "compute"):
        engine = load(model, misses=misses, dtype="bfloat16", cache=CacheBudget(slots=1))
        cache = engine.loaded.runner.new_cache(1, 8)
        zero = torch.tensor([0])
        engine.passes.begin("prefill", [5])
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        logits.append(engine.loaded.runner.forward(cache, engine.target_experts, ids, zero, zero, torch.tensor([5])))
        assert (engine.cache.stats.computed > 0) == (misses == "compute")
        engine.close()
    assert torch.equal(*logits)


class Costs(InPlace):
    """A chooser whose costs are given: seconds a row, seconds a fetch."""

    def __init__(self, compute: float, fetch: float) -> None:
        self.possible, self._forced, self._slowdown = True, False, 1.0
        self._few, self._many = compute, 16 * compute
        self._slab = type("Slab", (), {"expert_nbytes": 1e6})()
        self._link = type("Link", (), {"bytes_per_s": 1e6 / fetch})()


@pytest.mark.parametrize(("compute", "fetch"), [(1e-3, 1e-6), (1e-6, 1e-3), (1e-3, 1e-3), (1e-3, 4e-3), (3e-3, 1e-3)])
def test_misses_are_dealt_to_whoever_is_done_first(compute: float, fetch: float):
    missing = {expert: 1 + expert % 4 for expert in range(12)}
    chooser = Costs(compute, fetch)
    chosen = chooser.choose(missing)
    computing = sum(compute * missing[expert] for expert in chosen)
    fetching = fetch * (len(missing) - len(chosen))
    # Never worse than leaving it all to one side by more than the last item that was dealt.
    alone = min(fetch * len(missing), compute * sum(missing.values()))
    assert max(computing, fetching) <= alone + 1e-12
    assert abs(computing - fetching) <= 4 * compute + fetch or not chosen or len(chosen) == len(missing)
    if fetch < compute / 20:
        assert not chosen
    if compute * sum(missing.values()) < fetch:
        assert len(chosen) == len(missing)


@pytest.mark.parametrize(
    ("misses", "prefetch", "draft"),
    [("fetch", "draft", "self-int4"), ("compute", "draft", "sparse"), ("auto", "next-layer", "self-int3")],
)
def test_every_tensor_is_on_the_device_where_it_belongs(misses, prefetch, draft, model, expected, monkeypatch):
    """The whole engine on a device that refuses tensors of main memory; three sequences of different lengths."""
    with nothing_left(), stand_in_cuda(monkeypatch) as runtime:
        engine = load(model, "auto", misses=misses, prefetch=prefetch, draft=draft, cache=CacheBudget(slots=3))
        recording = record(engine, list(PROMPT), max_new_tokens=FEW, k=3)
        check_idle(engine)
        assert engine.loaded.device == DEVICE
        assert {p.device for p in engine.loaded.skeleton.model.parameters() if not p.is_meta} == {DEVICE}
        assert {slot.flat.device for shelf in engine.cache.pool.shelves for slot in shelf.slots} == {DEVICE}
        assert runtime.pinned == {engine.loaded.source.expert(0, 0).data_ptr(): engine.loaded.source.nbytes}
        engine.close()
    assert recording.ids == [ids[:FEW] for ids in expected]
    assert recording.of(events.RunStart)[0].machine["device"] == "cuda:0 (stand-in)"
    assert recording.results[0]["config"]["link_label"] == "pinned host memory to cuda:0"
    assert not runtime.pinned, "the slab is still registered"
    if misses != "compute":
        assert recording.results[0]["experts"]["bytes_loaded"] > 0


def test_the_stand_in_tells_tensors_of_two_devices_apart(monkeypatch):
    with stand_in_cuda(monkeypatch):
        away, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert away.device == DEVICE and (away + 1).device == DEVICE and away.cpu().device == here.device
        with pytest.raises(AssertionError, match="two devices"):
            away + here


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("misses", MISSES)
def test_a_real_device(misses: str, model, expected):
    """Where there is one: the same text, and in each slot the very bytes of its expert."""
    engine = load(model, "cuda", misses=misses, cache=CacheBudget(slots=3))
    recording = record(engine, list(PROMPT), max_new_tokens=TOKENS, k=3)
    check_idle(engine)
    for layer, shelf in enumerate(engine.cache.pool.shelves):
        for expert, slot in shelf.by_expert.items():
            assert torch.equal(slot.flat.view(torch.uint8).cpu(), engine.loaded.source.expert(layer, expert))
    engine.close()
    assert recording.ids == expected
    assert recording.results[0]["config"]["link_label"] == "pinned host memory to cuda:0"


def test_copies_wait_for_the_computation_and_are_timed_by_their_own_events(model, monkeypatch):
    """What `CudaStream` asks of CUDA, in order: wait for the fence of the request, then an event before and after."""
    with stand_in_cuda(monkeypatch) as runtime:
        engine = load(model, "cuda", misses="fetch")
        runtime.log.clear()
        record(engine, [PROMPTS[0]], max_new_tokens=4, k=2)
        engine.close()
    log = [entry for entry in runtime.log if entry[0] != "end"]
    fences = [event for kind, event in log if kind == "record" and event.thread == threading.current_thread().name]
    copies = [entry for entry in log if entry[1] not in fences or entry[0] == "wait"]
    assert len(copies) % 3 == 0 and copies
    for wait, begin, end in zip(*(iter(copies),) * 3, strict=True):
        assert (wait[0], begin[0], end[0]) == ("wait", "record", "record") and wait[1] in fences
        assert log.index(("record", wait[1])) < log.index(wait)


def test_memory_that_cannot_be_pinned_is_said(model, expected, monkeypatch, caplog):
    with stand_in_cuda(monkeypatch, refuse=2) as runtime, caplog.at_level(logging.WARNING):
        engine = load(model, "cuda:0")
        recording = record(engine, list(PROMPT), max_new_tokens=FEW, k=3)
        report = format_doctor(examine())
        engine.close()
    assert recording.ids == [ids[:FEW] for ids in expected] and not runtime.pinned
    label = recording.results[0]["config"]["link_label"]
    assert label.startswith("pageable host memory to cuda:0 (cudaHostRegister failed with status 2")
    assert "pageable memory: cudaHostRegister failed" in caplog.text
    assert "stays pageable: cudaHostRegister failed with status 2" in report


def test_doctor_tells_of_cuda(monkeypatch):
    with stand_in_cuda(monkeypatch) as runtime:
        assert "stand-in with 16 GiB; main memory can be pinned" in format_doctor(examine())
    assert not runtime.pinned
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no device: --link host copies within main memory" in format_doctor(examine())


def test_a_copy_fails_at_every_call(model, expected, monkeypatch):
    engine = load(model, misses="fetch", cache=CacheBudget(slots=3))
    stream = engine.loaded.link._stream
    honest = stream.copy
    counted = NthCall(honest, None, raising(AssertionError()))
    monkeypatch.setattr(stream, "copy", counted)
    engine.cache.reset()
    record(engine, list(PROMPT), max_new_tokens=3, k=2)
    failed = 0
    for n in range(0, counted.calls, 3):
        with nothing_left():
            monkeypatch.setattr(stream, "copy", NthCall(honest, n, raising(RuntimeError("CUDA error: gone\nmore"))))
            engine.cache.reset()
            try:
                record(engine, list(PROMPT), max_new_tokens=3, k=2)
            except TransferError as error:
                failed += 1
                assert "could not be copied to cpu: CUDA error: gone" in str(error) and "\n" not in str(error)
            check_idle(engine)
            monkeypatch.setattr(stream, "copy", honest)
            recording = record(engine, list(PROMPT), max_new_tokens=3, k=2)
            assert recording.ids == [ids[:3] for ids in expected]
    assert failed > 3
    engine.close()


def test_too_little_main_memory_is_refused_before_anything_is_read(model, monkeypatch):
    monkeypatch.setattr("engine.loading.available_bytes", lambda: 1000)
    with nothing_left(), pytest.raises(BudgetError, match=r"GiB of main memory \(0\.0 GiB are free\): use --link disk"):
        load(model)


def test_which_device_is_meant(monkeypatch):
    assert resolve_device("auto", "disk").type == resolve_device("cpu", "host").type == "cpu"
    with pytest.raises(UsageError, match="needs --link host, not disk"):
        resolve_device("cuda", "disk")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", "host").type == "cpu"
    with pytest.raises(UsageError, match="no CUDA device here, use --device cpu"):
        resolve_device("cuda:1", "host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        resolve_device("auto", "host") == torch.device("cuda:0") and str(resolve_device("cuda:1", "host")) == "cuda:1"
    )
    assert resolve_device("auto", "emulated").type == "cpu"
    with pytest.raises(UsageError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2", "host")


def test_experts_with_biases_are_not_computed_beside_a_device(model, monkeypatch):
    """Their biases lie on the device. `auto` fetches them then, and to insist is refused."""
    engine = load(model, misses="auto")
    module = type("Biased", (), {"has_bias": True, "has_post_expert_norm": False})()
    monkeypatch.setattr(engine.loaded.link, "device", DEVICE)
    assert InPlace(engine.loaded.link, module, "auto", False).choose({1: 1}) == []
    with pytest.raises(ModelError, match="use --misses fetch"):
        InPlace(engine.loaded.link, module, "compute", False)
    engine.close()
