"""MoE-SpeQ (arXiv 2511.14102) on an A100-40GB behind 16 GB/s: latencies, ablation, coverage, memory."""

from __future__ import annotations

from engine.control.hardware_profile import load_hardware
from engine.control.model_profile import load_model
from engine.control.operators import Workload
from engine.control.placement import GIB, SELF_DRAFT_BITS
from engine.control.policies import FORETOLD, moe_speq, on_demand
from engine.control.reproduction.row import Row
from engine.control.routing import UniformRouting

#: The setting of the code that the same group published later (SPECTER): prompts of 16 tokens at most, 128 new ones,
#: a draft length of 16, and of each layer's experts 2 of 16 (Phi), 16 of 64 (DeepSeek), 15 of 60 (Qwen) resident.
SETTING = {"phi-3.5-moe": 2, "deepseek-v2-lite": 16, "qwen1.5-moe-a2.7b": 15}
#: Section 2: more than 90 % of draft tokens are accepted.
WORK = Workload(batch=1, k=16, prompt=16, output=128, acceptance=0.9)
ARTIFACT = "the group's later artifact (resident experts, k = 16, lengths)"
PLAIN = f"{ARTIFACT}; PCIe 16 GB/s, A100 peaks; uniform routing (section 2: expert entropy is near its maximum)"
SPECULATIVE = f"{PLAIN}; 90 % acceptance"
UNIONS = (
    "missing: distinct experts of consecutive tokens (its routing), acceptance at the k that was used, the times of "
    "draft and verification"
)


def rows() -> list[Row]:
    """All rows of this paper."""
    return [*_phi(), *_qwen(), *_ablation(), *_coverage(), *_memory()]


def _routing(name: str) -> UniformRouting:
    model = load_model(name)
    return UniformRouting(model.experts, model.top_k)


def _milliseconds(name: str, slots: int) -> float:
    """A token of on-demand LRU."""
    found = on_demand(load_hardware("a100-40gb"), load_model(name), WORK, _routing(name), slots)
    return 1e3 / found.tokens_per_second


def _speculative(name: str, foretold: float = FORETOLD) -> float:
    """Tokens/s of MoE-SpeQ in that setting."""
    hardware, model = load_hardware("a100-40gb"), load_model(name)
    return moe_speq(hardware, model, WORK, _routing(name), SETTING[name], foretold).tokens_per_second


def _phi() -> list[Row]:
    """Section 4's averages."""
    name, source = "phi-3.5-moe", "MoE-SpeQ, section 4, Phi-3.5-MoE"
    model, slots = load_model(name), SETTING["phi-3.5-moe"]
    more = int(model.experts * SELF_DRAFT_BITS / 16)
    loads = 163.1e-3 * WORK.tokens * load_hardware("a100-40gb").slow_gbps * 1e9 / model.expert_bytes / model.moe_layers
    by_chance = _routing(name).missing(WORK.rows, slots)
    return [
        Row(source, "Mixtral-Offloading, same cache", "ms/token", 536.7, _milliseconds(name, slots), PLAIN),
        Row(source, "Mixtral-Offloading, same memory", "ms/token", 351.8, _milliseconds(name, slots + more),
            f"{PLAIN}; {more} slots more a layer, the bytes of an INT4 draft",
            "recorded routing is missing: LRU finds more than the resident share when tokens repeat experts"),
        Row(source, "MoE-SpeQ", "ms/token", 163.1, None, SPECULATIVE,
            f"{UNIONS}; 163.1 ms leave time for {loads:.1f} loads a layer and round, and by chance {by_chance:.1f} are "
            "missing", 1e3 / _speculative(name)),
        Row(source, "Transformers", "ms/token", 960.5, None, f"{PLAIN}, nothing resident",
            "missing: what its device map left on the GPU, and the rate of its copies from pageable memory",
            _milliseconds(name, 0)),
    ]  # fmt: skip


def _qwen() -> list[Row]:
    """The same law as for Phi on experts a ninth of the size: shown because it fails there."""
    return [
        Row("MoE-SpeQ, section 4, Qwen1.5-MoE", "Mixtral-Offloading, same cache", "ms/token", 2.5 * 74.1,
            _milliseconds("qwen1.5-moe-a2.7b", SETTING["qwen1.5-moe-a2.7b"]), PLAIN,
            "the time of its Python and of each copy is not published, and weighs more on small experts"),
    ]  # fmt: skip


