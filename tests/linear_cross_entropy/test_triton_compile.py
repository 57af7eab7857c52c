"""The kernels of linear losses compile for each kind of GPU, fit its shared memory, and spill nothing.  No GPU is
needed for that.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import ahead_of_time
import pytest
import torch
import triton
from ahead_of_time import (
    PRODUCTS,
    compile_all,
    is_serialized,
    launches,
    recording,
    turned,
    unused_barriers,
    weights_read,
)
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from onchip.kernels.triton import trial
from onchip.torch import linear_cross_entropy, linear_log_probs
from onchip.vocab.triton import gradients as triton_gradients
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import softmax as triton_softmax
from onchip.vocab.triton import sums as triton_sums
from onchip.vocab.triton import vectors as triton_vectors

# What only linear_log_probs launches.
OF_LOG_PROBS = {"spread_log_probs", "entropy_gradient", "write_entries"}
# Where ranks share a vocabulary: tests/manifests compile them.
OF_SHARDS = {"combine_shards", "number_ids", "scale_rounded", "shard_rows"}
# Compute capability, and bytes of shared memory that a block may use: H100, A100, and GeForce from Ampere on.
HOPPER, AMPERE, CONSUMER = (90, 232448), (80, 166912), (86, 101376)
# Exponentials in the weight gradient's memory, in scratch, and computed again in two chunks.
MIXED = {"plan": triton_spec.TritonPlan(300, 512, 256, kept_in_gradient=128, kept_in_scratch=128)}
OPTIONS = {
    "held": {"strategy": "stash"},
    "mixed": {"bias": True, "z_loss": 1e-3, "label_smoothing": 0.1} | MIXED,
    "in halves": {"plan": replace(MIXED["plan"], halves=True)},
    "everything": {
        "bias": True, "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3, "temperature": torch.ones(300),
        "token_weight": torch.ones(300), "class_weight": torch.ones(1000), "return_stats": True,
    },
    "added": {"weight_grad_out": True, "strategy": "recompute"},
    "labels": {"labels": torch.bfloat16},
    "all of labels": {"labels": torch.float32, "bias": True, "softcap": 5.0, "class_weight": torch.ones(1000)},
    "statistics of labels": {"labels": torch.bfloat16, "class_weight": torch.ones(1000), "return_stats": True},
    "in forward": {"plan": triton_spec.TritonPlan(128, in_forward=True), "softcap": 5.0},
    "in forward, added": {"plan": triton_spec.TritonPlan(128, in_forward=True), "weight_grad_out": True},
}  # fmt: skip

# "all of labels" has the kernels with more in their epilogues.
LIKE_OTHERS = ("labels", "statistics of labels")


def assert_fits(found, limit):
    for k in found:
        assert k.shared <= limit, (k.kernel, k.constants, k.shared)


def assert_no_spills(found):
    """But for what a logit's epilogue needs beyond the plain one: there the product has taken most registers."""
    for k in found:
        wanted = [name for name in ("offset_sum", "moment", "inner_scale", "even") if k.constants.get(name)]
        allowed = 512 if wanted else 24 if k.constants.get("bias") or k.constants.get("labels") else 0
        assert k.stack <= allowed, (k.kernel, k.constants, k.stack)


def products(found):
    return [k for k in found if k.kernel in PRODUCTS]


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in OPTIONS),
        ("mixed", True),
        pytest.param("everything", True, marks=pytest.mark.slow),
    ],
)
def test_hopper(options, columns):
    weight = turned(1000, 512) if columns else None
    made = launches(HOPPER, weight=weight, **OPTIONS[options])
    assert weight is None or weights_read(made) == {weight.data_ptr()}  # as it lies, forward and backward
    found = compile_all(made, HOPPER[0])
    assert {k.kernel for k in products(found)} >= set(PRODUCTS) - {"gradient_tiles"}
    assert_fits(found, HOPPER[1])
    assert_no_spills(found)
    for k in products(found):
        assert "wgmma.mma_async" in k.ptx, k.kernel
        assert k.constants["TMA"]
        assert "cp.async.bulk.tensor" in k.ptx, k.kernel


