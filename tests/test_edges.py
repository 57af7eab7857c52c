"""How every op works with PyTorch's tools: make_fx, tensors without values, inference mode, vmap over backward, FLOP
counters, opcheck and gradcheck.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import onchip.torch
from edges import BY_KERNELS, CALLS, by_kernels, check_kernels
from every_loss import Recorded, check_operator
from float64 import examples
from losses import nan_filled
from onchip.torch import TopK

each_call = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
FLOAT64 = {name: call for name, call in CALLS.items() if all(x.dtype == torch.float64 for x in call.leaves.values())}
FUNCTIONS = [getattr(onchip.torch, name) for name in onchip.torch.__all__ if name[0].islower()]
# What is no op's, but PyTorch's own layer inside of a module.
OF_PYTORCH = ("router_weight", "shared_gate_up_weight", "shared_down_weight")
# Of tracing without numbers, one call for each op.
SHOWN = [
    ("symbolic", name) for name in CALLS if (" " not in name and name[0].islower()) or name == "linear_jsd beta=0.3"
]


@pytest.fixture(autouse=True, scope="module")
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mapped(function, given):
    """Arguments whose tensors went through a function."""
    return pytree.tree_map_only(torch.Tensor, function, given)


# -------------------------------------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (mode != "real" and (mode, name) not in SHOWN))
        for name in CALLS
        for mode in ("real", "fake", "symbolic")
    ],
)
def test_make_fx(name, mode):
    """Of outputs and gradients; a graph for any sizes is taken with the ones that it was traced with."""
    call = CALLS[name]
    arguments = call.prepare()
    given, spec = pytree.tree_flatten(arguments)
    places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor)]

    def step(*tensors):
        parts = list(given)
        for i, x in zip(places, tensors, strict=True):
            parts[i] = x
        return call.gradients(*pytree.tree_unflatten(parts, spec))

    tensors = [given[i] for i in places]
    graph = make_fx(step, tracing_mode=mode)(*tensors)
    for p, q in zip(graph(*tensors), step(*tensors), strict=True):
        torch.testing.assert_close(p, q)


def test_make_fx_of_a_count_that_is_a_symbol():
    def step(hidden, weight, target):
        normalizer = target.shape[0]
        return onchip.torch.linear_cross_entropy(hidden, weight, target, normalizer=normalizer)

    def given(tokens):
        return torch.randn(tokens, 8), torch.randn(7, 8), torch.randint(7, (tokens,))

    graph = make_fx(step, tracing_mode="symbolic")(*given(5))
    torch.testing.assert_close(graph(*(more := given(9))), step(*more))


# ----------------------------------------------------------------------------------------------- tensors without values


@each_call
def test_without_values(call):
    """Meta tensors and fake ones: shapes and dtypes are there, and values that can't be read aren't checked."""
    made = [(x.shape, x.dtype) for x in call.gradients(*call.prepare())]
    for checked in (False, True):
        leaves, options = call.prepare("meta")
        if call.run in FUNCTIONS:
            options["check_inputs"] = checked
        there = call.gradients(leaves, options)
        assert all(x.is_meta for x in there)
        assert [(x.shape, x.dtype) for x in there] == made
        real = mapped(torch.Tensor.detach, call.prepare())
        with FakeTensorMode() as mode:
            leaves, fakes = mapped(mode.from_tensor, real)
            leaves = {name: x.requires_grad_() for name, x in leaves.items()}
            there = call.gradients(leaves, fakes | {x: y for x, y in options.items() if x == "check_inputs"})
        assert [(x.shape, x.dtype) for x in there] == made


# -------------------------------------------------------------------------------------------- tensors of inference mode


def of_inference(x):
    with torch.inference_mode():
        return x.detach().clone()


@each_call
def test_arguments_of_inference_mode(call):
    """Each gives what the same ordinary tensor gives, and may be overwritten before backward."""
    check_inference_mode(call, "cpu")


def check_inference_mode(call, device):
    leaves, options = call.prepare(device)
    expected = dict(zip(leaves, call.gradients(leaves, options)[-len(leaves) :], strict=True))
    for name in (*leaves, *options):
        given = (leaves | options)[name]
        alone = [name] == [*leaves] or name in OF_PYTORCH or (call is CALLS["MoE"] and name == "x")
        if alone or not isinstance(given, (torch.Tensor, TopK)):
            continue
        ours = mapped(of_inference, given)
        mine = {x: ours if x == name else y for x, y in leaves.items()}
        loss = call.loss(mine, {x: ours if x == name else y for x, y in options.items()})
        with torch.inference_mode():
            mapped(lambda x: x.zero_(), ours)
        needs = {x: y for x, y in leaves.items() if x != name}
        for of, g in zip(needs, torch.autograd.grad(loss, list(needs.values())), strict=True):
            torch.testing.assert_close(g, expected[of], msg=f"{name}, the gradient of {of}")


def test_main_gradient_of_inference_mode():
    """It can't be added to."""
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    with pytest.raises(ValueError, match="fp8_linear: weight_grad_out was created in inference mode"):
        onchip.torch.fp8_linear(x, weight, weight_grad_out=of_inference(weight))


