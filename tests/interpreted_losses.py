"""The Triton kernels of every loss under Triton's interpreter, on the CPU: what test_interpreted.py starts.

TRITON_INTERPRET=1 python interpreted_losses.py NAME ...     prints a line of JSON for each check
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import edges
import every_loss
import interpreted_soft_labels
from bits import assert_digits_stay_inside, triton_bits
from fp8_linear import fp8_interpreter
from interpreter import main, registering
from linear_cross_entropy import lce_fp8_cases as fp8_cases
from loss_checks import RIGHT, VALUES, assert_equal, bad_ids, each_row_its_own_mask, least_scratch, right
from losses import LCE, LLP, assert_near, losses, memory_off_by_256, mixed_plan, plan_in_forward, small_tiles
from numbers_kept import assert_is_tanh, assert_rounds
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.torch import linear_cross_entropy
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.triton import records, setup, walks
from tanh import triton_tanh

LOSSES = {str(loss): loss for loss in losses("triton", few=True)}
STASH, RECOMPUTE, ROWS, IN_PLACE, OF_LOGITS, LOG_PROBS, ENTROPY = LOSSES.values()
AUTO = replace(STASH, options={"reduction": "mean"})
# Each for every other loss, so for one of the two ways that most ops have; on a GPU all run for all.
CHECKS = {f"{check.__name__}-{name}": partial(check, loss)
          for i, (name, loss) in enumerate(LOSSES.items()) for j, check in enumerate((*VALUES, bad_ids))
          if (i + j) % 2 == 0}  # fmt: skip
# What depends on kernels; linear_jsd takes the longest, and jsd has the same operators.  What an operator is to
# autograd and to a compiler is the same for 'plain'.
CHECKS |= {name: f for name, f in every_loss.CHECKS.items()
           if name.startswith(("ignored_tokens", "inputs_left_alone", "retained_graph", "schema_is_true",
                               "interrupted", "default_dtype", "negated_upstream"))
           and not name.startswith("ignored_tokens-linear_jsd-none")}  # fmt: skip
# All of these run for 'plain' on the CPU, and for the kernels on a GPU.
SLOW = set(CHECKS) - {"small_losses_keep_their_digits-cross_entropy-inplace-none"}  # the only quick one of a p near 1
CHECKS |= interpreted_soft_labels.CHECKS
SLOW |= interpreted_soft_labels.SLOW
check = registering(CHECKS)


@check(*edges.BY_KERNELS)
def operator(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        edges.check_kernels(name, "cpu")
    finally:
        dist.destroy_process_group()


SLOW.add("operator-linear_jsd beta=0.3")


# --------------------------------------------------------------------------------------------------- the oracle's cases

# Of the options that a way through the kernels is chosen by; the others are taken by the one or the other.
BOTH = ("ragged", "masked vocab", "everything", "per token", "one class", "smoothed class weights")
# The others are slow, as are the second ways.
QUICK = ("ragged", "everything", "softcap")


def small(case):
    """Fewer numbers where more are more of the same: the interpreter takes 20 ms for each tile."""
    return replace(case, tokens=min(case.tokens, 20), vocab=min(case.vocab, 700))


for _loss, _other in ((STASH, RECOMPUTE), (ROWS, IN_PLACE), (OF_LOGITS, OF_LOGITS), (LOG_PROBS, ENTROPY)):
    _cases = [small(case) for case in _loss.own_cases() if case.vocab < 10_000]
    for _i, _case in enumerate(_cases):
        for _chosen in (_loss, _other) if _case.name in BOTH else ((_loss, _other)[_i % 2],):
            CHECKS[f"case-{_case}-{_chosen}"] = partial(_chosen.assert_case, _case)
            if not _case.name.startswith(QUICK) or _chosen is not _loss:
                SLOW.add(f"case-{_case}-{_chosen}")
for _name in ("per token", "everything"):
    _case = next(small(case) for case in ROWS.checks.CHECK_CASES if case.name == _name)
    CHECKS[f"case-{_name}-float16"] = partial(IN_PLACE.assert_case, _case, torch.float16)


# ---------------------------------------------------------------------------- where the exponentials of logits are kept

MIXED = {
    # 136 is a multiple of 8, for descriptors; 131 is none.
    "descriptors": LCE.case("mixed", 300, 136, 600),
    "pointers": LCE.case("mixed", 300, 131, 600, logit_std=30.0),
    "everything held": LCE.case(
        "mixed", 300, 136, 600, bias=True, ignored=0.1, token_weight=True, class_weight=True, token_temperature=True,
        options={"z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
    ),
    "per token": LCE.case("mixed", 300, 136, 600, ignored=0.1, zipf=True, options={"reduction": "none"}),
    "few tokens left": LCE.case("mixed", 300, 136, 600, ignored=0.8),
    "ids": replace(LLP, options={"entropy": True}).case("mixed", 264, 136, 400, bias=True, ids=2, ignored=0.02),
}  # fmt: skip


@check(*MIXED)
def mixed(name):
    case = MIXED[name]
    with mixed_plan(halves=name in ("pointers", "everything held", "ids")) as planned:
        (ENTROPY if name == "ids" else AUTO).assert_case(case)
    assert planned.called


@check("everything held", "ids")
def tiles_of_fewer_tokens(name):
    """As where the compiler keeps too little in registers."""
    with mock.patch.object(records.Launch, "spills", return_value=True), mixed_plan(halves=False):
        (ENTROPY if name == "ids" else AUTO).assert_case(MIXED[name])


# Gradients that forward computes, by chunks of 128 tokens.
IN_FORWARD = {
    "descriptors": AUTO.case("forward", 140, 136, 600, ignored=0.1, token_weight=True,
                            options={"z_loss": 1e-3, "label_smoothing": 0.2, "normalizer": 100}),
    "few tokens left": AUTO.case("forward", 260, 24, 300, ignored=0.8, class_weight=True, options={"z_loss": 1e-3}),
}  # fmt: skip


@check(*IN_FORWARD)
def in_forward(name):
    with plan_in_forward():
        AUTO.assert_case(IN_FORWARD[name])


@check(*IN_FORWARD)
def a_longer_first_chunk(name):
    """Some of whose exponentials wait in the memory of the weight's gradient: of 136 columns, those of 128 tokens."""
    with plan_in_forward(first=256):
        AUTO.assert_case(replace(IN_FORWARD[name], hidden=136, tokens=400))


