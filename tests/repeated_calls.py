"""Checks of each of several calls in a row, whatever the library does for calls of a kind that it has seen.

test_repeated_calls.py runs these on a GPU, and in a process that has the GPU that isn't there (fake_cuda.py).  Kernels
do nothing there, so nothing here looks at their numbers.
"""

import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fake_cuda
from every_loss import assert_equal, refused_after_failures
from losses import plan_in_forward
from onchip.frontend.torch_register import Operator
from onchip.kernels.triton.launch import Launch
from onchip.kernels.triton.packed import Packed
from onchip.ops.linear_cross_entropy import torch_op
from onchip.torch import cross_entropy, fp8_linear, linear_cross_entropy
from onchip.vocab.torch import operator, parallel

# More than the calls after which something may be taken for known.
TIMES = 5
T, V = 20, 300


def leaf(device):
    return torch.randn(T, V, device=device, dtype=torch.bfloat16).requires_grad_()


def target(device):
    return torch.randint(V, (T,), device=device)


def layer(device):
    """Hidden states, a weight of the same shape, and labels."""
    hidden, weight = (torch.randn(256, 128, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    return hidden, weight, torch.randint(256, (256,), device=device)


def loss_of(logits, **options):
    return cross_entropy(logits, target(logits.device), backend="triton", **options)


def overwritten_logits_are_never_a_leafs(device):
    """Nor a parameter's or a view's of one, though they look as those of the calls before."""

    def good():
        computed = leaf(device) * 1
        (by,) = torch.autograd.grad(loss_of(computed, inplace_backward=True), computed)
        assert by.data_ptr() == computed.data_ptr()

    parameter = torch.nn.Parameter(leaf(device).detach())
    whole = leaf(device)
    bad = {"are a leaf": (leaf(device), parameter), "a view of a leaf": (whole[:], whole.view(T, V), parameter[:])}
    for _ in range(TIMES):
        good()
        for said, several in bad.items():
            for x in several:
                with pytest.raises(ValueError, match=said):
                    loss_of(x, inplace_backward=True)
    for x in (x for several in bad.values() for x in several):
        for _ in range(TIMES):
            assert loss_of(x).requires_grad  # without it is fine
            with torch.no_grad():
                loss_of(x, inplace_backward=True)  # nothing is overwritten
            with pytest.raises(ValueError, match="inplace_backward=True would overwrite"):
                loss_of(x, inplace_backward=True)


def gradients_go_to_tensors_not_to_memory(device):
    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, backend="triton")

    x, _, labels = layer(device)
    for _ in range(TIMES):
        torch.autograd.grad(loss(x, x), x)
    for _ in range(TIMES):
        y = x.detach().requires_grad_()
        torch.autograd.grad(loss(x, y), [x, y])
    for _ in range(TIMES):
        torch.autograd.grad(loss(x, x), x)


def saved_tensor_hooks_run_in_each_call(device):
    """Whatever they do, and only where they are."""
    logits, labels = leaf(device), target(device)

    def random_state():
        return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()

    does = {
        0.1: lambda: torch.eye(2, device=device).to_sparse(),
        0.2: lambda: torch.rand(3, device=device),
        0.3: lambda: bool(torch.ones((), device=device)),
        0.4: lambda: cross_entropy(logits.detach(), labels, backend="triton", z_loss=0.5),
    }
    for label_smoothing, hook in does.items():
        seen = []

        def pack(x, hook=hook, seen=seen):
            seen.append(x.shape)
            hook()
            return x

        def step(label_smoothing=label_smoothing):
            loss = cross_entropy(logits, labels, backend="triton", label_smoothing=label_smoothing)
            torch.autograd.grad(loss, logits)

        counts = []
        for hooked in (True,) * TIMES + (False,) * TIMES + (True,) * TIMES:
            seen.clear()
            if hooked:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                    step()
                counts.append([*seen])
            else:
                before = random_state()
                step()
                assert torch.equal(before, random_state())
                assert not seen
        assert counts[0]
        assert counts == counts[:1] * len(counts)


def calls_under_hooks_are_prepared(device):
    """As in activation checkpointing, where every forward runs under hooks."""
    hidden, weight, labels = layer(device)

    def call(hidden, weight):
        return linear_cross_entropy(hidden * 1, weight, labels, backend="triton", softcap=20.0).square()

    def step():
        loss = checkpoint(call, hidden, weight, use_reentrant=False)
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]

    ran, run = [], Launch.run
    for _ in range(TIMES):
        step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", lambda launch: (ran.append(launch), run(launch)))
        made = step()
        assert not ran
    if device == "cuda":
        loss = call(hidden, weight)
        assert_equal(made, [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])])


