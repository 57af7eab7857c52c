"""Against the float64 oracle: sizes, dtypes, options, layouts, special values."""

import math

import numpy as np
import pytest
import torch
from common_llp import assert_right, assert_same, gradients, small_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.ops.linear_log_probs import reference, spec
from onchip.ops.linear_log_probs.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.linear_log_probs.checks import as_arguments, plain_linear_log_probs, run_oracle
from onchip.ops.linear_log_probs.torch_op import LogProbs, linear_log_probs
from onchip.vocab.chunks import Config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What the others below don't cover; `onchip check` runs all cases in all dtypes, with and without the entropy.
NAMES = (
    "ragged", "small logits", "large logits", "offset 1e4", "peaked", "peaked among several", "one class", "top-32",
    "all ignored", "softcap", "everything",
)  # fmt: skip
CASES = {case.name: case for case in CHECK_CASES}


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    """Fill every new buffer with NaN, so that an element that is not written shows."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def filled(*args, original=original, **kwargs):
            out = original(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

        monkeypatch.setattr(owner, name, filled)


@pytest.mark.parametrize("name", NAMES)
def test_check_cases(name):
    assert_right(CASES[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["small logits", "everything"])
def test_check_cases_in_16_bits(name, dtype):
    assert_right(CASES[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_check_cases_without_entropy(dtype):
    assert_right(CASES["everything"], dtype, entropy=False)


# V one, ragged, just past a power of two, GPT-2's and Llama's; T none, one, one short of a tile, one past; H odd, not a
# multiple of 16, a model's.
SIZES = [
    (0, 31, 123), (1, 31, 123), (4097, 31, 123), (0, 520, 1), (1, 520, 2049), (127, 520, 1), (1, 2880, 2049),
    (7, 31, 50257), (1, 31, 128256),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    assert_right(Case("size", *size))


@pytest.mark.parametrize(("dtype", "entropy"), list(zip(DTYPES, (True, False, True), strict=True)), ids=str)
def test_many_chunks(dtype, entropy):
    """The smallest budget: several chunks of tokens and of vocabulary, the last of each ragged."""
    case = Case("chunks", 333, 40, 2500, bias=True, ignored=0.2, ids=3, ignored_ids=0.2, options={"softcap": 5.0})
    name = str(dtype).removeprefix("torch.")
    problem = spec.Problem(333, 40, 2500, 3, name, grad_bias=True, softcap=True, entropy=entropy, compacted=True)
    budget = max(spec.scratch_at_least(problem, s) for s in ("forward", "recompute"))
    config = spec.plan(problem, "recompute", budget)
    assert config.token_chunk < 333 / 2
    assert config.vocab_chunk < 2500 / 2
    assert_right(case, dtype, scratch_bytes=budget, entropy=entropy)


def run(h, w, ids, b=None, upstream=None, **options):
    """log_prob, entropy, lse, top1 and the gradients of hidden and weight."""
    out = linear_log_probs(h, w, ids, b, entropy=True, lse=True, top1=True, **options)
    upstream = upstream or [torch.linspace(-1, 2, x.numel()).view(x.shape) for x in out[:3]]
    return [*out, *torch.autograd.grad(out[:3], (h, w), upstream)]


@settings(max_examples=5, deadline=None)
@given(st.integers(6, 40), st.integers(9, 90), st.booleans(), st.booleans())
def test_chunk_sizes_change_nothing(token_chunk, vocab_chunk, softcap, masked):
    h, w, ids, b = small_problem(4, tokens=40, vocab=90)
    ids, b = ids.clamp(min=55), b.detach().clone()
    ids[0, 3, 1], ids[1, 4] = -100, -100
    b[: 55 if masked else 0] = -math.inf
    options = {"softcap": 4.0 if softcap else None}
    whole = run(h, w, ids, b, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "plan", lambda problem, strategy, budget: Config(strategy, token_chunk, vocab_chunk))
        for x, y in zip(run(h, w, ids, b, **options), whole, strict=True):
            assert_same(x, y)


@settings(max_examples=5, deadline=None)
@given(st.randoms(use_true_random=False))
def test_permutations_of_tokens_vocabulary_and_ids(random):
    h, w, ids, _ = small_problem(5)
    h, ids = h.detach().reshape(24, -1).requires_grad_(), ids.reshape(24, -1)
    tokens, vocab, places = (list(range(n)) for n in (24, 70, 5))
    for x in (tokens, vocab, places):
        random.shuffle(x)
    new_place = torch.empty(70, dtype=torch.int64).index_copy_(0, torch.tensor(vocab), torch.arange(70))
    upstream = [torch.randn(24, 5), torch.randn(24), torch.randn(24)]
    plain = run(h, w, ids, upstream=upstream)
    permuted = linear_log_probs(
        h[tokens], w[vocab], new_place[ids[tokens]][:, places], entropy=True, lse=True, top1=True
    )
    grads = torch.autograd.grad(
        permuted[:3], (h, w), [upstream[0][tokens][:, places], upstream[1][tokens], upstream[2][tokens]]
    )
    assert_same(permuted.log_prob, plain[0][tokens][:, places])
    assert_same(permuted.entropy, plain[1][tokens])
    assert torch.equal(permuted.top1, new_place[plain[3][tokens]])
    for x, y in zip(grads, plain[4:], strict=True):
        assert_same(x, y)


@settings(max_examples=5, deadline=None)
@given(st.floats(-100, 100))
def test_a_shift_of_all_logits_moves_the_lse_alone(shift):
    h, w, ids, _ = small_problem()
    shifted = run(h, w, ids, torch.full((70,), shift))
    for i, (x, y) in enumerate(zip(shifted, run(h, w, ids), strict=True)):
        assert_same(x, y + shift if i == 2 else y, scale=abs(shift) + 1)


def test_repeating_the_batch_repeats_the_values_and_adds_up_the_gradients():
    h, w, ids, _ = small_problem(2)
    once = run(h, w, ids, upstream=[torch.ones(2, 12, 2), torch.ones(2, 12), torch.ones(2, 12)])
    thrice = linear_log_probs(h.repeat(3, 1, 1), w, ids.repeat(3, 1, 1), entropy=True, lse=True)
    assert_same(thrice.log_prob, once[0].repeat(3, 1, 1))
    for x, y in zip(torch.autograd.grad(sum(x.sum() for x in thrice[:3]), (h, w)), once[4:], strict=True):
        assert_same(x, 3 * y)


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_the_gradient_of_the_entropy_alone(std):
    """With small logits log p + H is what is left of two nearly opposite numbers."""
    case = Case("entropy", 127, 64, 2049, logit_std=std)
    inputs = make_inputs(case)
    inputs = inputs._replace(grad_log_prob=0 * inputs.grad_log_prob, grad_lse=0 * inputs.grad_lse)
    arguments, keywords = as_arguments(case, inputs, torch.float32, "cpu")
    oracle = run_oracle(arguments, keywords, inputs)
    out = linear_log_probs(*arguments, entropy=True, lse=True)
    grad = gradients(out, arguments, inputs)["grad_hidden"].numpy()
    # An error of the logits, as in checks.float32_bounds, in p and in z - mean.
    logit = np.finfo(np.float32).eps * (1 + std * (np.sqrt(2 * np.log(2050)) + np.sqrt(64 / 24)))
    spread = 1 + 1 / min(std, 1.0) if std > 0.5 else 1
    assert np.linalg.norm(grad - oracle.grad_hidden) / np.linalg.norm(oracle.grad_hidden) < 4 * logit * spread + 2e-6


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_every_integer_dtype_of_ids(dtype):
    h, w, ids, _ = small_problem()
    assert torch.equal(linear_log_probs(h, w, ids.to(dtype)), linear_log_probs(h, w, ids))


@pytest.mark.parametrize("shape", [(), (1,), (24,), (2, 12), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("each", [(), (1,), (3,)], ids=str)
def test_leading_dimensions(shape, each):
    h = torch.randn(*shape, 16, requires_grad=True)
    w, ids = torch.randn(70, 16, requires_grad=True), torch.randint(70, (*shape, *each))
    got = run(h, w, ids)
    assert [x.shape for x in got[:4]] == [ids.shape, shape, shape, shape]
    plain = plain_linear_log_probs(h, w, ids)
    upstream = [torch.linspace(-1, 2, x.numel()).view(x.shape) for x in plain[:3]]
    for x, y in zip(got, [*plain, *torch.autograd.grad(plain[:3], (h, w), upstream)], strict=True):
        assert_same(x, y)


def test_what_is_returned():
    h, w, ids, _ = small_problem(dtype=torch.bfloat16)
    alone = linear_log_probs(h, w, ids)
    assert isinstance(alone, torch.Tensor)
    assert alone.dtype == torch.float32
    out = linear_log_probs(h, w, ids, top1=True)
    assert isinstance(out, LogProbs)
    assert (out.entropy, out.lse) == (None, None)
    assert out.top1.dtype == torch.int64
    assert not out.top1.requires_grad
    assert linear_log_probs(h, w, ids, lse=True).lse.requires_grad
    assert linear_log_probs(h, w, ids, entropy=True).entropy.requires_grad


def test_strided_inputs():
    h, w, ids, b = (x.detach() for x in small_problem(2))
    strided = [h.transpose(0, 1).contiguous().transpose(0, 1), w.T.contiguous().T, ids.repeat(1, 1, 2)[..., :2]]
    strided.append(torch.stack((b, b), 1)[:, 0])
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in strided]
    for x, y in zip(run(*leaves), run(h.clone().requires_grad_(), w.clone().requires_grad_(), ids, b), strict=True):
        assert_same(x, y)


def test_nothing_leaks_from_ignored_tokens():
    """NaN and infinity in an ignored token's hidden state, temperature and upstream gradient."""
    h, w, ids, b = small_problem(2)
    ids[0, 3], ids[1, 5], ids[0, 4, 0] = -100, -100, -100
    dirty = h.detach().clone()
    dirty[0, 3], dirty[1, 5] = math.nan, math.inf
    tau = torch.ones(2, 12)
    tau[0, 3], tau[1, 5] = math.nan, 0
    clean = [torch.randn(2, 12, 2), torch.randn(2, 12), torch.randn(2, 12)]
    upstream = [x.clone() for x in clean]
    for x in upstream:
        x[0, 3] = math.nan
    upstream[0][0, 4, 0] = math.inf
    got = run(dirty.requires_grad_(), w, ids, b, upstream, temperature=tau)
    for x, y in zip(got, run(h, w, ids, b, clean), strict=True):
        assert_same(x, y)
    assert not any(x[0, 3].any() for x in (*got[:3], got[4]))
    assert got[3][0, 3] == -1
    assert got[0][0, 4, 0] == 0


