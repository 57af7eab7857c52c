"""Against the float64 oracle: sizes, dtypes, options, layouts, special values."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ce_common import assert_right, assert_same, computed, gradient, plain, small_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.cross_entropy.checks import as_arguments, run_oracle
from onchip.ops.cross_entropy.torch_op import cross_entropy
from onchip.oracle.checks import relative_error
from onchip.vocab.rows import memory as row_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
in_place = pytest.mark.parametrize("inplace", [False, True], ids=["new tensor", "in place"])


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    """Fill every new buffer with NaN, so that an element that is not written shows."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def filled(*args, original=original, **kwargs):
            out = original(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

        monkeypatch.setattr(owner, name, filled)


SMALL_CASES = {c.name: c for c in CHECK_CASES if c.vocab < 10_000}


@pytest.mark.parametrize("name", SMALL_CASES)
def test_check_cases(name):
    assert_right(SMALL_CASES[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["small logits", "large logits", "peaked", "one class", "softcap", "everything"])
def test_check_cases_in_16_bits(name, dtype):
    assert_right(SMALL_CASES[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sliced", "per token", "half ignored", "everything"])
def test_check_cases_in_place(name, dtype):
    assert_right(SMALL_CASES[name], dtype, inplace=True)


SIZES = [(0, 123), (1, 123), (127, 123), (4097, 123), (0, 1), (4097, 1), (1, 2049), (127, 2049), (1, 50257),
         (7, 50257), (1, 128256), (2, 262144)]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    assert_right(Case("size", *size))


@pytest.mark.parametrize("size", [(127, 2049), (1, 50257), (0, 123)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sizes_in_16_bits(size, dtype):
    assert_right(Case("size", *size), dtype)


@pytest.mark.parametrize("std", [0.02, 30.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_logit_sizes(std, options):
    assert_right(Case("std", 127, 2049, logit_std=std, options=options))


@pytest.mark.parametrize("inplace", [False, True], ids=["new tensor", "in place"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_many_chunks(dtype, inplace):
    """The smallest budget for eight rows: many chunks, the last of them ragged."""
    case = Case("chunks", 101, 700, ignored=0.2, sliced=3, options={"softcap": 5.0, "label_smoothing": 0.1})
    name = str(dtype).removeprefix("torch.")
    problem = row_memory.Problem(101, 700, name, softcap=True, stats=True, gathered=name != "float32")
    budget = row_memory.scratch_bytes(problem, 8)
    assert row_memory.plan(problem, budget) == 8
    assert_right(case, dtype, scratch_bytes=budget, inplace=inplace)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 45), st.booleans(), st.booleans(), st.sampled_from(["mean", "none"]))
def test_chunk_sizes_change_nothing(rows, softcap, ignored, reduction):
    x, y = small_problem(tokens=40, vocab=90)
    if ignored:
        y[0, ::3] = -100
    upstream = torch.linspace(-1, 2, 40).view(2, 20) if reduction == "none" else None

    def run(chunk):
        budget = row_memory.scratch_bytes(row_memory.Problem(40, 90, softcap=softcap, stats=True), chunk)
        loss, stats = cross_entropy(
            x, y, z_loss=1e-3, softcap=4.0 if softcap else None, reduction=reduction, return_stats=True,
            scratch_bytes=budget,
        )  # fmt: skip
        return [loss, *stats, gradient(loss, x, upstream)]

    for a, b in zip(run(rows), run(40), strict=True):
        assert_same(a, b)


@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False))
def test_permutations_of_tokens_and_vocabulary(random):
    x, y = small_problem()
    x, y = x.detach().reshape(24, -1).requires_grad_(), y.reshape(-1)
    tokens, vocab = list(range(24)), list(range(70))
    random.shuffle(tokens)
    random.shuffle(vocab)
    new_place = torch.empty(70, dtype=torch.int64).index_copy_(0, torch.tensor(vocab), torch.arange(70))
    loss = cross_entropy(x, y)
    permuted = cross_entropy(x[tokens][:, vocab], new_place[y[tokens]])
    assert_same(loss, permuted)
    assert_same(gradient(loss, x), gradient(permuted, x))


@settings(max_examples=6, deadline=None)
@given(st.floats(-100, 100))
def test_a_shift_of_all_logits_changes_nothing(shift):
    x, y = small_problem()
    loss, shifted = cross_entropy(x, y), cross_entropy(x + shift, y)
    assert_same(loss, shifted, scale=abs(shift) + 1)
    assert_same(gradient(loss, x), gradient(shifted, x), scale=abs(shift) + 1)


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 6))
def test_repeating_the_batch_keeps_the_mean(times):
    x, y = small_problem()
    once, again = cross_entropy(x, y), cross_entropy(x.repeat(times, 1, 1), y.repeat(times, 1))
    assert_same(once, again)
    assert_same(gradient(once, x), gradient(again, x))


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_every_integer_dtype_of_target(dtype):
    x, y = small_problem()
    assert_same(cross_entropy(x, y.to(dtype)), cross_entropy(x, y))


@pytest.mark.parametrize("shape", [(), (1,), (24,), (2, 12), (2, 3, 4)], ids=str)
def test_leading_dimensions(shape):
    x, y = torch.randn(*shape, 70, requires_grad=True), torch.randint(70, shape)
    loss, stats = cross_entropy(x, y, reduction="none", return_stats=True)
    assert loss.shape == shape
    assert all(s.shape == shape for s in stats)
    expected = F.cross_entropy(x.reshape(-1, 70), y.reshape(-1), reduction="none").reshape(shape)
    assert_same(loss, expected)
    upstream = torch.randn(shape)
    assert_same(gradient(loss, x, upstream), gradient(expected, x, upstream))


def _strided(kind):
    """Logits [3, 8, 50] of a layout, as the view of a leaf."""
    base = torch.randn(
        {"sliced": (3, 8, 64), "offset": (4, 9, 57), "every other": (3, 16, 100), "vocabulary first": (50, 3, 8),
         "tokens swapped": (8, 3, 50), "shifted": (3, 9, 50), "expanded": (8, 50)}[kind]
    ).requires_grad_()  # fmt: skip
    cut = {
        "sliced": lambda x: x[..., :50],
        "offset": lambda x: x[1:, 1:, 7:],
        "every other": lambda x: x[:, ::2, ::2],
        "vocabulary first": lambda x: x.permute(1, 2, 0),
        "tokens swapped": lambda x: x.transpose(0, 1),
        "shifted": lambda x: x[:, :-1],
        "expanded": lambda x: x.expand(3, 8, 50),
    }[kind]
    return base, cut


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(
    "kind", ["sliced", "offset", "every other", "vocabulary first", "tokens swapped", "shifted", "expanded"]
)
def test_strides_do_not_matter(kind, ignored, dtype):
    base, cut = _strided(kind)
    base = base.detach().to(dtype).requires_grad_()
    y = torch.randint(50, (8, 3)).t()
    if ignored:
        y[0, 2] = y[2, 5] = -100
    copy = cut(base.detach()).clone(memory_format=torch.contiguous_format).requires_grad_()
    expected = cross_entropy(copy, y, return_stats=True)
    expected_grad = gradient(expected[0], copy)
    for inplace in (False, True):
        source = computed(base) if inplace else base
        given = cut(source)
        if kind == "expanded":
            inplace = False
        loss, stats = cross_entropy(given, y, return_stats=True, inplace_backward=inplace)
        assert torch.equal(loss, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(stats, expected[1], strict=True))
        assert torch.equal(gradient(loss, given), expected_grad)


def test_the_rest_of_a_sliced_tensor_is_not_touched():
    base, cut = _strided("offset")
    source = computed(base)
    before = source.detach().clone()
    given = cut(source)
    loss = cross_entropy(given, torch.randint(50, (3, 8)), inplace_backward=True)
    (grad,) = torch.autograd.grad(loss, base)
    assert torch.equal(cut(source.detach()), cut(grad))
    cut(before).copy_(cut(grad))
    assert torch.equal(source.detach(), before)
    grad = grad.clone()
    cut(grad).zero_()
    assert not grad.any()


def test_an_expanded_upstream_gradient():
    x, y = small_problem()
    expanded = gradient(cross_entropy(x, y, reduction="none"), x, torch.tensor(0.5).expand(2, 12))
    assert_same(expanded, gradient(cross_entropy(x, y, reduction="sum") * 0.5, x))


@in_place
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_leaks_from_ignored_tokens(reduction, inplace):
    """NaN and infinity in an ignored token's logits, weight, temperature and upstream gradient."""
    x, y = small_problem()
    y[0, 3] = y[1, 5] = -100
    clean = x.detach().clone()
    with torch.no_grad():
        x[0, 3], x[1, 5] = math.nan, math.inf
    weight, temperature, upstream = torch.ones(2, 12), torch.ones(2, 12), torch.ones(2, 12)
    weight[0, 3] = temperature[0, 3] = upstream[0, 3] = math.nan
    temperature[1, 5] = 0
    given = computed(x)
    loss, stats = cross_entropy(
        given, y, token_weight=weight, temperature=temperature, reduction=reduction, return_stats=True,
        inplace_backward=inplace,
    )  # fmt: skip
    grad = gradient(loss, given, upstream if reduction == "none" else None)
    clean.requires_grad_()
    expected = cross_entropy(clean, y, reduction=reduction)
    assert_same(loss, expected)
    assert all((s[y == -100] == 0).all() for s in stats)
    assert (grad[y == -100] == 0).all()
    assert_same(grad, gradient(expected, clean, torch.ones_like(expected)))


@pytest.mark.parametrize("tokens", [0, 6])
def test_the_mean_of_no_tokens_is_zero(tokens):
    x = torch.randn(tokens, 30, requires_grad=True)
    loss = cross_entropy(x, torch.full((tokens,), -100))
    assert loss == 0
    assert (gradient(loss, x) == 0).all()


@pytest.mark.parametrize("ignore_index", [0, 5, -1])
def test_ignore_index_may_be_any_number(ignore_index):
    x, y = small_problem(vocab=8)
    y[0, :3] = ignore_index
    assert_same(cross_entropy(x, y, ignore_index=ignore_index), plain(x, y, ignore_index=ignore_index))


@pytest.mark.parametrize("masked", [slice(0, 1), slice(0, 1500), slice(1000, 2048), slice(512, 1024)], ids=str)
def test_masked_columns(masked):
    x = torch.randn(70, 2048)
    x[:, masked] = -math.inf
    kept = x[0] != -math.inf
    x.requires_grad_()
    y = torch.arange(2048)[kept][torch.randint(500, (70,))]
    loss, stats = cross_entropy(x, y, return_stats=True)
    expected, expected_stats = cross_entropy(x[:, kept], (torch.cumsum(kept, 0) - 1)[y], return_stats=True)
    assert_same(loss, expected)
    assert_same(stats.entropy, expected_stats.entropy)
    assert (stats.correct == expected_stats.correct).all()
    grad = gradient(loss, x)
    assert_same(grad, gradient(expected, x))
    assert not grad[:, masked].any()


def test_each_row_may_have_its_own_masked_prefix():
    x = torch.randn(40, 60).masked_fill(torch.ones(40, 60).tril(-1).bool(), -math.inf).requires_grad_()
    y = torch.full((40,), 59)
    loss = cross_entropy(x, y)
    assert_same(loss, plain(x, y))
    assert_same(gradient(loss, x), gradient(plain(x, y), x))


def test_a_masked_target_costs_infinity():
    x, y = small_problem()
    with torch.no_grad():
        x[0, 0, y[0, 0]] = -math.inf
    loss, stats = cross_entropy(x, y, reduction="none", return_stats=True)
    assert loss[0, 0] == math.inf
    assert stats.log_prob[0, 0] == -math.inf
    assert loss.flatten()[1:].isfinite().all()


def test_nan_in_a_counted_token_shows():
    x, y = small_problem()
    with torch.no_grad():
        x[0, 0, 0] = math.nan
    assert cross_entropy(x, y).isnan()


@pytest.mark.parametrize("prob", [0.999, 0.9999999])
def test_small_losses_keep_their_digits(prob):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    case = Case("peaked", 64, 500, target_prob=prob, options={"reduction": "none"})
    inputs = make_inputs(case)
    (logits, target), _ = as_arguments(case, inputs, torch.float32, "cpu")
    oracle = run_oracle([logits, target], case.options, inputs)
    loss = cross_entropy(logits, target, reduction="none")
    grad = gradient(loss, logits, torch.from_numpy(inputs.grad_loss))
    bound = 8 * torch.finfo(torch.float32).eps * float(np.abs(oracle.lse).max())
    assert np.max(np.abs(loss.detach().numpy() / oracle.loss - 1)) < bound
    assert relative_error(grad.numpy(), oracle.grad_logits) < bound


def test_ties_go_to_the_first():
    stats = cross_entropy(torch.zeros(3, 9), torch.tensor([0, 1, 8]), return_stats=True)[1]
    assert stats.correct.tolist() == [True, False, False]


def test_normalizer_makes_accumulated_gradients_those_of_the_whole_batch():
    x, y = small_problem()
    y[0, :5] = -100
    whole = gradient(cross_entropy(x, y), x)
    count = int((y != -100).sum())
    for normalizer in (count, torch.tensor(count), torch.tensor(float(count)), np.int64(count)):
        parts = [cross_entropy(x[i], y[i], normalizer=normalizer) for i in range(2)]
        assert_same(gradient(sum(parts), x), whole)


def test_a_temperature_tensor_with_one_value():
    x, y = small_problem()
    for shape in ((), (2, 12)):
        assert_same(cross_entropy(x, y, temperature=torch.full(shape, 0.7)), cross_entropy(x, y, temperature=0.7))


def test_label_smoothing_of_one():
    x, y = small_problem()
    assert_same(cross_entropy(x, y, label_smoothing=1.0), plain(x, y, label_smoothing=1.0))


def test_numbers_may_be_numpys():
    x, y = small_problem()
    options = {"ignore_index": np.int64(3), "scratch_bytes": np.int64(1 << 20), "softcap": np.float32(5)}
    assert_same(cross_entropy(x, y, z_loss=np.float64(0), **options), cross_entropy(x, y, ignore_index=3, softcap=5))
