"""grouped_matmul on a CUDA device: accuracy at real sizes, NaN for wrong numbers, graphs, and no synchronisation."""

from itertools import product

import pytest
import torch
from grouped_common import (
    EVERYTHING,
    FP8,
    FP8_EVERYTHING,
    PLAIN,
    WRONG_SIZES,
    assert_equal,
    assert_nan,
    assert_nan_from_the_first_wrong_group_on,
    assert_same,
    oracle,
    problem,
    step,
    turned,
)
from grouped_contract import CHECKS, On

from onchip.bench.torch_steps import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.grouped_matmul.cases import CHECK_CASES, GroupedCase, even, half_empty, skewed
from onchip.ops.grouped_matmul.checks import CHECKER
from onchip.oracle.torch import DTYPES
from onchip.torch import grouped_matmul
from shared import assert_within_bounds, capture, pairs_once, without_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unwritten_memory_shows")]
SWIGLU = {"activation": "swiglu"}
WHOLE = GroupedCase("whole", (300, 0, 1000, 20, 728), 1024, 512, tail=40, bias=True, row_scale=True, source_rows=500,
             options={**SWIGLU, "num_rows": 600})  # fmt: skip
# With up to 128 rows a group on average, groups of one tile take their steps in pairs: of seven the last has none.
SHORT = GroupedCase("groups of one tile and of several", (100, 0, 130, 7, 128, 60, 300, 1), 512, 448, tail=9)


def on_gpu(case, dtype=torch.bfloat16, seed=0):
    return problem(case, dtype, "cuda", seed)


def in_float32(arguments, grad):
    """Of the same numbers, by one dense product for each group."""
    x, w, sizes = (arguments[name].detach() for name in ("x", "weight", "group_sizes"))
    out, grad_x, grad_w = (torch.zeros_like(like, dtype=torch.float32) for like in (grad, x, w))
    start = 0
    for g, size in enumerate(sizes.tolist()):
        mine = slice(start, start + size)
        start += size
        out[mine], grad_x[mine] = x[mine].float() @ w[g].float().T, grad[mine].float() @ w[g].float()
        grad_w[g] = grad[mine].float().T @ x[mine].float()
    return {"out": out, "grad_x": grad_x, "grad_weight": grad_w}


@pairs_once("case, dtype, layout", product([*CHECK_CASES, EVERYTHING, WHOLE, SHORT], DTYPES, ["gnk", "gkn"]))
def test_cases(case, dtype, layout):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", backend="triton", weight_layout=layout))


@pytest.mark.parametrize("case", [*CHECK_CASES, EVERYTHING], ids=str)
def test_the_plain_path_where_it_is_named(case):
    assert_within_bounds(CHECKER.check_case(case, torch.bfloat16, "cuda", backend="plain"))
    arguments, grad = on_gpu(case)
    assert_equal(step(arguments, grad, backend="plain"), step(arguments, grad, backend="plain"))
    arguments["group_sizes"][0] = -1
    with pytest.raises(ValueError, match=r"group_sizes\[0\] is -1"):
        grouped_matmul(**arguments, backend="plain")


@pytest.mark.parametrize("sizes", [even, skewed, half_empty], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("tokens", "groups", "n", "k"), [(8192, 8, 14336, 4096), (16384, 256, 2048, 7168)], ids=str)
def test_real_sizes(tokens, groups, n, k, sizes):
    shapes = (tokens + 100, k), (groups, n, k), (tokens + 100, n)
    x, weight, grad = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    arguments = {"x": x.requires_grad_(), "weight": weight.mul_(k**-0.5).requires_grad_()}
    arguments["group_sizes"] = torch.tensor(sizes(tokens, groups), device="cuda")
    assert_same(step(arguments, grad), in_float32(arguments, grad), 4e-3)


def test_more_elements_than_32_bits_count():
    """Of the weight, the result, and x."""
    tokens, groups, n, k = 300000, 40, 8192, 8192
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    sizes = torch.tensor(skewed(tokens, groups), device="cuda")
    out = grouped_matmul(x, w, sizes)
    last = slice(tokens - int(sizes[-1]), tokens)
    assert_same({"last": out[last]}, {"last": x[last].float() @ w[-1].float().T}, 4e-3)


