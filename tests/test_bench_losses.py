"""The benchmarks of the losses over a vocabulary, in both frameworks: small real runs, references, inputs, peers."""

import dataclasses
import itertools
import subprocess
import sys
from functools import partial
from importlib import import_module
from io import StringIO

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import onchip
from onchip.bench import benchmark, harness, jax_steps, report, torch_steps
from onchip.bench import peers as bench_peers
from onchip.bench.peers import IGNORED
from onchip.bench.run import benchmark_named, benchmark_of, run_bench
from onchip.ops.cross_entropy import bench as cross_entropy
from onchip.ops.linear_cross_entropy import bench as linear_cross_entropy
from onchip.ops.linear_cross_entropy import checks as lce_cases
from onchip.oracle import checks as oracle_checks
from onchip.oracle.cases import Case
from onchip.registry import OPS
from onchip.torch import linear_cross_entropy as linear_cross_entropy_in_torch
from onchip.vocab import memory


def case_of(op, *sizes, **more):
    return type(import_module(f"onchip.ops.{op}.checks").CHECK_CASES[0])("small", *sizes, **more)


# Ragged sizes, and what each op has of its own.
SMALL = {
    "linear_cross_entropy": Case("small", 96, 32, 1000, ignored=0.5),
    "cross_entropy": case_of("cross_entropy", 65, 300, sliced=4, ignored=0.5),
    "linear_log_probs": case_of("linear_log_probs", 65, 24, 300, options={"entropy": True}),
    "linear_jsd": case_of("linear_jsd", 65, 24, 300, teacher_hidden=40, options={"beta": 0.3}),
}
# What runs nowhere in the tests, by the beginnings of names.
NOT_HERE = {
    "torch": ("liger", "quack", "trl", "cut-cross-entropy", "torch.compile", "onchip triton", "onchip fp8", "onchip, "),
    "jax": ("tokamax", "jax-cce", "onchip xla", "onchip, 64 MiB", "onchip, no bound"),
}
each = pytest.mark.parametrize(("framework", "op"), [(f, op) for f in ("torch", "jax") for op in SMALL])
each_framework = pytest.mark.parametrize("framework", ["torch", "jax"])
LCE = linear_cross_entropy.TORCH
pytestmark = pytest.mark.usefixtures("one_thread")


def implementation(op, name):
    (found,) = (impl for impl in op.IMPLEMENTATIONS if impl.name == name)
    return found


def steps_of(op, name, problem):
    return op.steps(problem, implementation(op, name))


def array(x):
    return oracle_checks.adapter_of(x).as_array(x)


def right(checked):
    return [name for name, (error, bound) in checked.items() if error <= bound]


def run(op, framework, folder, **options):
    how = {"cases": ["small"], "device": "cpu", "dtype": "float32", "repeats": 1, "impls": None, **options}
    return run_bench(op, framework, out=folder, console=Console(file=StringIO()), **how)


@pytest.fixture
def no_libraries(monkeypatch):
    """Distributions that are not installed: all but the frameworks'."""
    version = bench_peers.metadata.version

    def missing(package):
        if package in ("torch", "jax", "onchip"):
            return version(package)
        raise bench_peers.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(bench_peers.metadata, "version", missing)


