"""The command line: what each command prints, and what it says to a wrong call."""

import dataclasses
import json
import re
from collections import Counter
from importlib import import_module
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import onchip
from onchip import check, cli
from onchip.core import machine
from onchip.ops._shared import triton_calls
from onchip.ops._shared.checks import Check
from onchip.ops._shared.spec import DTYPE_BYTES
from onchip.ops.cross_entropy import spec as cross_entropy_spec
from onchip.ops.linear_cross_entropy import jax_checks, jax_op, spec, torch_checks, triton_spec
from onchip.ops.linear_jsd import spec as jsd_spec
from onchip.ops.linear_jsd import triton_spec as jsd_triton
from onchip.ops.linear_log_probs import spec as log_probs_spec
from onchip.ops.linear_log_probs import triton_spec as log_probs_triton
from onchip.plan import passes

LLAMA = ["plan", "--tokens", "16384", "--hidden", "4096", "--vocab", "128256", "--dtype", "bfloat16"]


def run(*arguments):
    # Wide enough that no message is wrapped.
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(a) for a in arguments])


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("demo", "plan", "check", "bench", "info"))


def plan_json(*arguments):
    return json.loads(run(*LLAMA, *arguments, "--json").stdout)


def test_plan_prints_a_table():
    result = run(*LLAMA)
    assert result.exit_code == 0
    assert "8016 MiB in float32 or 4008 MiB in bfloat16" in result.stdout
    assert all(budget in result.stdout for budget in ("default", "320*", "1002**", "16384", "no bound"))
    assert "predicted for an h100" in result.stdout
    assert "Without gradients" in result.stdout
    with_torch = run(*LLAMA, "--backend", "torch")
    assert "8016 MiB in float32 or 4008 MiB in bfloat16" in with_torch.stdout
    assert "recompute *" in with_torch.stdout


def test_plan_fits_a_narrow_terminal():
    long = ["plan", "--tokens", "131072", "--model", "deepseek-v3"]
    for arguments in (LLAMA, long, [*LLAMA, "--backend", "torch"]):
        result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, arguments)
        assert "…" not in result.stdout
        assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


def test_plan_json_is_what_the_torch_backend_will_do():
    document = plan_json("--scratch-mib", "1024", "--backend", "torch")
    assert document["backend"] == "torch"
    assert document["logits_bytes"] == {"float32": 4 * 16384 * 128256, "bfloat16": 2 * 16384 * 128256}
    problem = spec.Problem(16384, 4096, 128256, dtype="bfloat16", device="cuda")
    assert [(p["strategy"], p["budget_bytes"]) for p in document["plans"]] == [
        ("stash", None), ("recompute", None), ("stash", 1 << 30), ("recompute", 1 << 30),
    ]  # fmt: skip
    for plan in document["plans"]:
        assert plan["products"] == {"stash": 3, "recompute": 4}[plan["strategy"]]
        assert plan["auto"] == (spec.choose_strategy(problem, "auto", plan["budget_bytes"]) == plan["strategy"])
        if plan["fits"]:
            config = spec.plan(problem, plan["strategy"], plan["budget_bytes"])
            assert (plan["token_chunk"], plan["vocab_chunk"]) == (config.token_chunk, config.vocab_chunk)
            assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values()) == spec.scratch_bytes(problem, config)
            assert plan["budget_bytes"] is None or plan["scratch_bytes"] <= plan["budget_bytes"]
        else:
            assert plan["smallest_scratch_bytes"] > plan["budget_bytes"]


def test_plan_json_is_what_the_triton_backend_will_do():
    document = plan_json()
    assert document["backend"] == "triton"
    problem = spec.Problem(16384, 4096, 128256, dtype="bfloat16", device="cuda")
    budgets = {plan["budget"]: plan["budget_bytes"] for plan in document["plans"]}
    assert list(budgets) == ["default", "64", "256", "320*", "1002**", "1024", "4096", "16384", "no bound"]
    assert budgets["320*"] == (64 << 20) + 4 * 16384 * 4096
    assert budgets["1002**"] == 4 * 16384 * 128256 // 8
    for plan in document["plans"]:
        budget = 1 << 60 if plan["budget"] == "no bound" else plan["budget_bytes"]
        if not plan["fits"]:
            with pytest.raises(ValueError, match=f"needs {plan['smallest_scratch_bytes']} bytes"):
                triton_spec.plan(problem, plan["strategy"], budget)
            continue
        config = triton_spec.plan(problem, plan["strategy"], budget)
        assert {name: plan[name] for name in vars(config)} == vars(config)
        assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
        assert budget is None or plan["scratch_bytes"] <= budget
        assert plan["products"] == 3 + (16384 - config.held) / 16384
        assert plan["flops"] == 2 * 16384 * 4096 * 128256 * plan["products"]
        assert plan["predicted_ms"] > document["three_products_ms"]
    by_name = {(plan["budget"], plan["strategy"]): plan for plan in document["plans"]}
    assert by_name["no bound", "stash"]["products"] == 3
    assert by_name["no bound", "recompute"]["products"] == 4
    assert 3 < by_name["1024", "auto"]["products"] < 4
    forward = document["forward"]
    assert forward["scratch_bytes"] <= 64 << 20
    assert forward["predicted_ms"] > forward["product_ms"] == pytest.approx(document["three_products_ms"] / 3)