def test_all_ignored():
    h, w, ids, _ = small_problem(3)
    got = run((h.detach() * math.nan).requires_grad_(), w, torch.full_like(ids, -100))
    assert not any(x.any() for x in (*got[:3], *got[4:]))
    assert (got[3] == -1).all()
    assert not linear_log_probs(h, w, torch.full_like(ids, 69), ignore_index=69).any()


@pytest.mark.parametrize("masked", [slice(0, 1), slice(0, 1500), slice(1000, 2048)], ids=str)
def test_masked_vocabulary(masked):
    """-inf in the first chunk, in all of a chunk, at the end; also as an id."""
    h, w = torch.randn(70, 8, requires_grad=True), torch.randn(2048, 8, requires_grad=True)
    bias = torch.zeros(2048)
    bias[masked] = -math.inf
    ids = bias.isfinite().nonzero()[torch.randint(500, (70, 2)), 0]
    problem = spec.Problem(70, 8, 2048, 2, entropy=True, compacted=True)
    budget = max(spec.scratch_at_least(problem, s) for s in ("forward", "recompute"))
    got = run(h, w, ids, bias, scratch_bytes=budget)
    upstream = [torch.linspace(-1, 2, x.numel()).view(x.shape) for x in got[:3]]
    named = dict(zip(("grad_log_prob", "grad_entropy", "grad_lse"), upstream, strict=True))
    oracle = reference.linear_log_probs(h.detach(), w.detach(), ids, bias, **named)
    for x, y in zip(got, oracle[:6], strict=True):
        assert_same(x, torch.from_numpy(np.asarray(y)))
    assert not got[5][masked].any()
    out = linear_log_probs(h, w, torch.full((70,), masked.start), bias, entropy=True)
    assert (out.log_prob == -math.inf).all()
    (grad,) = torch.autograd.grad(out.entropy.sum(), h)
    assert grad.isfinite().all()


