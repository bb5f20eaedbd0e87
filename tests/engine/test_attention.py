"""Attention over ragged chunks, and the KV cache that holds them, against torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.attention import MAX_GROUPED_ROWS, chunked_attention
from engine.model.kv_cache import KVCache


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
def test_chunked_attention_is_attention(heads: int, kv_heads: int, rows: int, window: int | None, dim_v: int):
    starts = [0, 5, 17]
    length = max(starts) + rows
    query, key, value = tensors(3, heads, kv_heads, rows, length, 8, dim_v)
    mask = causal(starts, rows, length, window)
    got = chunked_attention(query, key, value, mask, 0.3)
    # The plain formula, every head with its own copy of K and V.
    key, value = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.3)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


def test_what_is_masked_cannot_be_noticed():
    """Rows past a sequence's end hold what an earlier draft left there."""
    query, key, value = tensors(2, 4, 2, 3, 12, 8, 8)
    mask = causal([2, 9], 3, 12)
    clean = chunked_attention(query, key, value, mask, 0.3)
    key[0, :, 5:], value[0, :, 5:] = 1e4, 1e4
    assert torch.equal(chunked_attention(query, key, value, mask, 0.3)[0], clean[0])


def test_bfloat16_keeps_its_type_and_comes_close():
    query, key, value = (t.bfloat16() for t in tensors(1, 4, 2, 5, 40, 16, 16))
    mask = causal([35], 5, 40)
    got = chunked_attention(query, key, value, mask, 0.25)
    assert got.dtype == torch.bfloat16
    exact = chunked_attention(query.float(), key.float(), value.float(), mask, 0.25)
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


def test_bytes_are_those_allocated():
    cache = KVCache(layers=2, sequences=3, max_length=16)
    for layer in range(2):
        cache.begin(torch.tensor([0]), torch.tensor([0]))
        cache.update(rows_of(0, 1, 1), rows_of(0, 1, 1), layer)
    assert cache.nbytes == 2 * 2 * 3 * 16 * 2 * 4 * 4  # layers, K and V, sequences, tokens, heads, dim, bytes
