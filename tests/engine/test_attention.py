"""Attention over ragged chunks, the KV cache that holds them and the masks between, against torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import SIZES
from transformers import masking_utils

from engine.errors import ModelError
from engine.kernels.attention import (
    MAX_GROUPED_ROWS,
    band,
    chunked_attention_reference,
    masked_attention,
)
from engine.kernels.native import Absent, native
from engine.model.deferred import Deferred, plain
from engine.model.kv_cache import KVCache
from engine.model.seams import ATTENTION, NATIVE_ATTENTION, ChunkMask, _attention_forward, _mask


def tensors(batch: int, heads: int, kv_heads: int, rows: int, length: int, dim: int, dim_v: int):
    random = torch.Generator().manual_seed(rows * 1000 + length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return normal(batch, heads, rows, dim), normal(batch, kv_heads, length, dim), normal(batch, kv_heads, length, dim_v)


def causal(starts: list[int], rows: int, length: int, window: int | None = None) -> torch.Tensor:
    """(batch, 1, rows, length): row i of sequence b stands at starts[b] + i and sees itself and what is before."""
    masks = []
    for start in starts:
        at, key = torch.arange(start, start + rows)[:, None], torch.arange(length)[None]
        masks.append((key <= at) & (key > at - (window or length + rows)))
    return torch.stack(masks)[:, None]


@pytest.mark.parametrize("window", (None, 3))
@pytest.mark.parametrize("rows", (1, 2, 9, MAX_GROUPED_ROWS, MAX_GROUPED_ROWS + 1))
@pytest.mark.parametrize("heads, kv_heads", ((4, 4), (4, 2), (6, 1)))
@pytest.mark.parametrize("dim_v", (8, 12))
def test_the_reference_is_attention(heads: int, kv_heads: int, rows: int, window: int | None, dim_v: int):
    starts, slots = [0, 5, 17], [3, 0, 2]
    length = max(starts) + rows
    query, key, value = tensors(4, heads, kv_heads, rows, length + 2, 8, dim_v)
    query = query[:3]
    got = chunked_attention_reference(query, key, value, torch.tensor(slots), torch.tensor(starts), 0.3, window or 0)
    # The plain formula, every head with its own copy of K and V.
    key, value = (t[slots, :, :length].repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    mask = causal(starts, rows, length, window)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.3)
    torch.testing.assert_close(got.double(), expected.transpose(1, 2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", (1, 4, MAX_GROUPED_ROWS + 1))
def test_a_sink_is_one_more_key_whose_value_is_nothing(rows: int):
    query, key, value = tensors(2, 4, 2, rows, 20 + rows, 8, 8)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    mask = causal([3, 20], rows, 20 + rows)
    got = masked_attention(query, key, value, mask, 0.3, sinks)
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf")).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sinks.exp()[None, :, None, None])
    torch.testing.assert_close(got, (weights @ value).transpose(1, 2), atol=2e-6, rtol=1e-5)


def test_what_is_masked_cannot_be_noticed():
    """Rows past a sequence's end hold what an earlier draft left there."""
    query, key, value = tensors(2, 4, 2, 3, 12, 8, 8)
    slots, starts = torch.tensor([0, 1]), torch.tensor([2, 9])
    clean = chunked_attention_reference(query, key, value, slots, starts, 0.3)
    key[0, :, 5:], value[0, :, 5:] = 1e4, 1e4
    assert torch.equal(chunked_attention_reference(query, key, value, slots, starts, 0.3)[0], clean[0])


def test_bfloat16_keeps_its_type_and_comes_close():
    query, key, value = (t.bfloat16() for t in tensors(1, 4, 2, 5, 40, 16, 16))
    mask = causal([35], 5, 40)
    got = masked_attention(query, key, value, mask, 0.25)
    assert got.dtype == torch.bfloat16
    exact = masked_attention(query.float(), key.float(), value.float(), mask, 0.25)
    torch.testing.assert_close(got.float(), exact, atol=0.03, rtol=0.03)


def rows_of(value: float, batch: int, rows: int) -> torch.Tensor:
    """(batch, 2 heads, rows, 4): each entry says which write, sequence and row it is from."""
    b, r = torch.arange(batch)[:, None, None, None], torch.arange(rows)[None, None, :, None]
    return (value + 10.0 * b + r).expand(batch, 2, rows, 4)


