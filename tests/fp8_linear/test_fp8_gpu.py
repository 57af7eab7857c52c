"""fp8_linear on a CUDA device: bits, accuracy, sizes, memory, streams, graphs."""

import math

import pytest
import torch
import torch.nn.functional as F
from fp8_common import assert_right, same_bits
from test_fp8_correctness import awkward

from onchip.bench.measure import peak_extra_bytes
from onchip.fp8 import numbers, torch_products, torch_quantize
from onchip.fp8.triton_tiles import ProductConfig, QuantizeConfig
from onchip.ops.fp8_linear import torch_op
from onchip.ops.fp8_linear.cases import CHECK_CASES
from onchip.ops.fp8_linear.checks import TENSOR_CORE_ERROR, plain_refusals, refusals
from onchip.ops.fp8_linear.reference import snr_db
from onchip.torch import Fp8Linear, fp8_linear, quantize_activation, quantize_weight

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def usable():
    """Backends that can run here; collected on machines without a device, too."""
    if not torch.cuda.is_available():
        return ("dequantize",)
    refusals = plain_refusals("cuda")
    return tuple(name for name, reason in refusals.items() if reason is None)


BACKENDS = pytest.mark.parametrize("backend", usable())
CONFIGS = {
    "default": ProductConfig(),
    "deep": ProductConfig(stages=6, parts=4),
    "two programs": ProductConfig(rows=64, warps=4, stages=3, per_processor=2),
    "narrow": ProductConfig(columns=64, warps=4, stages=3, per_processor=2),
    "256 wide": ProductConfig(columns=256, stages=4, parts=2),
    "256 high": ProductConfig(rows=256, stages=3, parts=2),
}
QUANTIZERS = {
    "default": QuantizeConfig(),
    "4 warps": QuantizeConfig(warps=4),
    "16 warps": QuantizeConfig(warps=16),
}