def test_the_options_reach_every_kernel_and_both_of_its_ways():
    made = [(x.kernel.__name__, x.arguments) for options in OPTIONS.values() for x in launches(HOPPER, **options)]
    in_files = {
        name
        for module in (triton_softmax, triton_gradients, triton_sums, triton_vectors)
        for name, f in vars(module).items()
        if hasattr(f, "params") and f.__module__ == module.__name__ and not name.startswith("_")
    }
    of_rows = {"reduce_losses"}
    assert {name for name, _ in made} - of_rows == in_files - OF_LOG_PROBS - OF_SHARDS
    for name, switch in (("softmax_tiles", "buffer"), ("weight_gradient", "ADD"), ("hidden_gradient", "scaled")):
        there = {bool(x[switch]) for kernel, x in made if kernel == name}
        assert there == {True, False}, name


def test_few_launches_where_all_is_kept():
    """By the largest budget that is the default of so few tokens."""
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, requires_grad=True)  # nobody reads it
    found = launches(HOPPER, tokens=4096, hidden=4096, vocab=128256, weight=weight, scratch_bytes=256 << 20)
    assert len(found) <= 30, [x.kernel.__name__ for x in found]


def test_narrow_tiles():
    """Of an H that is no multiple of 256."""
    found = compile_all(launches(HOPPER, hidden=576, **OPTIONS["mixed"]), HOPPER[0])
    assert_fits(found, HOPPER[1])
    assert_no_spills(found)
    assert all("wgmma.mma_async" in k.ptx for k in products(found))


SMOOTHED, FLOAT16 = {"label_smoothing": 0.1, "reduction": "sum"}, {"dtype": torch.float16}
SIZES = [(520, 20001), (576, 20001), (640, 1000), (896, 20001), (1152, 20001)]


@pytest.mark.parametrize(
    ("hidden", "vocab", "options"),
    [
        *((*sizes, {}) for sizes in SIZES),
        (640, 1000, SMOOTHED),
        pytest.param(576, 20001, FLOAT16, marks=pytest.mark.slow),
        (896, 20001, FLOAT16),
    ],
    ids=str,
)
def test_in_turns(hidden, vocab, options):
    """Forward computes the gradients of two chunks of tokens."""
    plan = triton_spec.TritonPlan(640, in_forward=True)
    found = launches(HOPPER, hidden=hidden, tokens=1000, vocab=vocab, plan=plan, in_turns=True, **options)
    names = [x.kernel.__name__ for x in found]
    assert names.count("softmax_in_turns") == (2 if hidden <= 896 and "label_smoothing" not in options else 0)
    made = [k for k in compile_all(found, HOPPER[0]) if k.kernel.endswith("in_turns")]
    assert_fits(made, HOPPER[1])
    for k in made:
        # A few numbers that each tile needs once: both groups that multiply have all registers that there are.
        assert k.spilled <= 24, (k.kernel, k.constants, k.stack)
        assert "wgmma.mma_async" in k.ptx
        assert not is_serialized(k.ptx)


def test_a_barrier_that_nothing_uses():
    source = GluonASTSource(trial.product, {"x": f"tensordesc<bf16[64, 64],{trial.LAYOUT!r}>"}, {}, {})
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER[0], 32), options={"num_warps": 4})
    assert len(unused_barriers(made.asm["ttgir"])) == 1  # `empty` of `new_barriers`


@pytest.mark.parametrize("hidden", [128, 576, 896])
def test_in_turns_where_nothing_is_kept(hidden):
    with recording(HOPPER, in_turns=True) as found, torch.no_grad():
        weight = torch.zeros(1000, hidden, dtype=torch.bfloat16)
        linear_cross_entropy(weight[:300], weight, torch.zeros(300, dtype=torch.int64), backend="triton")
    (made,) = (k for k in compile_all(found, HOPPER[0]) if k.kernel == "softmax_in_turns")
    assert not made.constants["exponentials"]
    assert_fits([made], HOPPER[1])
    assert made.spilled <= 24


