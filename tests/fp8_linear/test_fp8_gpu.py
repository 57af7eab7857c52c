"""fp8_linear on a CUDA device: bits, accuracy, sizes, memory, streams, graphs, and weights that change in graphs."""

import copy
import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from fp8_common import assert_equal, assert_right, assert_same, assert_same_bits, operands, quantize
from fp8_drawn import BY_BLOCK, awkward

from onchip.bench.torch_steps import peak_extra_bytes
from onchip.fp8 import numbers, torch_products
from onchip.fp8.triton_tiles import ProductConfig
from onchip.ops.fp8_linear.cases import CHECK_CASES
from onchip.ops.fp8_linear.checks import TENSOR_CORE_ERROR, plain_refusals
from onchip.ops.fp8_linear.reference import snr_db
from onchip.torch import Fp8Linear, fp8_linear, quantize_activation, quantize_weight, weights_unchanged
from shared import aside, capture, pairs_once, without_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unwritten_memory_shows")]
MIB = 1 << 20
# Of results in bfloat16 whose float32 sums were made in another order.
ROUNDED = 4e-3


def usable():
    """Backends that can run here; collected on machines without a device, too."""
    if not torch.cuda.is_available():
        return ("dequantize",)
    return tuple(name for name, reason in plain_refusals("cuda").items() if reason is None)


BACKENDS = pytest.mark.parametrize("backend", usable())
CONFIGS = {
    "default": ProductConfig(),
    "deep": ProductConfig(stages=6, parts=4),
    "two programs": ProductConfig(rows=64, warps=4, stages=3, per_processor=2),
    "narrow": ProductConfig(columns=64, warps=4, stages=3, per_processor=2),
    "256 high": ProductConfig(rows=256, stages=3, parts=2),
}