# JAX compiles each step for seconds: there it is one op, and only this package's implementation.
@pytest.mark.parametrize(
    ("framework", "op", "dtype"),
    [
        *(("torch", op, d) for op in SMALL for d in ("float32", "bfloat16")),
        pytest.param("jax", "linear_cross_entropy", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_run(framework, op, dtype, tmp_path, monkeypatch, quiet_bench, no_libraries):
    target = benchmark_of(op, framework)
    monkeypatch.setattr(target, "CASES", {"small": SMALL[op]})
    names = [impl.name for impl in target.IMPLEMENTATIONS if not impl.name.startswith("torch.compile")]
    not_here = {n for n in names if n.startswith((*NOT_HERE[framework], "optax"))}
    if framework == "jax":
        names = [n for n in names if n in (*not_here, "onchip auto")]
    elif dtype == "float32":
        not_here |= {n for n in names if "float32 logits" in n}
    if not hasattr(F, "linear_cross_entropy"):
        not_here |= {n for n in names if n.startswith("F.")}
    document = run(op, framework, tmp_path, dtype=dtype, impls=names)
    assert {n["impl"] for n in document["not_run"]} == not_here
    rows = {(report.short_name(row["impl"]), row["mode"]): row for row in document["rows"]}
    assert list(rows) == [(n, mode) for mode in harness.MODES for n in names if n not in not_here]
    returned = target.forward(target.make_problem(SMALL[op], "cpu", dtype))
    for (name, mode), row in rows.items():
        # In bfloat16 PyTorch's chunked loss may be off by more than twice eager's error.
        loose = dtype == "bfloat16" and name.startswith("F.linear_cross_entropy chunked")
        assert row["ok"] or loose, row
        assert row["floor_ms"] > 0
        assert (row["compile_s"] is None) == (framework == "torch")
        gradients = [f"grad_{n}" for n in target.leaves] if mode == "forward+backward" else []
        assert list(row["errors"]) == [*returned, *gradients]
        if dtype == "bfloat16" and name == target.fw.PLAIN:  # what all are held to
            assert row["error_bound"] == pytest.approx(2 * row["error"]) or row["error_bound"] == 2**-7
    if op == "linear_cross_entropy":
        name = "onchip auto" if framework == "jax" else "onchip stash"
        assert [rows[name, mode]["config"]["strategy"] for mode in harness.MODES] == ["forward", "stash"]
    assert document["environment"]["framework"] == framework
    assert ("torch" in document["environment"]) == (framework == "torch")
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith(op if framework == "torch" else f"{op}-jax")


# ------------------------------------------------------------------------------------------- references and the gate


def oracle_values(op, problem):
    """What the NumPy oracle makes of the same numbers."""
    reference = import_module(f"onchip.ops.{op}.checks")
    arrays, options = [array(x) for x in problem.arrays], problem.options
    if op == "cross_entropy":
        logits, target = arrays
        made = reference.cross_entropy(logits[:, : problem.columns], target)
        padding = ((0, 0), (0, logits.shape[1] - problem.columns))
        return {"loss": made.loss, "grad_logits": np.pad(made.grad_logits, padding)}
    if op == "linear_cross_entropy":
        made = reference.linear_cross_entropy(*arrays, **options)
        return {"loss": made.loss, "grad_hidden": made.grad_hidden, "grad_weight": made.grad_weight}
    if op == "linear_log_probs":
        each, entropy = 1 / len(arrays[2]), options["entropy"]
        made = reference.linear_log_probs(
            *arrays, grad_log_prob=np.full(len(arrays[2]), each), grad_entropy=each * entropy, grad_lse=0.0
        )
        names = ("log_prob", *(("entropy",) if entropy else ()), "grad_hidden", "grad_weight")
        return {name: getattr(made, name) for name in names}
    made = reference.linear_jsd(*arrays, **options)
    return {"loss": made.loss, "grad_hidden": made.grad_student_hidden, "grad_weight": made.grad_student_weight}


VARIANTS = {
    "linear_cross_entropy": [{}, {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-3}],
    "linear_log_probs": [{"entropy": False}, {"entropy": True}],
    "linear_jsd": [{"beta": 0.0}, {"beta": 1.0}, {"beta": 0.3}],
}


@pytest.mark.parametrize(
    ("framework", "op"),
    [
        *(("torch", op) for op in SMALL),
        ("jax", "linear_cross_entropy"),
        pytest.param("jax", "linear_jsd", marks=pytest.mark.slow),
    ],
)
def test_the_reference_is_the_oracle_and_finds_a_wrong_gradient(framework, op, monkeypatch):
    target = benchmark_of(op, framework)
    # Chunks of 30 rows, of which the last one isn't full.
    monkeypatch.setattr(benchmark, "CHUNK", 30 * SMALL[op].vocab)
    problem = target.make_problem(SMALL[op], "cpu", "float32")
    variants = VARIANTS.get(op, [{}])
    for options in variants if framework == "torch" else variants[-1:]:
        problem = dataclasses.replace(problem, options=options)
        reference = target.reference(problem)
        expected = oracle_values(op, problem)
        assert list(reference.values) == list(expected)
        for name, value in reference.values.items():
            assert np.asarray(value).dtype == np.float64
            np.testing.assert_allclose(np.asarray(value), expected[name], rtol=1e-9, atol=1e-13, err_msg=name)
    for name in ("onchip auto", target.fw.PLAIN):
        made = steps_of(target, name, problem)["forward+backward"]()
        assert right(target.check(reference, "forward+backward", made)) == list(expected), name
    for i in range(len(expected) - len(target.leaves), len(expected)):
        nan = made[i] + made[i] * np.nan if framework == "jax" else made[i].index_fill(0, torch.tensor([3]), torch.nan)
        for spoiled in (made[i] * 1.001, nan):
            found = right(target.check(reference, "forward+backward", [*made[:i], spoiled, *made[i + 1 :]]))
            assert found == [name for j, name in enumerate(expected) if j != i]
    with pytest.raises(ValueError, match="shape"):
        target.check(reference, "forward", [made[-1] for _ in range(reference.forward)])
    with pytest.raises(ValueError, match="shorter"):
        target.check(reference, "forward+backward", made[:-1])


@pytest.mark.parametrize(
    ("framework", "op"), [*(("torch", op) for op in SMALL), ("jax", "linear_jsd"), ("jax", "cross_entropy")]
)
def test_floors(framework, op):
    target = benchmark_of(op, framework)
    problem = target.make_problem(SMALL[op], "cpu", "float32")
    shapes = {mode: [tuple(x.shape) for x in target.floor(problem, mode)()] for mode in harness.MODES}
    if op == "cross_entropy":  # moves what the loss must
        columns = problem.arrays[0].shape[1]
        assert shapes == {"forward": [(33, columns)], "forward+backward": [(65, columns)]}
        return
    first, second = (tuple(x.shape) for x in problem.arrays[:2])
    first = (round(first[0] * (1 - SMALL[op].ignored)), first[1])  # of the tokens that count
    logits = [(first[0], second[0])] * (2 if op == "linear_jsd" else 1)
    assert shapes == {"forward": logits, "forward+backward": [*logits, first, second]}


@each_framework
def test_steps_drop_what_is_not_returned_and_sum_the_means(framework):
    x = jnp.arange(3.0) if framework == "jax" else torch.arange(3.0, requires_grad=True)
    y = np.arange(3.0) + 1
    one = jnp.ones(3) if framework == "jax" else torch.ones(3)
    steps = harness.adapter(framework).steps(lambda x, one: (x * (x + one), None), (x, one), 1)
    product, gradient = steps["forward+backward"]()
    np.testing.assert_allclose(array(product), (y - 1) * y)
    np.testing.assert_allclose(array(gradient), (2 * y - 1) / 3, rtol=1e-6)
    (alone,) = steps["forward"]()
    np.testing.assert_allclose(array(alone), (y - 1) * y)


def test_in_place_steps_go_on_after_the_first():
    target = cross_entropy.TORCH
    problem = target.make_problem(SMALL["cross_entropy"], "cpu", "float32")
    logits = problem.arrays[0]
    assert logits.stride() == (304, 1)
    before = logits.detach().clone()
    step = steps_of(target, "onchip auto, in place", problem)["forward+backward"]
    assert len(step()) == 2
    assert len(step()) == 1
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------ inputs


@each_framework
def test_inputs_are_drawn_as_their_case_says(framework):
    target = benchmark_of("linear_cross_entropy", framework)

    def draw(**more):
        made = target.make_problem(Case("c", 4000, 64, 50, **more), "cpu", "float32").arrays
        return [array(x) for x in made]

    # Half the tokens ignored, words' frequencies, sure predictions, larger logits.
    hidden, weight, labels = draw(ignored=0.5, zipf=True, target_prob=0.99, logit_std=3.0)
    kept = labels != IGNORED
    assert kept.mean() == 0.5
    assert weight.std() * 8 == pytest.approx(3, rel=0.05)
    shares = np.bincount(labels[kept], minlength=50) / kept.sum()
    assert shares[0] == pytest.approx(1 / sum(1 / n for n in range(1, 51)), abs=0.04)
    assert shares[49] < 0.02
    p = np.exp(hidden @ weight.T)[kept]
    assert 0.97 < np.median(p[np.arange(len(p)), labels[kept]] / p.sum(1)) < 0.997
    if framework == "jax":  # whose draws are functions of a key, and of which fp8_linear's benchmark sees more
        return
    hidden, weight, labels = draw()
    assert hidden.std() == pytest.approx(1, rel=0.02)
    assert len(np.unique(hidden[:, 0])) > 3900
    assert np.bincount(labels, minlength=50).min() > 40
    assert labels.min() >= 0
    assert all(np.array_equal(a, b) for a, b in zip(draw(), (hidden, weight, labels), strict=True))


@each_framework
def test_logits_are_drawn_as_their_case_says(framework):
    case = case_of("cross_entropy", 4000, 50, logit_std=3.0, logit_offset=100.0, zipf=True, ignored=0.25)
    logits, labels = (
        array(x) for x in benchmark_of("cross_entropy", framework).make_problem(case, "cpu", "float32").arrays
    )
    assert logits.mean() == pytest.approx(100, abs=0.1)
    assert logits.std() == pytest.approx(3, rel=0.02)
    kept = labels[labels != IGNORED]
    assert len(kept) == 3000
    assert (kept == 0).mean() == pytest.approx(1 / sum(1 / n for n in range(1, 51)), abs=0.04)


USERS = {
    "frozen": {"frozen": True},
    "ignored": {"ignored": 0.9},
    "softcap": {"options": {"softcap": 3.0}},
    "smoothing": {"ignored": 0.5, "options": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "per token": {"options": {"reduction": "none"}},
    "autocast": {"autocast": True},
}


@pytest.mark.parametrize(
    ("framework", "kind"), [*(("torch", x) for x in USERS), pytest.param("jax", "frozen", marks=pytest.mark.slow)]
)
def test_what_users_do_with_a_head(framework, kind):
    """The same loss and gradients by this package's op and by the plain expressions; a floor of what is needed."""
    target = benchmark_of("linear_cross_entropy", framework)
    case = lce_cases.BenchCase("small", 80, 32, 1000, **USERS[kind])
    problem = target.make_problem(case, "cpu", "bfloat16")
    reference = target.reference(problem)
    first = "losses" if kind == "per token" else "loss"
    names = [first, "grad_hidden", *([] if kind == "frozen" else ["grad_weight"])]
    assert list(reference.values) == names
    peer = "torch eager, float32 logits" if framework == "torch" else "XLA, 16-bit logits, gathered"
    for name in ("onchip auto", peer):
        steps = steps_of(target, name, problem)
        made = steps["forward+backward"]()
        assert right(target.check(reference, "forward+backward", made)) == names, name
        assert right(target.check(reference, "forward", steps["forward"]())) == names[:1], name
    if kind == "autocast":
        assert (made[1].dtype, made[2].dtype) == (torch.bfloat16, torch.float32)
    products = target.floor(problem, "forward+backward")()
    tokens = 8 if kind == "ignored" else 40 if kind == "smoothing" else 80
    assert [x.shape for x in products] == [(tokens, 1000), (tokens, 32), (1000, 32)][: len(names)]
    assert {str(x.dtype).removeprefix("torch.") for x in products} == {"bfloat16"}
    config = implementation(target, "onchip auto").config(problem, "forward+backward")
    assert config["strategy"] == ("recompute" if kind == "per token" else "stash")


def test_jax_has_no_autocast():
    case = lce_cases.BenchCase("small", 8, 8, 10, autocast=True)
    with pytest.raises(NotImplementedError, match="JAX has no autocast"):
        linear_cross_entropy.JAX.make_problem(case, "cpu", "bfloat16")


def test_cases_of_the_bench():
    for op, name in itertools.product(OPS, ("TORCH", "WORLD")):
        if (target := benchmark_named(op, name)) is None:
            continue
        assert {"cpu", "cuda" if name == "TORCH" else "world"} <= set(target.SUITES)
        every = [case for suite in target.SUITES.values() for case in suite]
        assert all(target.CASES[case.name] == case for case in every)  # no two share a name
    assert set(lce_cases.MODELS) <= {case.name for case in LCE.SUITES["cuda"]}


# -------------------------------------------------------------------------------------- this package's implementations


def test_budgets():
    llama = memory.Problem(4096, 4096, 128256, dtype="bfloat16", device="cuda", compacted=True)
    for fw in (LCE.fw, jax_steps):
        assert linear_cross_entropy._small(fw, llama) == (64 << 20) + 4 * 4096 * 4096
        assert linear_cross_entropy._part_of_logits(8, fw, llama) == 4096 * 128256 * 4 // 8
    problem = LCE.make_problem(Case("small", 512, 32, 4096), "cpu", "float32")
    eighth, auto = (implementation(LCE, f"onchip{name}") for name in (", an eighth of the logits", " auto"))
    assert eighth.config(problem, "forward+backward")["scratch_bytes"] == 512 * 4096 * 4 // 8
    assert auto.config(problem, "forward")["scratch_bytes"] is None


def test_an_approximation_is_held_to_bounds_of_its_own(tmp_path, monkeypatch, quiet_bench):
    """It is right where the op's own bound would call it wrong, and wrong past its own."""
    own = implementation(LCE, "onchip fp8, approximate, weight quantised before")
    load = partial(partial, linear_cross_entropy_in_torch, precision="fp8")
    near = dataclasses.replace(own, name="near", load=load, unavailable=bench_peers.always)
    bounds = dict.fromkeys(("loss", "grad_hidden", "grad_weight"), 1e-9)
    strict = dataclasses.replace(near, name="strict", error_bounds=bounds)
    monkeypatch.setattr(LCE, "CASES", {"small": Case("small", 96, 64, 1000)})
    monkeypatch.setattr(LCE, "IMPLEMENTATIONS", (near, strict))
    document = run("linear_cross_entropy", "torch", tmp_path)
    assert {r["config"]["weight_quantised_before"] for r in document["rows"]} == {True}
    ok = {(report.short_name(r["impl"]), r["mode"]): r["ok"] for r in document["rows"]}
    assert ok == {(name, mode): name == "near" for name in ("near", "strict") for mode in harness.MODES}
    assert {r["error_bound"] for r in document["rows"] if r["ok"]} <= {1e-3, 10 ** (-25 / 20)}


def test_a_named_backend_says_why_it_does_not_run(monkeypatch):
    refusals = {"mosaic_gpu": None, "xla": "no XLA"}
    monkeypatch.setattr(linear_cross_entropy, "plain_refusals", lambda device, dtype, framework: refusals)
    reasons = {i.name: i.unavailable("cuda", "bfloat16") for i in linear_cross_entropy.JAX.IMPLEMENTATIONS}
    assert [reasons[f"onchip {name}"] for name in ("auto", "xla")] == [None, "no XLA"]


# ------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_nothing_is_imported_before_it_is_asked_for(framework):
    other = {"torch": "jax", "jax": "torch"}[framework]
    code = (
        "import sys; from onchip.bench import harness, run; from onchip.registry import OPS;"
        f"names = ['{framework.upper()}', *(['WORLD'] if '{framework}' == 'torch' else [])];"
        f"ops = [made for op in OPS for name in names if (made := run.benchmark_named(op, name))];"
        "print([m for m in ('torch', 'jax', 'matplotlib', 'jinja2') if m in sys.modules]);"
        "names = [impl.name for op in ops for impl in op.IMPLEMENTATIONS];"
        "run.environment._busy_cores = lambda: 0;"
        f"run.environment.describe(run.resolve_device('cpu', '{framework}'), '{framework}');"
        f"harness.adapter('{framework}').release('cpu');"
        f"print([m for m in ('{other}', 'optax', 'liger_kernel', 'cut_cross_entropy', 'quack') if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert made.stdout == "[]\n[]\n"


@each
def test_optional_peers_say_why_they_do_not_run(framework, op, monkeypatch, no_libraries):
    peers = [impl for impl in benchmark_of(op, framework).IMPLEMENTATIONS if not impl.name.startswith("onchip")]
    extra = {"torch": "peers", "jax": "peers-jax"}[framework]
    for impl in peers:
        package = impl.package
        if package not in ("torch", "jax"):
            wanted = "trl" if package == "trl" else f"'onchip[{extra}]'"
            reason = f"{package} is not installed; pip install {wanted}"
            assert impl.unavailable("cuda", "bfloat16") == reason
            if framework == "torch" and package != "trl":
                assert impl.unavailable("cpu", "bfloat16") == "it runs on CUDA devices only"
                assert "not float64" in impl.unavailable("cuda", "float64")
    monkeypatch.setattr(bench_peers.metadata, "version", lambda package: f"{package}=1.2+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    refused = {i.name for i in peers if i.unavailable("cuda", "bfloat16")} - {"torch.compile, float32 logits"}
    assert refused - {"torch.compile"} == (
        {"quack scaled-exp", "liger for Hopper", "liger for Hopper, scaled"}
        if (framework, op) == ("torch", "linear_cross_entropy")
        else set()
    )
    assert all(impl.version() == f"{impl.package}=1.2" for impl in peers)
    assert implementation(benchmark_of(op, framework), "onchip auto").version() == onchip.__version__


def test_peers_say_what_they_lack(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in implementation(LCE, "torch.compile").unavailable("cpu", "float32")
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    assert "2.13" in implementation(LCE, "F.linear_cross_entropy").unavailable("cpu", "float32")


def test_a_peer_that_fails_at_import_is_listed(tmp_path, monkeypatch, quiet_bench):
    package = tmp_path / "cut_cross_entropy"
    package.mkdir()
    (package / "__init__.py").write_text("raise AttributeError('built for another Triton')")
    monkeypatch.syspath_prepend(str(tmp_path))
    cce, eager = (implementation(LCE, name) for name in ("cut-cross-entropy", "torch eager"))
    broken = dataclasses.replace(cce, unavailable=bench_peers.always)
    monkeypatch.setattr(LCE, "CASES", {"small": SMALL["linear_cross_entropy"]})
    monkeypatch.setattr(LCE, "IMPLEMENTATIONS", (broken, eager))
    document = run("linear_cross_entropy", "torch", tmp_path)
    reason = "AttributeError: built for another Triton"
    assert document["not_run"] == [{"impl": "cut-cross-entropy", "case": "small", "mode": None, "reason": reason}]
    assert [report.short_name(r["impl"]) for r in document["rows"]] == ["torch eager", "torch eager"]


# Stand-ins with the interfaces of the peers.


class LigerCrossEntropyLoss(torch.nn.Module):
    def forward(self, _input, target):
        return F.cross_entropy(_input, target)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, accum_dtype=None, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None):
        super().__init__()
        self.options = {"softcap": softcap, "z_loss": lse_square_scale}
        self.options |= {"label_smoothing": label_smoothing, "reduction": reduction}

    def forward(self, lin_weight, _input, target, bias=None):
        return torch_steps.cross_entropy(F.linear(_input, lin_weight), target, **self.options)


class OfSM90:
    @staticmethod
    def apply(_input, weight, target, ignore_index, reduction, bias, ce_weight, label_smoothing, softcap, z_loss):
        assert (ignore_index, bias, ce_weight) == (IGNORED, None, None)
        if softcap is not None:
            raise NotImplementedError("no softcap here")
        return F.cross_entropy(F.linear(_input, weight), target, reduction=reduction, label_smoothing=label_smoothing)


class ByToken:
    @staticmethod
    def apply(_input, weight, target):
        return F.cross_entropy(F.linear(_input, weight), target, reduction="none")


class LigerFusedLinearJSDLoss(torch.nn.Module):
    def __init__(self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5):
        super().__init__()
        assert (weight_hard_loss, weight_soft_loss) == (0.0, 1.0)
        self.beta = beta

    def forward(self, h, w, x, v, true_labels, student_bias, teacher_bias):
        s, t = (F.linear(*head).softmax(1) for head in ((h, w), (x, v)))
        m = (1 - self.beta) * s + self.beta * t
        terms = (1 - self.beta) * s * (s / m).log() + self.beta * t * (t / m).log()
        return terms.sum() / len(true_labels)


def quack_cross_entropy(x, target, lse_partial=None, weight=None, reduction="mean", inplace_backward=False):
    return F.cross_entropy(x, target, reduction=reduction)


def eager(hidden, weight, target, **options):
    assert set(options) <= {"filter_eps", "chunk_size", "use_scaled_exp"}
    return F.cross_entropy(F.linear(hidden, weight), target)


def entropy_from_logits(logits, chunk_size=128):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def tokamax(x, labels, weights, *, reduction, implementation):
    assert (weights.shape, reduction, implementation in ("xla", "chunked_xla")) == ((32, 1000), "mean", True)
    return linear_cross_entropy.plain(jax_steps, wide=True)(x, weights.T, labels)


def jax_cce(x, w, labels, *, chunk_size):
    assert chunk_size == 4096
    return linear_cross_entropy.plain(jax_steps)(x, w, labels)


LIBRARIES = {
    "liger_kernel.transformers": {
        "LigerCrossEntropyLoss": LigerCrossEntropyLoss,
        "LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss,
    },
    "liger_kernel.ops": {"LigerFusedLinearScaledCrossEntropyFunction": ByToken},
    linear_cross_entropy._LIGER_SM90: {"LigerFusedLinearCrossEntropySM90Function": OfSM90},
    "liger_kernel.chunked_loss": {"LigerFusedLinearJSDLoss": LigerFusedLinearJSDLoss},
    "quack.cross_entropy": {"cross_entropy": quack_cross_entropy},
    "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": eager},
    "cut_cross_entropy": {"linear_cross_entropy": eager},
    "trl.trainer.utils": {
        "selective_log_softmax": lambda logits, index: logits.log_softmax(-1).gather(-1, index[:, None])[:, 0],
        "entropy_from_logits": entropy_from_logits,
    },
    "tokamax": {"linear_softmax_cross_entropy_loss": tokamax},
    "jax_cce": {"linear_cross_entropy": jax_cce},
}


@pytest.mark.parametrize(("framework", "op"), [*(("torch", op) for op in SMALL), ("jax", "linear_cross_entropy")])
def test_peers_are_called_as_their_interfaces_want(framework, op, stand_in):
    for name, contents in LIBRARIES.items():
        stand_in(name, contents)
    target = benchmark_of(op, framework)
    problem = target.make_problem(dataclasses.replace(SMALL[op], ignored=0.0), "cpu", "float32")
    reference = target.reference(problem)
    peers = [impl for impl in target.IMPLEMENTATIONS if impl.package not in ("torch", "jax", "onchip", "optax")]
    assert peers
    for impl in peers:
        for mode, step in target.steps(problem, impl).items():
            made = step()
            checked = target.check(reference, mode, made)
            assert right(checked) == list(checked), (impl.name, mode, checked)
            if impl.name.startswith("tokamax") and mode == "forward+backward":
                assert made[2].shape == (32, 1000)  # of the weight that it was given
    if op == "linear_cross_entropy" and framework == "torch":
        options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-3}
        problem = target.make_problem(dataclasses.replace(SMALL[op], options=options), "cpu", "float32")
        checked = target.check(target.reference(problem), "forward", steps_of(target, "liger", problem)["forward"]())
        assert right(checked) == ["loss"]
        with pytest.raises(NotImplementedError, match="no softcap here"):
            steps_of(target, "liger for Hopper", problem)["forward"]()
    if framework == "jax":
        problem = target.make_problem(SMALL[op], "cpu", "float32")
        for impl in peers:
            with pytest.raises(NotImplementedError, match="it has no ignore_index"):
                target.steps(problem, impl)


@pytest.mark.parametrize(
    ("tokens", "hidden", "chunk"),
    [(8192, 1024, 4096), (8192, 4096, 8192), (32768, 4096, 8192), (4096, 4096, 2048), (4090, 4096, 2048)],
)
def test_no_chunk_of_quack_has_as_many_tokens_as_columns(tokens, hidden, chunk):
    problem = benchmark.BenchProblem(None, "cpu", (torch.empty(tokens, hidden, device="meta"),))
    assert implementation(LCE, "quack scaled-exp").config(problem, "forward") == {
        "chunk_size": chunk,
        "use_scaled_exp": True,
    }