def test_plan_with_bounds_of_ones_own():
    plans = plan_json("--scratch-mib", "300", "--scratch-mib", "500")["plans"]
    assert [(p["budget"], p["budget_bytes"]) for p in plans[::3]] == [
        ("default", None), ("300", 300 << 20), ("500", 500 << 20),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        (["--dtype", "float16"], "triton"),
        (["--dtype", "float32"], "torch"),
        (["--device", "cpu"], "torch"),
        (["--backend", "torch"], "torch"),
    ],
    ids=" ".join,
)
def test_plan_is_of_the_backend_that_the_op_takes(arguments, backend):
    assert plan_json(*arguments)["backend"] == backend


def test_plan_by_model():
    by_model, by_size = (
        json.loads(run(*args, "--json").stdout)
        for args in (["plan", "--tokens", "16384", "--model", "llama3.1-8b"], LLAMA)
    )
    assert by_model == by_size


@pytest.mark.parametrize("op", ["cross_entropy", "linear_log_probs", "linear_jsd"])
def test_plan_of_the_other_ops(op):
    arguments = [
        "plan",
        op,
        "--tokens",
        "8192",
        "--model",
        "llama3.1-8b",
        "--scratch-mib",
        "1",
        "--scratch-mib",
        "4096",
    ]
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["op"] == op
    assert (document["backend"], {plan["backend"] for plan in document["plans"]}) == ("triton", {"torch", "triton"})
    for plan in document["plans"]:
        if not plan["fits"]:
            assert (plan["budget_bytes"], "is too small" in plan["why"]) == (1 << 20, True)
            continue
        assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
        assert plan["budget_bytes"] is None or plan["scratch_bytes"] <= plan["budget_bytes"]
    assert {plan["fits"] for plan in document["plans"] if plan["budget_bytes"] == 4096 << 20} == {True}
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, arguments)
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in result.stdout.splitlines())
    assert "too small" in result.stdout
    for backend in ("torch", "triton"):
        assert f"backend '{backend}':" in result.stdout
        named = json.loads(run(*arguments, "--backend", backend, "--json").stdout)
        assert named == document | {
            "backend": backend,
            "plans": [p for p in document["plans"] if p["backend"] == backend],
        }


@pytest.mark.parametrize("op", ["linear_log_probs", "linear_jsd"])
def test_plan_of_many_tokens_fits_a_narrow_terminal(op):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(
        cli.app, ["plan", op, "--tokens", "131072", "--model", "deepseek-v3", "--backend", "triton"]
    )
    assert "…" not in result.stdout
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


@pytest.mark.parametrize("op", ["cross_entropy", "linear_log_probs", "linear_jsd"])
def test_plan_knows_the_backends_of_the_other_ops_in_their_order(op):
    module = import_module(f"onchip.ops.{op}.torch_op")
    assert tuple(passes.PASSES[op]) == module.BACKENDS


@pytest.mark.parametrize("where", [("--device", "cpu"), ("--dtype", "float32")], ids=" ".join)
def test_plan_of_the_other_ops_where_the_kernels_do_not_run(where):
    document = json.loads(run("plan", "linear_jsd", *LLAMA[1:], *where, "--json").stdout)
    assert {plan["backend"] for plan in document["plans"]} == {"torch"}
    result = run("plan", "linear_jsd", *LLAMA[1:], *where, "--backend", "triton")
    assert (result.exit_code, "its kernels don't run in" in result.stderr) == (2, True)


