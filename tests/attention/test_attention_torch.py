"""attention in PyTorch: the oracle, laws of masks, memory, and how calls work with PyTorch's tools."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from onchip.attention.problem import AttentionProblem, least_scratch, rows_of_block, scratch_parts
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.masks import Blocks, Causal, Chunked, Documents, Full, Intervals, Tree, Window
from onchip.ops.attention.cases import CHECK_CASES, AttentionCase
from onchip.ops.attention.checks import CHECKER
from onchip.torch import attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = ((1, 1), (239, 1), (799, 3), (113, 203))


def drawn(batch=1, queries=24, keys=None, heads=4, key_heads=2, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, heads), (keys or queries, key_heads), (keys or queries, key_heads)
    return [
        torch.randn(batch, t, h, size, generator=generator, dtype=dtype).requires_grad_() for t, h in shapes
    ]  # fmt: skip


def results(given, mask, **options):
    """out, lse and the gradients of their sum with changing signs."""
    out, lse = attention(*given, mask, return_lse=True, **options)
    signs = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * signs).sum() + lse[lse > -torch.inf].sum() / 7
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [x for x in given if x.requires_grad])]


# ----------------------------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_every_case_in_one_dtype(case):
    number = CHECK_CASES.index(case)
    how = {"layout": ("bthd", "bhtd")[number % 2]}
    for dtype in (torch.float32, DTYPES[1 + number % 3]):
        checks = CHECKER.check_case(case, dtype, **how)
        assert all(check.ok for check in checks), checks


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_of_flash_attention(lengths):
    queries, keys = lengths
    for mask in ("causal", "causal, last sees last", "full"):
        case = AttentionCase(mask, mask, batch=1, queries=queries, keys=keys)
        assert all(check.ok for check in CHECKER.check_case(case, torch.float32))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing(shape):
    queries, keys = shape
    q, k, v = (torch.randn(2, t, 2, 4, requires_grad=True) for t in (queries, keys, keys))
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((2, queries, 2, 4), (2, queries, 2))
    assert torch.equal(out, torch.zeros_like(out))
    for x, g in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(g, torch.zeros_like(x))


# ----------------------------------------------------------------------------------------------------------------- laws

lengths_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(lengths_of_documents, st.sampled_from([Causal(), Full(), Window(3), Window(2, 5), Chunked(4)]))
def test_a_packed_batch_is_its_documents_alone(lengths, mask):
    tokens = sum(lengths)
    given = drawn(queries=tokens)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = Documents(ids)
    packed = documents & (Chunked(4, within=documents) if isinstance(mask, Chunked) else mask)
    whole = results(given, packed)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = attention(*(x[:, rows] for x in given), mask)
        torch.testing.assert_close(whole[0][:, rows], alone)
        start += length


@settings(max_examples=10, deadline=None)
@given(lengths_of_documents, st.randoms())
def test_documents_in_another_order(lengths, random):
    given = drawn(queries=sum(lengths))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    new = list(range(len(lengths)))
    random.shuffle(new)
    order = torch.cat([(ids == x).nonzero()[:, 0] for x in new])
    before = results(given, Documents(ids) & Causal())
    turned = [x.detach()[:, order].requires_grad_() for x in given]
    out = attention(*turned, Documents(ids[order]) & Causal())
    torch.testing.assert_close(out, before[0][:, order])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_a_tree_is_its_unrolled_rows(ups):
    """Each path from the root alone gives what the tree gives for its last token."""
    parents, path = [-1], [0]
    for up in ups:
        del path[max(1, len(path) - up) :]
        parents.append(path[-1])
        path.append(len(parents) - 1)
    tokens = len(parents)
    last = list(range(tokens))
    for token in range(tokens - 1, 0, -1):
        last[parents[token]] = max(last[parents[token]], last[token])
    q, k, v = drawn(queries=tokens)
    out = attention(q, k, v, Tree(torch.tensor(last) + 1))
    for token in range(tokens):
        row = [token]
        while parents[row[0]] >= 0:
            row.insert(0, parents[row[0]])
        torch.testing.assert_close(attention(q[:, row], k[:, row], v[:, row])[:, -1], out[:, token])


def test_documents_from_lengths_some_of_them_zero():
    q, k, v = drawn(queries=12)
    mask = Documents.from_cu_seqlens(torch.tensor([0, 4, 4, 9]), 12)
    ids = torch.tensor([0] * 4 + [2] * 5 + [9] * 3)
    torch.testing.assert_close(attention(q, k, v, mask), attention(q, k, v, Documents(ids, padding=9)))
    assert torch.equal(attention(q, k, v, mask)[:, 9:], torch.zeros(1, 3, 4, 8, dtype=q.dtype))


@pytest.mark.parametrize("wrong", [[4, 4, 9], [0, 9, 4], [5, 7]])
def test_lengths_for_their_sums_raise(wrong):
    with pytest.raises(ValueError, match=r"attention: cu_seqlens must begin with 0 and never fall; got \["):
        Documents.from_cu_seqlens(torch.tensor(wrong), 12)


def test_sums_of_lengths_may_be_traced():
    @torch.compile(backend="eager", fullgraph=True)
    def ids(sums):
        return Documents.from_cu_seqlens(sums, 12).ids

    assert ids(torch.tensor([0, 4, 9])).tolist() == [[0] * 4 + [1] * 5 + [2] * 3]


def test_documents_of_no_tokens():
    q, k, v = drawn(queries=0)
    assert attention(q, k, v, Documents(torch.zeros(0, dtype=torch.int64)) & Causal()).shape == q.shape


def test_both_is_and():
    for a, b in ((Window(5), Blocks(torch.tensor([0] * 6 + [1] * 10 + [-1] * 8))), (Causal(), Window(3, 9))):
        q, k, v = drawn()
        seen = [m.lower(1, 24, 24, q) for m in (a, b, a & b, b & a)]
        j = torch.arange(24)
        dense = [(m.start[..., None] <= j) & (j < m.end[..., None]) for m in seen]
        assert torch.equal(dense[0] & dense[1], dense[2])
        assert torch.equal(dense[2], dense[3])
        assert torch.equal(attention(q, k, v, a & b), attention(q, k, v, seen[2]))


def test_large_ids_are_told_apart():
    ids = torch.tensor([0, 0, 2**32, 2**32])
    low = Documents(ids).lower(1, 4, 4, ids)
    assert low.start.tolist() == [[0, 0, 2, 2]]
    assert low.start.dtype == torch.int32


# ------------------------------------------------------------------------------------------------- what isn't a number


def test_nan_stays_where_it_is_seen():
    q, k, v = drawn(queries=20)
    ids = torch.tensor([0] * 9 + [1] * 8 + [2] * 3)
    mask = Documents(ids, padding=2) & Causal()
    right = results([q, k, v], mask)
    for name in range(3):
        for value in (torch.nan, torch.inf):
            broken = [x.detach().clone() for x in (q, k, v)]
            broken[name][:, 17:] = value  # padding
            broken[name][:, 4] = value
            made = results([x.requires_grad_() for x in broken], mask)
            for x, y in zip(made, right, strict=True):
                assert torch.equal(x[:, 9:], y[:, 9:])
            sees = slice(4, 5) if name == 0 else slice(4, 9)
            assert made[0][:, sees].isnan().all()
            assert torch.equal(made[0][:, :4], right[0][:, :4])


def test_a_gradient_of_rows_that_see_nothing_may_be_anything():
    q, k, v = drawn(queries=8)
    sinks = torch.ones(4, dtype=torch.float64, requires_grad=True)
    mask = Documents(torch.tensor([0] * 5 + [1] * 3), padding=1) & Causal()
    for more in ({}, {"sinks": sinks}):
        leaves = [q, k, v, *more.values()]
        found = []
        for value in (0.0, torch.nan):
            out, lse = attention(q, k, v, mask, return_lse=True, **more)
            grads = torch.ones_like(out), torch.zeros_like(lse)
            grads[0][:, 5:] = value
            if not more:
                grads[1][:, 5:] = value
            found.append(torch.autograd.grad([out, lse], leaves, grads))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
        assert all(x.isfinite().all() for x in found[0])


# -------------------------------------------------------------------------------------------------------- around a call


def test_the_same_bits_twice():
    given = drawn(queries=300, dtype=torch.float32)
    runs = [results(given, Window(70)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_strides_layouts_and_no_batch():
    q, k, v = drawn(queries=16)
    right = attention(q, k, v)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(attention(*turned, layout="bhtd").transpose(1, 2), right)
    assert torch.equal(attention(*(x.transpose(1, 2) for x in turned)), right)
    assert torch.equal(attention(q[0], k[0], v[0]), right[0])
    packed = torch.cat([q, k, v], 2)
    assert torch.equal(attention(packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]), right)


def test_compiled_without_a_break():
    q, k, v = drawn(queries=16, dtype=torch.float32)
    ids = torch.tensor([0] * 7 + [1] * 9)

    def step(q, k, v, ids):
        mask = Documents(ids) & Causal()
        return attention(q, k, v, mask.lower(1, q.shape[1], k.shape[1], q), softcap=5.0)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    made, right = (f(q, k, v, ids) for f in (compiled, step))
    torch.testing.assert_close(made, right)
    for x, y in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (made, right)), strict=True):
        torch.testing.assert_close(x, y)
    stop = torch.arange(16) + 1
    every = torch.compile(
        lambda q, k, v, ids, stop: attention(q, k, v, Tree(stop) & Blocks(ids) & Window(3)), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    torch.testing.assert_close(every(q, k, v, ids, stop), attention(q, k, v, Tree(stop) & Blocks(ids) & Window(3)))


def test_autocast():
    given = drawn(queries=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*given)
    assert out.dtype == torch.bfloat16
    right = attention(*(x.detach().bfloat16() for x in given))
    assert torch.equal(out, right)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), given))


def test_checkpointing():
    given = drawn(queries=16)
    right = torch.autograd.grad(attention(*given, Window(4)).sum(), given)
    out = checkpoint(lambda *x: attention(*x, Window(4)), *given, use_reentrant=False)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(out.sum(), given), right, strict=True))


def test_gradients_of_some():
    q, k, v = drawn(queries=16)
    right = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    for n in range(3):
        given = [x if i == n else x.detach() for i, x in enumerate((q, k, v))]
        assert torch.equal(torch.autograd.grad(attention(*given).sum(), given[n])[0], right[n])
    _, lse = attention(q, k, v, return_lse=True)
    assert torch.autograd.grad(lse.sum(), (q, k))[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("dtype", "softcap"),
    [
        pytest.param(torch.float32, None, marks=pytest.mark.slow),
        (torch.bfloat16, 5.0),
    ],
    ids=str,
)
def test_memory_is_at_most_the_formula(dtype, softcap):
    q, k, v = (x.detach().to(dtype) for x in drawn(queries=90, heads=8, key_heads=2, size=32))
    p, size = AttentionProblem(1, 90, 90, 8, 2, 32, 32), dtype.itemsize
    for backward in (False, True):
        least = least_scratch(p, size, backward=backward, softcap=softcap is not None)
        for budget in (least, 3 * least, None):
            leaves = [x.clone().requires_grad_(backward) for x in (q, k, v)]

            def step(leaves=leaves, budget=budget, backward=backward):
                out = attention(*leaves, Full(), softcap=softcap, scratch_bytes=budget)
                return [out, *(torch.autograd.grad(out, leaves, out.detach()) if backward else ())]

            step()
            rows = rows_of_block(p, size, budget, backward=backward, softcap=softcap is not None)
            parts = scratch_parts(p, size, rows, backward=backward, softcap=softcap is not None)
            kept = 4 * 90 * 8  # lse
            assert peak_extra_bytes(step, device="cpu") <= sum(parts.values()) + kept
            if budget is not None:
                assert sum(parts.values()) <= budget


@pytest.mark.parametrize("mask", [Full(), Causal(2), Window(3), Window(None, None), Window(10**12, 10**12, -7)])
def test_closed_forms_are_lowered_in_two_steps(mask):
    q = torch.zeros(1, 5, 1, 8)
    with torch.profiler.profile() as profile:
        ranges = mask.ranges(1, 5, 9, q)
    assert sum(x.name in ("aten::arange", "aten::full") for x in profile.events()) >= 2
    assert not any(x.name in ("aten::add", "aten::sub", "aten::mul") for x in profile.events())
    i, j = torch.arange(5)[:, None], torch.arange(9)
    seen = (j >= ranges.start.T) & (j < ranges.end.T)
    offset, left, right = (getattr(mask, name, None) for name in ("offset", "left", "right"))
    expected = torch.ones(5, 9, dtype=torch.bool)
    if isinstance(mask, Causal):
        expected = j <= i + offset
    elif isinstance(mask, Window):
        after = j - i - offset
        expected = (after >= -(10**13 if left is None else left)) & (after <= (10**13 if right is None else right))
    assert torch.equal(seen, expected)


def test_lowering_makes_nothing_of_queries_by_keys():
    """O(T), and nothing is read: it works on tensors without values too."""
    tokens = 1 << 14
    ids = torch.arange(tokens) // 100
    made = [
        lambda put: Documents(put(ids)) & Causal(), lambda put: Blocks(put(ids)) & Window(50, None),
        lambda put: Chunked(64, within=Documents(put(ids))), lambda put: Tree(put(ids + 5)),
    ]  # fmt: skip
    for make in made:
        mask = make(lambda x: x)

        def step(mask=mask):
            low = mask.lower(1, tokens, tokens, ids)
            return [low.start, low.end]

        step()
        assert peak_extra_bytes(step, device="cpu") <= 200 * tokens
        low = make(lambda x: x.to("meta")).lower(2, tokens, tokens, ids.to("meta"))
        assert low.start.is_meta
        assert isinstance(low, Intervals)


def test_the_oracle_agrees_with_sdpa():
    case = AttentionCase("causal", "causal documents", std=1.0)
    inputs = CHECKER.inputs(case, "float64")
    q, k, v = (torch.from_numpy(x).double().transpose(1, 2).requires_grad_() for x in inputs[:3])
    seen = torch.from_numpy(np.array(case.seen()))[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    right = CHECKER.oracle(case, q=inputs.q, k=inputs.k, v=inputs.v, grad_out=inputs.grad_out)
    grads = torch.autograd.grad(out, (q, k, v), torch.from_numpy(inputs.grad_out).double().transpose(1, 2))
    for made, expected in zip((out, *grads), (right.out, right.grad_q, right.grad_k, right.grad_v), strict=True):
        np.testing.assert_allclose(made.detach().transpose(1, 2).numpy(), expected, atol=1e-10)


class _Named(torch.Tensor):
    """A subclass that another library might have."""


def test_subclasses_of_tensors():
    given = drawn(dtype=torch.float32)
    expected = attention(*given, Documents(torch.arange(24) // 10) & Causal())
    named = [x.detach().as_subclass(_Named) for x in given]
    made = attention(*named, Documents((torch.arange(24) // 10).as_subclass(_Named)) & Causal())
    torch.testing.assert_close(made.as_subclass(torch.Tensor), expected)
