"""linear_jsd and jsd on the 'mosaic_gpu' backend, compiled for a GPU: what the CPU can't show."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jsd_mosaic import assert_certain_models, forget

from onchip.jax import jsd, linear_jsd
from onchip.ops.linear_jsd import memory, mosaic_walk
from onchip.ops.linear_jsd.checks import CHECKER, JsdCase
from onchip.ops.linear_jsd.memory import Head, JsdMosaicPlan, JsdProblem
from shared import alternating, assert_within_bounds, pairs_once

pytestmark = pytest.mark.gpu
CASE = JsdCase("kernels", 700, 512, 4104, teacher_hidden=640)
EVERYTHING = {"ignored": 0.3, "bias": True, "token_weight": True}
EVERYTHING |= {"options": {"beta": 0.3, "temperature": 1.5, "temperature_squared": True, "hard_weight": 0.2}}


@alternating(
    changes=[
        {},
        EVERYTHING,
        {"options": {"beta": 0.0, "reduction": "none"}},
        {"options": {"beta": 1.0}},
        {"logit_std": 30.0},
        {"noise": 0.01, "teacher_hidden": 0},
        {"noise": 0.0, "teacher_hidden": 0},
        {"ignored": 1.0},
        {"teacher": "logits"},
        {"teacher": "tail"},
        {"teacher": "tail", **EVERYTHING},
        {"teacher": "truncated", "options": {"beta": 1.0}},
        {"teacher": "renormalised"},
    ],
    layout=["hv", "vh"],
)
def test_heads(changes, layout):
    case = replace(CASE, **changes)
    assert_within_bounds(CHECKER.check_case(case, "bfloat16", "cuda", backend="mosaic_gpu", weight_layout=layout))


OF_LOGITS = (
    {},
    EVERYTHING,
    {"options": {"beta": 0.0}},
    {"options": {"beta": 1.0}},
    EVERYTHING | {"teacher": "tail"},
    {"teacher": "truncated"},
)


@pairs_once("changes, dtype, vocab", product(OF_LOGITS, ["float32", "bfloat16", "float16"], [136, 50264]))
def test_logits(changes, dtype, vocab):
    changes = {"teacher": "logits"} | changes | {"bias": False}
    case = replace(CASE, student="logits", tokens=61, vocab=vocab, **changes)
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", backend="mosaic_gpu"))


WAYS = [JsdMosaicPlan("kept", 256), JsdMosaicPlan("summed", 512), JsdMosaicPlan("again", 256, 1024)]


@pytest.fixture(params=WAYS, ids=str)
def way(request, monkeypatch):
    monkeypatch.setattr(mosaic_walk, "plan", lambda *_: request.param)
    forget()
    yield request.param
    forget()


def test_ways(way):
    layout = "hv" if way.way == "summed" else "vh"
    case = replace(CASE, **EVERYTHING)
    assert_within_bounds(CHECKER.check_case(case, "bfloat16", "cuda", backend="mosaic_gpu", weight_layout=layout))


def test_certain_models():
    assert_certain_models("mosaic_gpu")


def test_memory_is_what_the_formula_says(way):
    """And the same inputs give the same bits."""
    tokens, hidden, vocab = 3999, 1024, 32768
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((tokens, hidden), (vocab, hidden)) * 2
    arrays = [jax.random.normal(k, s, jnp.bfloat16) * (1 if s[0] == tokens else 0.03)
              for k, s in zip(keys, shapes, strict=True)]  # fmt: skip
    student = Head(tokens, hidden, vocab, "bfloat16", device="cuda", grad_hidden=True, grad_weight=True)
    p = JsdProblem(vocab, student, replace(student, grad_hidden=False, grad_weight=False), stash=True)
    run = jax.jit(jax.grad(partial(linear_jsd, backend="mosaic_gpu"), (0, 1))).lower(*arrays).compile()
    assert run.memory_analysis().temp_size_in_bytes <= memory.MOSAIC_PLANNER.scratch_bytes(p, way)
    first = run(*arrays)
    assert all((x == y).all() for _ in range(9) for x, y in zip(first, run(*arrays), strict=True))


def test_logits_need_no_memory():
    shape = jax.ShapeDtypeStruct((2048, 32768), jnp.bfloat16)
    run = jax.jit(jax.grad(lambda *x: jsd(*x, backend="mosaic_gpu"))).lower(shape, shape).compile()
    student = Head(2048, 0, 32768, "bfloat16", device="cuda", grad_hidden=True, grad_weight=False)
    p = JsdProblem(32768, student, replace(student, grad_hidden=False), stash=False)
    assert run.memory_analysis().temp_size_in_bytes <= memory.MOSAIC_PLANNER.scratch_bytes(
        p, JsdMosaicPlan("again", 2048)
    )