class Watching(TorchDispatchMode):
    """Sees operators, as a compiler does: calls go through the registered ones."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def registered_operators_are_prepared(device):
    """Forward and backward, as torch.compile runs them."""
    hidden, weight, labels = layer(device)
    logits, of_logits = leaf(device), target(device)
    x = torch.randn(256, 128, device=device, dtype=torch.bfloat16).requires_grad_()
    calls = {
        "head": lambda: linear_cross_entropy(hidden, weight, labels, backend="triton", softcap=7.0),
        "logits": lambda: cross_entropy(logits, of_logits, backend="triton", softcap=7.0),
        "fp8": lambda: fp8_linear(x, weight, backend="triton").float().square().mean(),
    }
    leaves = {"head": (hidden, weight), "logits": (logits,), "fp8": (x, weight)}
    ran, run = [], Launch.run
    for name, call in calls.items():

        def step(call=call, leaves=leaves[name]):
            loss = call()
            return [loss.detach(), *torch.autograd.grad(loss, leaves)]

        with Watching():
            for _ in range(TIMES):
                made = step()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Launch, "run", lambda launch: (ran.append(launch), run(launch)))
                last = step()
                assert not ran, name
        if device == "cuda":
            assert_equal(last, made)
            assert_equal(last, step())


class Counted(TorchFunctionMode):
    """Functions of PyTorch that are called."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def who_watches_functions_sees_each_call(device):
    logits, labels, counts = leaf(device), target(device), []

    def call():
        return cross_entropy(logits, labels, backend="triton", z_loss=0.5)

    call()  # which may compile kernels
    for _ in range(TIMES):
        with Counted() as counted:
            call()
        counts.append(counted.seen)
        call()
    assert counts == counts[:1] * TIMES


def the_default_dtype_decides_on_nothing(device):
    def step():
        hidden, weight, labels = layer(device)
        loss, stats = linear_cross_entropy(hidden, weight, labels, return_stats=True, backend="triton")
        made = loss, *stats, *torch.autograd.grad(loss, [hidden, weight])
        return [x.dtype for x in made if x is not None]

    expected = step()
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(TIMES):
                assert step() == expected
        finally:
            torch.set_default_dtype(torch.float32)


def views_that_negate_are_refused(device):
    negated = torch._neg_view(leaf(device).detach()).requires_grad_()
    for good in (False, True):
        for _ in range(TIMES):
            if good:
                loss_of(leaf(device))
            with pytest.raises(TypeError, match=r"cross_entropy: logits .* pass logits.resolve_neg\(\)"):
                loss_of(negated)


def an_interrupted_backward_is_not_repeated(device):
    base, labels = leaf(device), target(device)

    def forward():
        return cross_entropy(base * 1, labels, inplace_backward=True, backend="triton")

    def backward(loss, mode, **options):
        with mode:
            return torch.autograd.grad(loss, base, **options)

    for _ in range(TIMES):
        assert refused_after_failures("cross_entropy", forward, backward)
        loss = forward()
        torch.autograd.grad(loss, base)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, base)


