"""Every loss over a vocabulary in PyTorch: cases against the oracle, and what holds for all of them (loss_checks.py).

On a GPU the Triton kernels run here; without one they run in test_interpreted.py.
"""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from loss_checks import VALUES, bad_ids, right
from losses import CE, LCE, LLP, VOCAB, assert_near, losses
from onchip.torch import CrossEntropyLoss, LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy, log_probs
from onchip.vocab import memory
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.torch import tiles, walk

pytestmark = pytest.mark.usefixtures("unwritten_memory_shows")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = DTYPES[1:]
LOSSES = list(losses())
MEANS = [loss for loss in LOSSES if loss.options.get("reduction") != "none"]


GPU = [list(losses(backend, "cuda")) for backend in ("plain", "triton")]


def pairs(them):
    """A test of each loss and check, slow where another way through the op is enough."""
    made = {f"{check.__name__}-{loss}-{loss.backend}": (partial(check, loss), enough) for (loss, check), enough in them}
    return pytest.mark.parametrize(
        "check", [pytest.param(x, id=name, marks=[pytest.mark.slow] * enough) for name, (x, enough) in made.items()]
    )


def by_turns(them, others):
    """Each loss with each of the others; and whether the next way through its op, if there is one, is enough."""
    them = list(them)
    for i, j in itertools.product(range(len(them)), range(len(others))):
        yield (them[i], others[j]), bool((i + j) % 2 and sum(x.op is them[i].op for x in them) > 1)


@pairs(by_turns(LOSSES, VALUES))
def test_values(check):
    check()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pairs(x for them in GPU for x in by_turns(them, (*VALUES, bad_ids)))
def test_values_on_the_gpu(check):
    check()


# --------------------------------------------------------------------------------------------------- the oracle's cases

IN_16_BITS = ("small logits", "large logits", "peaked", "one class", "softcap", "everything", "smoothed class weights")


def cases(them, most=10**9):
    """Each case with one way through an op; what is hard for 16 bits with all of them in bfloat16.

    Triton's products are of 16 bits alone.
    """
    means = [loss for loss in them if loss.options.get("reduction") != "none"]
    for op in dict.fromkeys(loss.op for loss in means):
        ways = [loss for loss in means if loss.op is op]
        narrow = ways[0].linear and ways[0].backend == "triton"
        for i, case in enumerate(case for case in ways[0].own_cases() if case.vocab < most):
            hard = case.name.removesuffix(", logits") in IN_16_BITS
            for j, dtype in enumerate(HALF if narrow else DTYPES):
                if hard or (j == i % 2 if narrow else dtype == torch.float32):
                    for loss in ways if hard and dtype == torch.bfloat16 else [ways[(i + j) % len(ways)]]:
                        yield pytest.param(loss, case, dtype, id=f"{case}-{loss}-{loss.backend}-{dtype}")


@pytest.mark.parametrize(("loss", "case", "dtype"), list(cases(LOSSES, 10_000)))
def test_cases(loss, case, dtype):
    loss.assert_case(case, dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(("loss", "case", "dtype"), [x for them in GPU for x in cases(them)])
def test_cases_on_the_gpu(loss, case, dtype):
    loss.assert_case(case, dtype)


# Every size of the list at least once with every neighbour that two cores can afford: V one, ragged, just past a power
# of two, GPT-2's and Llama's; T none, one, one short of a tile, one past; H odd, not a multiple of 16, a model's.
SIZES = [
    (0, 31, 123),
    (4097, 31, 123),
    (127, 520, 1),
    (127, 520, 2049),
    (1, 2880, 2049),
    (3, 31, 50257),
    (1, 31, 128256),
]


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        pytest.param(*x, marks=[pytest.mark.slow] * enough, id="{}-{}".format(*x))
        for x, enough in by_turns(losses(few=True), SIZES)
    ],
)
def test_sizes(loss, size):
    options = {"reduction": loss.options.get("reduction", "mean")}
    loss.assert_case(loss.case("size", *size, options=options))
    if size in SIZES[:4:3]:
        loss.assert_case(loss.case("size", *size, options=options), torch.bfloat16)