@pytest.mark.parametrize("prob", [0.999, 0.9999999])
@pytest.mark.parametrize("ids", [0, 3])
def test_small_log_probs_keep_their_digits(prob, ids):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    case = Case("peaked", 64, 64, 500, target_prob=prob, ids=ids)
    inputs = make_inputs(case)
    if ids:  # the others would hide the gradient of the first
        inputs.grad_log_prob[:, 1:] = 0
        inputs.ids[:, ids - 1] = (inputs.ids[:, 0] + 1) % 500
    inputs = inputs._replace(grad_lse=0 * inputs.grad_lse)
    arguments, keywords = as_arguments(case, inputs, torch.float32, "cpu")
    oracle = run_oracle(arguments, keywords, inputs)
    out = linear_log_probs(*arguments, entropy=True, lse=True)
    bound = 8 * torch.finfo(torch.float32).eps * float(np.abs(oracle.lse).max())
    assert np.max(np.abs(out.log_prob.detach().numpy() / oracle.log_prob - 1)) < bound
    assert np.max(np.abs(out.entropy.detach().numpy() / oracle.entropy - 1)) < bound
    grad = gradients(out, arguments, inputs)["grad_hidden"].numpy()
    assert np.linalg.norm(grad - oracle.grad_hidden) / np.linalg.norm(oracle.grad_hidden) < 2 * bound