def calls_interrupt_a_launch_of_their_kind(device):
    """As in a signal's handler: the same thread can't wait until it has sent the launch."""
    hidden, weight, labels = layer(device)
    interrupted = 0

    def send(packed):
        nonlocal interrupted
        if not interrupted:
            interrupted += 1
            linear_cross_entropy(hidden, weight, labels, backend="triton")
            interrupted += 1
        before(packed)

    before = Packed.send
    for _ in range(TIMES):
        linear_cross_entropy(hidden, weight, labels, backend="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "send", send)
        linear_cross_entropy(hidden, weight, labels, backend="triton")
    assert interrupted == 2


def in_inference_mode_nothing_is_recorded(device):
    """Even with gradients enabled inside; and afterwards it is as before."""
    hidden, weight, labels = layer(device)
    for _ in range(TIMES):
        with torch.inference_mode(), torch.enable_grad():
            assert not linear_cross_entropy(hidden, weight, labels, backend="triton").requires_grad
        loss = linear_cross_entropy(hidden, weight, labels, backend="triton")
        torch.autograd.grad(loss, (hidden, weight))


def hooks_change_the_strides_of_what_is_saved(device):
    """Backward has what forward made with the strides that it made it with."""
    hidden, weight, labels = layer(device)
    seen = []

    def turned(x):
        whole = torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device)
        return whole[..., 0].copy_(x)

    def taken(operator, ctx):
        tensors, link = before(operator, ctx)
        seen.append([None if x is None else x.stride() for x in tensors])
        return tensors, link

    before = Operator._taken
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operator, "_taken", taken)
        for hooks in (nullcontext, lambda: saved_tensors_hooks(lambda x: x, turned)):
            for _ in range(TIMES):
                with hooks():
                    loss = linear_cross_entropy(hidden, weight, labels, backend="triton")
                made = torch.autograd.grad(loss, (hidden, weight))
                if device != "cpu" and hooks is nullcontext:
                    expected = made
                elif device != "cpu":
                    assert_equal(made, expected)
    assert len(seen) == 2 * TIMES
    assert all(strides == seen[0] for strides in seen)


def upstream_gradients_without_memory_are_zeros(device):
    hidden, weight, labels = layer(device)
    for _ in range(TIMES):
        loss = linear_cross_entropy(hidden, weight, labels, backend="triton")
        zero = torch._efficientzerotensor(loss.shape, dtype=loss.dtype, device=loss.device)
        made = torch.autograd.grad(loss, (hidden, weight), zero)
        assert device == "cpu" or not any(x.any() for x in made)


def threads_call_at_once(device):
    """With more kinds of calls than are remembered."""
    errors, given = [], [(leaf(device)[:n], target(device)[:n]) for n in range(1, T)]

    def run(shift):
        try:
            for times in range(4):
                for i in range(len(given)):
                    logits, labels = given[(i * shift) % len(given)]
                    cross_entropy(logits, labels, backend="triton", label_smoothing=times / 10)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i in (1, 2, 3, 5)]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def ranks_exchange_in_every_call(device):
    """Those that share a vocabulary, in prepared calls too; here this one alone is there."""
    hidden, weight, labels = layer(device)
    weight, seen = weight.detach().repeat(2, 1).requires_grad_(), []

    def spied(function):
        return lambda *args, **options: (seen.append(function.__name__), function(*args, **options))[1]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((parallel, "begin_gather"), (parallel, "begin_sum"), (torch_op, "localized")):
                patch.setattr(module, name, spied(getattr(module, name)))
            patch.setattr(operator, "require_agreement", lambda *_, **__: None)
            for planned, gathers in ((plan_in_forward, 2), (nullcontext, 1)):
                with planned():
                    for i in range(TIMES):
                        options = {"vocab_group": dist.group.WORLD, "backend": "triton"}
                        loss = linear_cross_entropy(hidden, weight, labels, **options)
                        torch.autograd.grad(loss, (hidden, weight))
                        if i > 1:  # prepared
                            assert "localized" not in seen
                            assert seen.count("begin_gather") == gathers
                            assert seen.count("begin_sum") == 1
                        seen.clear()
    finally:
        dist.destroy_process_group()


SCENARIOS = {
    f.__name__: f
    for f in (
        overwritten_logits_are_never_a_leafs,
        gradients_go_to_tensors_not_to_memory,
        saved_tensor_hooks_run_in_each_call,
        calls_under_hooks_are_prepared,
        registered_operators_are_prepared,
        who_watches_functions_sees_each_call,
        the_default_dtype_decides_on_nothing,
        views_that_negate_are_refused,
        an_interrupted_backward_is_not_repeated,
        calls_interrupt_a_launch_of_their_kind,
        in_inference_mode_nothing_is_recorded,
        hooks_change_the_strides_of_what_is_saved,
        upstream_gradients_without_memory_are_zeros,
        threads_call_at_once,
        ranks_exchange_in_every_call,
    )
}


def main(names):
    from onchip.frontend import torch_builder

    with fake_cuda.gpu(), fake_cuda.without_bodies(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_builder, "ALIGNED", 64)  # as memory of the CPU's is
        for name in names:
            SCENARIOS[name]("cpu")
            print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
