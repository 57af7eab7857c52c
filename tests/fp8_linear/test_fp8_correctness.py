"""What the op computes: the bits of quantised numbers, products compared with the oracle, memory."""

import numpy as np
import pytest
import torch
from fp8_common import assert_right, assert_same, assert_same_bits, assert_the_oracles, quantize, small_problem
from fp8_drawn import FORMATS, SCALES, awkward

from onchip.fp8 import numbers, torch_products, torch_quantize, triton_launches
from onchip.fp8.numbers import ROW, SQUARE
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, MODEL_CASES, Fp8LinearCase
from onchip.torch import fp8_linear, quantize_activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_cases(case, dtype):
    assert_right(case, dtype)


def assert_quantized(made, expected, group):
    """Bits, scales, and zeros (or NaN, in a NaN's group) beyond the end."""
    columns = expected.data.shape[1]
    data = made.data.view(torch.uint8).numpy()
    nan = np.isnan(reference.decode(expected.data, expected.fmt))
    np.testing.assert_array_equal(np.isnan(reference.decode(data[:, :columns], expected.fmt)), nan)
    np.testing.assert_array_equal(data[:, :columns][~nan], expected.data[~nan])
    scales = expected.scale[:: group[0], :: group[1]]
    stored = made.scales.numpy()
    stored = stored.T if group[0] == 1 else stored[:, : scales.shape[1]]
    np.testing.assert_array_equal(stored, scales)
    beyond = reference.decode(data[:, columns:], expected.fmt)
    assert ((beyond == 0) | np.isnan(beyond)).all()
    healthy = np.isfinite(expected.value).all(1)
    assert (beyond[healthy] == 0).all()


@SCALES
@FORMATS
@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (256, 128), (9, 1000)], ids=str)
def test_quantised_bits_are_the_oracles(shape, fmt, scale):
    x = awkward(*shape)
    for group in (ROW, SQUARE)[: 2 if fmt == "e4m3" else 1]:
        rows, columns = quantize(torch.from_numpy(x), group == SQUARE, fmt, scale)
        assert_quantized(rows, reference.quantize(x, group, fmt, scale), group)
        assert_quantized(columns, reference.quantize(x.T, group, fmt, scale), group)


@pytest.mark.parametrize("by_block", [False, True])
def test_chunks_do_not_change_the_bits(by_block, monkeypatch):
    x = torch.from_numpy(awkward(600, 300))
    whole = quantize(x, by_block)
    monkeypatch.setattr(torch_quantize, "_CHUNK", 1)
    assert_same_bits(quantize(x, by_block), whole)


def test_rows_behind_the_last_one_change_nothing():
    x = torch.from_numpy(awkward(130, 300))
    (rows, columns), (more, same) = (torch_quantize.quantize(x, "e4m3", "float32", row_multiple=n) for n in (1, 4))
    assert (more.data.shape, more.scales.shape) == ((132, 384), (3, 132))
    assert_same_bits([(more.data[:130], more.scales[:, :130]), same], [rows, columns])


def test_products_in_chunks_are_the_same(monkeypatch):
    x, w, b = small_problem(m=300, n=260, bias=True)
    expected = fp8_linear(x, w, b)
    monkeypatch.setattr(torch_products, "_CHUNK", 1)
    assert_same(fp8_linear(x, w, b), expected)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "one dimension", "four dimensions"])
def test_any_strides_and_dimensions(layout):
    x, w, _ = small_problem()
    x, w = x.detach(), w.detach()
    x = {
        "transposed": x.transpose(0, 1),
        "sliced": torch.cat([x, x], -1)[..., 1:145],
        "expanded": x[:, :1].expand(2, 12, 144),
        "one dimension": x[0, 0],
        "four dimensions": x[:, None],
    }[layout].requires_grad_()
    w = w.T.contiguous().T if layout == "transposed" else w
    assert_the_oracles(
        x, w.requires_grad_(), grad=lambda out: torch.randn(out.shape[-1], *out.shape[:-1]).movedim(0, -1)
    )


def test_no_rows():
    """Of every backend: every_loss.py."""
    _, w, b = small_problem(bias=True)
    x = torch.randn(3, 0, 144, requires_grad=True)
    with torch.no_grad():
        assert fp8_linear(x, w, b).shape == (3, 0, 136)
    total = torch.ones(136, 144)
    fp8_linear(x, w, b, weight_grad_out=total).sum().backward()
    assert (total == 1).all()
    assert not b.grad.any()


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16], ids=str)
def test_each_argument_has_its_own_dtype(weight, bias):
    """A float32 master weight is quantised from all of its digits."""
    x, w, b = small_problem(bias=True)
    assert_the_oracles(*(t.detach().to(d).requires_grad_() for t, d in ((x, torch.bfloat16), (w, weight), (b, bias))))