def make(m, n, k, *, dtype=torch.bfloat16, device="cuda", seed=0):
    """(x, weight, grad_out); x and weight are leaves that need gradients."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, device=device, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(n, k, device=device, generator=g) * k**-0.5).to(dtype).requires_grad_()
    return x, w, torch.randn(m, n, device=device, generator=g).to(dtype)


def step(x, w, grad, layer=fp8_linear, **options):
    """Output and gradients."""
    out = layer(x, w, **options)
    return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


# ---------------------------------------------------------------------------------------------------------- quantising


@pairs_once(
    "shape, fmt, dtype, scale",
    product(
        [(1, 1), (130, 300), (513, 1000), (256, 384), (300, 264), (129, 257)],
        numbers.FP8_MAX,
        [torch.float32, torch.bfloat16, torch.float16],
        numbers.SCALES,
    ),
)
def test_quantised_bits_are_pytorchs(shape, fmt, dtype, scale):
    """NaN, infinities, zeros, subnormals, 1e-30 and ties among them; on this device and on the CPU."""
    from onchip.fp8 import triton_launches

    x = torch.from_numpy(awkward(*shape)).to(dtype)
    # Bits of every pattern, too.
    patterns = torch.randint(0, 1 << 15, (shape[0] // 4, shape[1])).to(torch.int16)
    x[: shape[0] // 4] = patterns.view(torch.bfloat16).to(dtype)
    layouts = {
        "rows": x.cuda(),
        "columns": x.cuda().T.contiguous().T,
        "neither": torch.stack([x, x], 2).cuda()[..., 0],
        "from the middle of a word": torch.cat([x[0, :1], x.flatten()]).cuda()[1:].view_as(x),
    }
    for by_block in (False, True)[: 2 if fmt == "e4m3" else 1]:
        expected = quantize(x, by_block, fmt, scale)
        assert_same_bits(quantize(x.cuda(), by_block, fmt, scale), expected)
        for strided in layouts.values():
            assert_same_bits(quantize(strided, by_block, fmt, scale, triton_launches), expected)
    rows, columns = quantize(x, False, fmt, scale)
    for strided in layouts.values():
        more, turned = triton_launches.quantize(strided, fmt, scale, row_multiple=4)
        assert len(more.data) == more.scales.shape[1] == numbers.up(len(x), 4)
        assert_same_bits([(more.data[: len(x)], more.scales[:, : len(x)]), turned], [rows, columns])


@pytest.mark.parametrize("shape", [(70000, 32768), (65536 * 128, 260)], ids=str)
def test_quantising_more_elements_than_32_bits_count(shape):
    """And more blocks below each other than the second axis of a grid may have."""
    from onchip.fp8 import triton_launches

    rows, columns = shape
    assert rows * columns > 1 << 31
    x = torch.randn(256, columns, device="cuda").bfloat16().repeat(-(-rows // 256), 1)[:rows]
    by_row, by_column = quantize(x, False, by=triton_launches)
    part, part_columns = quantize(x[:256], False)
    last = slice(rows // 256 * 256 - 256, rows // 256 * 256)
    assert_same_bits([(by_row.data[last], by_row.scales[:, last], by_column.data[:, last])],
                     [(part.data, part.scales, part_columns.data)])  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ products


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_cases(case, dtype, backend):
    if plain_refusals("cuda", given=case.options)[backend] is None:
        assert_right(case, dtype, "cuda", backend=backend)
    else:
        with pytest.raises(ValueError, match="no blockwise scales for E5M2"):
            assert_right(case, dtype, "cuda", backend=backend)


@pairs_once(
    "config, size, by_block",
    product(CONFIGS, [(1000, 1032, 2048), (4097, 515, 640), (64, 8192, 128), (8192, 130, 4096)], [True, False]),
)
def test_every_config_is_right(config, size, by_block):
    """By descriptors and by pointers, stored and added, against float32 products of the dequantised operands."""
    from onchip.fp8 import triton_launches

    a, b = operands(*size, by_block, device="cuda")
    exact = torch_products.dequantized_product(a, b, by_block, None, torch.float32, None)
    for tma in (True, False):
        for before in (3.0, None):
            out = torch.full_like(exact, math.nan if before is None else before)
            add = before is not None
            triton_launches.product_launch(a, b, by_block, None, out, add, CONFIGS[config], 132, tma=tma).run()
            assert_same(out - (before or 0), exact, TENSOR_CORE_ERROR)


@BACKENDS
@pytest.mark.parametrize("size", [(8192, 4096, 4096), (1024, 1032, 1032)], ids=str)
@pytest.mark.parametrize("factor", [1, 1e-30])
def test_signal_to_noise_is_28_db(factor, size, backend):
    """However small the gradients are."""
    x, w, g = make(*size)
    made = step(x, w, g * factor, backend=backend)
    xf, wf, gf = x.detach().double(), w.detach().double(), (g * factor).double()
    for result, exact in zip(made, (xf @ wf.T, gf @ wf, gf.T @ xf), strict=True):
        assert snr_db(result.double().cpu(), exact.cpu()) >= 28


@BACKENDS
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_show_where_they_are_and_nowhere_else(bad, where, backend):
    x, w, g = make(300, 264, 392)
    with torch.no_grad():
        {"x": x, "weight": w, "grad": g}[where][200, 140] = bad
    out, grad_x, grad_w = step(x, w, g, backend=backend)
    seen = {
        "x": (out[200].isnan().all(), out[:200].isfinite().all(), grad_w[:, 140].isnan().all()),
        "weight": (out[:, 200].isnan().all(), out[:, :128].isfinite().all(), grad_x[:, 140].isnan().all()),
        "grad": (grad_x[200].isnan().all(), grad_x[:200].isfinite().all(), grad_w[140].isnan().all()),
    }
    assert all(seen[where]), seen[where]


@BACKENDS
@pytest.mark.parametrize("k", [1000, 1003])
def test_weight_grad_out_accumulates(k, backend):
    """Through a descriptor and by pointers; also into a slice whose address fits no descriptor."""
    n = 1024
    flat = torch.full((n * k + 1,), 1e-3, device="cuda")
    for offset in (0, 1):
        total = flat[offset : offset + n * k].view(n, k)
        total.fill_(1e-3)
        expected = torch.zeros_like(total, dtype=torch.float64)
        for seed in (1, 2, 3):
            x, w, g = make(500 * seed, n, k, seed=seed)
            fp8_linear(x, w, backend=backend, weight_grad_out=total).backward(g)
            assert w.grad is None
            _, grad_x, grad_w = step(x, w.detach().float().requires_grad_(), g, backend="dequantize")
            assert_same(x.grad, grad_x, ROUNDED)
            expected += grad_w.double()
        assert_same(total.double() - 1e-3, expected, TENSOR_CORE_ERROR)


@pytest.mark.parametrize("backend", [name for name in usable() if name != "dequantize"])
@BY_BLOCK
def test_a_product_is_added_as_it_is_made(backend, by_block):
    """With no second matrix of float32, and as precisely as by an addition after it."""
    a, b = operands(3008, 4096, 2000, by_block, device="cuda")
    product = torch_products.product_of(backend)
    made = product(a, b, by_block, None, torch.float32, None)
    total = torch.full_like(made, 0.5)
    assert product(a, b, by_block, None, torch.bfloat16, total) is total
    assert_same(total.double() - 0.5, made, 1e-6)

    def again():
        product(a, b, by_block, None, torch.bfloat16, total)
        return ()

    assert peak_extra_bytes(again, device="cuda") <= MIB


@pytest.mark.parametrize("backend", [name for name in usable() if name != "dequantize"])
def test_more_elements_of_the_result_than_32_bits_count(backend):
    """Its last rows are right, forward and in the gradient of x."""
    m, n, k = 70000, 32768, 256
    assert m * n > 1 << 31
    x, w, _ = make(m, n, k)
    g = torch.ones(1, n, device="cuda", dtype=torch.bfloat16).expand(m, n)
    out, grad_x, _ = step(x, w, g, backend=backend)
    right, right_grad, _ = step(x[-200:].detach().requires_grad_(), w, g[-200:], backend="dequantize")
    assert_same(out[-200:], right, ROUNDED)
    assert_same(grad_x[-200:], right_grad, ROUNDED)


# --------------------------------------------------------------------------------------------------- memory and streams


@BACKENDS
def test_what_is_kept_for_backward(backend):
    m, n, k = 4096, 4096, 8192
    x, w, _ = make(m, n, k)
    fp8_linear(x, w, backend=backend)  # compiles
    problem = numbers.Fp8Problem(m, n, k)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = fp8_linear(x, w, backend=backend)
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    assert numbers.saved_bytes(problem) <= kept <= numbers.saved_bytes(problem) + MIB
    assert numbers.saved_bytes(problem) == (1 + 4 / 128) * x.numel() + (1 + 4 / 128**2) * w.numel()


def test_the_peak_of_a_step():
    """Of kernels nothing but what is quantised, and one 16-bit gradient that is not handed out yet."""
    m, n, k = 4096, 4096, 4096
    x, w, g = make(m, n, k)
    problem = numbers.Fp8Problem(m, n, k)
    step(x, w, g, backend="triton")
    peak = peak_extra_bytes(lambda: step(x, w, g, backend="triton"), device="cuda")
    forward = numbers.saved_bytes(problem) + numbers.quantized_bytes(m, k) + numbers.block_quantized_bytes(n, k)
    backward = numbers.saved_bytes(problem) + numbers.gradient_bytes(problem)
    assert peak <= max(forward, backward) + 2 * MIB


@BACKENDS
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 130, 587, 588, 589])
def test_any_number_of_rows_as_often_as_one_likes(m, backend):
    """From the third call on it is prepared; of a weight that was quantised, for an activation that was, and added."""
    k, n = 264, 520
    ways = {
        "plain": fp8_linear,
        "weight": lambda x, w, **how: fp8_linear(x, quantize_weight(w), **how),
        "activation": lambda x, w, **how: fp8_linear(quantize_activation(x), w, **how),
        "cloned": lambda x, w, **how: fp8_linear(quantize_activation(x)._replace(x=x.clone()), w, **how),
        "columns": lambda x, w, **how: fp8_linear(x.T.contiguous().T, w, **how),
    }
    x, w, g = make(m, n, k)
    right = step(x, w, g, backend="dequantize")
    for way in ways.values():
        made = [step(x, w, g, way, backend=backend) for _ in range(4)]
        for p, q in zip(made[0], right, strict=True):
            assert_same(p, q, ROUNDED)
        for other in made[1:]:
            assert_equal(other, made[0])
    for _ in range(4):
        total = torch.full((n, k), 0.5, device="cuda")
        out = fp8_linear(x, w, weight_grad_out=total, backend=backend)
        out.backward(g)
        assert_same(out, right[0], ROUNDED)
        assert_same(x.grad, right[1], ROUNDED)
        assert w.grad is None
        x.grad = None
        assert_same(total - 0.5, right[2].float(), 2 * ROUNDED)


@BACKENDS
def test_the_same_bits_every_time(backend):
    """On a side stream as well, and from a weight that was quantised before or not; another backend's are near."""
    x, w, g = make(1000, 1032, 2050)
    first = step(x, w, g, backend=backend)
    for _ in range(3):
        assert_equal(step(x, w, g, backend=backend), first)
        assert_equal(step(x, w, g, lambda x, w: fp8_linear(x, quantize_weight(w), backend=backend)), first)
    made = aside(lambda: step(x, w, g, backend=backend))
    torch.cuda.synchronize()
    assert_equal(made, first)
    for p, q in zip(first, step(x, w, g, backend="dequantize"), strict=True):
        assert_same(p, q, ROUNDED)


