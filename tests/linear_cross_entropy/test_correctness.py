"""Against the float64 oracle: sizes, dtypes, options, layouts, special values."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import assert_right, assert_same, gradients, small_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.ops.linear_cross_entropy import torch_tiles
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.linear_cross_entropy.checks import as_arguments, run_oracle
from onchip.oracle.checks import relative_error
from onchip.torch import linear_cross_entropy
from onchip.vocab import memory
from onchip.vocab.chunks import Config

STRATEGIES = ("stash", "recompute")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    """Fill every new buffer with NaN, so that an element that is not written shows."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def filled(*args, original=original, **kwargs):
            out = original(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

        monkeypatch.setattr(owner, name, filled)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CHECK_CASES if c.vocab < 10_000], ids=str)
def test_check_cases(case, dtype, strategy):
    assert_right(case, dtype, strategy=strategy)


# Every size of the list at least once with every neighbour that two cores can afford: V one, ragged, just past a power
# of two, GPT-2's and Llama's; T none, one, one short of a tile, one past; H odd, not a multiple of 16, a model's.
SIZES = [
    (0, 31, 123), (1, 31, 123), (127, 31, 123), (4097, 31, 123),
    (0, 520, 1), (1, 520, 2049), (127, 520, 2049), (4097, 520, 2049),
    (1, 2880, 2049), (127, 2880, 123), (127, 31, 50257), (1, 520, 50257), (31, 31, 128256), (1, 127, 128256),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, strategy):
    assert_right(Case("size", *size), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [(127, 520, 2049), (1, 31, 50257), (0, 31, 123)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sizes_in_16_bits(size, dtype, strategy):
    assert_right(Case("size", *size), dtype, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_logit_sizes(std, options, strategy):
    assert_right(Case("std", 127, 520, 2049, logit_std=std, options=options), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_chunks(dtype, strategy):
    """The smallest budget: several chunks of tokens and of vocabulary, the last of each ragged."""
    case = Case("chunks", 333, 40, 2500, bias=True, ignored=0.2, options={"softcap": 5.0, "label_smoothing": 0.1})
    name = str(dtype).removeprefix("torch.")
    problem = memory.Problem(333, 40, 2500, name, grad_bias=True, softcap=True, stats=True, compacted=True)
    budget = memory.scratch_at_least(problem, strategy)
    config = memory.plan(problem, strategy, budget)
    assert config.token_chunk < 333 / 2
    assert strategy == "stash" or config.vocab_chunk < 2500 / 2
    assert_right(case, dtype, strategy=strategy, scratch_bytes=budget)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.sampled_from(["forward", *STRATEGIES]), st.booleans(), st.booleans())
def test_chunk_sizes_change_nothing(token_chunk, vocab_chunk, strategy, softcap, masked):
    hidden, weight, target, _ = small_problem(tokens=40, vocab=90)
    bias = torch.zeros(90).index_fill(0, torch.arange(55 if masked else 0), -math.inf)
    target = target.reshape(-1).clamp(min=55)
    head = torch_tiles.Head(weight.detach(), bias, 0.0, 1e-3, 4.0 if softcap else None, 1.0)
    tokens = torch_tiles.select_tokens(
        target, 90, None, None, None, ignore_index=60, reduction="mean", temperature=1.0, check_values=True
    )
    h = hidden.detach().reshape(40, -1)
    grads = (True, True, True)

    def run(token_chunk, vocab_chunk):
        config = Config(strategy, token_chunk, vocab_chunk)
        if strategy == "stash":
            softmax, *made = torch_tiles.stash(h, head, tokens, config, grads=grads, stats=True)
            return [softmax.loss(head, tokens), softmax.entropy(), softmax.argmax.float(), *made]
        softmax = torch_tiles.forward_only(h, head, tokens, config, stats=True)
        out = [softmax.loss(head, tokens), softmax.entropy(), softmax.argmax.float(), softmax.lse]
        if strategy == "recompute":
            per_token = [tokens.spread(x, target.shape) for x in (softmax.lse, softmax.log_prob(tokens))]
            out += torch_tiles.recompute(
                h, head, tokens, config, lse=per_token[0], log_prob=per_token[1], scale=tokens.inverse_count,
                grads=grads, dtypes=(torch.float32,) * 3,
            )  # fmt: skip
        return out

    for a, b in zip(run(token_chunk, vocab_chunk), run(40, 90), strict=True):
        assert_same(a, b)


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(STRATEGIES))
def test_permutations_of_tokens_and_vocabulary(random, strategy):
    h, w, y, _ = small_problem()
    h, y = h.detach().reshape(24, -1).requires_grad_(), y.reshape(-1)
    tokens, vocab = list(range(24)), list(range(70))
    random.shuffle(tokens)
    random.shuffle(vocab)
    new_place = torch.empty(70, dtype=torch.int64).index_copy_(0, torch.tensor(vocab), torch.arange(70))
    loss = linear_cross_entropy(h, w, y, strategy=strategy)
    permuted = linear_cross_entropy(h[tokens], w[vocab], new_place[y[tokens]], strategy=strategy)
    assert_same(loss, permuted)
    for a, b in zip(gradients(loss, h, w), gradients(permuted, h, w), strict=True):
        assert_same(a, b)


@settings(max_examples=10, deadline=None)
@given(st.floats(-100, 100), st.sampled_from(STRATEGIES))
def test_a_shift_of_all_logits_changes_nothing(shift, strategy):
    h, w, y, _ = small_problem()
    loss = linear_cross_entropy(h, w, y, strategy=strategy)
    shifted = linear_cross_entropy(h, w, y, torch.full((70,), shift), strategy=strategy)
    assert_same(loss, shifted, scale=abs(shift) + 1)
    for a, b in zip(gradients(loss, h, w), gradients(shifted, h, w), strict=True):
        assert_same(a, b, scale=abs(shift) + 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_repeating_the_batch_keeps_the_mean(strategy):
    h, w, y, _ = small_problem()
    once = linear_cross_entropy(h, w, y, strategy=strategy)
    thrice = linear_cross_entropy(h.repeat(3, 1, 1), w, y.repeat(3, 1), strategy=strategy)
    assert_same(once, thrice)
    for a, b in zip(gradients(once, h, w), gradients(thrice, h, w), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_every_integer_dtype_of_target(dtype):
    h, w, y, _ = small_problem()
    assert_same(linear_cross_entropy(h, w, y.to(dtype)), linear_cross_entropy(h, w, y))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(), (1,), (24,), (2, 12), (2, 3, 4)], ids=str)
def test_leading_dimensions(shape, strategy):
    h = torch.randn(*shape, 16, requires_grad=True)
    w, y = torch.randn(70, 16, requires_grad=True), torch.randint(70, shape)
    loss, stats = linear_cross_entropy(h, w, y, reduction="none", return_stats=True, strategy=strategy)
    assert loss.shape == shape
    assert all(x.shape == shape for x in stats)
    plain = F.cross_entropy(F.linear(h, w).reshape(-1, 70), y.reshape(-1), reduction="none").reshape(shape)
    assert_same(loss, plain)
    upstream = torch.randn(shape)
    for a, b in zip(gradients(loss, h, w, grad=upstream), gradients(plain, h, w, grad=upstream), strict=True):
        assert a.shape == b.shape
        assert_same(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_do_not_matter(strategy):
    h, w, y, b = small_problem(bias=True)
    plain = linear_cross_entropy(h, w, y, b, strategy=strategy, token_weight=torch.ones(2, 12))
    wide = {
        "hidden": torch.zeros(2, 24, 32).index_copy(1, torch.arange(0, 24, 2), F.pad(h, (0, 16)))[:, ::2, :16],
        "weight": w.t().contiguous().t(),
        "target": y.t().contiguous().t(),
        "bias": torch.stack([b, b], 1)[:, 0],
    }
    assert not any(x.is_contiguous() for x in wide.values())
    strided = linear_cross_entropy(*wide.values(), strategy=strategy, token_weight=torch.ones(12, 2).t())
    assert_same(plain, strided)
    for p, q in zip(gradients(plain, h, w, b), gradients(strided, h, w, b), strict=True):
        assert_same(p, q)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_expanded_upstream_gradient(strategy):
    h, w, y, _ = small_problem()
    loss = linear_cross_entropy(h, w, y, reduction="none", strategy=strategy)
    expanded = gradients(loss, h, w, grad=torch.tensor(0.5).expand(2, 12))
    again = gradients(linear_cross_entropy(h, w, y, reduction="sum", strategy=strategy) * 0.5, h, w)
    for a, b in zip(expanded, again, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_leaks_from_ignored_tokens(reduction, strategy):
    """NaN and infinity in an ignored token's hidden state, weight, temperature and upstream gradient."""
    h, w, y, b = small_problem(bias=True)
    y[0, 3] = y[1, 5] = -100
    clean = h.detach()
    with torch.no_grad():
        h[0, 3], h[1, 5] = math.nan, math.inf
    weight, temperature, upstream = torch.ones(2, 12), torch.ones(2, 12), torch.ones(2, 12)
    weight[0, 3] = temperature[0, 3] = upstream[0, 3] = math.nan
    temperature[1, 5] = 0
    options = {"reduction": reduction, "strategy": strategy}
    loss, stats = linear_cross_entropy(
        h, w, y, b, token_weight=weight, temperature=temperature, return_stats=True, **options
    )
    grads = gradients(loss, h, w, b, grad=upstream if reduction == "none" else None)
    h2 = clean.masked_fill((y == -100)[..., None], 7.0).requires_grad_()
    expected = linear_cross_entropy(h2, w, y, b, **options)
    assert_same(loss, expected)
    assert all((x[y == -100] == 0).all() for x in stats)
    assert (grads[0][y == -100] == 0).all()
    for p, q in zip(grads, gradients(expected, h2, w, b, grad=torch.ones_like(expected)), strict=True):
        assert_same(p, q)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tokens", [0, 6])
def test_the_mean_of_no_tokens_is_zero(tokens, strategy):
    h, w = torch.randn(tokens, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    loss = linear_cross_entropy(h, w, torch.full((tokens,), -100), strategy=strategy)
    assert loss == 0
    assert all((g == 0).all() for g in gradients(loss, h, w))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ignore_index", [0, 5, -1])
def test_ignore_index_may_be_any_number(ignore_index, strategy):
    h, w, y, _ = small_problem(vocab=8)
    y[0, :3] = ignore_index
    loss = linear_cross_entropy(h, w, y, ignore_index=ignore_index, strategy=strategy)
    plain = F.cross_entropy(F.linear(h, w).reshape(-1, 8), y.reshape(-1), ignore_index=ignore_index)
    assert_same(loss, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("masked", [slice(0, 1), slice(0, 1500), slice(1000, 2048), slice(512, 1024)], ids=str)
def test_masked_vocabulary(masked, strategy):
    """-inf in the first block, in all of a block, at the end; the recompute walk here has blocks of 512."""
    h, w = torch.randn(70, 8, requires_grad=True), torch.randn(2048, 8, requires_grad=True)
    bias = torch.zeros(2048)
    bias[masked] = -math.inf
    y = torch.arange(2048)[bias == 0][torch.randint(500, (70,))]
    budget = (
        None
        if strategy == "stash"
        else memory.scratch_at_least(memory.Problem(70, 8, 2048, compacted=True, stats=True), strategy)
    )
    loss, stats = linear_cross_entropy(h, w, y, bias, strategy=strategy, scratch_bytes=budget, return_stats=True)
    kept = bias == 0
    place = torch.cumsum(kept, 0) - 1
    expected, expected_stats = linear_cross_entropy(h, w[kept], place[y], return_stats=True)
    assert_same(loss, expected)
    assert_same(stats.entropy, expected_stats.entropy)
    assert (stats.correct == expected_stats.correct).all()
    for a, b in zip(gradients(loss, h, w), gradients(expected, h, w), strict=True):
        assert_same(a, b)
        assert a.isfinite().all()


def test_a_masked_target_costs_infinity():
    h, w, y, _ = small_problem()
    bias = torch.zeros(70)
    bias[y[0, 0]] = -math.inf
    loss, stats = linear_cross_entropy(h, w, y, bias, reduction="none", return_stats=True)
    assert loss[0, 0] == math.inf
    assert stats.log_prob[0, 0] == -math.inf
    assert loss[0, 1:].isfinite().all() or (y[0, 1:] == y[0, 0]).any()


def test_nan_in_a_counted_token_shows():
    h, w, y, _ = small_problem()
    with torch.no_grad():
        h[0, 0, 0] = math.nan
    assert linear_cross_entropy(h, w, y).isnan()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prob", [0.999, 0.9999999])
def test_small_losses_keep_their_digits(prob, strategy):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    case = Case("peaked", 64, 64, 500, target_prob=prob, options={"reduction": "none"})
    inputs = make_inputs(case)
    arguments, _ = as_arguments(case, inputs, torch.float32, "cpu")
    oracle = run_oracle(arguments, case.options, inputs)
    loss = linear_cross_entropy(*arguments, reduction="none", strategy=strategy)
    loss.backward(torch.from_numpy(inputs.grad_loss))
    largest = float(np.abs(oracle.lse).max())
    bound = 8 * torch.finfo(torch.float32).eps * largest
    assert np.max(np.abs(loss.detach().numpy() / oracle.loss - 1)) < bound
    assert relative_error(arguments[0].grad, oracle.grad_hidden) < bound


def test_ties_go_to_the_first():
    stats = linear_cross_entropy(torch.zeros(3, 4), torch.randn(9, 4), torch.tensor([0, 1, 8]), return_stats=True)[1]
    assert stats.correct.tolist() == [True, False, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_normalizer_makes_accumulated_gradients_those_of_the_whole_batch(strategy):
    h, w, y, _ = small_problem()
    y[0, :5] = -100
    whole = gradients(linear_cross_entropy(h, w, y), h, w)
    count = int((y != -100).sum())
    for normalizer in (count, torch.tensor(count), torch.tensor(float(count)), np.int64(count)):
        parts = [linear_cross_entropy(h[i], w, y[i], normalizer=normalizer, strategy=strategy) for i in range(2)]
        for a, b in zip(gradients(sum(parts), h, w), whole, strict=True):
            assert_same(a, b)


def test_a_temperature_tensor_with_one_value():
    h, w, y, _ = small_problem()
    number = linear_cross_entropy(h, w, y, temperature=0.7)
    for shape in ((), (2, 12)):
        assert_same(linear_cross_entropy(h, w, y, temperature=torch.full(shape, 0.7)), number)


def test_label_smoothing_of_one():
    h, w, y, _ = small_problem()
    plain = F.cross_entropy(F.linear(h, w).reshape(-1, 70), y.reshape(-1), label_smoothing=1.0)
    assert_same(linear_cross_entropy(h, w, y, label_smoothing=1.0), plain)


def test_numbers_may_be_numpys():
    h, w, y, _ = small_problem()
    options = {
        "ignore_index": np.int64(3),
        "scratch_bytes": np.int64(1 << 20),
        "softcap": np.float32(5),
        "z_loss": np.float64(0),
    }
    plain = linear_cross_entropy(h, w, y, ignore_index=3, softcap=5)
    assert_same(linear_cross_entropy(h, w, y, **options), plain)