def test_plan_of_the_other_ops_is_what_they_will_do():
    sizes = ("--tokens", "8192", "--hidden", "4096", "--vocab", "128256", "--scratch-mib", "1024")

    def plans(op, backend, *more):
        """By the pass, in the default budget and in 1 GiB."""
        document = json.loads(run("plan", op, *sizes, *more, "--backend", backend, "--json").stdout)
        default, bounded = (
            {p["pass"]: p for p in document["plans"] if p["budget_bytes"] == b} for b in (None, 1 << 30)
        )
        return default, bounded

    def first(op, *more):
        return next(iter(plans(op, "torch", *more)[0].values()))["chunk"]["tokens"]

    rows = cross_entropy_spec.plan(cross_entropy_spec.Problem(8192, 128256, "bfloat16", "cuda"))
    assert first("cross_entropy") == rows
    log_probs = log_probs_spec.Problem(8192, 4096, 128256, dtype="bfloat16", device="cuda")
    assert first("linear_log_probs") == log_probs_spec.plan(log_probs, "forward").token_chunk
    student, teacher = (jsd_spec.Head(h, 128256, "bfloat16") for h in (4096, 2048))
    jsd = jsd_spec.Problem(8192, 128256, student, teacher, device="cuda")
    assert first("linear_jsd", "--teacher-hidden", "2048") == jsd_spec.plan(jsd)

    for plan in plans("cross_entropy", "triton"):
        assert plan["forward, and backward"]["scratch_parts"] == {"vectors": 48 * 8192}
    for budget, plan in zip((None, 1 << 30), plans("linear_log_probs", "triton"), strict=True):
        config = log_probs_triton.plan(log_probs, budget)
        assert plan["both passes"]["chunk"]["vocab_chunk"] == config.vocab_chunk
        assert plan["both passes"]["scratch_bytes"] == log_probs_triton.scratch_bytes(log_probs, config)
        assert plan["both passes"]["products"] == 3 + (8192 - config.held) / 8192
        assert (plan["forward"]["products"], plan["forward"]["again"]) == (1, 0)
        assert plan["both passes, entropy"]["products"] >= plan["both passes"]["products"]
    student = dataclasses.replace(student, grad_hidden=True, grad_weight=True)
    jsd = dataclasses.replace(jsd, student=student)
    for budget, plan in zip((None, 1 << 30), plans("linear_jsd", "triton", "--teacher-hidden", "2048"), strict=True):
        config = jsd_triton.plan(jsd, budget)
        chunk = plan["both passes"]["chunk"]
        assert chunk == {"tokens": config.token_chunk, "vocab": 128256} | {
            name: getattr(config, name) for name in ("held", "vocab_chunk", "weight_chunk")
        }
        assert plan["both passes"]["scratch_bytes"] == jsd_triton.scratch_bytes(jsd, config)
        assert plan["both passes"]["products"] == 4 + 2 * (8192 - config.held) / 8192
        assert (plan["forward"]["products"], plan["forward"]["again"]) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "softmax", "--tokens", "8", "--vocab", "8"], "no op 'softmax'; there is: linear_cross_entropy, "),
        (["plan", "cross_entropy", "--tokens", "8"], "give --hidden and --vocab, or --model"),
        (["plan", "linear_jsd", *LLAMA[1:], "--teacher-hidden", "0"], "--teacher-hidden must be 1 or more; got 0"),
        (
            ["plan", "cross_entropy", *LLAMA[1:], "--backend", "cuda"],
            "backend must be one of 'auto', 'triton', 'torch'",
        ),
        (["check", "softmax"], "no op 'softmax'; there is: linear_cross_entropy, linear_log_probs, "),
        (["plan", "--tokens", "0", "--model", "llama3.1-8b"], "--tokens must be 1 or more; got 0"),
        (["plan", "--tokens", "8"], "give --hidden and --vocab, or --model"),
        (["plan", "--tokens", "8", "--hidden", "8"], "give --hidden and --vocab, or --model"),
        (["plan", "--tokens", "8", "--model", "gpt-9"], "no model 'gpt-9'; there is: llama3.1-8b"),
        (["plan", "--tokens", "8", "--hidden", "8", "--vocab", "-1"], "--vocab must be 1 or more"),
        ([*LLAMA[:-1], "int8"], "--dtype must be one of float32, bfloat16, float16; got 'int8'"),
        ([*LLAMA, "--weight-dtype", "fp8"], "--weight-dtype must be one of"),
        ([*LLAMA, "--device", "tpu"], "--device must be cuda or cpu; got 'tpu'"),
        ([*LLAMA, "--backend", "cuda"], "backend must be one of 'auto', 'triton', 'torch'; got 'cuda'"),
        ([*LLAMA, "--device", "cpu", "--backend", "triton"], "its kernels don't run in bfloat16 on cpu"),
        ([*LLAMA, "--scratch-mib", "0"], "--scratch-mib must be 1 or more; got 0"),
        (["check", "--device", "tpu"], "--device must be auto, cpu or cuda; got 'tpu'"),
        (["check", "--framework", "numpy"], "--framework must be torch or jax; got 'numpy'"),
        (["bench", "linear_cross_entropy", "--framework", "all"], "--framework must be torch or jax; got 'all'"),
        (["bench", "linear_cross_entropy", "--framework", "jax", "--dtype", "int8"], "--dtype must be one of float32"),
        (["bench", "softmax"], "no op 'softmax'; there is: linear_cross_entropy"),
        (["bench", "linear_cross_entropy", "--case", "nope"], "--case 'nope' matches nothing"),
        (["demo", "--steps", "0"], "steps"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_call_is_a_message_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("check", "--device", "cuda")
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device here" in result.stderr


@pytest.mark.parametrize("command", [["check"], ["bench", "linear_cross_entropy"]], ids=lambda x: x[0])
def test_cuda_that_jax_does_not_see(monkeypatch, command):
    monkeypatch.setattr("jax.devices", list)
    result = run(*command, "--framework", "jax", "--device", "cuda")
    assert result.exit_code == 2
    assert "JAX sees no CUDA device here" in result.stderr


def test_info():
    document = json.loads(run("info", "--json").stdout)
    assert document["onchip"] == onchip.__version__
    assert document["versions"]["torch"]
    assert document["versions"]["jax"]
    assert document["versions"]["jaxlib"]
    assert any(name.startswith("jax ") for name in document["machine"])
    assert {(b["framework"], b["backend"], b["device"]) for b in document["backends"]} == {
        ("torch", "torch", "cpu"), ("torch", "torch", "cuda"), ("torch", "triton", "cuda"),
        ("torch", "dequantize", "cpu"), ("torch", "dequantize", "cuda"), ("torch", "scaled_mm", "cuda"),
        ("jax", "xla", "cpu"), *(("jax", backend, "cuda") for backend in jax_op.BACKENDS["gpu"]),
    }  # fmt: skip
    assert {(b["framework"], b["op"]) for b in document["backends"]} == {
        (framework, op) for framework in ("torch", "jax") for op in cli.CHECKED
    }
    assert all(b["why"] for b in document["backends"])
    assert all(b["usable"] for b in document["backends"] if b["device"] == "cpu")
    assert onchip.__version__ in run("info").stdout


@pytest.mark.parametrize(
    ("capability", "usable", "why"),
    [
        ("9.0", True, "kernels for this device"),
        ("8.0", False, "it is for compute capability 9.0 (Hopper); this is 8.0"),
    ],
)
def test_info_on_the_jax_backends_of_a_gpu(monkeypatch, capability, usable, why):
    gpu = SimpleNamespace(platform="gpu", id=0, device_kind="NVIDIA X100", compute_capability=capability)
    monkeypatch.setattr("jax.devices", lambda: [gpu])
    document = json.loads(run("info", "--json").stdout)
    assert document["machine"]["jax gpu:0"] == "NVIDIA X100"
    rows = {
        b["backend"]: b
        for b in document["backends"]
        if (b["framework"], b["device"], b["op"]) == ("jax", "cuda", "linear_cross_entropy")
    }
    assert rows["xla"]["usable"]
    assert (rows["mosaic_gpu"]["usable"], rows["mosaic_gpu"]["why"]) == (usable, why)


@pytest.mark.parametrize(
    ("capability", "installed", "usable", "why"),
    [
        ((9, 0), True, True, "kernels for this device"),
        ((8, 6), True, True, "kernels for this device"),
        ((7, 5), True, False, "it needs compute capability 8.0 or later; this is 7.5"),
        ((9, 0), False, False, "Triton is not installed"),
    ],
)
def test_info_on_the_triton_backend(monkeypatch, capability, installed, usable, why):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(triton_calls, "find_spec", lambda name: object() if installed else None)
    rows = json.loads(run("info", "--json").stdout)["backends"]
    wanted = ("torch", "triton", "cuda", "linear_cross_entropy")
    (row,) = (r for r in rows if (r["framework"], r["backend"], r["device"], r["op"]) == wanted)
    assert (row["usable"], row["why"]) == (usable, why)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_info_without_a_framework_says_what_to_install(monkeypatch, framework):
    from importlib import metadata

    version = metadata.version

    def missing(name):
        if name == framework:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    document = json.loads(run("info", "--json").stdout)
    assert document["versions"][framework] is None
    rows = [b for b in document["backends"] if b["framework"] == framework]
    assert rows
    assert all(not b["usable"] and f"pip install 'onchip[{framework}]'" in b["why"] for b in rows)
    assert f"pip install 'onchip[{framework}]'" in run("info").stdout


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(torch_checks, "CHECK_CASES", torch_checks.CHECK_CASES[-2:])
    monkeypatch.setattr(jax_checks, "CHECK_CASES", [c for c in jax_checks.CHECK_CASES if c.name == "one class"])


QUANTITIES = {"loss", "lse", "log_prob", "entropy", "correct", "grad_hidden", "grad_weight"}


@pytest.mark.parametrize(
    ("options", "backends"),
    [
        ([], {"torch": "torch", "jax": "xla"}),
        (["--framework", "torch"], {"torch": "torch"}),
    ],
    ids=["default", "torch"],
)
def test_check(few_cases, options, backends):
    result = run("check", "linear_cross_entropy", "--full", "--device", "cpu", *options, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"]
    assert {(r["framework"], r["device"], r["dtype"], r["implementation"]) for r in document["rows"]} == {
        (framework, "cpu", dtype, f"{backend} {strategy}")
        for framework, backend in backends.items()
        for dtype in DTYPE_BYTES
        for strategy in ("stash", "recompute")
    }
    assert {r["quantity"] for r in document["rows"]} >= QUANTITIES


@pytest.fixture
def pretended(monkeypatch):
    """Every check of every op is right at once; gives the checks that ran, as (framework, op)."""
    ran = []

    def planned(framework, op, number):
        return lambda device: (
            [lambda: ran.append((framework, op)) or [Check("case", "float32", "torch", "loss", 0.0, 1e-6)]] * number
        )

    for framework, ops in cli.CHECKS.items():
        for op, module in ops.items():
            monkeypatch.setattr(import_module(module), "planned_checks", planned(framework, op, 62))
    return ran


def test_check_runs_a_sample_of_every_op_in_every_framework(pretended):
    document = json.loads(run("check", "--framework", "all", "--json").stdout)
    assert document["ok"]
    assert {(r["framework"], r["op"]) for r in document["rows"]} == {(f, op) for f in cli.CHECKS for op in cli.CHECKED}
    counts = Counter(pretended)
    assert set(counts.values()) == {6, 3}  # one in 11 of PyTorch's, one in 29 of JAX's


def test_check_of_some_ops(pretended):
    run("check", "cross_entropy", "linear_jsd", "--framework", "torch", "--full")
    assert Counter(pretended) == {("torch", "cross_entropy"): 62, ("torch", "linear_jsd"): 62}


@pytest.mark.parametrize("module", [m for ops in cli.CHECKS.values() for m in ops.values()])
def test_a_sample_of_the_checks_has_all_dtypes(module):
    planned = import_module(module).planned_checks("cpu")
    step = check._ONE_IN["jax" if "jax" in module else "torch"]
    sample = planned[::-step]
    assert sample[0] is planned[-1]  # with all options at once
    assert len({str(run.args[1]) for run in sample}) == 3


def test_check_takes_the_frameworks_that_are_installed(pretended, monkeypatch):
    monkeypatch.setattr("onchip.core.machine.find_spec", lambda name: None if name == "torch" else name)
    document = json.loads(run("check", "--json").stdout)
    assert {r["framework"] for r in document["rows"]} == {"jax"}
    result = run("check", "--framework", "all")
    assert result.exit_code == 2
    assert "pip install 'onchip[torch]'" in result.stderr


def test_the_default_framework_is_the_first_that_is_installed(monkeypatch):
    assert machine.choose_framework(None) == "torch"
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "torch" else name)
    assert machine.choose_framework(None) == "jax"
    assert machine.choose_framework("torch") == "torch"


@pytest.mark.parametrize(
    ("framework", "checks", "title"), [("torch", torch_checks, "PyTorch"), ("jax", jax_checks, "JAX")]
)
def test_check_that_fails_ends_with_1(few_cases, monkeypatch, framework, checks, title):
    wrong = Check("case", "float32", "stash", "loss", float("nan"), 1e-6)
    monkeypatch.setattr(checks, "check_case", lambda *args, **how: [wrong])
    result = run("check", "linear_cross_entropy", "--framework", framework, "--device", "cpu")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert f"linear_cross_entropy in {title} on cpu" in result.stdout