@check(("256", 0.5), ("264", 0.1), ("256", 0.1), ("264", 0.5))
def exponentials_where_digits_will_be(hidden, ignored):
    """Of a longer first chunk: of 640 tokens the gradient's memory holds 256, that of its digits 128, which may be more
    than they take.
    """
    given = replace(IN_FORWARD["few tokens left"], hidden=int(hidden), tokens=900, vocab=300)
    with plan_in_forward(first=640):
        AUTO.assert_case(replace(given, ignored=ignored))


@check("linear_cross_entropy", "linear_log_probs")
def a_frozen_weight(name):
    """Hidden's gradient is left in 24 bits, which backward multiplies and rounds, also of a retained graph."""
    loss = LOG_PROBS if name == "linear_log_probs" else replace(AUTO, options={"reduction": "none"})
    given = loss.problem((140,), 24, 300, ids=2 if loss.of_ids else None)
    given |= {name: given[name].detach() for name in ("weight", "bias") if name in given}
    given[loss.ids][:: 2 if loss.of_ids else 9] = -100
    options = {} if loss.of_ids else {"softcap": 5.0}
    with plan_in_forward():
        made = loss.call(given, **options)
        upstream = loss.upstream(made)
        outputs, grads = [made[n] for n in upstream], list(upstream.values())
        first, second = (torch.autograd.grad(outputs, given["hidden"], grads, retain_graph=x)[0] for x in (True, False))
    assert torch.equal(first, second)
    right = torch.from_numpy(loss.oracle(given, upstream, **options).grad_hidden)
    assert_near("grad_hidden", first, right, bound=RIGHT[loss.dtype])


