"""chunked_attention: against float64, row by row bit for bit, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, FLOAT, ROUNDING, TINY, Bounded, few_examples, random, same_bits, seeds, some_rows

from engine.kernels.attention import chunked_attention, chunked_attention_reference
from engine.kernels.native import Native

#: Multiply-adds of one head pair that an example may cost: sizes are drawn first, and the longest cache gives way.
MOST_WORK = 1_000_000
#: Sizes of keys and values.
HEADS = ((8, 8), (20, 20), (24, 17), (40, 40), (80, 80), (128, 128), (192, 128), (1, 1))
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """The operator's arguments. Whatever no row sees holds NaN."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    scale: float
    window: int = 0
    sinks: torch.Tensor | None = None

    @staticmethod
    def random(
        seed: int, batch: int = 1, kv_heads: int = 1, group: int = 1, rows: int = 1, dim: int = 8, value_dim: int = 8,
        longest: int = 20, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32,
        tokens_first: bool = False,
    ) -> Case:  # fmt: skip
        """`longest` tokens in the last sequence, its new rows included; the others have fewer."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(longest, rows)
        starts = torch.randint(longest - rows + 1, (batch,), generator=generator)
        starts[-1] = longest - rows
        slots = torch.randperm(batch + 1, generator=generator)[:batch]

        def cache(seed: int, width: int) -> torch.Tensor:
            shape = (batch + 1, kv_heads, longest + 3, width)
            whole = random(seed, *shape, dtype=dtype)
            kept = torch.full_like(whole, NAN)
            for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
                seen = slice(max(0, start - window + 1) if window else 0, start + rows)
                kept[slot, :, seen] = whole[slot, :, seen]
            return kept.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else kept

        query = random(seed + 1, batch, kv_heads * group, rows, dim, dtype=dtype, scale=2)
        logits = random(seed + 2, kv_heads * group) if sinks else None
        return Case(query, cache(seed + 3, dim), cache(seed + 4, value_dim), slots, starts, dim**-0.5, window, logits)

    def run(self) -> torch.Tensor:
        return chunked_attention(
            self.query, self.key, self.value, self.slots, self.starts, self.scale, self.window, self.sinks
        )

    def alone(self, sequence: int, row: int) -> Case:
        """Row `row` of a sequence as a call of its own."""
        return replace(
            self,
            query=self.query[sequence : sequence + 1, :, row : row + 1],
            slots=self.slots[sequence : sequence + 1],
            starts=self.starts[sequence : sequence + 1] + row,
        )

    def expected(self, sequence: int) -> Bounded:
        """(rows, heads, value_dim): the formula in float64, and how far float32 sums of that length may be off.

        A logit is off by the rounding of its sum, its product with the scale and its difference to the largest; a
        probability by the exponential of twice that and, where it is stored so, by its rounding to bfloat16. Both the
        weighted sum and what it is divided by are wrong by so much, and by the order of their own terms.
        """
        rows, heads, start = self.query.shape[2], self.query.shape[1], int(self.starts[sequence])
        group, end = heads // self.key.shape[1], start + self.query.shape[2]
        first = max(0, start - self.window + 1) if self.window else 0
        query, slot = self.query[sequence].double(), int(self.slots[sequence])
        key, value = (t[slot, :, first:end].double().repeat_interleave(group, 0) for t in (self.key, self.value))
        position, at = torch.arange(start, end)[:, None], torch.arange(first, end)
        sees = (at <= position) & (at > position - (self.window or math.inf))
        logits = (query @ key.transpose(1, 2) * self.scale).masked_fill(~sees, -math.inf)
        size = (query.abs() @ key.abs().transpose(1, 2) * self.scale).masked_fill(~sees, 0.0)
        most = logits.amax(-1, keepdim=True)
        column = torch.full((heads, rows, 1), -math.inf, dtype=torch.float64)
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, rows, 1)
            most = torch.maximum(most, column)
        weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
        off = (FLOAT * ((self.query.shape[3] + 4) * size + 6 * (size + most.abs()))).amax(-1, keepdim=True)
        wrong = torch.expm1(2 * off) + 8 * FLOAT
        if self.query.dtype == torch.bfloat16:
            wrong = wrong + ROUNDING[torch.bfloat16]
        terms = weights @ value.abs()
        error = terms * (2 * wrong / (1 - wrong) + 2 * (end - first + 8) * FLOAT) + TINY * value.abs().sum(
            1, keepdim=True
        )
        bounded = Bounded(weights @ value, error).rounded(self.query.dtype)
        return Bounded(bounded.value.transpose(0, 1), bounded.error.transpose(0, 1))


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    rows = draw(st.sampled_from([*range(1, 18), 40, 130]))
    batch = draw(st.sampled_from([1, 1, 2, 3, 33]))
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4, 7, 64]))
    dim, value_dim = draw(
        st.sampled_from([(8, 8), (20, 20), (24, 17), (40, 40), (80, 80), (128, 128), (192, 128), (1, 1)])
    )
    affordable = MOST_WORK // (rows * batch * kv_heads * group) + 1
    longest = min(draw(st.sampled_from([1, 9, 64, 200, 511, 512, 513, 1025, 2000, 9000])), affordable)
    window = draw(st.sampled_from([0, 0, 1, 2, 30, 512, 700]))
    return Case.random(
        draw(seeds), batch, kv_heads, group, rows, dim, value_dim, longest, window, draw(st.booleans()), dtype,
        draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data(), threads=st.integers(1, 3))
@few_examples
def test_it_is_attention_and_a_row_does_not_depend_on_its_company(
    variant: str, library: Native, dtype: torch.dtype, data: st.DataObject, threads: int
) -> None:
    """Within the bound, and bit for bit what each row gets alone, on another number of threads."""
    case = data.draw(cases(dtype))
    library.set_threads(threads)
    together = case.run()
    library.set_threads(threads % 3 + 1)
    for sequence in {0, len(case.slots) // 2, len(case.slots) - 1}:
        case.expected(sequence).check(together[sequence])
        for row in some_rows(case.query.shape[2]):
            alone = case.alone(sequence, row).run()
            assert same_bits(together[sequence, row], alone[0, 0]), f"sequence {sequence}, row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_chunks_of_any_size_get_the_same(variant: str, dtype: torch.dtype) -> None:
    """A prompt of 300 tokens, whose keys are all there: in one pass, in passes of 7, and from a cache of more heads."""
    case = Case.random(3, rows=300, kv_heads=2, group=3, dim=24, value_dim=24, longest=900, window=400, dtype=dtype)
    whole = case.run()
    for first in range(0, 300, 7):
        query = case.query[:, :, first : first + 7]
        part = replace(case, query=query, starts=case.starts + first).run()
        assert same_bits(part, whole[:, first : first + 7].contiguous())
    second = replace(case, query=case.query[:, 3:], key=case.key[:, 1:], value=case.value[:, 1:]).run()
    assert same_bits(second, whole[:, :, 3:].contiguous())


def test_more_rows_than_partial_results_fit_at_once(variant: str) -> None:
    """16 MiB of partial results are 105 rows here."""
    case = Case.random(4, rows=120, group=64, dim=8, value_dim=192, longest=1100)
    case.expected(0).check(case.run()[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_bad_row_stays_alone(variant: str, dtype: torch.dtype, bad: float) -> None:
    """Row 3's query, key and value are not finite: the rows before it cannot see that, those behind it must."""
    case = Case.random(5, batch=2, kv_heads=2, group=2, rows=6, dim=24, value_dim=24, longest=700, dtype=dtype)
    good = case.run()
    sequence, at = 1, int(case.starts[1]) + 3
    query, key, value = case.query.clone(), case.key.clone(), case.value.clone()
    query[sequence, :, 3, 5] = bad
    assert same_bits(replace(case, query=query).run()[:, [0, 1, 2, 4, 5]], good[:, [0, 1, 2, 4, 5]])
    for tensor in (key, value):
        tensor[case.slots[sequence], :, at, 5] = bad
    found = replace(case, key=key, value=value).run()
    assert same_bits(found[0], good[0])
    assert same_bits(found[sequence, :3], good[sequence, :3])
    assert not torch.isfinite(found[sequence, 3:, :, 5]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_left_the_window_is_not_met(variant: str, dtype: torch.dtype) -> None:
    """Row 0 still sees a bad value, row 1 does not any more."""
    case = Case.random(6, rows=4, dim=24, value_dim=24, longest=600, window=50, dtype=dtype)
    good, value = case.run(), case.value.clone()
    value[case.slots[0], :, int(case.starts[0]) - 49] = NAN
    found = replace(case, value=value).run()
    assert found[0, 0].isnan().all()
    assert same_bits(found[0, 1:], good[0, 1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.7, 30.0])
def test_any_scale(variant: str, dtype: torch.dtype, scale: float) -> None:
    case = replace(Case.random(7, rows=3, dim=20, value_dim=20, longest=600, sinks=True, dtype=dtype), scale=scale)
    reference = chunked_attention_reference(
        case.query.double(), case.key.double(), case.value.double(), case.slots, case.starts, scale, 0, case.sinks
    )
    tolerance = 2e-3 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(case.run().double(), reference, atol=tolerance, rtol=tolerance)


def test_a_window_longer_than_everything_is_none(variant: str) -> None:
    case = Case.random(8, batch=2, rows=5, longest=700)
    assert same_bits(replace(case, window=2**62).run(), case.run())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_takes_weight(variant: str, dtype: torch.dtype) -> None:
    """With a sink of −∞ nothing changes; one far above all logits leaves nothing."""
    case = Case.random(9, kv_heads=2, group=2, rows=3, longest=40, dtype=dtype)
    sinks = torch.tensor([-math.inf, 200.0, -math.inf, 3.0])
    plain, found = case.run(), replace(case, sinks=sinks).run()
    assert same_bits(found[:, :, ::2].contiguous(), plain[:, :, ::2].contiguous())
    assert (found[:, :, 1] == 0).all()
    assert (found[:, :, 3].abs() <= plain[:, :, 3].abs()).all() and not torch.equal(found[:, :, 3], plain[:, :, 3])


def test_nothing_to_do(variant: str) -> None:
    case = Case.random(10, batch=2, rows=3)
    assert replace(case, query=case.query[:, :, :0]).run().shape == (2, 0, 1, 8)
    assert replace(case, query=case.query[:0], slots=case.slots[:0], starts=case.starts[:0]).run().shape == (0, 3, 1, 8)


GOOD = Case.random(11, batch=2, kv_heads=2, group=2, rows=3, longest=20)
REFUSED = {
    "query, key and value must be": replace(GOOD, query=GOOD.query[0]),
    "query must be float32 or bfloat16": replace(GOOD, query=GOOD.query.double()),
    "one dtype": replace(GOOD, value=GOOD.value.bfloat16()),
    "last dimension": replace(GOOD, key=GOOD.key.transpose(2, 3).contiguous().transpose(2, 3)),
    "key has head size": replace(GOOD, key=GOOD.key[..., :7]),
    "caches of different sizes": replace(GOOD, value=GOOD.value[:, :, 1:]),
    "cannot share": replace(GOOD, query=GOOD.query[:, :3]),
    "window must be": replace(GOOD, window=-1),
    r"slots\[1\] = 3": replace(GOOD, slots=torch.tensor([0, 3])),
    "slots must be int64": replace(GOOD, slots=GOOD.slots.int()),
    "slots has shape": replace(GOOD, slots=GOOD.slots[:1]),
    r"starts\[0\] = -1": replace(GOOD, starts=torch.tensor([-1, 0])),
    r"starts\[1\] = 21": replace(GOOD, starts=torch.tensor([0, 21])),  # rows 21 to 23 of a cache of 23
    "starts has shape": replace(GOOD, starts=GOOD.starts[:, None]),
    "sinks has shape": replace(GOOD, sinks=torch.zeros(2)),
    "sinks must be float32": replace(GOOD, sinks=torch.zeros(4, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_arguments_are_refused(library: Native, text: str) -> None:
    GOOD.run()
    with pytest.raises(RuntimeError, match=text):
        REFUSED[text].run()
