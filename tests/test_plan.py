"""`onchip plan`: that what it shows is what the ops will do, and what it says to a wrong call."""

import dataclasses
import json
from importlib import import_module

import pytest

from onchip.ops.linear_cross_entropy import fp8_op, jax_op
from onchip.ops.linear_jsd import memory as jsd_spec
from onchip.ops.linear_jsd import triton_memory as jsd_triton
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.xla import memory as jax_spec
from shared import run_cli

LLAMA = ["plan", "--tokens", "16384", "--hidden", "4096", "--vocab", "128256", "--dtype", "bfloat16"]


def plan_json(*arguments):
    """The document of a command; what fits is within its budget, and what doesn't is refused."""
    document = json.loads(run_cli(*arguments, "--json").stdout)
    for plan in document["plans"]:
        if plan["fits"]:
            assert plan["scratch_bytes"] == sum(plan["scratch_parts"].values())
            assert plan["budget_bytes"] is None or plan["scratch_bytes"] <= plan["budget_bytes"]
        else:
            assert f"scratch_bytes={plan['budget_bytes']} is too small" in plan["why"]
    return document


DEEPSEEK = ("--tokens", "131072", "--model", "deepseek-v3")
SMALL_AND_LARGE = ("--scratch", "1MiB", "--scratch", "4096MiB")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (LLAMA[1:], ["8016 MiB in float32 or 4008 MiB in bfloat16", "predicted for an h100", "Without gradients"]),
        (LLAMA[1:], ["default  auto", "  320*", "1002**", " 16384", "no bound", "needs"]),
        ((*LLAMA[1:], "--backend", "torch"), ["8016 MiB in float32", "recompute *", "tile, dH, dW"]),
        (DEEPSEEK, ["in dW"]),
        ((*DEEPSEEK, "--framework", "jax"), ["mosaic_gpu backend in JAX, forward and all gradients", "of dW"]),
        ((*DEEPSEEK, "--framework", "jax", "--backend", "xla"), ["xla backend in JAX", "chunks"]),
        ((*LLAMA[1:], "--precision", "fp8"), ["triton backend in PyTorch by default, precision fp8, forward and all "]),
        ((*LLAMA[1:], "--precision", "fp8"), ["softmax gradient, transposed, in FP8: 2067"]),
        (("linear_log_probs", *DEEPSEEK), ["backend 'torch':", "backend 'triton':", "again"]),
        (("linear_jsd", *DEEPSEEK, "--backend", "triton"), ["T=131072 H=7168 V=129280 teacher's H=7168"]),
        (("cross_entropy", *DEEPSEEK, *SMALL_AND_LARGE), ["backend 'torch':", "backend 'triton':", "too small"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple | list) else "",
)
def test_plan_prints_a_table_that_fits_a_narrow_terminal(arguments, said):
    result = run_cli("plan", *arguments, columns=80)
    assert result.exit_code == 0
    assert all(text in result.stdout for text in said)
    assert "…" not in result.stdout
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


PLANNERS = {"torch": memory, "xla": jax_spec, "triton": triton_spec, "mosaic_gpu": mosaic_spec}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("where", [(), ("--dtype", "float32"), ("--device", "cpu")], ids=" ".join)
def test_plan_json_is_what_a_backend_of_matrix_products_will_do(framework, where):
    backend = "torch" if framework == "torch" else "xla"
    document = plan_json(*LLAMA, "--scratch", "1024MiB", "--framework", framework, "--backend", backend, *where)
    planner = PLANNERS[backend]
    problem = memory.Problem(16384, 4096, 128256, dtype=document["dtype"], device=document["device"])
    assert document["logits_bytes"]["float32"] == 4 * 16384 * 128256
    assert [(p["strategy"], p["budget_bytes"]) for p in document["plans"]] == [
        ("stash", None), ("recompute", None), ("stash", 1 << 30), ("recompute", 1 << 30),
    ]  # fmt: skip
    for plan in document["plans"]:
        strategy, budget = plan["strategy"], plan["budget_bytes"]
        assert plan["products"] == {"stash": 3, "recompute": 4}[strategy]
        assert document["default_scratch_bytes"][strategy] == planner.default_scratch(problem, strategy)
        if not plan["fits"]:
            assert f"{plan['smallest_scratch_bytes']} bytes" in plan["why"]
            continue
        config = planner.plan(problem, strategy, budget)
        assert plan["auto"] == (planner.choose_strategy(problem, "auto", budget) == strategy)
        assert (plan["token_chunk"], plan["vocab_chunk"]) == (config.token_chunk, config.vocab_chunk)
        assert plan["scratch_parts"] == planner.scratch_parts(problem, config)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_plan_json_is_what_the_kernels_will_do(framework):
    document = plan_json(*LLAMA, "--framework", framework)
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
        if not plan["fits"]:
            assert f"needs {plan['smallest_scratch_bytes']} bytes" in plan["why"]
            continue
        budget = 1 << 62 if plan["budget"] == "no bound" else plan["budget_bytes"]
        config = planner.plan(problem, plan["strategy"], budget)
        chunks = (
            (config.recompute_chunks * config.chunk, config.chunk)
            if framework == "jax"
            else (config.vocab_chunk, config.weight_chunk)
        )
        assert (plan["vocab_chunk"], plan["weight_chunk"]) == chunks
        kept = config.kept_in_gradient, config.kept_in_scratch
        assert (plan["stashed"], plan["overflow"], plan["halves"]) == (*kept, config.halves)
        assert plan["scratch_parts"] == planner.scratch_parts(problem, config)
        assert plan["products"] == 3 + (16384 - config.kept) / 16384
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