def test_ragged_writes_land_behind_each_sequence():
    cache = KVCache(layers=2, sequences=3, max_length=16)
    cache.begin(torch.tensor([0, 2]), torch.tensor([0, 4]))
    keys, values = cache.update(rows_of(100, 2, 3), rows_of(500, 2, 3), 1)
    assert keys.shape == values.shape == (2, 2, 7, 4)
    assert keys[0, 0, :3, 0].tolist() == [100, 101, 102]
    assert keys[1, 0, 4:7, 0].tolist() == [110, 111, 112]
    assert values[1, 1, 4:7, 3].tolist() == [510, 511, 512]
    assert cache.get_query_offset().tolist() == [[0], [4]]
    assert cache.get_mask_sizes(3, 1) == (7, 0)
    # Only `commit` moves a length; verification overwrites what the draft wrote.
    assert cache.lengths.tolist() == [0, 0, 0]
    cache.commit(2, 5)
    cache.begin(torch.tensor([2]), torch.tensor([5]))
    keys, _ = cache.update(rows_of(900, 1, 2), rows_of(900, 1, 2), 1)
    assert keys[0, 0, 4:7, 0].tolist() == [110, 900, 901]
    assert cache.lengths.tolist() == [0, 0, 5]


def test_one_sequence_is_not_copied():
    cache = KVCache(layers=1, sequences=2, max_length=8)
    cache.begin(torch.tensor([1]), torch.tensor([0]))
    keys, _ = cache.update(rows_of(0, 1, 2), rows_of(0, 1, 2), 0)
    again, _ = cache.update(rows_of(7, 1, 2), rows_of(7, 1, 2), 0)
    assert keys.data_ptr() == again.data_ptr()


def test_many_sequences_are_copied_only_for_who_looks():
    cache = KVCache(layers=1, sequences=3, max_length=8)
    cache.begin(torch.tensor([2, 0]), torch.tensor([0, 1]))
    first, _ = cache.update(rows_of(0, 2, 2), rows_of(0, 2, 2), 0)
    again, _ = cache.update(rows_of(7, 2, 2), rows_of(7, 2, 2), 0)
    assert first.storage.data_ptr() == again.storage.data_ptr()
    assert again.storage.shape == (3, 2, 8, 4)
    assert torch.equal(plain(again), again.storage[[2, 0], :, :3])
    assert plain(again).data_ptr() != again.storage.data_ptr()


def test_bytes_are_those_allocated():
    cache = KVCache(layers=2, sequences=3, max_length=16)
    for layer in range(2):
        cache.begin(torch.tensor([0]), torch.tensor([0]))
        cache.update(rows_of(0, 1, 1), rows_of(0, 1, 1), layer)
    assert cache.nbytes == 2 * 2 * 3 * 16 * 2 * 4 * 4  # layers, K and V, sequences, tokens, heads, dim, bytes


def test_a_deferred_tensor_is_one_for_all_who_treat_it_so():
    made = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.tensor([[True, False], [False, True]])

    deferred = Deferred(make)
    assert not made
    tensor = make()
    assert deferred.shape == (2, 2) and deferred.dtype == torch.bool
    assert torch.equal(deferred[0], tensor[0])
    assert torch.equal(~deferred, ~tensor)
    assert torch.equal(deferred & tensor[:1], tensor & tensor[:1])
    assert torch.equal(torch.where(deferred, 1.0, 2.0), torch.where(tensor, 1.0, 2.0))
    assert torch.equal(torch.cat([deferred, tensor], dim=0), torch.cat([tensor, tensor]))
    assert torch.equal(F.pad(deferred, (0, 1)), F.pad(tensor, (0, 1)))
    assert len(made) == 2  # ours above, and one for all of these


