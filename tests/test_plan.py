"""`onchip plan`: that what it shows is what the ops will do, and what it says to a wrong call."""

import dataclasses
import json
from importlib import import_module

import pytest
from typer.testing import CliRunner

from onchip import cli
from onchip import plan as plan_command
from onchip.ops.linear_cross_entropy import fp8_op, jax_op
from onchip.ops.linear_jsd import memory as jsd_spec
from onchip.ops.linear_jsd import triton_memory as jsd_triton
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.xla import memory as jax_spec

LLAMA = ["plan", "--tokens", "16384", "--hidden", "4096", "--vocab", "128256", "--dtype", "bfloat16"]


def run(*arguments, columns=200):
    """By default wide enough that no message is wrapped."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, arguments)


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
    jax = ("--framework", "jax")
    for arguments in (LLAMA, long, [*LLAMA, "--backend", "torch"], [*long, *jax], [*long, *jax, "--backend", "xla"]):
        result = run(*arguments, columns=80)
        assert "…" not in result.stdout
        assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


PLANNERS = {"torch": memory, "xla": jax_spec, "triton": triton_spec, "mosaic_gpu": mosaic_spec}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("where", [(), ("--dtype", "float32"), ("--device", "cpu")], ids=" ".join)
def test_plan_json_is_what_a_backend_of_matrix_products_will_do(framework, where):
    backend = "torch" if framework == "torch" else "xla"
    document = plan_json("--scratch-mib", "1024", "--framework", framework, "--backend", backend, *where)
    planner, dtype = PLANNERS[backend], document["dtype"]
    problem = memory.Problem(16384, 4096, 128256, dtype=dtype, device=document["device"])
    assert document["logits_bytes"]["float32"] == 4 * 16384 * 128256
    assert [(p["strategy"], p["budget_bytes"]) for p in document["plans"]] == [
        ("stash", None), ("recompute", None), ("stash", 1 << 30), ("recompute", 1 << 30),
    ]  # fmt: skip
    for plan in document["plans"]:
        strategy, budget = plan["strategy"], plan["budget_bytes"]
        assert plan["products"] == {"stash": 3, "recompute": 4}[strategy]
        assert document["default_scratch_bytes"][strategy] == planner.default_scratch(problem, strategy)
        if not plan["fits"]:
            with pytest.raises(ValueError, match=f"{plan['smallest_scratch_bytes']} bytes for strategy"):
                planner.choose_strategy(problem, strategy, budget)
            continue
        config = planner.plan(problem, strategy, budget)
        assert plan["auto"] == (planner.choose_strategy(problem, "auto", budget) == strategy)
        assert (plan["token_chunk"], plan["vocab_chunk"]) == (config.token_chunk, config.vocab_chunk)
        assert plan["scratch_parts"] == planner.scratch_parts(problem, config)
        assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
        assert budget is None or plan["scratch_bytes"] <= budget


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_plan_json_is_what_the_kernels_will_do(framework):
    document = plan_json("--framework", framework)
    assert document["backend"] == {"torch": "triton", "jax": "mosaic_gpu"}[framework]
    planner = PLANNERS[document["backend"]]
    problem = memory.Problem(16384, 4096, 128256, dtype="bfloat16", device="cuda")
    budgets = {plan["budget"]: plan["budget_bytes"] for plan in document["plans"]}
    assert list(budgets) == ["default", "64", "256", "320*", "1002**", "1024", "4096", "16384", "no bound"]
    assert budgets["320*"] == (64 << 20) + 4 * 16384 * 4096
    assert budgets["1002**"] == 4 * 16384 * 128256 // 8
    for strategy, size in document["default_scratch_bytes"].items():
        assert size == planner.default_scratch(problem, strategy)
    for plan in document["plans"]:
        budget = 1 << 62 if plan["budget"] == "no bound" else plan["budget_bytes"]
        if not plan["fits"]:
            with pytest.raises(ValueError, match=f"needs {plan['smallest_scratch_bytes']} bytes"):
                planner.plan(problem, plan["strategy"], budget)
            continue
        config = planner.plan(problem, plan["strategy"], budget)
        if framework == "torch":
            assert {name: plan[name] for name in vars(config)} == vars(config)
        else:
            assert (plan["vocab_chunk"], plan["weight_chunk"]) == (config.recompute_chunks * config.chunk, config.chunk)
            kept = config.kept_in_gradient, config.kept_in_scratch
            assert (plan["stashed"], plan["overflow"], plan["halves"]) == (*kept, config.halves)
        assert plan["scratch_parts"] == planner.scratch_parts(problem, config)
        assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
        assert budget is None or plan["scratch_bytes"] <= budget
        held = config.held if framework == "torch" else config.kept
        assert plan["products"] == 3 + (16384 - held) / 16384
        assert plan["flops"] == 2 * 16384 * 4096 * 128256 * plan["products"]
        assert plan["predicted_ms"] == planner.predict(problem, config) > document["three_products_ms"]
    assert {plan["fits"] for plan in document["plans"]} == {True, False}
    by_name = {(plan["budget"], plan["strategy"]): plan for plan in document["plans"]}
    assert by_name["no bound", "stash"]["products"] == 3
    assert by_name["no bound", "recompute"]["products"] == 4
    assert 3 < by_name["1024", "auto"]["products"] < 4
    forward = document["forward"]
    assert forward["scratch_bytes"] <= 64 << 20
    assert forward["predicted_ms"] > forward["product_ms"] == pytest.approx(document["three_products_ms"] / 3)


def test_plan_of_the_mosaic_backend_prints_the_table_of_the_triton_backend():
    lines = run(*LLAMA, "--framework", "jax").stdout.splitlines()
    assert lines[1].startswith("mosaic_gpu backend in JAX, forward and all gradients")
    triton = run(*LLAMA).stdout.splitlines()
    assert lines[3].split() == triton[3].split()
    assert lines[-9:-3] == triton[-9:-3]  # what the columns are
    assert lines[5].split()[:6] == ["default", "auto", "3.75", "4096", "0", "12288"]


def test_plan_knows_the_backends_of_jax_in_their_order():
    wrong = run(*LLAMA, "--framework", "jax", "--backend", "none").stderr
    assert "'auto', 'mosaic_gpu', 'xla'; got" in wrong
    assert jax_op.BACKENDS["gpu"][:2] == ("mosaic_gpu", "xla")


def test_plan_json_is_what_precision_fp8_will_do():
    document = plan_json("--precision", "fp8", "--scratch-mib", "1", "--scratch-mib", "4096")
    assert (document["precision"], document["backend"]) == ("fp8", "triton")
    for plan in document["plans"]:
        grad = plan["pass"] == "both passes"
        device = "cuda" if plan["backend"] == "triton" else "cpu"
        gradients = {"grad_hidden": grad, "grad_weight": grad}
        problem = memory.Problem(16384, 4096, 128256, dtype="bfloat16", device=device, **gradients)
        assert plan["products"] == (3 if grad else 1)
        if not plan["fits"]:
            assert (plan["budget_bytes"], "the smallest chunk needs" in plan["why"]) == (1 << 20, True)
            continue
        chunk = fp8_spec.plan(problem, plan["budget_bytes"])
        assert plan["chunk"] == {"tokens": chunk, "vocab": 128256}
        assert plan["scratch_parts"] == fp8_spec.scratch_parts(problem, chunk)
        assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
        assert plan["budget_bytes"] is None or plan["scratch_bytes"] <= plan["budget_bytes"]
    backends = [plan["backend"] for plan in document["plans"]]
    assert tuple(dict.fromkeys(backends)) == tuple(plan_command.FP8_PASSES) == fp8_op.BACKENDS
    assert {plan["fits"] for plan in document["plans"]} == {True, False}


def test_plan_of_fp8_prints_a_table():
    result = run(*LLAMA, "--precision", "fp8", columns=80)
    assert "triton backend in PyTorch by default, precision fp8, forward and all gradients" in result.stdout
    assert "softmax gradient, transposed, in FP8: 2067" in result.stdout
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in result.stdout.splitlines())


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
        (["--precision", "fp8", "--dtype", "float32"], "triton"),
        (["--precision", "fp8", "--device", "cpu"], "torch"),
        (["--framework", "jax", "--dtype", "float16"], "mosaic_gpu"),
        (["--framework", "jax", "--dtype", "float32"], "xla"),
        (["--framework", "jax", "--device", "cpu"], "xla"),
        (["--framework", "jax", "--hidden", "520"], "xla"),
        (["--framework", "jax", "--vocab", "50257"], "xla"),
        (["--framework", "jax", "--backend", "xla"], "xla"),
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
    result = run(*arguments, columns=80)
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
    result = run("plan", op, "--tokens", "131072", "--model", "deepseek-v3", "--backend", "triton", columns=80)
    assert "…" not in result.stdout
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


@pytest.mark.parametrize("op", ["cross_entropy", "linear_log_probs", "linear_jsd"])
def test_plan_knows_the_backends_of_the_other_ops_in_their_order(op):
    module = import_module(f"onchip.ops.{op}.torch_op")
    assert tuple(plan_command.PASSES[op]) == module.BACKENDS


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

    rows = row_memory.plan(row_memory.Problem(8192, 128256, "bfloat16", "cuda"))
    assert first("cross_entropy") == rows
    log_probs = memory.Problem(8192, 4096, 128256, dtype="bfloat16", device="cuda", ids=1)
    assert first("linear_log_probs") == memory.plan(log_probs, "forward").token_chunk
    student, teacher = (jsd_spec.Head(h, 128256, "bfloat16") for h in (4096, 2048))
    jsd = jsd_spec.Problem(8192, 128256, student, teacher, device="cuda")
    assert first("linear_jsd", "--teacher-hidden", "2048") == jsd_spec.plan(jsd)

    for plan in plans("cross_entropy", "triton"):
        assert plan["forward, and backward"]["scratch_parts"] == {"vectors": 48 * 8192}
    for budget, plan in zip((None, 1 << 30), plans("linear_log_probs", "triton"), strict=True):
        config = triton_spec.plan(log_probs, "auto", budget)
        assert plan["both passes"]["chunk"]["vocab_chunk"] == config.vocab_chunk
        assert plan["both passes"]["scratch_bytes"] == triton_spec.scratch_bytes(log_probs, config)
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
        ([*LLAMA, "--precision", "int8"], "--precision must be full or fp8; got 'int8'"),
        (
            [*LLAMA, "--precision", "fp8", "--framework", "jax"],
            "--precision fp8 is for linear_cross_entropy in PyTorch alone; leave it out",
        ),
        (["plan", "linear_jsd", *LLAMA[1:], "--precision", "fp8"], "in PyTorch alone; leave it out"),
        ([*LLAMA, "--precision", "fp8", "--device", "cpu", "--backend", "triton"], "its kernels don't run in"),
        ([*LLAMA, "--framework", "numpy"], "--framework must be torch or jax; got 'numpy'"),
        (
            ["plan", "linear_jsd", *LLAMA[1:], "--framework", "jax"],
            "--framework jax is for linear_cross_entropy alone; leave it out for the plan of linear_jsd in PyTorch",
        ),
        (
            [*LLAMA, "--framework", "jax", "--backend", "triton"],
            "backend must be one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'",
        ),
        ([*LLAMA, "--framework", "jax", "--backend", "mosaic_gpu", "--device", "cpu"], "it runs on NVIDIA GPUs"),
        (
            [*LLAMA, "--framework", "jax", "--backend", "mosaic_gpu", "--vocab", "50257"],
            "it needs H to be a multiple of 64 from 128 on, V of 8 from 16 on",
        ),
        (
            [*LLAMA, "--framework", "jax", "--weight-dtype", "float32"],
            "in JAX weight has hidden's dtype; leave --weight-dtype out",
        ),
        ([*LLAMA, "--scratch-mib", "0"], "--scratch-mib must be 1 or more; got 0"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_call_is_a_message_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