# --------------------------------------------------------------------------------------------------- vmap over backward


@each_call
def test_several_upstream_gradients_at_once(call):
    """Refused, whoever asks."""
    check_refusals(call, "cpu")


@each_call
def test_derivatives_forward(call):
    """Refused, as torch.func's gradients are."""
    leaves, options = call.prepare()
    names, (x, *others) = list(leaves), leaves.values()

    def first(x):
        return call.outputs(dict(zip(names, (x, *others), strict=True)), options)[0]

    ones = torch.ones_like(x)
    for transform in (torch.func.grad(first), lambda x: torch.func.jvp(first, (x,), (ones,))):
        with pytest.raises(RuntimeError, match=r"[A-Za-z_]+: torch\.func transforms .* are not supported"):
            transform(x.detach())
    refused = pytest.raises(RuntimeError, match="forward-mode differentiation is not supported")
    with torch.autograd.forward_ad.dual_level(), refused:
        first(torch.autograd.forward_ad.make_dual(x.detach(), ones))


def check_refusals(call, device):
    leaves, options = call.prepare(device)
    names, tensors = list(leaves), tuple(leaves.values())
    refused = pytest.raises(RuntimeError, match=r"[a-z_]+: several upstream gradients .* pass vectorize=False")

    def first(*given):
        return call.outputs(dict(zip(names, given, strict=True)), options)[0]

    with refused:
        torch.autograd.functional.jacobian(first, tensors, vectorize=True)
    made = first(*tensors)
    several = made.new_ones(2, *made.shape)
    with refused:
        torch.autograd.grad(made, tensors, several, is_grads_batched=True, retain_graph=True)
    with refused:
        torch.func.vmap(lambda g: torch.autograd.grad(made, tensors, g, retain_graph=True))(several)
    torch.autograd.grad(made, tensors, several[0])
    for transform in (torch.func.vmap, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=r"[A-Za-z_]+: torch\.func transforms .* are not supported"):
            transform(lambda x: first(x, *tensors[1:]))(tensors[0].detach())


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def counted(run):
    with FlopCounterMode(display=False) as counter:
        made = run()
    return counter.get_total_flops(), made


@each_call
def test_flops(call):
    """Those of the matrix products that the maths has: one forward, two for the gradients."""
    leaves, options = call.prepare()
    product = call.product
    if call is CALLS["MoE"]:  # the router, both layers of two experts for each token, and those of the shared one
        tokens, size = leaves["x"].shape
        wide = leaves["down"].shape[2]
        product = 2 * tokens * size * (len(leaves["router_weight"]) + 2 * 3 * wide + 3 * wide)
    forward, loss = counted(lambda: call.loss(leaves, options))
    backward, _ = counted(lambda: loss.backward(retain_graph=True))
    assert (forward >= product, forward + backward) == (True, 3 * product)
    assert counted(lambda: call.loss(mapped(torch.detach, leaves), options))[0] == product
    loss = call.loss(leaves, options)  # unseen: then backward has its own, or forward had them
    assert counted(loss.backward)[0] == backward