def mask_of(function, starts: list[int], rows: int, local_size: int | None = None) -> torch.Tensor | ChunkMask:
    return _mask(
        batch_size=len(starts), q_length=rows, kv_length=max(starts) + rows, q_offset=torch.tensor(starts)[:, None],
        kv_offset=0, mask_function=function, local_size=local_size, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("rows", (1, 2, 7))
@pytest.mark.parametrize("window", (None, 1, 3, 100))
def test_bands_are_recognized(rows: int, window: int | None):
    starts = [0, 6, 2]
    function = (
        masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    )
    mask = mask_of(function, starts, rows, window)
    assert isinstance(mask, ChunkMask)
    assert mask.window == (window or 0) and mask.starts.tolist() == starts
    assert torch.equal(plain(mask), causal(starts, rows, 6 + rows, window))
    assert torch.equal(plain(mask), band(torch.tensor(starts), rows, 6 + rows, window or 0))


@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("start", range(9))
def test_a_chunked_mask_is_no_window_unless_all_rows_see_the_same(start: int, rows: int):
    """From the last row of a chunk a chunk looks like a window; for one row it then is one."""
    function = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = mask_of(function, [start], rows, 4)
    expected = torch.stack([torch.arange(start + rows) // 4 == at // 4 for at in range(start, start + rows)])
    expected &= causal([start], rows, start + rows)[0, 0]
    assert torch.equal(plain(mask)[0, 0], expected)
    if isinstance(mask, ChunkMask):
        assert torch.equal(expected, causal([start], rows, start + rows, mask.window)[0, 0])


def test_other_masks_stay_boolean():
    prefix = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 3)
    both_ways = masking_utils.bidirectional_mask_function
    for function in (prefix, both_ways, masking_utils.sliding_window_bidirectional_mask_function(2)):
        mask = mask_of(function, [0, 2], 4)
        assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 4, 6) and mask.dtype == torch.bool
        assert mask[0, 0, 0, 1]  # a key that causal masks hide


@pytest.mark.parametrize("option", ("softcap", "position_bias"))
def test_what_attention_does_not_know_is_refused(option: str):
    query, key, value = tensors(1, 2, 2, 1, 4, 8, 8)
    mask = mask_of(masking_utils.causal_mask_function, [3], 1)
    with pytest.raises(ModelError, match=option):
        _attention_forward(torch.nn.Identity(), query, key, value, mask, 1.0, **{option: 1.0})


DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
}  # fmt: skip
#: What is special about the attention of each.
MODELS: dict[str, dict] = {
    "GptOssConfig": {"head_dim": 20, "sliding_window": 5, "num_local_experts": 4},  # sinks, every other layer windowed
    "GraniteMoeSWAConfig": {"sliding_window": 5, "num_local_experts": 4},  # sinks under another roof
    "MixtralConfig": {"sliding_window": 6, "num_local_experts": 4},
    "DeepseekV2Config": DEEPSEEK,  # expands the latents that it gets from the cache; values are wider than keys
    "Qwen3MoeConfig": {"head_dim": 24, "num_experts": 4, "moe_intermediate_size": 24},  # norms on q and k
}


@pytest.mark.parametrize("implementation", (ATTENTION, NATIVE_ATTENTION))
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_attend_through_the_seam_as_they_do_by_themselves(name: str, implementation: str, kernels):
    """Ragged chunks of two sequences against transformers' eager attention over each whole sequence."""
    settings = {**SIZES, "num_experts_per_tok": 2, "num_hidden_layers": 2, "intermediate_size": 24, **MODELS[name]}
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**settings), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():  # sinks start as they were found in memory
        parameter.normal_(0, 0.3)
    lengths = (13, 20)
    ids = torch.randint(1, 300, (2, max(lengths)))
    expected = [model(input_ids=ids[i : i + 1, :length]).logits[0] for i, length in enumerate(lengths)]

    model.set_attn_implementation(implementation)
    cache = KVCache(layers=2, sequences=4, max_length=24)
    slots = torch.tensor([3, 1])
    starts, found = [0, 0], ([], [])
    for rows in (4, 1, 5, 3):
        # The second sequence runs ahead: it takes a pass of its own after each one that they share.
        for sequences in ((0, 1), (1,)):
            rows_now = rows if len(sequences) > 1 else 2
            at = torch.tensor([starts[i] for i in sequences])
            positions = at[:, None] + torch.arange(rows_now)
            if int(positions.max()) >= 20:
                continue
            cache.begin(slots[list(sequences)], at)
            chunk = torch.stack([ids[i, starts[i] : starts[i] + rows_now] for i in sequences])
            logits = model(input_ids=chunk, position_ids=positions, cache=cache, use_cache=True).logits
            for i, row in zip(sequences, logits, strict=True):
                found[i].append(row)
                starts[i] += rows_now
    for i in range(2):
        got = torch.cat(found[i])
        torch.testing.assert_close(got, expected[i][: len(got)], atol=1e-3, rtol=1e-3)
    assert starts[0] == 13 and starts[1] > 15


@pytest.fixture(scope="module")
def kernels(cache_directory) -> None:
    """The compiled kernels are loaded, or the test is skipped."""
    found = native()
    if isinstance(found, Absent):
        pytest.skip(f"no compiled kernels: {found.reason}")