@pytest.mark.parametrize(
    ("hidden", "vocab", "options", "parameters"),
    [
        (520, 20001, {}, None),
        (576, 300, SMOOTHED, torch.float32),
        (576, 300, FLOAT16, None),
        pytest.param(520, 20001, FLOAT16, torch.float32, marks=pytest.mark.slow),
        pytest.param(2048, 20001, SMOOTHED, None, marks=pytest.mark.slow),
        (2048, 20001, {}, torch.float32),
    ],
    ids=str,
)
def test_added_to_the_weights_sum(hidden, vocab, options, parameters):
    """Of two chunks of tokens; by Triton's kernel where eight columns can't be swapped."""
    plan = triton_spec.TritonPlan(640, in_forward=True)
    more = {"tokens": 1000, "vocab": vocab, "plan": plan, "parameters": parameters, **options}
    name = "weight_gradient" if hidden % 32 else "weight_added"
    found = [x for x in launches(HOPPER, hidden=hidden, in_turns=True, **more) if x.kernel.__name__ == name]
    added = [x.arguments["ADD"] if hidden % 32 else x.arguments["old_sum"] is not None for x in found]
    assert added == [False, True]
    made = compile_all(found, HOPPER[0])
    assert_fits(made, HOPPER[1])
    for k in made:
        assert k.constants["PAIRED"] == ("dtype" not in options)
        assert k.spilled <= 16, (k.kernel, k.constants, k.stack)  # up to four numbers of the warp that copies
        assert "wgmma.mma_async" in k.ptx
        assert not is_serialized(k.ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("hidden", "vocab"), [(1000, 300), (1024, 20001), pytest.param(2048, 20480, marks=pytest.mark.slow)]
)
def test_staggered(hidden, vocab, dtype):
    """Some exponentials are kept, some recomputed; of a smoothed loss all are kept."""
    found = launches(HOPPER, hidden=hidden, tokens=1000, vocab=vocab, in_turns=True, dtype=dtype, **MIXED)
    smoothed = {"plan": triton_spec.TritonPlan(128, in_forward=True), "label_smoothing": 0.1}
    found += launches(HOPPER, hidden=hidden, tokens=1000, vocab=vocab, in_turns=True, dtype=dtype, **smoothed)
    made = [k for k in compile_all(found, HOPPER[0]) if k.kernel.endswith("_staggered")]
    assert {k.kernel for k in made} == {"gradient_staggered", "softmax_staggered"}
    assert_fits(made, HOPPER[1])
    assert_no_spills(made)
    assert not any(is_serialized(k.ptx) for k in made)


SOFTMAX, GRADIENT = "softmax_staggered", "gradient_staggered"


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"bias": True}, ()),
        ({"softcap": 30.0}, ()),
        ({"weight": turned(1000, 1024)}, ()),
        ({"labels": torch.float32}, ()),
        ({"label_smoothing": 0.1}, (SOFTMAX,)),
        ({"label_smoothing": 0.1, "class_weight": torch.ones(1000)}, ()),
        ({"hidden": 4160}, ()),
        ({"hidden": 896}, ()),
        ({"return_stats": True}, (GRADIENT,)),
        ({"class_weight": torch.ones(1000)}, (GRADIENT, SOFTMAX)),
        ({"z_loss": 1e-4, "logit_scale": 0.5}, (GRADIENT, SOFTMAX)),
    ],
    ids=lambda x: "-".join(x),
)
def test_what_staggered_takes(options, taken):
    with mock.patch.object(ahead_of_time, "spills", return_value=False):  # where they'd be left for that
        found = launches(HOPPER, in_turns=True, **{"hidden": 1024} | MIXED | options)
    assert {name for x in found if (name := x.kernel.__name__).endswith("_staggered")} == {*taken}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [128, 576, 640, 1152])
def test_hidden_apart(hidden, dtype):
    """Of what is kept and computed again, and of a chunk of tokens."""
    found = []
    for plan in (replace(MIXED["plan"], halves=True), triton_spec.TritonPlan(128, in_forward=True)):
        found += launches(HOPPER, hidden=hidden, dtype=dtype, plan=plan, in_turns=True)
    assert "hidden_gradient" not in {x.kernel.__name__ for x in found}
    found = [x for x in found if x.kernel.__name__ == "hidden_apart"]
    assert {x.arguments["scaled"] for x in found} == {0, 1}
    made = compile_all(found, HOPPER[0])
    assert_fits(made, HOPPER[1])
    for k in made:
        assert k.stack == 0
        assert "wgmma.mma_async" in k.ptx
        assert not is_serialized(k.ptx)


def test_what_hidden_apart_does_not_take():
    """A weight that lies turned, and an H that it isn't for."""
    for more in ({"weight": turned(1000, 512)}, {"hidden": 1024}):
        names = {x.kernel.__name__ for x in launches(HOPPER, in_turns=True, **more, **MIXED)}
        assert "hidden_gradient" in names
        assert "hidden_apart" not in names


