"""attention's Mosaic kernels on the CPU: what they are told about a mask; lowered for CUDA, and interpreted.

Lowering finds illegal operands and too much shared memory, the interpreter wrong results and races; neither notices a
missing commit_smem or wgmma_wait.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowered import on_h100
from onchip.attention.masks import Intervals
from onchip.attention.mosaic import backward, fused, problem, work
from onchip.attention.mosaic.backward import BY_KEY, BY_QUERY
from onchip.attention.mosaic.forward import FORWARD
from onchip.attention.mosaic.fused import FUSED
from onchip.attention.problem import MOSAIC_SIZES, AttentionProblem
from onchip.jax import attention
from onchip.kernels.mosaic.registers import fit
from onchip.masks import Causal, Documents, Full, Tree
from onchip.ops.attention.cases import KINDS, Drawn

BF16 = jnp.bfloat16
op = partial(attention, backend="mosaic_gpu")


@pytest.fixture
def hopper():
    with on_h100():
        yield


# -------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocked"])
def test_what_is_hidden_is_skipped_or_masked(kind):
    """Each tile is there once, the longest first; what it sees is in its blocks, and all see what isn't masked."""
    drawn = Drawn(2, 300, 300)
    lowered = KINDS[kind].make(jnp.asarray, drawn).lower(2, 300, 300, jnp.zeros(1))
    rows = [None if x is None else jnp.broadcast_to(x, (2, 300)) for x in (lowered.start, lowered.end, lowered.stop)]
    seen = np.broadcast_to(KINDS[kind].seen(drawn), (2, 300, 300))
    of_queries = [(partial(work.query_items, tile=tile), 128, tile, seen) for tile in (128, 192)]
    for make, block, tile_size, pairs in (*of_queries, (work.key_items, 64, 128, seen.swapaxes(1, 2))):
        items = np.asarray(make(Intervals(*rows), 300, block))
        assert sorted(map(tuple, items[:, :2])) == [(b, t) for b in range(2) for t in range(-(-300 // tile_size))]
        lengths = items[:, 3] - items[:, 2]
        assert (np.diff(lengths) <= 0).all()
        assert (lengths >= (0 if block == 64 else 1)).all()
        for batch, tile, first, last, full_first, full_last in items:
            of_tile = pairs[batch, tile * tile_size : (tile + 1) * tile_size]
            there = np.zeros(300, bool)
            there[first * block : last * block] = True
            assert not of_tile[:, ~there].any()
            assert of_tile[:, full_first:full_last].all()
            assert full_last <= 300 or block == 64  # keys that aren't there are masked


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocked"])
def test_turns_are_the_order_in_which_tiles_meet_a_block(kind):
    """Who has the turn k waits for those of the turns before, which are of earlier items: nobody waits for ever."""
    drawn, blocks = Drawn(2, 500, 500), -(-500 // 64)
    lowered = KINDS[kind].make(jnp.asarray, drawn).lower(2, 500, 500, jnp.zeros(1))
    rows = [None if x is None else jnp.broadcast_to(x, (2, 500)) for x in (lowered.start, lowered.end, lowered.stop)]
    mask = Intervals(*rows)
    items, turns = map(np.asarray, work.key_items_in_order(mask, 500, 64))
    np.testing.assert_array_equal(items, work.key_items(mask, 500, 64, 128))
    assert turns.shape == (2, 4, blocks)
    seen = np.broadcast_to(KINDS[kind].seen(drawn), (2, 500, 500))
    met = {(b, j): [] for b in range(2) for j in range(blocks)}  # the tiles, from the first item to the last
    for b, t, first, last, *_ in items:
        for j in range(blocks):
            if turns[b, t, j] < 0:
                assert not seen[b, j * 64 : (j + 1) * 64, t * 128 : (t + 1) * 128].any()
            else:
                assert first <= j < last
                met[b, j].append(t)
    for (b, j), tiles in met.items():
        assert turns[b, tiles, j].tolist() == [2 * n + (n + 1 == len(tiles)) for n in range(len(tiles))]


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_memory_of_the_turns(tokens):
    """Compiled for the CPU; that of the two kernels' list is most of it there, since XLA fuses less than for GPUs."""
    given = [jax.ShapeDtypeStruct((2, tokens), jnp.int32)] * 2

    def memory(make):
        compiled = jax.jit(lambda start, end: make(Intervals(start, end), tokens, 64)).lower(*given).compile()
        return compiled.memory_analysis()

    alone, both = memory(partial(work.key_items, tile=128)), memory(work.key_items_in_order)
    p = AttentionProblem(2, tokens, tokens, 1, 1, 64, 64)
    of_turns = problem.memory_parts(p, backward=True, fused=True)["turns of tiles"]
    more = both.output_size_in_bytes - alone.output_size_in_bytes
    assert of_turns <= more <= of_turns + 64
    assert both.temp_size_in_bytes - alone.temp_size_in_bytes <= of_turns


def test_when_one_kernel_makes_all_gradients():
    """What heads and a bound say of it."""
    wide = AttentionProblem(2, 300, 300, 6, 2, 128, 128)
    for size, values, is_one in ((64, 64, True), (40, 8, True), (128, 128, False), (64, 72, False), (256, 256, False)):
        p = wide._replace(size=size, value_size=values)
        assert problem.fits_one_kernel(p, None) == is_one
        if is_one:
            of_two, of_one = (sum(problem.memory_parts(p, backward=True, fused=x).values()) for x in (False, True))
            assert of_one - of_two == 4 * 2 * 304 * 6 * 64 + 4 * 2 * 3 * 5 + 4 * (1 + 2 * 6 * 5)
            assert problem.fits_one_kernel(p, of_one)
            assert not problem.fits_one_kernel(p, of_one - 1)
    assert tuple(FUSED) == problem.FUSED_SIZES


def test_heads_that_are_worked_on_together():
    assert work.heads_together(8, 1 << 20, 4 << 20) == 4
    assert work.heads_together(6, 1 << 20, 4 << 20) == 3
    assert work.heads_together(8, 1 << 20, 1 << 10) == 1


@pytest.mark.parametrize("sizes", MOSAIC_SIZES, ids=str)
def test_warpgroups_ask_for_no_more_registers_than_a_program_has(sizes):
    """One that does waits for ever."""
    forward, gradients = FORWARD[sizes], [x[sizes] for x in (BY_QUERY, BY_KEY)]
    asked = {
        (forward.warpgroups + 1, *forward.registers): [forward.registers[0]] * forward.warpgroups,
        **{(3, *x.registers): [x.registers[0]] * 2 for x in gradients},
    }
    for (warpgroups, *_, copies), multiply in asked.items():
        assert fit((*multiply, copies))
        assert sum((*multiply, copies)) <= {3: 3 * 168, 4: 4 * 128}[warpgroups]
    if sizes in FUSED:
        most, *others = FUSED[sizes].registers
        assert fit((most, most, *others))
        with pytest.raises(AssertionError):
            replace(FUSED[sizes], registers=(most, *others[:-1], others[-1] + 8))


def test_how_many_registers_a_program_has():
    assert fit((240, 240, 24))
    assert not fit((240, 240, 32))
    assert fit((160, 160, 160, 32))
    assert not fit((160, 160, 160, 40))
    assert not fit((100, 100, 24))  # multiples of 8


# ---------------------------------------------------------------------------------------------------- lowered for CUDA


def shapes(batch, queries, keys, heads, key_heads, size):
    return ((batch, queries, heads, size), BF16), *[((batch, keys, key_heads, size), BF16)] * 2


def lower(f, *given):
    arguments = [jax.ShapeDtypeStruct(*x) for x in given]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def gradients(*, wanted=(0, 1, 2), mask=lambda ids: Documents(ids) & Causal(), **options):
    def loss(q, k, v, ids, *sinks):
        more = {"sinks": sinks[0]} if sinks else {}
        out, lse = op(q, k, v, mask(ids), return_lse=True, **options, **more)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.value_and_grad(loss, wanted)


def test_vmap_is_a_larger_batch_and_unneeded_gradients_take_no_kernel(hopper):
    given = [((3, *x), dtype) for x, dtype in shapes(1, 256, 256, 2, 1, 64)]
    text = lower(jax.vmap(gradients(wanted=(0,)), in_axes=(0, 0, 0, None)), *given, ((256,), jnp.int32))
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "tensor<3x256x2x64xbf16>" in text


def step_of(mask, wanted=(0, 1, 2), **options):
    def loss(q, k, v, ids):
        return op(q, k, v, mask(ids), **options).astype(jnp.float32).sum()

    return jax.grad(loss, wanted)


def causal(ids):
    return Causal()


@pytest.fixture
def traced_anew():
    """JAX keeps what it traced, also with stand-ins."""
    yield
    jax.clear_caches()


def test_gradients_take_one_kernel_or_two(hopper, traced_anew, monkeypatch):
    """By what is known when tracing: the mask's class, the heads, and a bound."""
    made = []

    def stand_in(name, *which):
        def run(given, *_, **how):
            made.append(name)
            like = [given.q, given.k, jnp.zeros((*given.k.shape[:-1], given.v.shape[-1]), given.v.dtype)]
            results = [like[i] for i in which]
            return results[0] if len(which) == 1 else results

        return run

    monkeypatch.setattr(fused, "all_gradients", stand_in("all", 0, 1, 2))
    monkeypatch.setattr(backward, "by_query", stand_in("q", 0))
    monkeypatch.setattr(backward, "by_key", stand_in("kv", 1, 2))

    def of(mask, size, **options):
        jax.clear_caches()
        made.clear()
        given = [jax.ShapeDtypeStruct(*x) for x in shapes(2, 250, 250, 2, 1, size)]
        jax.eval_shape(step_of(mask, **options), *given, jnp.arange(250) // 50)
        return made

    def documents(ids):
        return Documents(ids) & Causal()

    p = AttentionProblem(2, 250, 250, 2, 1, 64, 64)
    most = sum(problem.memory_parts(p, backward=True, fused=True).values())
    for mask, size in ((documents, 64), (causal, 64), (lambda ids: Full(), 40)):
        assert of(mask, size) == ["all"]
    assert of(causal, 64, scratch_bytes=most) == ["all"]
    assert of(causal, 64, scratch_bytes=most - 1) == ["q", "kv"]
    for mask, size in ((causal, 128), (causal, 192), (Tree, 64)):
        assert of(mask, size) == ["q", "kv"]
    assert of(causal, 64, wanted=(1, 2)) == ["kv"]
    assert of(causal, 64, wanted=(0,)) == ["q"]
    assert of(lambda ids: jax.jit(lambda x: x)(Causal().lower(2, 250, 250, ids)), 64) == ["all"]


def in_scan(f):
    return lambda q, k, v, ids: jax.lax.scan(lambda _, x: (None, jax.checkpoint(f)(*x, ids)), None, (q, k, v))[1]


def in_shard_map(f):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.sharding.PartitionSpec("data", None, "model")
    return jax.shard_map(f, mesh=mesh, in_specs=(*[split] * 3, jax.sharding.PartitionSpec()), out_specs=(split,) * 3)


def mapped(f):
    return jax.vmap(f, (0, 0, 0, None))


@pytest.mark.parametrize(
    ("mask", "size", "wrap", "more", "kernels"),
    [
        pytest.param(Documents, 64, mapped, (3,), 2, marks=pytest.mark.slow),
        (causal, 64, in_scan, (3,), 2),
        (causal, 64, in_shard_map, (), 2),
        (Documents, 128, mapped, (3,), 3),
    ],
)
def test_one_kernel_under_transformations(hopper, mask, size, wrap, more, kernels):
    given = [((*more, *x), dtype) for x, dtype in shapes(2, 250, 250, 2, 1, size)]
    text = lower(wrap(step_of(mask)), *given, ((250,), jnp.int32))
    assert text.count("custom_call @mosaic_gpu") == kernels


def test_sequences_that_vmap_adds_take_room_too(hopper):
    p = AttentionProblem(2, 250, 250, 2, 1, 64, 64)
    bound = sum(problem.memory_parts(p, backward=True, fused=True).values())
    for size, kernels in ((1, 2), (2, 3)):
        given = [((size, *x), dtype) for x, dtype in shapes(2, 250, 250, 2, 1, 64)]
        text = lower(mapped(step_of(causal, scratch_bytes=bound)), *given, ((250,), jnp.int32))
        assert text.count("custom_call @mosaic_gpu") == kernels


def test_which_calls_kernels_serve():
    q, k, v = (jnp.zeros((1, 8, h, 64), BF16) for h in (2, 1, 1))
    with on_h100():
        for wrong, call in {
            "it is for bfloat16 and float16, not float32": [x.astype(jnp.float32) for x in (q, k, v)],
            "heads have at most 256 numbers; q's have 264": [jnp.zeros((1, 8, 1, 264), BF16)] * 3,
            "there are no queries or no keys": [x[:, :0] for x in (q, k, v)],
        }.items():
            with pytest.raises(ValueError, match=f"backend 'mosaic_gpu' can't run this call: {wrong}"):
                op(*call)
    with pytest.raises(ValueError, match="it runs on NVIDIA GPUs, not on 'cpu'"):
        op(q, k, v)


# --------------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "is_fused"), [*((x, False) for x in MOSAIC_SIZES), *((x, True) for x in FUSED)], ids=str
)
def test_interpreted(sizes, is_fused):
    """Forward and gradients, in one kernel or two, of documents with softcap and sinks.

    In a process of its own: warpgroups that wait take threads of XLA's pool, of which it makes as many as there are
    processors unless it is told otherwise."""
    script = Path(__file__).parent / "interpreted_attention.py"
    paths = os.pathsep.join(filter(None, sys.path))
    made = subprocess.run(
        [sys.executable, str(script), *map(str, (*sizes, int(is_fused)))],
        env={**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    errors = json.loads(made.splitlines()[-1])
    assert errors.keys() == {"out", "lse", "q", "k", "v", "sinks"}
    assert errors.pop("lse") < 1e-6
    assert errors.pop("sinks") < 1e-2  # two numbers, sums of terms that mostly cancel, made of out in 16 bits
    assert max(errors.values()) < 5e-3