@BACKENDS
@pytest.mark.parametrize("shared", [False, True])
def test_no_synchronisation(shared, backend):
    x, w, g = make(1000, 1032, 2050)

    def run():
        given, weight = (quantize_activation(x), quantize_weight(w)) if shared else (x, w)
        return torch.autograd.grad(fp8_linear(given, weight, backend=backend), (x, w), g)

    without_synchronisation(run)


@BACKENDS
def test_a_cuda_graph_quantises_what_the_weight_has_become_and_adds_at_each_replay(backend):
    x, w, g = make(256, 384, 512)
    total = torch.zeros(384, 512, device="cuda")

    def run():
        fp8_linear(x, w, backend=backend, weight_grad_out=total).backward(g)
        quantized = quantize_weight(w)
        return [*step(x, w, g, backend=backend), *step(x, w, g, lambda x, w: fp8_linear(x, quantized))]

    graph, captured = capture(run)
    for _ in range(2):
        with torch.no_grad():
            w.mul_(-1.5)
            x.copy_(torch.randn_like(x))
        total.zero_()
        for count in (1, 2):
            graph.replay()
            right = step(x, w, g, backend=backend)
            assert_equal(captured[:3], right)
            assert_same(captured[5], right[2], ROUNDED)
            assert_same(total, count * right[2].float(), ROUNDED)