@check("mixed", "retained")
def memory_at_multiples_of_256_bytes(way):
    with memory_off_by_256():
        if way == "retained":
            a_retained_graph(str(AUTO))
        else:
            with mixed_plan():
                AUTO.assert_case(AUTO.case("off", 300, 136, 600, bias=True, ignored=0.1))


@check(str(ENTROPY))
def a_retained_graph(name):
    """Exponentials in scratch and in the weight's gradient: backward makes gradients of them in place."""
    loss = AUTO if name == str(AUTO) else LOSSES[name]
    given = loss.problem((300,) if loss is AUTO else (24,), 136, 250, ids=2 if loss.of_ids else None)
    scratch = triton_memory.TritonPlan(24, 256, 256, kept_in_scratch=128)
    with mixed_plan() if loss is AUTO else mock.patch.object(triton_planner, "plan", return_value=scratch):
        made = loss.call(given)
        upstream = loss.upstream(made)
        leaves = [x for x in given.values() if x.requires_grad]
        first = []
        for retain in (True, True, False):
            grads = torch.autograd.grad(
                [made[n] for n in upstream], leaves, list(upstream.values()), retain_graph=retain
            )
            first = first or [g.clone() for g in grads]
            assert all(torch.equal(p, q) for p, q in zip(grads, first, strict=True))
            for g in grads:
                g.mul_(3)  # what a caller does with its gradients must not reach the graph


@check("mixed", "ids")
def a_weight_whose_columns_lie_in_rows(way):
    """It is read as it lies, here by descriptors."""
    loss = ENTROPY if way == "ids" else AUTO
    given = loss.problem((300 if way == "mixed" else 20,), 136, 304, ids=3 if way == "ids" else None)
    given["weight"] = (given["weight"].detach() / 8).requires_grad_()
    turned = given["weight"].detach().T.contiguous().T.requires_grad_()
    with mixed_plan() if way == "mixed" else nullcontext():
        expected, made = (loss.run(given | {"weight": w}) for w in (given["weight"], turned))
    assert_equal(loss, made, expected)


@check("linear_cross_entropy", "linear_log_probs")
def the_weight_is_copied_once(op):
    """For autocast, where exponentials are kept; in forward and two backwards where logits are recomputed."""
    loss = LOG_PROBS if op == "linear_log_probs" else AUTO
    given = loss.problem((140,), 24, 300, ids=2 if loss.of_ids else None)
    weight = given["weight"].detach()
    narrow = weight.to(torch.float16).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    given["hidden"] = given["hidden"].detach().to(torch.float16).requires_grad_()
    for options, times in [({}, 1)] if loss.of_ids else [({"strategy": "stash"}, 1), ({"strategy": "recompute"}, 3)]:
        expected = loss.run(given | {"weight": narrow}, **options)
        with (
            torch.autocast("cpu", torch.float16),
            mock.patch.object(setup, "product_weight", wraps=setup.product_weight) as copied,
        ):
            made = loss.call(given | {"weight": wide}, **options)
            upstream = loss.upstream(made)
            first, second = (
                torch.autograd.grad([made[n] for n in upstream], wide, list(upstream.values()), retain_graph=retain)[0]
                for retain in (True, False)
            )
        assert copied.call_count == times
        assert torch.equal(first, second)
        assert first.dtype == torch.float32
        assert_near("grad_weight", first.half(), expected["grad_weight"].double(), bound=1e-3)


@check("linear_cross_entropy", "linear_log_probs")
def forward_in_chunks_of_tokens(op):
    loss = ENTROPY if op == "linear_log_probs" else replace(AUTO, options={"reduction": "none"})
    given = loss.problem((140,), 24, 300, ids=2 if loss.of_ids else None)
    given[loss.ids][::9] = -100
    given = {name: x.detach() for name, x in given.items()}
    options = {"softcap": 5.0} | ({} if loss.of_ids else {"label_smoothing": 0.1, "z_loss": 1e-3})
    with mock.patch.object(triton_planner, "plan", return_value=triton_memory.TritonPlan(128)):
        right(loss, given, **options)