def test_nan_shows_where_it_is_and_nowhere_else():
    x, w, _ = small_problem(m=300)
    with torch.no_grad():
        x[0, 3, 5] = float("nan")
    out = fp8_linear(x, w)
    assert out[0, 3].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[1].isfinite().all()
    out.backward(torch.ones_like(out))
    assert w.grad[:, 5].isnan().all()
    assert w.grad[:, 6:].isfinite().all()
    assert x.grad.isfinite().all()


def test_the_model_cases_are_those_of_the_benchmark():
    by_name = {case.name: (case.m, case.n, case.k) for case in MODEL_CASES}
    assert len(MODEL_CASES) == len(by_name) == 84
    assert by_name["llama2-7b-qkv-1"] == (4096, 12288, 4096)
    assert by_name["llama3.1-405b-down-4"] == (32768, 16384, 53248)


# --------------------------------------------------------------------------------------------------------------- memory


def saved(run):
    """The tensors that autograd keeps of `run()`."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return kept


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("m", [256, 130])
def test_only_fp8_is_kept_for_backward(m):
    x, w, _ = small_problem(m, 256, 384, torch.bfloat16)
    kept = saved(lambda: fp8_linear(x, w))
    problem = numbers.Fp8Problem(m, 256, 384)
    assert bytes_of(kept) == numbers.saved_bytes(problem)
    assert not {torch.bfloat16} & {t.dtype for t in kept}
    of_weight = numbers.block_quantized_bytes(384, 256)
    assert bytes_of(saved(lambda: fp8_linear(x, w.detach()))) == of_weight
    assert bytes_of(saved(lambda: fp8_linear(x.detach(), w))) == numbers.saved_bytes(problem) - of_weight
    assert bytes_of(saved(lambda: fp8_linear(x.detach(), w.detach()))) == 0


def test_layers_that_share_an_activation_keep_one_copy():
    x, w, _ = small_problem(256, 128, 256, torch.bfloat16)
    v = w.detach().clone().requires_grad_()
    shared = quantize_activation(x)
    kept = {t.data_ptr(): t for t in saved(lambda: (fp8_linear(shared, w), fp8_linear(shared, v)))}
    of_weight = numbers.block_quantized_bytes(256, 128)
    assert bytes_of(kept.values()) == numbers.saved_bytes(numbers.Fp8Problem(256, 128, 256)) + of_weight


def test_the_formula_of_a_weights_copies():
    w = torch.randn(300, 500)
    assert bytes_of(t for q in quantize(w, True) for t in q) == numbers.weight_bytes(numbers.Fp8Problem(1, 300, 500))


def test_a_case_that_is_wrong_is_seen():
    """The bounds are tight: a scale of the wrong block fails them."""
    case = Fp8LinearCase("wrong", 130, 260, 264)
    right = torch_quantize.quantize

    def swapped(*arguments, by_block=False, **wanted):
        made = right(*arguments, by_block=by_block, **wanted)
        if not by_block:
            return made
        return tuple(None if q is None else q._replace(scales=q.scales.roll(1, 0)) for q in made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_quantize, "quantize", swapped)
        with pytest.raises(AssertionError, match="grad_x unquantised"):
            assert_right(case)


@pytest.mark.parametrize(
    ("x", "aligned"),
    [
        (torch.empty(130, 300, dtype=torch.bfloat16), True),
        (torch.empty(300, 130, dtype=torch.float16).T, True),
        (torch.empty(130, 300, dtype=torch.bfloat16)[::2, 2:200], True),
        (torch.empty(130, 301), True),
        (torch.empty(130, 301)[:, 1:], True),
        (torch.empty(130, 301, dtype=torch.bfloat16), False),
        (torch.empty(130, 301, dtype=torch.bfloat16)[:, :300], False),
        (torch.empty(130, 300, dtype=torch.bfloat16)[:, 1:201], False),
        (torch.empty(130, 300, dtype=torch.bfloat16)[:, ::2], True),
        (torch.empty_strided((2, 8), (1 << 24, 1), dtype=torch.bfloat16, device="meta"), True),
    ],
    ids=lambda value: f"{list(value.shape)} {list(value.stride())}" if isinstance(value, torch.Tensor) else None,
)
def test_how_matrices_are_read(x, aligned):
    outs = (torch_quantize.empty(*shape, "e4m3", x) for shape in (x.shape, x.shape[::-1]))
    arguments = triton_launches.quantize_launch(x, *outs, "e4m3", "float32").arguments
    assert arguments["ALIGNED"] is aligned
    assert arguments["x"].stride(1) == 1
    assert arguments["stride_r"] < 1 << 24