@pytest.mark.parametrize(
    ("device", "hidden", "options"),
    [
        pytest.param(HOPPER, 515, "everything", marks=pytest.mark.slow),
        pytest.param(AMPERE, 512, "held", marks=pytest.mark.slow),
        (AMPERE, 512, "in forward"),
        (CONSUMER, 512, "everything"),
    ],
    ids=str,
)
def test_pointers(device, hidden, options):
    found = compile_all(launches(device, hidden=hidden, **OPTIONS[options]), device[0])
    assert_fits(found, device[1])
    for k in products(found):
        assert not k.constants["TMA"]
        assert "cp.async.bulk.tensor" not in k.ptx
        assert ("wgmma" if device == HOPPER else "mma.sync") in k.ptx


@pytest.mark.parametrize(
    "options",
    [pytest.param({"dtype": torch.float16}, marks=pytest.mark.slow), {"parameters": torch.float32}],
    ids=str,
)
def test_other_dtypes(options):
    """float16, and float32 parameters under autocast, whose gradients leave in twice the bytes."""
    found = compile_all(launches(HOPPER, **options, **OPTIONS["mixed"]), HOPPER[0])
    assert_fits(found, HOPPER[1])
    assert_no_spills(found)


def test_soft_labels_of_ids():
    """With smoothing, whose even part goes to kept and recomputed entries."""
    found = compile_all(
        launches(HOPPER, labels=torch.float32, ids=4, bias=True, label_smoothing=0.1, **MIXED), HOPPER[0]
    )
    assert {k.kernel for k in products(found)} == set(PRODUCTS)
    assert_fits(found, HOPPER[1])
    assert_no_spills(found)


# ----------------------------------------------------------------------------------------------------- linear_log_probs

OF_IDS = {
    "one id": MIXED,
    "several": {"ids": 4, "bias": True} | MIXED,
    "entropy": {"entropy": True} | MIXED,
    "everything": {"entropy": True, "ids": 4, "bias": True, "softcap": 5.0, "temperature": torch.ones(300)},
}


launches_of_ids = partial(launches, op=linear_log_probs, lse=True)


@pytest.mark.parametrize(
    "options", [pytest.param(x, marks=[pytest.mark.slow] if x == "entropy" else []) for x in OF_IDS]
)
def test_hopper_of_ids(options):
    """What differs from linear_cross_entropy's launches."""
    own = {"gather_tokens", "gradient_tiles", "position_terms", "add_targets", "hidden_rows", *OF_LOG_PROBS}
    found = [x for x in launches_of_ids(HOPPER, **OF_IDS[options]) if x.kernel.__name__ in own]
    for k in compile_all(found, HOPPER[0]):
        assert k.shared <= HOPPER[1], (k.kernel, k.constants, k.shared)
        # The entropy's epilogue needs the logits twice, where the product has taken most registers.
        wanted = [k.constants.get(name) for name in ("inner_scale", "entropy_scale")]
        assert k.stack <= (512 if any(wanted) else 16 if k.constants.get("bias") else 0), (k.kernel, k.stack)
        if k.kernel in PRODUCTS:
            assert "wgmma.mma_async" in k.ptx
            assert "cp.async.bulk.tensor" in k.ptx


def test_ampere_of_ids():
    found = launches_of_ids(AMPERE, dtype=torch.float16, **OF_IDS["entropy"])
    (compiled,) = compile_all([x for x in found if x.kernel.__name__ == "gradient_tiles"], AMPERE[0])
    assert compiled.shared <= AMPERE[1]
    assert "mma.sync" in compiled.ptx


def test_what_is_launched_of_ids():
    made = {x.kernel.__name__ for options in OF_IDS.values() for x in launches_of_ids(HOPPER, **options)}
    assert made >= OF_LOG_PROBS
    weight = turned(1000, 512)  # is read as it lies
    assert weights_read(launches_of_ids(HOPPER, weight=weight, **OF_IDS["several"])) == {weight.data_ptr()}
    x = torch.randn(4, 8)
    with recording(HOPPER) as found:  # backend="auto" takes the kernels where they can run
        linear_log_probs(x, x, torch.zeros(4, dtype=torch.int64))
    assert found