def test_plan_knows_the_backends_of_jax_in_their_order():
    wrong = run_cli(*LLAMA, "--framework", "jax", "--backend", "none").stderr
    assert "'auto', 'mosaic_gpu', 'xla'; got" in wrong
    assert jax_op.BACKENDS["gpu"][:2] == ("mosaic_gpu", "xla")


def test_plan_json_is_what_precision_fp8_will_do():
    document = plan_json(*LLAMA, "--precision", "fp8", *SMALL_AND_LARGE)
    assert (document["precision"], document["backend"]) == ("fp8", "triton")
    for plan in document["plans"]:
        grad = plan["pass"] == "both passes"
        device = "cuda" if plan["backend"] == "triton" else "cpu"
        gradients = {"grad_hidden": grad, "grad_weight": grad}
        problem = memory.Problem(16384, 4096, 128256, dtype="bfloat16", device=device, **gradients)
        assert plan["products"] == (3 if grad else 1)
        assert plan["fits"] == (plan["budget_bytes"] != 1 << 20)
        if plan["fits"]:
            chunk = fp8_spec.plan(problem, plan["budget_bytes"])
            assert plan["chunk"] == {"tokens": chunk, "vocab": 128256}
            assert plan["scratch_parts"] == fp8_spec.scratch_parts(problem, chunk)
    assert tuple(dict.fromkeys(plan["backend"] for plan in document["plans"])) == tuple(fp8_op.QUANTIZERS)