@check("stash", "recompute", "out")
def repeated_labels(how):
    """The first two tokens of a vocabulary entry have their target's term added apart, further ones don't."""
    loss = replace(AUTO, options={"reduction": "mean"} | ({} if how == "out" else {"strategy": how}))
    given = loss.problem((260,), 136, 600)
    given["weight"] = (given["weight"].detach() / 12).requires_grad_()
    # One, two, three and many tokens, in one block of them and across blocks, and none where the first is ignored.
    y = torch.arange(260)
    y[1] = y[2] = 1
    y[3] = y[130] = y[259] = 259
    y[10:60] = 7
    y[200:250] = 7
    y[70], y[71] = -100, 70
    given["target"] = y
    if how == "out":
        out = torch.zeros(600, 136)
        loss.call(given, weight_grad_out=out)["loss"].backward()
        grads, oracle = out, loss.oracle(given, {})
    else:
        made, oracle = right(loss, given, scale=4)
        grads = made["grad_weight"]
    expected = torch.from_numpy(oracle.grad_weight)
    for label in (1, 7, 70, 100, 259):
        assert_near("grad_weight", grads[label], expected[label], bound=RIGHT[torch.float16])


@check("least", "twice the least")
def compiled_with_a_budget_and_sizes_that_change(budget):
    """Planned where the operator runs: while it is traced, sizes are symbols."""

    def step(given, size):
        return AUTO.call(given, scratch_bytes=size)["loss"]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (8, 10, 14):
        given = AUTO.problem((tokens,))
        size = least_scratch(AUTO, given) * (1 if budget == "least" else 2)
        leaves = [x for x in given.values() if x.requires_grad]
        for p, q in zip(*(torch.autograd.grad(f(given, size), leaves) for f in (step, compiled)), strict=True):
            assert torch.equal(p, q)


@check()
def compiled_once_for_any_vocabulary():
    """Its size stays a symbol, where gradients are collected too: a graph for each would be compiled."""
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda given: AUTO.call(given)["loss"], fullgraph=True, backend=graphs, dynamic=True)
    counts = []
    for tokens, vocab in ((24, 304), (40, 304), (40, 264)):
        given = AUTO.problem((tokens,), hidden=128, vocab=vocab)
        torch.autograd.grad(compiled(given), [x for x in given.values() if x.requires_grad])
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * len(counts)


# -------------------------------------------------------------------------------------------- rows of logits that exist


