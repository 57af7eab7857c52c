"""Checks of the values and gradients of every loss on every backend, in addition to the oracle's cases: each takes a
`Loss`.  test_every_loss.py runs them in PyTorch, and test_interpreted.py with the kernels on the CPU.
"""

import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from every_loss import check_operators
from losses import LCE, assert_near
from onchip.oracle.checks import relative_error
from onchip.oracle.torch import computed

INTEGERS = ("int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
RIGHT = {torch.float32: None, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of gradients


def right(loss, given, upstream=None, **more):
    """As the oracle's."""
    return loss.assert_right(given, upstream, **{"bound": RIGHT[loss.dtype]} | more)


def assert_equal(loss, made, expected):
    """Two results of the op by the same sums, perhaps in another order."""
    assert made.keys() == expected.keys()
    for name, x in made.items():
        assert_near(name, x, expected[name].cpu(), bound=RIGHT[loss.dtype])


def least_scratch(loss, given, **options):
    """What the refusal of a byte says that the smallest chunk needs."""
    with pytest.raises(ValueError, match=f"^{loss.op.__name__}: scratch_bytes=1 is too small") as caught:
        loss.call(given, scratch_bytes=1, **options)
    return int(re.search(r"needs? (\d+) bytes", str(caught.value))[1])


def everything(loss, given):
    """Every option that goes with the loss."""
    per_token = torch.rand(given[loss.ids].shape[:2], device=loss.device) + 0.5
    options = {"softcap": 5.0, "logit_scale": 0.5, "temperature": per_token}
    if not loss.of_ids:
        options |= {"label_smoothing": 0.1, "z_loss": 1e-3, "token_weight": per_token}
    if "mean" in loss.options.values():
        options |= {"normalizer": torch.tensor(5.0)}
    if not loss.of_ids and loss.options.get("precision") != "fp8":
        vocab = given["weight"].shape[0] if loss.linear else given["logits"].shape[-1]
        options |= {"class_weight": torch.rand(vocab, device=loss.device) + 0.5}
    return options


def few_tokens(loss):
    for tokens in (0, 1):
        loss.assert_case(loss.case("few", tokens, 31, 123, ids=2, bias=True))


def leading_dimensions(loss):
    shapes = [(), (1,), (2, 3, 4)] if loss.backend == "plain" else [(), (2, 3)]
    for shape in shapes:
        for ids in (None, 1, 3)[: 3 if loss.of_ids else 1]:
            right(loss, loss.problem(shape, ids=ids))


def every_integer_dtype(loss):
    given = loss.problem((2, 4))
    expected = loss.call(given)
    for dtype in INTEGERS if loss.backend == "plain" else ("int32", "uint8", "uint64"):
        made = loss.call(given | {loss.ids: given[loss.ids].to(getattr(torch, dtype))})
        assert all(torch.equal(made[name], x) for name, x in expected.items()), dtype


LAYOUTS = {
    "sliced": (lambda v: (2, 3, v + 14), lambda x: x[..., :-14]),
    "offset": (lambda v: (3, 4, v + 7), lambda x: x[1:, 1:, 7:]),
    "every other": (lambda v: (2, 6, 2 * v), lambda x: x[:, ::2, ::2]),
    "vocabulary first": (lambda v: (v, 2, 3), lambda x: x.permute(1, 2, 0)),
    "tokens swapped": (lambda v: (3, 2, v), lambda x: x.transpose(0, 1)),
    "shifted": (lambda v: (2, 4, v), lambda x: x[:, :-1]),
    "expanded": (lambda v: (3, v), lambda x: x.expand(2, *x.shape)),
}


def layouts(loss):
    """Strided inputs of all kinds; none is changed, nor what lies between the numbers of one that is overwritten."""
    given = loss.problem((2, 3), vocab=50)
    ones = torch.rand(2, 3, device=loss.device) + 0.5
    constants = {"temperature": ones} | ({} if loss.of_ids else {"token_weight": ones})
    indices = given[loss.ids]
    indices[0, 2] = -100
    expected = loss.run(given | constants)

    def spread(x):
        """The same numbers, each followed by another."""
        return torch.stack([x.detach(), torch.full_like(x, 3)], -1)[..., 0].requires_grad_(x.requires_grad)

    def turned(x):
        """With the first dimension's numbers side by side."""
        x = x.detach().movedim(0, -1).contiguous().movedim(-1, 0)
        return x.requires_grad_(x.is_floating_point() and x.ndim > 1)

    per_token = {name: spread(x) for name, x in constants.items()} | {loss.ids: turned(indices)}
    variants = [per_token]
    if loss.linear:
        h, w, b = (given[name] for name in ("hidden", "weight", "bias"))
        wide = torch.cat([w.detach(), torch.full_like(w, math.nan)], 1)[:, :16].requires_grad_()
        variants += [{"hidden": turned(h), "weight": wide}, {"weight": turned(w), "bias": spread(b)}]
        same = w.detach()[:1].expand(50, 16).requires_grad_()
        copied = loss.run(given | constants | {"weight": same.detach().clone().requires_grad_()})
        assert_equal(loss, loss.run(given | constants | {"weight": same}), copied)
    for change in variants:
        arguments = given | constants | change
        before = {name: (x.detach().clone(), x._version) for name, x in arguments.items()}
        assert_equal(loss, loss.run(arguments), expected)
        assert all(torch.equal(x, old) and arguments[name]._version == version
                   for name, (old, version) in before.items() for x in [arguments[name]])  # fmt: skip
    if not loss.linear:
        _layouts_of_logits(loss, constants, indices)


def _layouts_of_logits(loss, constants, indices):
    half = torch.float16 if loss.backend == "triton" and loss.device == "cpu" else torch.bfloat16
    options = {"backend": loss.backend, **constants}
    options |= {} if loss.of_ids else {"reduction": loss.options["reduction"]}
    upstream = 0.3 * torch.ones(() if "mean" in loss.options.values() else (2, 3), device=loss.device)
    for (kind, (shape, cut)), dtype in zip(LAYOUTS.items(), itertools.cycle((torch.float32, half))):
        base = torch.randn(shape(2000 if loss.device == "cuda" else 50), device=loss.device).to(dtype)
        copy = cut(base).clone(memory_format=torch.contiguous_format).requires_grad_()
        value = loss.op(copy, indices, **options)
        (expected,) = torch.autograd.grad(value, copy, upstream)
        leaf = base.clone().requires_grad_()
        if loss.inplace and kind != "expanded":
            source = computed(leaf)
            given = cut(source)
            made = loss.op(given, indices, **options, inplace_backward=True)
            (grad,) = torch.autograd.grad(made, given, upstream)
            assert torch.equal(cut(source.detach()), grad), kind
            rest = [x.clone() for x in (source.detach(), base)]
            for x in rest:
                cut(x).zero_()
            assert torch.equal(*rest), kind
        else:
            made = loss.op(cut(leaf), indices, **options)
            (grad,) = torch.autograd.grad(made, leaf, upstream)
            expected = torch.autograd.grad(cut(leaf), leaf, expected)[0]
        # Sums of another width have other roundings.
        assert_near("loss", made.detach(), value.detach().cpu())
        assert_near("grad_logits", grad, expected.cpu())


def numbers_of_other_types(loss):
    """Options as NumPy's numbers and as tensors without dimensions; a temperature of one value."""
    given = loss.problem((2, 4))
    given[loss.ids][0, 1] = 3
    options = {"ignore_index": np.int64(3), "scratch_bytes": np.int64(1 << 20), "softcap": np.float32(5)}
    options |= {} if loss.of_ids else {"label_smoothing": np.float64(1), "z_loss": np.float32(0.25)}
    right(loss, given, **options, temperature=torch.full((), 0.7, device=loss.device))
    if loss.options.get("reduction") == "mean":
        for normalizer in (torch.tensor(5), torch.tensor(5.0), np.int64(5)):  # a tensor may be on the CPU
            right(loss, given, normalizer=normalizer)


def any_ignore_index(loss):
    for index in (0, -1):
        given = loss.problem((2, 4), vocab=8)
        given[loss.ids][0, :3] = index
        right(loss, given, ignore_index=index)


def masked_vocabulary(loss):
    """-inf in the first entry, in all of the first tiles, between, at the end."""
    vocab = 2048 if loss.backend == "plain" else 600
    parts = (slice(0, 1), slice(0, 3 * vocab // 4), slice(vocab // 4, vocab // 2), slice(vocab // 2, vocab))
    for part in parts if loss.backend == "plain" or not loss.linear else parts[1:3]:
        given = loss.problem((2, 3), vocab=vocab)
        masked = torch.zeros(vocab, dtype=torch.bool, device=loss.device)
        masked[part] = True
        with torch.no_grad():
            given["bias" if loss.linear else "logits"].masked_fill_(masked, -math.inf)
        given[loss.ids] = (~masked).nonzero()[:, 0][given[loss.ids] % int((~masked).sum())]
        options = {"logit_scale": 4.0} if part.start == 0 else {}
        made, _ = right(loss, given, scale=4, **options)
        assert not (made["grad_bias"] if loss.linear else made["grad_logits"])[..., part].any()


def each_row_its_own_mask(loss):
    """-inf up to the target; in all of a row but its target."""
    if loss.linear:
        return
    given = loss.problem((6,), vocab=700)
    indices = torch.tensor([0, 255, 256, 511, 512, 699], device=loss.device)
    columns = torch.arange(700, device=loss.device)
    with torch.no_grad():
        given["logits"].masked_fill_(columns < indices[:, None], -math.inf)
        given["logits"][0, 300:] = -math.inf
        given["logits"][4].masked_fill_(columns != 512, -math.inf)
    right(loss, given | {loss.ids: indices})


def special_values(loss):
    """A masked target costs infinity, ties go to the first, and NaN in a counted token shows."""
    given = loss.problem((2, 3))
    target = given[loss.ids]
    target[0] = torch.tensor([5, 6, 7], device=loss.device)
    with torch.no_grad():
        given["bias" if loss.linear else "logits"][..., 5] = -math.inf
    if loss.of_ids:
        made = loss.call(given)
        assert torch.equal(made["log_prob"][0].isinf(), target[0] == 5)
        if loss.options["entropy"]:
            (g,) = torch.autograd.grad(made["entropy"].sum(), given["hidden" if loss.linear else "logits"])
            assert g.isfinite().all()
    else:
        for smoothing in (0.0, 0.1, 1.0):
            made = loss.call(given, label_smoothing=smoothing, reduction="none")
            assert made["loss"][0, 0] == math.inf
            assert made["log_prob"][0, 0] == -math.inf
            # The mean of all logits is infinite where one is.
            assert made["loss"][0, 1:].isfinite().all() == (smoothing == 0)
    zeros = {name: torch.zeros_like(x) for name, x in given.items() if x.is_floating_point()}
    target[0] = torch.tensor([0, 1, 69], device=loss.device)
    made = loss.call(given | zeros)
    assert made["top1" if loss.of_ids else "argmax"][0].tolist() == [0, 0, 0]
    assert loss.of_ids or made["correct"][0].tolist() == [True, False, False]
    with torch.no_grad():
        given["hidden" if loss.linear else "logits"][0, 0, 0] = math.nan
    made = loss.call(given)
    for value in loss.values:
        assert made[value].isnan().any()


def bad_ids(loss):
    """Where the device isn't read: NaN for that token alone, and `check_inputs` raises."""
    for bad in (70, 2**40, -5):
        given = loss.problem((2, 4), ids=2 if loss.of_ids else None)
        where = (1, 2, 1) if loss.of_ids else (1, 2)
        given[loss.ids][where] = bad
        given[loss.ids][0, 3] = -100
        made, _ = right(loss, given)
        first = "hidden" if loss.linear else "logits"
        assert made[f"grad_{first}"].isnan().any(-1).nonzero().tolist() == [[1, 2]]
    said = rf"{loss.ids}\[{', '.join(map(str, where))}\] is {bad}"
    with pytest.raises(ValueError, match=said):
        loss.call(given, check_inputs=True)


def one_class_has_the_gradient_of_z_loss_alone(loss):
    """All else cancels, and leaves no roundings."""
    if loss.of_ids:
        return
    given = loss.problem((5,), vocab=1)
    options = {"label_smoothing": 0.6, "z_loss": 1e-3}
    upstream = loss.upstream(loss.call(given, **options))
    made, oracle = loss.run(given, upstream, **options), loss.oracle(given, upstream, **options)
    first = "grad_hidden" if loss.linear else "grad_logits"
    bound = 1e-5 if loss.dtype == torch.float32 else 1e-2
    assert relative_error(made[first], getattr(oracle, first)) < bound


def small_losses_keep_their_digits(loss):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    if loss.dtype != torch.float32:
        return
    for prob, ids in ((0.999, 0), (0.9999999, 3 * loss.of_ids)):
        case = loss.case("peaked", 64 if loss.backend == "plain" else 6, 64, 500, target_prob=prob, ids=ids)
        inputs = loss.checks.make_inputs(case)
        if ids:  # the others would hide the gradient of the first
            inputs.grad_log_prob[:, 1:] = 0
            inputs.ids[:, ids - 1] = (inputs.ids[:, 0] + 1) % 500
        arguments, _ = loss.checks.CHECKER.as_arguments(case, inputs, torch.float32, loss.device)
        given = {n: x for n, x in zip(loss.checks.CHECKER.names, arguments, strict=True) if x is not None}
        upstream = {"log_prob": torch.from_numpy(inputs.grad_log_prob)} if loss.of_ids else {}
        if loss.of_ids and loss.options["entropy"]:
            upstream["entropy"] = torch.from_numpy(inputs.grad_entropy)
        upstream = {name: x.to(loss.device) for name, x in upstream.items()} or loss.upstream(loss.call(given))
        made = loss.run(given, upstream)
        oracle = loss.oracle(given, upstream)
        bound = 16 * torch.finfo(torch.float32).eps * float(np.abs(oracle.lse).max())
        for name in upstream:
            assert np.max(np.abs(made[name].cpu().numpy() / getattr(oracle, name) - 1)) < bound, name
        first = "grad_hidden" if loss.linear else "grad_logits"
        assert relative_error(made[first], getattr(oracle, first)) < bound


def the_smallest_scratch_is_enough(loss):
    """Several chunks of tokens and of the vocabulary, the last of each ragged."""
    tokens, vocab = (150, 1200) if loss.backend == "plain" else (8, 700)
    for dtype in (loss.dtype, torch.bfloat16) if loss.backend == "plain" else (loss.dtype,):
        given = loss.problem((tokens,), 24, vocab, ids=3 if loss.of_ids else None, dtype=dtype)
        _smallest_scratch(loss, given, vocab)


def _smallest_scratch(loss, given, vocab):
    given[loss.ids][::7] = -100
    bias = "bias" if loss.linear else "logits"
    masked = given | {bias: given[bias].detach().clone().requires_grad_()}
    with torch.no_grad():
        masked[bias][..., : vocab // 2] = -math.inf
    masked[loss.ids] = torch.where(given[loss.ids] < 0, -100, vocab // 2 + given[loss.ids] % (vocab // 2))
    capped = {"softcap": 5.0} | ({} if loss.of_ids else {"label_smoothing": 0.1})
    for arguments, options in ((given, capped), (masked, {})):
        least = least_scratch(loss, arguments, **options)
        right(loss, arguments, scratch_bytes=least, scale=4, **options)
        with pytest.raises(ValueError, match="is too small"):
            loss.call(arguments, scratch_bytes=least - 1, **options)


def every_option_in_the_operators_and_compiled(loss):
    given = loss.problem((2, 4))
    given[loss.ids][0, 0] = -100
    options = everything(loss, given)
    right(loss, given, scale=2, **options)
    check_operators(lambda: loss.run(given, **options))
    if not loss.inplace:
        torch._dynamo.reset()
        made = partial(loss.call, **options, scratch_bytes=1 << 20)
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")(given)
        expected = made(given)
        assert all(torch.equal(compiled[name], x) for name, x in expected.items())
        leaves = [x for x in given.values() if x.requires_grad]
        grads = [torch.autograd.grad(x[loss.values[0]].sum(), leaves) for x in (compiled, expected)]
        for g, q in zip(*grads, strict=True):
            assert_near("grad", g, q.cpu())


def weight_grad_out(loss):
    """Each micro-batch adds to it, unrounded; weight itself gets nothing, a backward not for it adds none."""
    if loss.op is not LCE.op:
        return
    half = loss.dtype if loss.backend == "triton" else torch.bfloat16
    for dtype, hidden, cast in ((loss.dtype, 16, False), (half, 19, False), (torch.float32, 16, True)):
        total = torch.full((70, hidden), 0.5, device=loss.device)
        expected = total.double().cpu()
        for seed in (0, 1):
            given = loss.problem((2, 4), hidden, seed=seed, dtype=dtype)
            given["target"][0, seed] = -100
            with torch.autocast(loss.device, half, enabled=cast):
                value = loss.call(given, weight_grad_out=total)["loss"]
            upstream = loss.upstream({"loss": value}) if seed else {"loss": torch.ones_like(value)}
            before = total.clone()
            (to_hidden,) = torch.autograd.grad(value, given["hidden"], upstream["loss"], retain_graph=True)
            assert torch.equal(total, before)
            for times in (1, 2):
                value.backward(upstream["loss"], retain_graph=times == 1)
            seen = {n: x.detach().to(half) if cast and x.is_floating_point() else x for n, x in given.items()}
            oracle = loss.oracle(seen, upstream)
            expected += 2 * torch.from_numpy(oracle.grad_weight)
            assert given["weight"].grad is None
            assert torch.equal(2 * to_hidden, given["hidden"].grad)
        bound = 2e-6 if loss.backend == "plain" and loss.device == "cpu" else RIGHT[half]
        assert_near("grad_weight", total - 0.5, expected - 0.5, bound=bound)
        with torch.autocast(loss.device, half, enabled=cast):
            frozen = loss.call(given | {"weight": given["weight"].detach()}, weight_grad_out=total)["loss"]
        frozen.sum().backward()
        assert_near("grad_weight", total - 0.5, expected - 0.5, bound=bound)


def an_id_that_cancels_the_softmax_is_not_rounded_away(loss):
    """A student that agrees with its teacher: of p - t nothing is left but the others' entries."""
    if not loss.of_ids or loss.options["entropy"]:
        return
    given = loss.problem((2, 2)) | {"bias": None}
    given["ids"] = torch.arange(VOCAB := 70, device=loss.device).expand(2, 2, VOCAB).contiguous()
    h, w = given["hidden"], given["weight"]
    p = torch.softmax(h.detach().double() @ w.detach().double().T, -1)
    made = loss.run(given, {"log_prob": p.float()})
    for name, other in (("grad_hidden", w), ("grad_weight", h)):
        assert float(made[name].double().abs().max()) < 1e-5 * float(other.detach().abs().max())


def upstream_of_any_kind(loss):
    """Expanded, zero, and of one output alone."""
    given = loss.problem((2, 4), ids=3 if loss.of_ids else None)
    given[loss.ids][1, 2] = -100
    if loss.of_ids:
        given[loss.ids][1, 3, 0] = -100
    made = loss.call(given)
    for name in loss.values:
        for number in (0.5, 0.0):
            alone = {name: torch.tensor(number, device=loss.device).expand(made[name].shape)}
            others = {n: torch.zeros_like(made[n]) for n in loss.values if n != name}
            expected, _ = right(loss, given, alone | others)
            if others:
                assert_equal(loss, loss.run(given, alone), expected)


def only_what_needs_a_gradient_gets_one(loss):
    given = loss.problem((2, 4))
    given[loss.ids][0, 1] = -100
    leaves = [name for name, x in given.items() if x.is_floating_point()]
    every = loss.run(given)
    for needs in itertools.product((False, True), repeat=len(leaves)):
        wanted = dict(zip(leaves, needs, strict=True))
        some = {name: x.detach().requires_grad_(wanted.get(name, False)) if name in wanted else x
                for name, x in given.items()}  # fmt: skip
        made = loss.call(some)
        assert made[loss.values[0]].requires_grad == any(needs)
        found = loss.run(some)
        assert {name for name in leaves if f"grad_{name}" in found} == {name for name in leaves if wanted[name]}
        assert_equal(loss, found, {name: every[name] for name in found})


def autocast(loss):
    """The products see 16 bits; gradients come back in each input's own dtype, rounded once.  Without autocast too,
    where hidden or weight has 16 bits."""
    half = loss.dtype if loss.dtype != torch.float32 else torch.bfloat16
    full = torch.float32
    for cast, *dtypes in ((True, full, full), (True, half, full), (False, half, full), (False, full, half)):
        if not (cast or loss.linear):
            continue
        given = loss.problem((2, 8), dtype=torch.float32)
        if loss.linear:
            for name, dtype in zip(("hidden", "weight"), dtypes, strict=True):
                given[name] = given[name].detach().to(dtype).requires_grad_()
        with torch.autocast(loss.device, half, enabled=cast):
            made = loss.run(given)
        seen = given
        if loss.linear:
            seen = {n: x.detach().to(half).float() if x.is_floating_point() else x for n, x in given.items()}
        oracle = loss.oracle(seen, loss.upstream(made))
        exact = loss.backend == "plain" and loss.device == "cpu"  # elsewhere products read the gradient in 16 bits
        for name, x in made.items():
            bound = 1e-6 if exact or not loss.linear else RIGHT[half]
            if name.startswith("grad_"):
                assert x.dtype == given[name.removeprefix("grad_")].dtype
                bound = max(bound, torch.finfo(half).eps if x.dtype == half else 0)
            assert_near(name, x, torch.from_numpy(np.asarray(getattr(oracle, name))), scale=2, bound=bound)


def float16_keeps_gradients_that_float16_can_not_hold(loss):
    """A mean over many tokens under a loss scale, or an upstream gradient, below float16's smallest number."""
    given = loss.problem((8,), dtype=torch.float16)
    with torch.no_grad():
        given["weight" if loss.linear else "logits"].mul_(0.01)
    made = loss.call(given)
    small, large = ({n: torch.full_like(made[n], x) for n in loss.values} for x in (1e-7, 1.0))
    tiny, one = loss.run(given, small), loss.run(given, large)
    for name in (n for n in one if n.startswith("grad_")):
        # What float16 can resolve at the end, no worse: its spacing there is 6e-8.
        assert float((tiny[name].double() - one[name].double() * 1e-7).abs().max()) < 4e-8, name
    if "mean" in loss.options.values():
        right(loss, given, {"loss": torch.tensor(1e8, device=loss.device)}, normalizer=1e8, bound=2e-3)


VALUES = (
    few_tokens, leading_dimensions, every_integer_dtype, layouts, numbers_of_other_types, any_ignore_index,
    masked_vocabulary, each_row_its_own_mask, special_values, small_losses_keep_their_digits,
    one_class_has_the_gradient_of_z_loss_alone,
    an_id_that_cancels_the_softmax_is_not_rounded_away, upstream_of_any_kind, only_what_needs_a_gradient_gets_one,
    the_smallest_scratch_is_enough, every_option_in_the_operators_and_compiled, weight_grad_out,
    autocast, float16_keeps_gradients_that_float16_can_not_hold,
)  # fmt: skip