def _ablation() -> list[Row]:
    """Table 4: tokens/s of DeepSeek-V2-Lite."""
    name, source = "deepseek-v2-lite", "MoE-SpeQ, table 4, DeepSeek-V2-Lite"
    full, no_prefetch, no_kernel = 13.02, 12.37, 8.88
    neither = 1 / (1 / no_prefetch + 1 / no_kernel - 1 / full)
    return [
        Row(source, "full", "tokens/s", full, None, SPECULATIVE, UNIONS, _speculative(name)),
        Row(source, "without asynchronous prefetch", "tokens/s", no_prefetch, None, SPECULATIVE, UNIONS,
            _speculative(name, foretold=0.0)),
        Row(source, "without fused kernel", "tokens/s", no_kernel, None, SPECULATIVE,
            f"{UNIONS}; and the speed of the draft's expert kernels with and without fusion"),
        Row(source, "without both", "tokens/s", 8.29, neither,
            "the table's other three rows: what prefetch hides and what the kernel saves of a token's time, added"),
    ]  # fmt: skip


def _coverage() -> list[Row]:
    """Table 3: percent of the experts of a step that are there, DeepSeek-V2-Lite."""
    source, routing = "MoE-SpeQ, table 3, DeepSeek-V2-Lite", _routing("deepseek-v2-lite")
    found = [
        Row(source, f"LRU, {slots} slots", "%", paper, None, f"{slots} of 64 experts resident, uniform routing",
            "missing: recorded routing of this model; its tokens repeat experts far more than chance does",
            100 * (1 - routing.missing(1, slots) / routing.top_k))
        for slots, paper in ((6, 29.2), (16, 50.94), (22, 61.13), (32, 76.56), (48, 95.77))
    ]  # fmt: skip
    single = 100 * (1 - (1 - 0.847) / 4)
    ahead = (("sooner", 6, 96.04), ("later", 6, 96.33), ("sooner", 16, 95.44), ("later", 16, 95.46),
             ("sooner", 32, 91.98), ("later", 32, 95.9))  # fmt: skip
    found += [
        Row(source, f"single prefetch, {when}, {slots} slots", "%", paper, None,
            "section 2, Qwen1.5-MoE: a predictor one layer ahead tells 84.7 % of top-4 sets, and misses one of four or "
            "more in the others: at most",
            "missing: what this predictor foretells on DeepSeek-V2-Lite, and which of its prefetches were late", single)
        for when, slots, paper in ahead
    ]  # fmt: skip
    found += [
        Row(source, f"speculative, {slots} slots", "%", paper, None,
            "section 2, Qwen1.5-MoE: an INT4 draft tells 90.9 % of top-4 sets, and misses one of four or more in the "
            "others: at most",
            "missing: what the draft foretells on DeepSeek-V2-Lite, and what was resident besides", 100 * FORETOLD)
        for slots, paper in ((6, 99.85), (16, 98.62), (32, 96.25))
    ]  # fmt: skip
    return found


def _memory() -> list[Row]:
    """Table 2: Qwen1.5-MoE with 12K tokens of context, what draft and target share."""
    model, source = load_model("qwen1.5-moe-a2.7b"), "MoE-SpeQ, table 2, Qwen1.5-MoE"
    routed = model.moe_layers * model.top_k * model.expert_params / GIB
    target, draft = routed * 2, routed * SELF_DRAFT_BITS / 8
    experts = model.moe_layers * 3 * model.hidden * model.shared_intermediate * 2 / GIB
    kv = 12 * 1024 * model.kv_bytes() / GIB
    other = model.shared_bytes / GIB - experts
    inputs = "config; 4 experts a layer, as many as a token needs (inferred), INT4 group 128; 12,288 tokens"
    shared = (
        ("nothing", 13.40, 0.0),
        ("shared experts", 11.85, experts),
        ("all weights but routed experts", 9.93, experts + other),
        ("these and KV", 7.68, experts + other + kv),
    )
    return [
        Row(source, f"draft and target that share {what}", "GB", paper,
            target + draft + 2 * (experts + other + kv) - once, inputs)
        for what, paper, once in shared
    ]  # fmt: skip