def test_flops_are_those_of_the_plain_expression():
    """Also where a gradient isn't needed."""
    hidden, weight, target = torch.randn(5, 8), torch.randn(7, 8), torch.randint(7, (5,))
    for frozen in ((), (weight,), (hidden,)):
        for x in (hidden, weight):
            x.requires_grad_(not any(x is y for y in frozen))
        plain, _ = counted(lambda: F.cross_entropy(F.linear(hidden, weight), target).backward())
        for strategy in ("stash", "recompute"):
            ours, _ = counted(
                lambda how=strategy: onchip.torch.linear_cross_entropy(hidden, weight, target, strategy=how).backward()
            )
            assert ours == plain


def test_a_counter_that_was_made_before_the_formulas_were_known():
    call = CALLS["linear_cross_entropy"]
    counter = FlopCounterMode(display=False)
    for operator in [x for x in counter.flop_registry if str(x).startswith("onchip.")]:
        del counter.flop_registry[operator]
    with counter:
        call.loss(*call.prepare()).backward()
    assert counter.get_total_flops() == 3 * call.product


# ------------------------------------------------------------------------------------------- registration and gradients


def with_main_gradient(call):
    """Backward into memory of the caller's."""
    leaves, options = call.prepare()
    total = torch.zeros_like(leaves["weight"]).detach()
    call.loss(leaves, options | {"weight_grad_out": total}).backward()
    assert leaves["weight"].grad is None
    assert total.any()


@functools.cache
def recorded(name):
    """The operators that a call runs, and with what."""
    call = CALLS[name]
    with Recorded() as seen:
        call.gradients(*call.prepare())
        if call.run in FUNCTIONS and "weight" in call.leaves and "log_probs" not in name:
            with_main_gradient(call)
    return seen.calls


def test_every_operator_is_known():
    """Here, or to the checks of kernels: a new one fails this."""
    of_kernels = {f"{name}{suffix}" for name in BY_KERNELS.values() for suffix in ("", "_backward")}
    here = {operator.name().removeprefix("onchip::") for name in CALLS for operator, _ in recorded(name)}
    # Afterwards: some modules are imported by the calls that need them.
    names = {x.removeprefix("onchip::") for x in torch._C._dispatch_get_all_op_names() if x.startswith("onchip::")}
    of_hopper = {"attention", "attention_backward"}  # test_attention_gpu.py
    assert {x for x in names if not x.startswith("test_")} == here | of_kernels | of_hopper


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    """And what comes out of an operator doesn't depend on what was in memory."""
    for operator, arguments in recorded(name):
        check_operator(operator, arguments)
        with nan_filled():
            first = run(operator, arguments)
        for x, y in zip(first, run(operator, arguments), strict=True):
            assert torch.equal(x, y), operator


def run(operator, arguments):
    """What it returns and what it changed, as bytes."""
    mine = mapped(torch.clone, arguments)
    made = operator(*mine)
    return [
        x.contiguous().reshape(-1).view(torch.uint8)
        for x in pytree.tree_leaves((made, mine))
        if isinstance(x, torch.Tensor)
    ]


@pytest.mark.parametrize("name", FLOAT64)
def test_gradcheck(name):
    """Of all calls in float64; of the losses entry by entry."""
    call = FLOAT64[name]
    leaves, options = call.prepare()

    def function(*given):
        return tuple(call.outputs(dict(zip(leaves, given, strict=True)), options))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=name not in examples("target"))


# ------------------------------------------------------------------------------------------------ of the Triton kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_on_the_gpu(name):
    """Called three times, from the second on by what repeats calls; test_interpreted.py has opcheck on the CPU."""
    check_kernels(name, "cuda")
    call = by_kernels(name)
    for _ in range(3):
        check_inference_mode(call, "cuda")
        check_refusals(call, "cuda")
    leaves, options = call.prepare("cuda")
    flops, _ = counted(lambda: call.loss(leaves, options).backward())
    assert flops == 3 * call.product