MANY_TILES = {
    "plain": ROWS.case("tiles", 3, 0, 1000),
    "full": ROWS.case("tiles", 3, 0, 768, logit_std=30.0),
    "odd": ROWS.case("tiles", 3, 0, 523, ignored=0.3, options={"reduction": "sum"}),
    "everything": ROWS.case(
        "tiles", 3, 0, 1000, masked=600, sliced=24, ignored=0.3, token_weight=True, token_temperature=True,
        options={"z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
    ),
    "smoothing": ROWS.case("tiles", 3, 0, 600, class_weight=True,
                           options={"label_smoothing": 0.1, "softcap": 15.0, "reduction": "none"}),
    "offset": ROWS.case("tiles", 3, 0, 600, logit_offset=1e4, options={"label_smoothing": 0.1}),
}  # fmt: skip


@check(*MANY_TILES)
def many_tiles(name):
    with small_tiles() as used:
        ROWS.assert_case(MANY_TILES[name])
        if name in ("odd", "everything"):
            IN_PLACE.assert_case(MANY_TILES[name], torch.float16)
    assert used.called


@check("plain", "offset", "everything")
def several_ids_in_many_tiles(name):
    more = {"ids": 3, "masked": 600, "ignored": 0.3, "token_temperature": True, "options": {"softcap": None}}
    case = OF_LOGITS.case(
        "tiles", 3, 0, 1000, **{"plain": {}, "offset": {"logit_offset": 1e4}, "everything": more}[name]
    )
    with small_tiles() as used:
        for entropy in (True, False):
            OF_LOGITS.assert_case(case, entropy=entropy)
    assert used.called


@check()
def masks_ties_and_bad_labels_in_many_tiles():
    with small_tiles():
        each_row_its_own_mask(ROWS)
        ties = {"logits": torch.zeros(4, 600), "target": torch.tensor([0, 1, 256, 599])}
        made = ROWS.call(ties)
        assert made["correct"].tolist() == [True, False, False, False]
        assert made["argmax"].tolist() == [0, 0, 0, 0]
        given = IN_PLACE.problem((4,), vocab=600)
        given["target"][1] = 2**40
        right(IN_PLACE, given)


@check()
def three_strides_of_rows_are_refused():
    x = torch.randn(4, 4, 4, 10)[::2, ::2, ::2]
    with pytest.raises(ValueError, match="backend 'triton' can't run this call: its logits' leading dimensions must"):
        ROWS.call({"logits": x, "target": torch.zeros(2, 2, 2, dtype=torch.int64)})
    ROWS.call({"logits": x[0], "target": torch.zeros(2, 2, dtype=torch.int64)})


@check()
def labels_sorted_by_counting():
    """In the order of a stable sort."""
    h, w = torch.randn(150, 16).half(), torch.randn(40, 16).half()
    y = torch.randint(40, (150,))
    made = []
    for most in (walks.MOST_COUNTED, 0):
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        with mock.patch.object(walks, "MOST_COUNTED", most):
            value = linear_cross_entropy(*leaves, y, ignore_index=7, backend="triton", strategy="stash")
            value.backward()
        made.append([x.grad for x in leaves])
    assert all(torch.equal(p, q) for p, q in zip(*made, strict=True))


@check()
def tanh_at_any_size():
    assert_is_tanh(partial(triton_tanh, device="cpu"))


@check(12, 16, "rounded")
def floats_of_few_digits(way):
    digits = 16 if way == 16 else 12
    assert_rounds(partial(triton_bits, device="cpu", paired=digits == 12, rounded=way == "rounded"), digits)


@check(4, 8)
def a_float32_gradient_of_few_digits(bits):
    """Each row of it, the first ones too, in the memory of the 16 bits that come first."""
    vocab, hidden, pairs = 300, 24, triton_memory.PAIRS
    value = torch.randint(-(2**31), 2**31, (vocab, hidden), dtype=torch.int64).to(torch.int32)
    value &= 0x3FFFFFFF & -(1 << (16 - bits))  # finite, and of so many digits beyond the first 16 bits
    digits = (value >> (16 - bits) & (1 << bits) - 1).to(torch.uint8)
    if bits == 4:  # of two rows in each
        halves = torch.nn.functional.pad(digits, (0, 0, 0, -vocab % pairs)).view(-1, 2, pairs // 2, hidden)
        digits = (halves[:, 0] | halves[:, 1] << 4).reshape(-1, hidden)
    out = torch.empty(vocab, hidden)
    first = out.view(-1).view(torch.int16)[: value.numel()].view(vocab, hidden)
    first.copy_((value >> 16).to(torch.int16))
    run = SimpleNamespace(
        vocab=vocab,
        hidden=hidden,
        launch=lambda kernel, grid, **more: Launch(kernel, grid, {"V": vocab, "H": hidden, **more}),
    )
    walks._scale_weight(run, records.Sum(first, digits), out, torch.tensor(0.5), rounded=False, add=False)
    assert torch.equal(out, value.view(torch.float32) / 2)


@check()
def digits_stay_inside():
    assert_digits_stay_inside("cpu")


# ------------------------------------------------------------------------------------------------------ products in FP8


@check("ragged", "small", "everything", "classes")
def in_fp8(name):
    """The same as PyTorch's operations make of the same problem, in chunks of 128 tokens."""
    (case,) = (c for c in fp8_cases.CASES if c.name == name)
    with mock.patch.object(fp8_op.memory, "DEFAULT_CHUNK", 128):
        made, right = (fp8_cases.results(case, torch.float32, backend=b)[0] for b in ("triton", "plain"))
    # A number that is nearly between two of E4M3 may come out as the one or the other.
    fp8_cases.assert_alike(made, right, 1e-5, 2e-3)


@check("probs", "dense")
def soft_labels_in_fp8(form):
    """The same, with statistics, of labels in chunks of 128 tokens."""
    with mock.patch.object(fp8_op.memory, "DEFAULT_CHUNK", 128):
        given, options = fp8_cases.soft_problem(form, 140, 40, 200), fp8_cases.of_every_kind(140, 200)
        made, right = (fp8_cases.soft_results(given, options, backend=b) for b in ("triton", "plain"))
        fp8_cases.assert_alike(made, right, 1e-5, 2e-3)


@check()
def in_fp8_of_any_strides():
    """Without statistics, of some gradients alone."""
    h, w, b = torch.randn(40, 24), torch.randn(70, 24), torch.randn(140)[::2]
    y = torch.randint(70, (40,))
    y[3] = -100
    for needs in ((True, False), (False, True), (False, False)):
        made = []
        for change in (torch.clone, lambda x: x.T.contiguous().T):
            leaves = [change(x).requires_grad_(need) for x, need in zip((h, w), needs, strict=True)]
            bias = b.clone(memory_format=torch.contiguous_format) if change is torch.clone else b
            loss = linear_cross_entropy(*leaves, y, bias, precision="fp8", backend="triton")
            if any(needs):
                loss.backward()
            made.append([loss.detach(), *(x.grad for x in leaves if x.requires_grad)])
        assert all(torch.equal(p, q) for p, q in zip(*made, strict=True)), needs


def four_slices(tokens, hidden, room=None):
    """Of the vocabulary: more than it has tiles, or fewer.  A GPU's are as many as it runs programs at once."""
    return False, 4 if room is None else min(4, room // tokens)


def every_backend(device):
    return {"plain": None, "triton": None}


# Between what is quick: other sizes, or fewer options.
SLOW |= {
    "mixed-per token", "mixed-few tokens left", "in_forward-few tokens left", "many_tiles-full", "many_tiles-odd",
    "many_tiles-offset", "several_ids_in_many_tiles-plain", "several_ids_in_many_tiles-offset",
    "repeated_labels-out", "compiled_with_a_budget_and_sizes_that_change-twice the least",
    "a_weight_whose_columns_lie_in_rows-mixed", "forward_in_chunks_of_tokens-linear_log_probs",
    "in_fp8-ragged", "in_fp8-small", "compiled_with_a_budget_and_sizes_that_change-least", "repeated_labels-stash",
    "mixed-descriptors", "mixed-ids", "soft_labels-mixed", "a_longer_first_chunk-few tokens left",
    "the_weight_is_copied_once-linear_log_probs", "memory_at_multiples_of_256_bytes-retained",
    "a_retained_graph-linear_log_probs-entropy", "exponentials_where_digits_will_be-256-0.1",
    "exponentials_where_digits_will_be-264-0.5", "exponentials_where_digits_will_be-264-0.1",
    "a_longer_first_chunk-descriptors", "a_frozen_weight-linear_log_probs",
    "tiles_of_fewer_tokens-ids", "mixed-pointers",
}  # fmt: skip
assert CHECKS.keys() >= SLOW

if __name__ == "__main__":
    # FP8's products are those of dequantised numbers, and logits are stored in float32: the interpreter computes
    # bfloat16 wrongly.
    fp8_interpreter.mend()
    with (
        # (Not a Mock: torch.compile looks into it.)
        mock.patch.object(fp8_op, "refusals", every_backend),
        mock.patch.object(fp8_op.walk, "LOGITS", torch.float32),
        mock.patch.object(triton_memory, "hidden_sums", lambda *sizes: four_slices(*sizes)[1]),
        mock.patch.object(walks, "chunk_hidden", four_slices),
    ):
        main(CHECKS, sys.argv[1:])