def make(m, n, k, *, dtype=torch.bfloat16, device="cuda", seed=0):
    """(x, weight, grad_out); x and weight are leaves that need gradients."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, device=device, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(n, k, device=device, generator=g) * k**-0.5).to(dtype).requires_grad_()
    return x, w, torch.randn(m, n, device=device, generator=g).to(dtype)


def step(x, w, grad, **options):
    """Output and gradients."""
    out = fp8_linear(x, w, **options)
    return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


@pytest.fixture(autouse=True)
def unwritten_memory_shows():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


# ---------------------------------------------------------------------------------------------------------- quantising


@pytest.mark.parametrize("scale", numbers.SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", numbers.FP8_MAX)
@pytest.mark.parametrize("config", QUANTIZERS)
@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (513, 1000), (256, 384), (300, 264), (129, 257)], ids=str)
def test_quantised_bits_are_pytorchs(shape, config, fmt, dtype, scale):
    """NaN, infinities, zeros, subnormals, 1e-30 and ties among them; on this device and on the CPU."""
    from onchip.fp8 import triton_launches

    x = torch.from_numpy(awkward(*shape)).to(dtype)
    # Bits of every pattern, too.
    g = torch.Generator().manual_seed(0)
    x[: shape[0] // 4] = torch.randint(0, 1 << 15, x[: shape[0] // 4].shape, generator=g).to(torch.int16).view(
        torch.bfloat16
    ).to(dtype)  # fmt: skip
    wanted = {"rows": True, "columns": True}
    expected = torch_quantize.quantize_activation(x, fmt, scale, **wanted)
    results = [
        torch_quantize.quantize_activation(x.cuda(), fmt, scale, **wanted),
        triton_launches.quantize_activation(x.cuda(), fmt, scale, config=QUANTIZERS[config], **wanted),
        triton_launches.quantize_activation(x.cuda().T.contiguous().T, fmt, scale, **wanted),
        triton_launches.quantize_activation(torch.stack([x, x], 2).cuda()[..., 0], fmt, scale, **wanted),
        # Its first row begins in the middle of a word of 32 bits.
        triton_launches.quantize_activation(
            torch.cat([x[0, :1], x.flatten()]).cuda()[1:].view_as(x), fmt, scale, config=QUANTIZERS[config], **wanted
        ),
    ]
    for made in results:
        assert_all_same(made, expected)
    wanted = {"rows": True, "transposed": True}
    expected = torch_quantize.quantize_weight(x, scale, **wanted)
    assert_all_same(torch_quantize.quantize_weight(x.cuda(), scale, **wanted), expected)
    made = triton_launches.quantize_weight(x.cuda(), scale, config=QUANTIZERS[config], **wanted)
    assert_all_same(made, expected)


def assert_all_same(made, expected):
    for p, q in zip(made, expected, strict=True):
        assert same_bits(p.data.cpu(), q.data)
        assert same_bits(p.scales.cpu(), q.scales)


def test_quantising_more_elements_than_32_bits_count():
    from onchip.fp8 import triton_launches

    rows, columns = 70000, 32768
    assert rows * columns > 1 << 31
    x = torch.randn(256, columns, device="cuda").bfloat16().repeat(274, 1)[:rows]
    by_row, by_column = triton_launches.quantize_activation(x, "e4m3", "float32", rows=True, columns=True)
    part, part_columns = torch_quantize.quantize_activation(x[:256], "e4m3", "float32", rows=True, columns=True)
    last = rows // 256 * 256
    assert same_bits(by_row.data[last - 256 : last], part.data)
    assert same_bits(by_column.data[:, last - 256 : last], part_columns.data)
    assert same_bits(by_row.scales[:, last - 256 : last], part.scales)


# ------------------------------------------------------------------------------------------------------------ products


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_cases(case, dtype, backend):
    if refusals("cuda", **case.options)[backend] is None:
        assert_right(case, dtype, "cuda", backend=backend)
    else:
        with pytest.raises(ValueError, match="no blockwise scales for E5M2"):
            assert_right(case, dtype, "cuda", backend=backend)


def operands(m, n, k, by_block, fmt="e4m3"):
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(size, k, device="cuda", generator=g) for size in (m, n))
    # Blocks of very different sizes: a scale of the wrong block can't pass for the right one.
    w *= torch.exp2(torch.randint(-8, 8, (n, 1), device="cuda", generator=g).float())
    a, _ = torch_quantize.quantize_activation(x, fmt, "float32", rows=True, columns=False)
    if by_block:
        return a, torch_quantize.quantize_weight(w, "float32", rows=True, transposed=False)[0]
    return a, torch_quantize.quantize_activation(w, "e4m3", "float32", rows=True, columns=False)[0]


@pytest.mark.parametrize("by_block", [True, False], ids=["weight", "1x128"])
@pytest.mark.parametrize("size", [(1000, 1032, 2048), (4097, 515, 640), (64, 8192, 128), (8192, 130, 4096)], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_right(config, size, by_block):
    """By descriptors and by pointers, stored and added, against float32 products of the dequantised operands."""
    from onchip.fp8 import triton_launches

    a, b = operands(*size, by_block)
    exact = torch_products.dequantized_product(a, b, by_block, None, torch.float32, None)
    for tma in (True, False):
        for add in (True, False):
            out = torch.full_like(exact, 3.0) if add else torch.full_like(exact, math.nan)
            launch = triton_launches.product_launch(a, b, by_block, None, out, add, CONFIGS[config], 132, tma=tma)
            launch.run()
            error = (out - (3.0 if add else 0) - exact).norm() / exact.norm()
            assert error < TENSOR_CORE_ERROR, (tma, add, float(error))


def test_the_bounds_see_one_scale_for_256_columns():
    """A tile of 256 columns with the scale of its first half is far outside of them."""
    a, b = operands(512, 512, 512, True)
    exact = torch_products.dequantized_product(a, b, True, None, torch.float32, None)
    wrong = b._replace(scales=b.scales[::2].repeat_interleave(2, 0).contiguous())
    made = torch_products.dequantized_product(a, wrong, True, None, torch.float32, None)
    assert (made - exact).norm() / exact.norm() > 10 * TENSOR_CORE_ERROR


@BACKENDS
@pytest.mark.parametrize("size", [(8192, 4096, 4096), (4096, 4096, 14336)], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": "power_of_two"}], ids=str)
def test_signal_to_noise_is_28_db(options, size, backend):
    x, w, g = make(*size)
    made = step(x, w, g, backend=backend, **options)
    xf, wf, gf = (t.detach().float() for t in (x, w, g))
    for result, exact in zip(made, (xf @ wf.T, gf @ wf, gf.T @ xf), strict=True):
        assert snr_db(result.float().cpu(), exact.cpu()) >= 28


@BACKENDS
@pytest.mark.parametrize("factor", [1e-10, 1e-30])
def test_tiny_gradients_are_kept(factor, backend):
    x, w, g = make(1024, 1032, 1032)
    made = step(x, w, g * factor, backend=backend)
    wf, gf, xf = w.detach().double(), (g * factor).double(), x.detach().double()
    for result, exact in zip(made[1:], (gf @ wf, gf.T @ xf), strict=True):
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


@pytest.mark.parametrize("k", [1000, 1003])
def test_weight_grad_out_accumulates(k):
    """Through a descriptor and by pointers; also into a slice whose address fits no descriptor."""
    n = 1024
    for backend in usable():
        flat = torch.full((n * k + 1,), 1e-3, device="cuda")
        for offset in (0, 1):
            total = flat[offset : offset + n * k].view(n, k)
            total.fill_(1e-3)
            expected = total.double()
            for seed in (1, 2, 3):
                x, w, g = make(500 * seed, n, k, seed=seed)
                fp8_linear(x, w, backend=backend, weight_grad_out=total).backward(g)
                assert w.grad is None
                (right,) = torch.autograd.grad(fp8_linear(x, w.detach().float().requires_grad_()), x, g)
                assert (x.grad - right).norm() < 4e-3 * right.norm()
                expected += step(x, w.detach().float().requires_grad_(), g, backend="dequantize")[2].double()
            assert (total - expected).norm() < TENSOR_CORE_ERROR * (expected - 1e-3).norm()


@pytest.mark.parametrize("backend", [name for name in usable() if name != "dequantize"])
@pytest.mark.parametrize("by_block", [True, False], ids=["weight", "1x128"])
def test_a_product_is_added_as_it_is_made(backend, by_block):
    """With no second matrix of float32, and as precisely as by an addition after it."""
    x, w, _ = make(3008, 4096, 2000)
    of = torch_op._backend(backend)
    a, _ = of.quantize_activation(x.detach(), "e4m3", "float32", rows=True, columns=False)
    if by_block:
        b, _ = of.quantize_weight(w.detach(), "float32", rows=True, transposed=False)
    else:
        b, _ = of.quantize_activation(w.detach(), "e4m3", "float32", rows=True, columns=False)
    made = of.product(a, b, by_block, None, torch.float32, None)
    total = torch.full_like(made, 0.5)
    assert of.product(a, b, by_block, None, torch.bfloat16, total) is total
    assert (total - 0.5 - made).norm() <= 1e-6 * made.norm()

    def again():
        of.product(a, b, by_block, None, torch.bfloat16, total)
        return ()

    assert peak_extra_bytes(again, device="cuda") <= MIB


@BACKENDS
def test_a_cuda_graph_adds_at_each_replay(backend):
    x, w, g = make(512, 384, 256)
    total = torch.zeros(384, 256, device="cuda")

    def backward():
        fp8_linear(x, w, backend=backend, weight_grad_out=total).backward(g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward()
    torch.cuda.current_stream().wait_stream(stream)
    one = total.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for count in (2, 3):
        graph.replay()
        assert (total - count * one).norm() <= 1e-6 * total.norm()


def test_more_elements_of_the_result_than_32_bits_count():
    """Its last rows are right, forward and in the gradient of x."""
    m, n, k = 70000, 32768, 256
    assert m * n > 1 << 31
    for backend in usable():
        if backend == "dequantize":
            continue
        x, w, _ = make(m, n, k)
        g = torch.ones(1, n, device="cuda", dtype=torch.bfloat16).expand(m, n)
        out = fp8_linear(x, w, backend=backend)
        expected = fp8_linear(x[-200:].detach(), w.detach(), backend="dequantize")
        assert (out[-200:] - expected).float().norm() < 4e-3 * expected.float().norm()
        (grad_x,) = torch.autograd.grad(out, x, g)
        last = x[-200:].detach().requires_grad_()
        (right,) = torch.autograd.grad(fp8_linear(last, w.detach(), backend="dequantize"), last, g[-200:])
        assert (grad_x[-200:] - right).float().norm() < 4e-3 * right.float().norm()
        del out, grad_x


# --------------------------------------------------------------------------------------------------- memory and streams


@BACKENDS
def test_what_is_kept_for_backward(backend):
    m, n, k = 4096, 4096, 8192
    x, w, _ = make(m, n, k)
    fp8_linear(x, w, backend=backend)  # compiles
    problem = numbers.Problem(m, n, k)
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
    problem = numbers.Problem(m, n, k)
    step(x, w, g, backend="triton")
    peak = peak_extra_bytes(lambda: step(x, w, g, backend="triton"), device="cuda")
    forward = numbers.saved_bytes(problem) + numbers.quantized_bytes(m, k) + numbers.block_quantized_bytes(n, k)
    backward = numbers.saved_bytes(problem) + numbers.gradient_bytes(problem)
    assert peak <= max(forward, backward) + 2 * MIB


@BACKENDS
def test_the_same_bits_every_time(backend):
    """On a side stream as well, from a weight that was quantised before or not, and from one retained graph."""
    x, w, g = make(1000, 1032, 2050)
    first = step(x, w, g, backend=backend)
    for _ in range(3):
        for quantized in (w, quantize_weight(w)):
            out = fp8_linear(x, quantized, backend=backend)
            again = [out.detach(), *torch.autograd.grad(out, (x, w), g)]
            assert all(torch.equal(p, q) for p, q in zip(again, first, strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = step(x, w, g, backend=backend)
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(aside, first, strict=True))
    out = fp8_linear(x, w, backend=backend)
    for retain in (True, False):
        made = torch.autograd.grad(out, (x, w), g, retain_graph=retain)
        assert all(torch.equal(p, q) for p, q in zip(made, first[1:], strict=True))


def test_quantised_to_the_same_numbers_by_every_backend():
    """What differs among backends is the order of float32 sums alone."""
    x, w, g = make(1000, 1032, 2050)
    results = {name: step(x, w, g, backend=name) for name in usable()}
    for name, made in results.items():
        for p, q in zip(made, results["dequantize"], strict=True):
            assert (p - q).float().norm() < 4e-3 * q.float().norm(), name


@BACKENDS
@pytest.mark.parametrize("shared", [False, True])
def test_no_synchronisation(shared, backend):
    x, w, g = make(1000, 1032, 2050)
    step(x, w, g, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given, weight = (quantize_activation(x), quantize_weight(w)) if shared else (x, w)
        out = fp8_linear(given, weight, backend=backend)
        torch.autograd.grad(out, (x, w), g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@BACKENDS
def test_a_cuda_graph_quantises_what_the_weight_has_become(backend):
    x, w, g = make(256, 384, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, w, g, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    step(x, w, g, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, w, g, backend=backend)
    for _ in range(2):
        with torch.no_grad():
            w.mul_(-1.5)
            x.copy_(torch.randn_like(x))
        graph.replay()
        right = step(x, w, g, backend=backend)
        assert all(torch.equal(p, q) for p, q in zip(captured, right, strict=True))


@BACKENDS
def test_every_device_whichever_is_current(backend):
    for index in range(torch.cuda.device_count()):
        x, w, g = make(300, 264, 392, device=f"cuda:{index}")
        made = step(x, w, g, backend=backend)
        right = step(x, w, g, backend="dequantize")
        for p, q in zip(made, right, strict=True):
            assert p.device == x.device
            assert (p - q).float().norm() < 4e-3 * q.float().norm()


@BACKENDS
def test_compile(backend):
    x, w, g = make(1000, 1032, 2048)
    layer = torch.compile(lambda x, w: F.silu(fp8_linear(x * 2, w, backend=backend)), fullgraph=True)
    eager = F.silu(fp8_linear(x * 2, w, backend=backend))
    made = layer(x, w)
    assert (made - eager).float().norm() < 4e-3 * eager.float().norm()
    for p, q in zip(torch.autograd.grad(made, (x, w), g), torch.autograd.grad(eager, (x, w), g), strict=True):
        assert (p - q).float().norm() < 0.02 * q.float().norm()


def test_training_goes_as_in_bfloat16():
    """A small regression: the losses of both stay within a few per cent of each other."""
    losses = {}
    for kind in ("bf16", *usable()):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 512), torch.nn.Linear(512, 128)]
        if kind != "bf16":
            layers = [Fp8Linear.from_linear(layer, backend=kind) for layer in layers]
        model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        g = torch.Generator("cuda").manual_seed(1)
        truth = torch.randn(256, 128, device="cuda", generator=g) / 16
        for _ in range(200):
            x = torch.randn(512, 256, device="cuda", generator=g)
            loss = F.mse_loss(model(x.bfloat16()).float(), torch.tanh(x @ truth))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[kind] = float(loss)
    assert all(abs(value / losses["bf16"] - 1) < 0.1 for value in losses.values()), losses