def test_tiny_gradients_survive_float16():
    """An upstream gradient of 1e-7 is below float16's smallest number before it meets hidden and weight."""
    h, w, ids, _ = small_problem(2, dtype=torch.float16)
    one, tiny = (
        torch.autograd.grad(linear_log_probs(h, w, ids), (h, w), torch.full((2, 12, 2), x)) for x in (1.0, 1e-7)
    )
    for small, large in zip(tiny, one, strict=True):
        # What float16 can resolve at the end, no worse: its spacing there is 6e-8.
        assert float((small.double() - large.double() * 1e-7).abs().max()) < 4e-8


def test_ties_go_to_the_first_and_nan_shows():
    out = linear_log_probs(torch.zeros(3, 4), torch.ones(9, 4), torch.tensor([0, 1, 8]), top1=True)
    assert out.top1.tolist() == [0, 0, 0]
    h, w, ids, _ = small_problem()
    with torch.no_grad():
        h[0, 0, 0] = math.nan
    out = linear_log_probs(h, w, ids, entropy=True, lse=True)
    assert all(x.isnan().nonzero().tolist() == [[0, 0]] for x in out[:3])


def test_on_a_device_that_is_not_read_a_bad_id_gives_nan(monkeypatch):
    """The walk that CUDA takes: nothing is left out, nothing raises; ignored tokens are masked."""
    from onchip.ops.linear_log_probs import torch_walks

    h, w, ids, b = small_problem(2)
    ids[0, 3], ids[1, 5, 0] = -100, -100
    expected = run(h, w, ids, b)
    select = torch_walks.select

    def select_on_gpu(ids, *args, **options):
        class Elsewhere:
            """Ids that say that they lie elsewhere."""

            device = torch.device("meta")
            ndim, shape = ids.ndim, ids.shape

            def reshape(self, *shape):
                return ids.reshape(*shape)

        monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.zeros(*a))
        return select(Elsewhere(), *args, **options)

    monkeypatch.setattr(torch_walks, "select", select_on_gpu)
    for entropy in (True, False):
        with torch.no_grad():
            h[0, 3] = math.nan
        out = linear_log_probs(h, w, ids, b, entropy=entropy, lse=True)
        assert_same(out.log_prob, expected[0])
        kept = [x for x in out[:3] if x is not None]
        grads = torch.autograd.grad(kept, (h, w), [torch.linspace(-1, 2, x.numel()).view(x.shape) for x in kept])
        if entropy:
            for x, y in zip(grads, expected[4:], strict=True):
                assert_same(x, y)
        assert all(g.isfinite().all() for g in grads)
    bad = ids.clone()
    bad[1, 7, 1] = 70
    out = linear_log_probs(h, w, bad, b, entropy=True)
    assert out.log_prob.isnan().nonzero().tolist() == [[1, 7, 1]]
    assert out.entropy.isfinite().all()
    (grad,) = torch.autograd.grad(out.log_prob, h, torch.ones(2, 12, 2))
    assert grad.isnan().any(-1).nonzero().tolist() == [[1, 7]]