def test_plan_with_bounds_of_ones_own():
    plans = plan_json(*LLAMA, "--scratch", "300MiB", "--scratch", "0.25", "--scratch", "1048576")["plans"]
    assert [(p["budget"], p["budget_bytes"]) for p in plans[::3]] == [
        ("default", None), ("300", 300 << 20), ("2004", 2004 << 20), ("1.0", 1 << 20),
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
    assert plan_json(*LLAMA, *arguments)["backend"] == backend


def test_plan_by_model():
    assert plan_json("plan", "--tokens", "16384", "--model", "llama3.1-8b") == plan_json(*LLAMA)


@pytest.mark.parametrize("op", ["cross_entropy", "linear_log_probs", "linear_jsd"])
def test_plan_of_the_other_ops(op):
    arguments = ["plan", op, "--tokens", "8192", "--model", "llama3.1-8b", *SMALL_AND_LARGE]
    document = plan_json(*arguments)
    assert (document["op"], document["backend"]) == (op, "triton")
    plans = {}
    for plan in document["plans"]:
        plans.setdefault(plan["backend"], []).append(plan)
    assert tuple(plans) == import_module(f"onchip.ops.{op}.torch_op").BACKENDS
    assert {plan["fits"] for plan in document["plans"] if plan["budget_bytes"] == 4096 << 20} == {True}
    for backend in plans:
        assert plan_json(*arguments, "--backend", backend) == document | {"backend": backend, "plans": plans[backend]}


@pytest.mark.parametrize("where", [("--device", "cpu"), ("--dtype", "float32")], ids=" ".join)
def test_plan_of_the_other_ops_where_the_kernels_do_not_run(where):
    document = plan_json("plan", "linear_jsd", *LLAMA[1:], *where)
    assert {plan["backend"] for plan in document["plans"]} == {"torch"}
    result = run_cli("plan", "linear_jsd", *LLAMA[1:], *where, "--backend", "triton")
    assert (result.exit_code, "its kernels don't run in" in result.stderr) == (2, True)


def test_plan_of_the_other_ops_is_what_they_will_do():
    sizes = ("--tokens", "8192", "--hidden", "4096", "--vocab", "128256", "--scratch", "1024MiB")

    def plans(op, backend, *more):
        """By the pass, in the default budget and in 1 GiB."""
        plans = plan_json("plan", op, *sizes, *more, "--backend", backend)["plans"]
        return [{p["pass"]: p for p in plans if p["budget_bytes"] == b} for b in (None, 1 << 30)]

    def first(op, *more):
        return next(iter(plans(op, "torch", *more)[0].values()))["chunk"]["tokens"]

    rows = row_memory.plan(row_memory.Problem(8192, 128256, "bfloat16", "cuda"))
    assert first("cross_entropy") == rows
    log_probs = memory.Problem(8192, 4096, 128256, dtype="bfloat16", device="cuda", ids=1)
    assert first("linear_log_probs") == memory.plan(log_probs, "forward").token_chunk
    alone = {"device": "cuda", "grad_hidden": False, "grad_weight": False}
    student, teacher = (memory.Problem(8192, h, 128256, "bfloat16", **alone) for h in (4096, 2048))
    jsd = jsd_spec.Problem(128256, student, teacher)
    assert first("linear_jsd", "--teacher-hidden", "2048") == jsd_spec.plan(jsd)

    for plan in plans("cross_entropy", "triton"):
        assert plan["forward, and backward"]["scratch_parts"] == {"vectors": 48 * 8192}
    for budget, plan in zip((None, 1 << 30), plans("linear_log_probs", "triton"), strict=True):
        config = triton_spec.plan(log_probs, "auto", budget)
        assert plan["both passes"]["chunk"]["vocab_chunk"] == config.vocab_chunk
        assert plan["both passes"]["scratch_bytes"] == triton_spec.scratch_bytes(log_probs, config)
        assert plan["both passes"]["products"] == 3 + (8192 - config.kept) / 8192
        assert (plan["forward"]["products"], plan["forward"]["again"]) == (1, 0)
        assert plan["both passes, entropy"]["products"] >= plan["both passes"]["products"]
    student = dataclasses.replace(student, grad_hidden=True, grad_weight=True)
    jsd = dataclasses.replace(jsd, student=student)
    for budget, plan in zip((None, 1 << 30), plans("linear_jsd", "triton", "--teacher-hidden", "2048"), strict=True):
        config = jsd_triton.plan(jsd, "", budget)
        chunk = plan["both passes"]["chunk"]
        assert chunk == {"tokens": config.token_chunk, "vocab": 128256} | {
            name: getattr(config, key)
            for name, key in (("held", "kept"), ("vocab_chunk", "vocab_chunk"), ("weight_chunk", "weight_chunk"))
        }
        assert plan["both passes"]["scratch_bytes"] == jsd_triton.scratch_bytes(jsd, config)
        assert plan["both passes"]["products"] == 4 + 2 * (8192 - config.kept) / 8192
        assert (plan["forward"]["products"], plan["forward"]["again"]) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "softmax", "--tokens", "8", "--vocab", "8"], "no op 'softmax'; there is: linear_cross_entropy, "),
        (["plan", "cross_entropy", "--tokens", "8"], "give --hidden and --vocab, or --model"),
        (["plan", "linear_jsd", *LLAMA[1:], "--teacher-hidden", "0"], "--teacher-hidden must be 1 or more; got 0"),
        (["plan", "--tokens", "0", "--model", "llama3.1-8b"], "--tokens must be 1 or more; got 0"),
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
        ([*LLAMA, "--scratch", "0MiB"], "scratch_bytes must be positive; got 0"),
        ([*LLAMA, "--scratch", "1.5"], "scratch_bytes=1.5 is a float, a part of the float32 logits"),
        ([*LLAMA, "--scratch", "1G"], "scratch_bytes must be like '1GiB'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_call_is_a_message_and_exit_code_2(arguments, message):
    result = run_cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