@pytest.mark.parametrize("loss", MEANS, ids=str)
@pytest.mark.parametrize("std", [0.02, 30.0])
def test_logit_sizes(std, loss):
    for options in ({"softcap": 20.0}, {"label_smoothing": 0.1}):
        loss.assert_case(loss.case("std", 127, 64, 2049, logit_std=std, options=options))


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_the_gradient_of_the_entropy_alone(std):
    """With small logits log p + H is what is left of two nearly opposite numbers."""
    loss = LOSSES[-1]
    arguments, _ = loss.checks.CHECKER.as_arguments(
        case := loss.case("entropy", 127, 64, 2049, logit_std=std), loss.checks.make_inputs(case), torch.float32
    )
    given = dict(zip(("hidden", "weight", "ids"), arguments, strict=False))
    upstream = {"entropy": torch.randn(127)}
    made = loss.run(given, upstream)["grad_hidden"].numpy()
    oracle = loss.oracle(given, upstream | {"log_prob": torch.zeros(127)}).grad_hidden
    # An error of the logits, as in checks.float32_bounds, in p and in z - mean.
    logit = np.finfo(np.float32).eps * (1 + std * (np.sqrt(2 * np.log(2050)) + np.sqrt(64 / 24)))
    spread = 1 + 1 / min(std, 1.0) if std > 0.5 else 1
    assert np.linalg.norm(made - oracle) / np.linalg.norm(oracle) < 4 * logit * spread + 2e-6


# ----------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=25, deadline=None)
@drawn(st.sampled_from(LOSSES), st.integers(1, 40), st.integers(1, 90), st.booleans(), st.booleans())
def test_chunk_sizes_change_nothing(loss, token_chunk, vocab_chunk, softcap, masked):
    given = loss.problem((2, 20), vocab=90, ids=4 if loss.of_ids else None)
    given[loss.ids].clamp_(min=55)
    given[loss.ids][given[loss.ids] == 60] = -100
    with torch.no_grad():
        given["bias" if loss.linear else "logits"][..., : 55 if masked and not softcap else 0] = -np.inf
    options = {"softcap": 4.0 if softcap else None} | ({} if loss.of_ids else {"z_loss": 1e-3})
    if not loss.linear:
        problem = row_memory.RowsProblem(40, 90, softcap=softcap, stats=True, ids=4 if loss.of_ids else 0)
        right(loss, given, scratch_bytes=row_memory.scratch_bytes(problem, token_chunk), **options)
        return
    with mock.patch.object(memory, "plan", side_effect=lambda p, how, _: ChunkConfig(how, token_chunk, vocab_chunk)):
        right(loss, given, scale=2, **options)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.linear], ids=str)
def test_nothing_is_multiplied_for_what_needs_no_gradient(loss, monkeypatch):
    """Ignored tokens cost nothing either."""
    work, product = [], tiles.product

    def counted(out, a, b, **options):
        work.append(a.shape[0] * a.shape[1] * b.shape[1])
        product(out, a, b, **options)

    for module in (tiles, walk):
        monkeypatch.setattr(module, "product", counted)
    recomputes = loss.of_ids or "recompute" in loss.options.values() or loss.options.get("reduction") == "none"
    for needs in itertools.product((False, True), repeat=2):
        given = loss.problem(ids=2 if loss.of_ids else None)
        given.pop("bias")
        given[loss.ids][0, :6] = -100  # a quarter
        if loss.of_ids:
            given["ids"][1, :, 1] = -100
        for name, need in zip(("hidden", "weight"), needs, strict=True):
            given[name].requires_grad_(need)
        work.clear()
        loss.run(given)
        again = recomputes and not (loss.op is LCE.op and "stash" in loss.options.values() and not needs[1])
        products = 1 + sum(needs) + (any(needs) and again)
        assert sum(work) == products * 18 * 16 * 70, needs


# ---------------------------------------------------------------------------------- what the CPU does for other devices


