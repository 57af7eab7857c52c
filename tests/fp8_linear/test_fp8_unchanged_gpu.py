"""Weights that change, or don't, on a CUDA device: graphs that are captured by hand and by torch.compile, streams."""

import copy
from contextlib import nullcontext

import pytest
import torch

from onchip.torch import Fp8Linear, fp8_linear, quantize_weight, weights_unchanged

pytestmark = pytest.mark.gpu
MICRO_BATCHES = 2


def make():
    """(a model, its twin, micro-batches)"""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Fp8Linear(512, 1024), Fp8Linear(1024, 256)).cuda().bfloat16()
    xs = torch.randn(MICRO_BATCHES, 384, 512, device="cuda", dtype=torch.bfloat16)
    return model, copy.deepcopy(model), xs


def train(model, xs, context=nullcontext):
    """A step of gradient descent over micro-batches; the losses."""
    losses, grads, parameters = [], [], list(model.parameters())
    with context():
        for x in xs:
            losses.append(model(x).float().square().mean())
            grads.append(torch.autograd.grad(losses[-1], parameters))
    with torch.no_grad():
        for p, *of_each in zip(parameters, *grads, strict=True):
            p.sub_(sum(of_each), alpha=0.5)
    return torch.stack(losses).detach()


def capture(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph, captured


def assert_equal(made, expected):
    assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))


@pytest.mark.parametrize("inside", [True, False], ids=["unchanged", "default"])
def test_a_captured_step_and_eager_calls_after_it(inside):
    """The replay updates the weights, which nothing counts; the context is entered and left in the capture."""
    model, twin, xs = make()
    start = copy.deepcopy(model.state_dict())
    graph, losses = capture(lambda: train(model, xs, (lambda: weights_unchanged(model)) if inside else nullcontext))
    model.load_state_dict(start)
    for _ in range(3):
        graph.replay()
        assert torch.equal(losses, train(twin, xs))
        assert_equal(model.parameters(), twin.parameters())
        assert torch.equal(model(xs[0]), twin(xs[0]))
        with weights_unchanged(model, check_inputs=True):
            assert torch.equal(model(xs[0]), twin(xs[0]))


def test_a_capture_inside_of_a_context_makes_copies_of_its_own():
    """A replay reads no memory of the context's, which is given back, nor the weights of its time."""
    model, twin, xs = make()
    with weights_unchanged(model):
        model(xs[0])
        with torch.no_grad():
            graph, out = capture(lambda: model(xs[0]))
    rubbish = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(16)]
    with torch.no_grad():
        for p in (*model.parameters(), *twin.parameters()):
            p.mul_(-1.5)
        graph.replay()
        assert torch.equal(out, twin(xs[0]))
    del rubbish


def test_a_context_that_is_entered_in_a_capture_is_left_in_it():
    model, _, xs = make()
    model(xs[0])  # compiles
    graph, context = torch.cuda.CUDAGraph(), weights_unchanged(model)
    with torch.cuda.graph(graph), torch.no_grad():
        context.__enter__()
        model(xs[0])
    with pytest.raises(RuntimeError, match="entered in the capture of a CUDA graph and left after it"):
        context.__exit__(None, None, None)


def test_another_stream_and_micro_batches():
    model, twin, xs = make()
    expected = train(twin, xs)
    stream = torch.cuda.Stream()
    with weights_unchanged(model):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = model(xs[0]).float().square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(aside, expected[0])
    assert torch.equal(train(model, xs, lambda: weights_unchanged(model)), expected)
    assert_equal(model.parameters(), twin.parameters())


def test_a_quantised_weight_in_a_graph():
    model, _, xs = make()
    weight = model[0].weight

    def run():
        quantized = quantize_weight(weight)
        out = [fp8_linear(x, quantized) for x in xs]
        return [*out, torch.autograd.grad(sum(o.float().square().sum() for o in out), weight)[0]]

    graph, captured = capture(run)
    for _ in range(2):
        with torch.no_grad():
            weight.mul_(-1.5)
        graph.replay()
        assert_equal(captured, run())


def test_check_inputs_sees_what_nothing_counts():
    model, _, xs = make()
    model(xs[0])
    for check in (False, True):
        with weights_unchanged(model, check_inputs=check):
            model(xs[0])
            model[0].weight.data.mul_(2)
            if check:
                with pytest.raises(RuntimeError, match="weight changed after it was quantised; quantise it again"):
                    model(xs[0])
            else:
                model(xs[0])


@pytest.mark.parametrize("inside", [True, False], ids=["unchanged", "default"])
def test_reduce_overhead(inside):
    """Steps of an optimizer, whose kernels write to the weights outside of the graphs."""
    model, twin, xs = make()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, twin)]
    for p in (*model.parameters(), *twin.parameters()):
        p.grad = torch.zeros_like(p)  # not in the graphs' memory
    for _ in range(5):
        with weights_unchanged(model) if inside else nullcontext():
            for x in xs:
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(x)
                expected = twin(x)
                assert (out - expected).float().norm() < 4e-3 * expected.float().norm()
                out.float().square().mean().backward()
                expected.float().square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert (p.grad - q.grad).float().norm() < 2e-2 * q.grad.float().norm()
        with torch.no_grad():  # small differences don't add up
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p.grad.copy_(q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_equal(model.parameters(), twin.parameters())