@pytest.mark.parametrize("layout", ["gnk", "gkn"])
@pytest.mark.parametrize(
    "case", [FP8, FP8_EVERYTHING, GroupedCase("", (300, 0, 1000, 20, 728), 1024, 512, tail=40)], ids=str
)
def test_fp8(case, layout):
    """As the plain path, whose numbers are quantised alike; and no louder than fp8_linear."""
    arguments, grad = on_gpu(case)
    if layout == "gkn":
        arguments = turned(arguments)
    made = step(arguments, grad, precision="fp8", backend="triton")
    # A bit of what is kept for an activation moves others to another number of FP8.
    bound = 2e-2 if case is FP8_EVERYTHING else 5e-3
    assert_same(made, step(arguments, grad, precision="fp8", backend="plain"), bound)
    if case is not FP8_EVERYTHING:
        assert_same(made, oracle(arguments, grad), 10 ** (-28 / 20))


@pytest.mark.parametrize(
    ("case", "options"),
    [(PLAIN, {}), (EVERYTHING, {}), (WHOLE, {}), (WHOLE, {"precision": "fp8"})],
    ids=str,
)
def test_no_synchronisation(case, options):
    arguments, grad = on_gpu(case)
    without_synchronisation(lambda: list(step(arguments, grad, **options).values()))


@pytest.mark.parametrize("case", [PLAIN, EVERYTHING, WHOLE], ids=str)
def test_a_cuda_graph_follows_the_sizes(case):
    arguments, grad = on_gpu(case)
    graph, captured = capture(lambda: list(step(arguments, grad).values()))
    for _ in range(2):
        arguments["group_sizes"].copy_(arguments["group_sizes"].flip(0))
        graph.replay()
        expected = step(arguments, grad)
        assert_equal(dict(zip(expected, captured, strict=True)), expected)


@pytest.mark.parametrize(("name", "value"), [("rows", -1), ("rows", 500), ("scatter_rows", 600)], ids=str)
def test_wrong_indices_give_nan_and_with_check_inputs_an_error(name, value):
    arguments, grad = on_gpu(WHOLE)
    arguments[name][2000] = value
    assert_nan(step(arguments, grad))
    with pytest.raises(ValueError, match="grouped_matmul: "):
        grouped_matmul(**arguments, check_inputs=True)


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_wrong_sizes_give_nan_from_the_first_on_and_with_check_inputs_an_error(name):
    assert_nan_from_the_first_wrong_group_on(*WRONG_SIZES[name], device="cuda")
    arguments, _ = on_gpu(EVERYTHING)
    which, values, _ = WRONG_SIZES[name]
    del arguments["group_sizes"]
    with pytest.raises(ValueError, match=f"grouped_matmul: .*{which}"):
        grouped_matmul(**arguments, **{which: torch.tensor(values, device="cuda")}, check_inputs=True)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check):
    check(On("cuda", "triton", WHOLE, torch.bfloat16, 4e-3))


@pytest.mark.parametrize(("options", "products"), [({}, 0), (SWIGLU, 2)], ids=["plain", "swiglu"])
def test_the_peak_of_a_step(options, products):
    """What is kept for the activation, and its gradient."""
    case = GroupedCase("", even(8192, 16), 2048, 1024, options=options)
    arguments, grad = on_gpu(case)
    step(arguments, grad)
    peak = peak_extra_bytes(lambda: list(step(arguments, grad).values()), device="cuda")
    assert peak <= products * 8192 * 2048 * 2 + 2 * MIB


def test_compile():
    arguments, _ = on_gpu(WHOLE)
    compiled = torch.compile(grouped_matmul, fullgraph=True)
    assert_equal({"out": compiled(**arguments)}, {"out": grouped_matmul(**arguments)})


def test_every_device_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        arguments, grad = problem(EVERYTHING, torch.float16, f"cuda:{index}")
        assert step(arguments, grad)["out"].device.index == index