@pytest.fixture
def elsewhere(monkeypatch):
    """Ids say that they lie on another device: nothing is left out, nothing raises, ignored tokens are masked."""
    select = tiles.select

    def select_elsewhere(op, name, ids, *args, **options):
        class Ids:
            device = torch.device("meta")
            ndim, shape = ids.ndim, ids.shape

            def reshape(self, *shape):
                return ids.reshape(*shape)

        return select(op, name, Ids(), *args, **options)

    monkeypatch.setattr(tiles, "select", select_elsewhere)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.linear], ids=str)
def test_on_a_device_that_is_not_read_a_bad_id_gives_nan(loss):
    given = loss.problem((2, 4), ids=2 if loss.of_ids else None)
    given[loss.ids][0, 3] = -100
    right(loss, given)
    with torch.no_grad():
        given["hidden"][0, 3] = 0
    expected = loss.run(given)
    with torch.no_grad():
        given["hidden"][0, 3] = torch.nan
    assert all(torch.equal(x, expected[name]) for name, x in loss.run(given).items())
    given["hidden"] = loss.problem((2, 4))["hidden"]
    given[loss.ids][(1, 2, 1) if loss.of_ids else (1, 2)] = 70
    made, _ = right(loss, given)
    assert made["grad_hidden"].isnan().any(-1).nonzero().tolist() == [[1, 2]]


# ----------------------------------------------------------------------------------------------------- what is returned


@pytest.mark.parametrize(("loss", "module"), [(LCE, LinearCrossEntropyLoss), (CE, CrossEntropyLoss)], ids=str)
def test_the_module_is_the_function_and_owns_nothing(loss, module):
    given = loss.problem()
    options = {"label_smoothing": 0.1, "softcap": 5.0, "reduction": "sum"}
    made = module(**options)
    assert not list(made.parameters())
    assert not made.state_dict()
    assert torch.equal(made(*given.values()) if not loss.linear else made(**given), loss.op(**given, **options))
    assert repr(made) == f"{module.__name__}(reduction='sum', label_smoothing=0.1, softcap=5.0)"
    constants = {"token_weight": torch.rand(2, 12), "temperature": torch.rand(2, 12) + 0.5, "normalizer": 7}
    constants["class_weight"] = torch.rand(VOCAB)
    assert torch.equal(module(normalizer=3)(**given, **constants), loss.op(**given, **constants))
    value, stats = module(return_stats=True)(**given)
    assert value.requires_grad
    assert not any(x.requires_grad for x in stats)
    assert [x.dtype for x in stats] == [torch.float32] * 3 + [torch.bool, torch.int64, torch.float32]
    assert repr(made := module(scratch_bytes=0.75)) == f"{module.__name__}(scratch_bytes=0.75)"
    many = loss.problem((640,), vocab=500)
    assert torch.equal(made(**many), loss.op(**many, scratch_bytes=0.75))
    for wrong in ({"reduction": "avg"}, {"softcap": 0.0}, {"backend": "x"}, {"normalizer": 0}, {"scratch_bytes": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            module(**wrong)


@pytest.mark.parametrize("loss", [LCE, CE], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_those_of_pytorch(smoothing, loss):
    given = loss.problem((40,)) | {"class_weight": torch.rand(VOCAB) + 0.1}
    given["target"][::5] = -100
    leaves = [x for x in given.values() if x.requires_grad]
    z = F.linear(*(given[n] for n in ("hidden", "weight", "bias"))) if loss.linear else given["logits"]
    for reduction in ("mean", "sum", "none"):
        how = {"label_smoothing": smoothing, "reduction": reduction}
        made = loss.op(**given, **how)
        plain = F.cross_entropy(z, given["target"], weight=given["class_weight"], **how)
        torch.testing.assert_close(made, plain)
        upstream = torch.linspace(-1, 2, 40) if reduction == "none" else torch.tensor(3.0)
        grads = [torch.autograd.grad(x, leaves, upstream, retain_graph=True) for x in (made, plain)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("loss", [LCE, CE], ids=str)
def test_classes_that_weigh_nothing(loss):
    """Their tokens count for nothing, whatever their logits are, and so they do in the mean."""
    given = loss.problem((6,)) | {"class_weight": torch.zeros(VOCAB)}
    made = loss.run(given, {"loss": torch.tensor(1.0)})
    assert not any(made[name].any() for name in made if name.startswith(("loss", "grad_")))
    with torch.no_grad():
        given["bias" if loss.linear else "logits"][..., :10] = -np.inf
    given["target"].clamp_(min=20)
    given["class_weight"][20:] = 1
    right(loss, given, label_smoothing=0.1)
    given["class_weight"][9] = 1
    assert loss.op(**given, label_smoothing=0.1) == np.inf


def test_what_linear_log_probs_returns():
    given = LLP.problem(dtype=torch.bfloat16)
    alone = LLP.op(**given)
    assert isinstance(alone, torch.Tensor)
    assert alone.dtype == torch.float32
    out = LLP.op(**given, top1=True)
    assert (out.entropy, out.lse) == (None, None)
    assert out.top1.dtype == torch.int64
    assert not out.top1.requires_grad
    out = LLP.op(**given, mean_logits=True, log_sum_sq_probs=True)
    assert out[1:4] == (None, None, None)
    assert not out.mean_logits.requires_grad
    assert not out.log_sum_sq_probs.requires_grad
    assert LLP.op(**given, lse=True).lse.requires_grad
    assert LLP.op(**given, entropy=True).entropy.requires_grad


@pytest.mark.parametrize(
    ("loss", "scratch_bytes"),
    [
        pytest.param(
            loss, x, marks=[pytest.mark.slow] * (loss is CE or (loss is LLP) == (x == "1 MiB")), id=f"{loss}-{x}"
        )
        for loss in (LCE, CE, LLP)
        for x in ("1 MiB", 0.9)
    ],
)
def test_texts_and_parts_for_scratch_compile_with_changing_sizes(loss, scratch_bytes):
    torch._dynamo.reset()
    compiled = torch.compile(partial(loss.op, scratch_bytes=scratch_bytes), fullgraph=True, backend="aot_eager")
    for tokens in (640, 960, 500):
        given = loss.problem((tokens,), vocab=500)
        assert torch.equal(compiled(**given), loss.op(**given, scratch_bytes=scratch_bytes))


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x.op in [log_probs, *(y.op for y in MEANS[:i])]), id=str(x))
        for i, x in enumerate(MEANS)
        if not x.inplace
    ],
)
def test_autocast_in_and_out_of_a_compiled_function(loss):
    torch._dynamo.reset()
    given = loss.problem()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(given):
        with torch.autocast("cpu", torch.bfloat16):
            return loss.call(given)

    with torch.autocast("cpu", torch.bfloat16):
        expected = loss.call(given)
    assert all(torch.equal(x, expected[name]) for name, x in step(given).items())
    with torch.no_grad():
        assert not step(given)[loss.values[0]].requires_grad