@BACKENDS
def test_every_device_whichever_is_current(backend):
    for index in range(torch.cuda.device_count()):
        x, w, g = make(300, 264, 392, device=f"cuda:{index}")
        for p, q in zip(step(x, w, g, backend=backend), step(x, w, g, backend="dequantize"), strict=True):
            assert p.device == x.device
            assert_same(p, q, ROUNDED)


@BACKENDS
def test_compile(backend):
    x, w, g = make(1000, 1032, 2048)

    def layer(x, w):
        return F.silu(fp8_linear(x * 2, w, backend=backend))

    made, eager = (step(x, w, g, f) for f in (torch.compile(layer, fullgraph=True), layer))
    for p, q, bound in zip(made, eager, (ROUNDED, 0.02, 0.02), strict=True):
        assert_same(p, q, bound)


# --------------------------------------------------------------------------------------- weights that change, or don't


def twins():
    """(a model, its twin, micro-batches)"""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Fp8Linear(512, 1024), Fp8Linear(1024, 256)).cuda().bfloat16()
    xs = torch.randn(2, 384, 512, device="cuda", dtype=torch.bfloat16)
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


@pytest.mark.parametrize("inside", [True, False], ids=["unchanged", "default"])
def test_a_captured_step_and_eager_calls_after_it(inside):
    """The replay updates the weights, which nothing counts; the context is entered and left in the capture."""
    model, twin, xs = twins()
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
    model, twin, xs = twins()
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
    model, _, xs = twins()
    with torch.no_grad(), weights_unchanged(model):
        model(xs[0])  # compiles
    graph, context = torch.cuda.CUDAGraph(), weights_unchanged(model)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
        context.__enter__()
        model(xs[0])
    with pytest.raises(RuntimeError, match="entered during the capture of a CUDA graph and left after it"):
        context.__exit__(None, None, None)


def test_another_stream_and_micro_batches():
    model, twin, xs = twins()
    expected = train(twin, xs)
    with weights_unchanged(model):
        assert torch.equal(aside(lambda: model(xs[0]).float().square().mean()), expected[0])
    assert torch.equal(train(model, xs, lambda: weights_unchanged(model)), expected)
    assert_equal(model.parameters(), twin.parameters())


@pytest.mark.parametrize("inside", [True, False], ids=["unchanged", "default"])
def test_reduce_overhead(inside):
    """Steps of an optimizer, whose kernels write to the weights outside of the graphs."""
    model, twin, xs = twins()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, twin)]
    for p in (*model.parameters(), *twin.parameters()):
        p.grad = torch.zeros_like(p)  # not in the graphs' memory
    for _ in range(5):
        with weights_unchanged(model) if inside else nullcontext():
            for x in xs:
                torch.compiler.cudagraph_mark_step_begin()
                out, expected = compiled(x), twin(x)
                assert_same(out, expected, ROUNDED)
                for made in (out, expected):
                    made.float().square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(p.grad, q.grad, 2e-2)
            p.grad.copy_(q.grad)  # small differences don't add up
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_equal(model.parameters(), twin.parameters())