# ---------------------------------------------------------------------------------------------------- the causal shift


def each_position_predicts_the_next_label(loss):
    """As the oracle; and the same bits as with targets that the caller has shifted, NaN in the last position or not."""
    given = loss.problem((2, 12))
    numbers = torch.rand(2, 2, 12).to(loss.device)
    given |= {"token_weight": numbers[0], "temperature": numbers[1] + 0.5}
    given["class_weight"] = torch.rand(VOCAB).to(loss.device)
    given["target"][1, 5:7] = -100
    with torch.no_grad():
        given["hidden"][:, -1] = torch.nan
    made, _ = right(loss, given, shift=True)
    moved = {
        name: torch.nn.functional.pad(given[name][:, 1:], (0, 1), value=-100) for name in ("target", "token_weight")
    }
    expected = loss.run(given | moved, loss.upstream(made))
    assert all(torch.equal(x, expected[name]) for name, x in made.items())
    if loss.options["reduction"] == "none":
        assert made["loss"][:, -1].tolist() == [0, 0]
        torch._dynamo.reset()
        compiled = torch.compile(partial(loss.call, shift=True), fullgraph=True, backend="aot_eager")(given)
        assert_near("loss", compiled["loss"].detach(), made["loss"].cpu())


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.op is LCE.op], ids=str)
def test_each_position_predicts_the_next_label(loss):
    each_position_predicts_the_next_label(loss)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("loss", [x for them in GPU for x in them if x.op is LCE.op], ids=lambda x: f"{x}-{x.backend}")
def test_each_position_predicts_the_next_label_on_the_gpu(loss):
    each_position_predicts_the_next_label(loss)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("op", "several"), [(CE, None), (LLP, None), (LLP, 3)], ids=str)
def test_logits_and_ids_of_the_next_position(op, several, device):
    """The same bits as with those that the caller has shifted, NaN in the last position or not."""
    loss = replace(op, device=device, backend="auto", options={"entropy": True} if op is LLP else {})
    given = loss.problem((2, 12), ids=several)
    given[loss.ids][1, 5:7] = -100
    with torch.no_grad():
        given["hidden" if loss.linear else "logits"][:, -1] = torch.nan
    moved = {loss.ids: torch.full_like(given[loss.ids], -100)}
    moved[loss.ids][:, :-1] = given[loss.ids][:, 1:]
    options = {}
    if op is CE:
        weights = torch.rand(2, 12, device=device)
        given["token_weight"], moved["token_weight"] = weights, torch.nn.functional.pad(weights[:, 1:], (0, 1))
        options = {"reduction": "none"}
    made, expected = loss.run(given, shift=True, **options), loss.run(given | moved, **options)
    assert all(torch.equal(x, expected[name]) for name, x in made.items())
    assert not made[loss.values[0]][:, -1].any()
    bad = given | {loss.ids: given[loss.ids].clone()}
    bad[loss.ids][1, 3] = VOCAB
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"{loss.ids}\[1, 3{', 0' * (several is not None)}\] is {VOCAB}"):
            loss.run(bad, shift=True, **options)


@pytest.mark.parametrize("shape", [(9,), (3, 1), (2, 0), (2, 3, 4)], ids=str)
def test_labels_of_any_shape_and_dtype_are_shifted(shape):
    given = LCE.problem(shape)
    for dtype in (torch.uint8, torch.uint64, torch.int8):
        right(LCE, given | {"target": given["target"].to(dtype)}, shift=True)
    module = LinearCrossEntropyLoss(shift=True, ignore_index=2**63 - 1)
    assert torch.equal(module(**given), linear_cross_entropy(**given, shift=True))
    assert repr(module).endswith(", shift=True)")


# ------------------------------------------------------------------------------------------- a gradient over the logits


def test_in_place_the_gradient_takes_the_logits_memory():
    for reduction in ("mean", "none"):
        given = CE.problem()
        x, y = given.values()
        y[0, 0] = -100
        upstream = torch.rand(2, 12) if reduction == "none" else torch.tensor(0.3)
        expected = replace(CE, options={"reduction": reduction}).run(given, {"loss": upstream})["grad_logits"]
        logits = x * 1
        loss = cross_entropy(logits, y, reduction=reduction, inplace_backward=True)
        assert torch.equal(logits, x)
        (grad,) = torch.autograd.grad(loss, logits, upstream)
        assert grad.data_ptr() == logits.data_ptr()
        assert torch.equal(grad, expected)
    with torch.no_grad():  # nothing is overwritten without a backward
        assert torch.equal(cross_entropy(x, y, inplace_backward=True), cross_entropy(x, y))


def test_what_saved_the_logits_raises_once_they_are_overwritten():
    """Two losses of the same logits, one of which is told to overwrite them; logits whose layer needs its output."""
    x, y = CE.problem().values()
    for second in (lambda z: z.square().sum(), lambda z: cross_entropy(z, y, inplace_backward=True)):
        logits = x * 1
        first, other = cross_entropy(logits, y, inplace_backward=True), second(logits)
        first.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(torch.tanh(x), y, inplace_backward=True).backward()


def test_in_place_through_a_linear_layer():
    given = LCE.problem() | {"bias": None}
    h, w, y = given["hidden"], given["weight"], given["target"]
    expected = torch.autograd.grad(linear_cross_entropy(h, w, y), (h, w))
    cross_entropy((h @ w.T)[:, :-1], y[:, 1:], inplace_backward=True).backward()
    h.grad = w.grad = None
    (cross_entropy(h @ w.T, y, inplace_backward=True) / 3).backward()
    for leaf, grad in zip((h, w), expected, strict=True):
        torch.testing.assert_close(leaf.grad * 3, grad)
