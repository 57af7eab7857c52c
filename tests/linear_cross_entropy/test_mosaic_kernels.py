"""The Mosaic GPU kernels on the CPU: some tiles lowered for CUDA, and all of them interpreted on small sizes.

The first finds illegal operands (test_mosaic_op.py lowers the whole op), the second wrong results and races; neither
notices a missing commit_smem or wgmma_wait, and the interpreter's products are not WGMMA's.
test_mosaic_sums.py has the sum of the weight's gradient.
"""

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
from small_mosaic import (
    CONFIG,
    COUNT,
    HIDDEN,
    INTERPRETER,
    PADDED,
    SHIFT,
    SPLIT,
    TOKENS,
    Small,
    at,
    compile_only,
    of,
    reference_to,
    relative,
)

from numbers_kept import assert_is_tanh
from onchip.kernels.mosaic.order import Work, place_tile
from onchip.kernels.mosaic.product import MosaicConfig
from onchip.vocab.mosaic import kernels, products, rebase
from onchip.vocab.mosaic.blocks import KeptBlocks, tanh
from onchip.vocab.mosaic.positions import NO_LABEL, MosaicLabels, MosaicPartials, Operands
from onchip.vocab.xla.tiles import Wanted

LAYOUTS = pytest.mark.parametrize("vocab_major", [True, False], ids=["VH", "HV"])


# ------------------------------------------------------------------------------------------------ lowered for CUDA


@pytest.mark.parametrize("hidden", [128, 136, 192, 2560, 2880, 4072, 4096, 5120, 7168])
def test_strips_cover_a_row(hidden):
    share, strip = rebase._strips(hidden)
    assert hidden % share == share % 8 == strip % 128 == 0
    assert strip <= share


@pytest.mark.parametrize(
    "config",
    [
        MosaicConfig(tile_m=256, tile_n=128),
        MosaicConfig(in_flight=0, stages=3),
        MosaicConfig(tile_m=128, tile_n=192),
        MosaicConfig(stages=3, staging_slots=3, split="n"),
    ],
    ids=str,
)
def test_configs_lower(config):
    vector, half = ((512,), jnp.float32), jnp.float16
    weight, number = ((192, 2112), half), ((1,), jnp.int32)
    inputs = (((512, 192), half), weight, ((512,), jnp.int32), vector, number, *[vector] * 3)
    size = 1536 // config.tile_n * config.tile_n
    kernel = partial(kernels.gradient_tiles, vocab_major=False, first=at(0), size=size, config=config)
    compile_only(lambda *x: kernel(Operands(*x[:5]), *x[5:]), *inputs)


# -------------------------------------------------------------------------------------------------- order of tiles


@pytest.mark.parametrize(("tiles_m", "tiles_n", "halves"), [(1, 1, True), (17, 9, True), (2, 66, False)])
def test_work_is_done_once(tiles_m, tiles_n, halves):
    programs, steps = 132, 5
    work = Work(jnp.int32(tiles_m), jnp.int32(tiles_n), jnp.int32(steps), programs, 8, halves)
    items = int(work.items)
    turns, own = np.meshgrid(np.arange(-(-items // programs)), np.arange(programs))
    numbers = jax.jit(jax.vmap(work.number))(jnp.int32(turns.ravel()), jnp.int32(own.ravel())).tolist()
    # A program ends with the first number past the last item: it must have no item after that.
    assert sorted(x for x in numbers if x < items) == list(range(items))
    i, j, first, count = (np.asarray(x) for x in jax.jit(jax.vmap(work.item))(jnp.arange(int(work.items)))[:4])
    done = np.zeros((tiles_m, tiles_n, steps), int)
    for place in zip(i, j, first, count, strict=True):
        done[place[0], place[1], place[2] : place[2] + place[3]] += 1
    assert (done == 1).all()
    # Only a program's last item may be a half.
    assert (count[: (len(count) - 1) // programs * programs] == steps).all()
    assert len(count) == tiles_m * tiles_n or (halves and len(count) <= -(-tiles_m * tiles_n // programs) * programs)


def test_groups_of_rows_are_even():
    row, _ = place_tile(jnp.arange(17 * 4), jnp.int32(17), jnp.int32(4), 16)
    assert (np.asarray(row) < 9).tolist() == [True] * 36 + [False] * 32


# ---------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.parametrize("weighed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab_major", [False], ids=["HV"])  # test_products has the other one
def test_softmax(vocab_major, weighed):
    s = Small(vocab_major, vocab=448)
    operands = s.operands._replace(class_weight=s.class_weight if weighed else None)

    @jax.jit
    def run():
        stash = reference_to(jnp.full(s.weight.shape, jnp.nan, jnp.bfloat16))
        spare = reference_to(jnp.full((PADDED - SPLIT, TOKENS)[:: 1 if vocab_major else -1], jnp.nan, jnp.bfloat16))
        made = kernels.softmax_tiles(
            ([KeptBlocks(stash, spare, SHIFT, SPLIT)], None), operands, vocab_major=vocab_major, shift=s.shift,
            wanted=Wanted(True, True, True, True), config=CONFIG, interpret=INTERPRETER,
        )  # fmt: skip
        return made, jax.freeze(stash), jax.freeze(spare)

    made, stash, spare = run()
    squares = np.asarray(made.squares)[:, : s.n].T
    made = [np.asarray(x)[:, : s.n].T for x in made[:5]]
    z = s.z.reshape(s.n, -1, CONFIG.part_n)
    top = z.max(2)
    below = z - top[:, :, None]
    e = np.exp(below)
    own = (np.arange(PADDED) == s.label[: s.n, None]).reshape(z.shape)
    np.testing.assert_allclose(made[0], top, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made[1], np.where(own, 0, e).sum(2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(squares, np.where(own, 0, e * e).sum(2), rtol=1e-4, atol=1e-5)
    inside = np.where(np.isinf(below), 0, below) * (s.class_weight.reshape(z.shape[1:]) if weighed else 1)
    np.testing.assert_allclose(made[2], inside.sum(2), rtol=1e-5)
    np.testing.assert_allclose(made[3], (e * np.maximum(below, -1e30)).sum(2), rtol=1e-4, atol=1e-5)
    assert (made[4] == z.argmax(2) + CONFIG.part_n * np.arange(z.shape[1])).all()
    values = s.kept(stash, spare)
    expected = np.where(own.reshape(s.n, PADDED), 0, s.exponentials)
    assert relative(values[: s.n], expected) < 2**-8
    assert (values[: s.n][own.reshape(s.n, PADDED)] == 0).all()
    assert (values[s.n :] == 0).all()


@pytest.mark.parametrize("kernel", [pytest.param("softmax", marks=pytest.mark.slow), "gradient"])
def test_soft_labels(kernel):
    """With weights of classes, from the second token of the labels on; tokens and entries are no whole tiles."""
    s, config = Small(vocab_major=True, vocab=448), MosaicConfig(tile_m=128, tile_n=256, stages=2, staging_slots=1)
    q = np.random.default_rng(1).uniform(size=(COUNT + 1, s.vocab)).astype(np.float32)
    q[:, ::3] = 0
    bias = np.where(np.arange(PADDED) % 6 == 0, -np.inf, s.bias).astype(np.float32)
    operands = s.operands._replace(class_weight=s.class_weight, bias=bias)
    common = {
        "vocab_major": True,
        "labels": MosaicLabels(jnp.asarray(q), at(1)),
        "config": config,
        "interpret": INTERPRETER,
    }
    z, q = (s.x + bias[: s.vocab]) * s.factor[: s.n, None], q[1:]
    weight = s.class_weight[: s.vocab]
    if kernel == "softmax":
        made = jax.jit(lambda: kernels.softmax_tiles(None, operands, wanted=Wanted(True, True), **common))()
        for name, value in made._asdict().items():
            assert value is None or value.shape == (2, TOKENS), name
        for i, part in enumerate((slice(0, 256), slice(256, 448))):
            top, largest = z[:, part].max(1), z[:, part].argmax(1)
            cost = np.where(q[:, part] == 0, 0, q[:, part]) * np.where(q[:, part] == 0, 0, top[:, None] - z[:, part])
            others = np.exp(z[:, part] - top[:, None])
            others[np.arange(s.n), largest] = 0
            expected = {
                "maximum": top, "argmax": part.start + largest, "others": others.sum(1),
                "cost": (cost * weight[part]).sum(1), "mass": (q[:, part] * weight[part]).sum(1),
                "plain_cost": cost.sum(1), "plain_mass": q[:, part].sum(1),
            }  # fmt: skip
            for name, x in expected.items():
                np.testing.assert_allclose(getattr(made, name)[i, : s.n], x, rtol=1e-4, atol=1e-5, err_msg=name)
        return
    lse, by_labels = np.logaddexp.reduce(z, 1), np.linspace(-1, 2, s.n)

    def padded(x, fill=0):
        return np.pad(x, (0, TOKENS - s.n), constant_values=fill).astype(np.float32)

    g = np.exp(z - lse[:, None]) * s.scale[: s.n, None] - by_labels[:, None] * q * weight
    g[np.arange(s.n), s.label[: s.n]] = 7
    of_label = padded(np.full(s.n, 7))
    made = jax.jit(
        lambda: kernels.gradient_tiles(
            operands, padded(lse, np.inf), s.scale, of_label, first=at(256), size=256, by_labels=padded(by_labels),
            **common,
        )
    )()  # fmt: skip
    made = s.values(np.asarray(made, np.float64), 0, 256, TOKENS)
    assert relative(made[: s.n, :192], g[:, 256:]) < 2**-8
    assert not made[s.n :].any()
    assert not made[:, 192:].any()


@pytest.mark.slow
def test_softmax_all_kept_in_scratch():
    s = Small(vocab_major=True, vocab=448)

    @jax.jit
    def run():
        spare = reference_to(jnp.full((PADDED, TOKENS), jnp.nan, jnp.bfloat16))
        kernels.softmax_tiles(
            ([KeptBlocks(None, spare)], None), s.operands, vocab_major=True, shift=s.shift, wanted=Wanted(),
            config=CONFIG, interpret=INTERPRETER,
        )  # fmt: skip
        return jax.freeze(spare)

    values = s.values(np.asarray(run(), np.float64), 0, PADDED, TOKENS)
    own = np.arange(PADDED) == s.label[: s.n, None]
    assert relative(values[: s.n], np.where(own, 0, s.exponentials)) < 2**-8
    assert (values[s.n :] == 0).all()


@pytest.mark.slow
def test_rooms():
    """In a process of its own: the interpreter's threads wait for each other in XLA's, of which a process that ran
    other tests may have too few left; and on two cores now and then another one too, which is ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    command = [sys.executable, "-c", "import test_mosaic_kernels; test_mosaic_kernels.check_rooms()"]
    for attempt in range(3):
        try:
            subprocess.run(command, check=True, env=environment, timeout=60)
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
        else:
            break


def check_rooms():
    """Exponentials of the first 128 tokens in the memory of the weight's gradient, of the others in scratch, from two
    launches of one kernel; made relative to something else together; and hidden's product of the second half."""
    s, half = Small(vocab_major=True, vocab=448), TOKENS // 2
    common = {"vocab_major": True, "config": CONFIG, "interpret": INTERPRETER}
    moved = (np.arange(TOKENS) % 3 == 0).astype(np.float32)

    @jax.jit
    def run():
        stash, spare, scratch = (
            reference_to(jnp.full((entries, tokens), jnp.nan, jnp.bfloat16))
            for entries, tokens in ((s.vocab, HIDDEN), (PADDED - SPLIT, half), (PADDED, half))
        )
        rooms = [KeptBlocks(stash, spare, SHIFT, SPLIT), KeptBlocks(None, scratch)]
        partials = MosaicPartials(*(reference_to(jnp.full((CONFIG.parts(s.vocab), TOKENS), jnp.nan)) for _ in range(2)))
        for begin in (0, half):
            operands = s.operands._replace(number=jnp.minimum(s.count, begin + half))
            kernels.softmax_tiles(
                (rooms, partials), operands, shift=s.shift, begin=at(begin), wanted=Wanted(), **common
            )  # fmt: skip
        rebase.rebase_exponentials(
            rooms, partials.maximum[...], s.shift, s.shift + moved, s.count, vocab=s.vocab, **common
        )
        hidden = products.hidden_product(
            s.weight, s.count, tokens=half, first_token=at(half), kept=KeptBlocks(stash, spare[...], SHIFT, SPLIT),
            kept_tokens=half, in_scratch=scratch[...], scale=s.scale, **common,
        )  # fmt: skip
        return hidden, *(jax.freeze(x) for x in (stash, spare, scratch, partials.maximum))

    hidden, stash, spare, scratch, maximum = (np.asarray(x, np.float64) for x in run())
    np.testing.assert_allclose(maximum[:, : s.n].T, s.z.reshape(s.n, -1, CONFIG.part_n).max(2), rtol=1e-5, atol=1e-5)
    first = np.concatenate([s.values(stash, SHIFT, SPLIT, half), s.values(spare, 0, PADDED - SPLIT, half)], 1)
    values = np.concatenate([first, s.values(scratch, 0, PADDED, half)])
    own = np.arange(PADDED) == s.label[: s.n, None]
    expected = np.where(own, 0, s.exponentials * np.exp(-moved)[: s.n, None])
    assert relative(values[: s.n], expected) < 2**-7
    assert (values[s.n :] == 0).all()
    expected = values[half : s.n, : s.vocab] @ s.weight64 * s.scale[half : s.n, None]
    assert relative(hidden[: s.n - half], expected) < 1e-6


# These two take the interpreter 20 s a layout: each has one.
@pytest.mark.slow
@pytest.mark.parametrize("vocab_major", [True], ids=["VH"])
def test_products(vocab_major):
    """The first 128 tokens' exponentials in the memory of the weight's gradient, the others' in scratch."""
    s = Small(vocab_major, vocab=512)
    values = np.zeros((192, PADDED))
    values[: s.n] = s.exponentials
    kept = 128
    stash = s.matrix(values[:kept, :SPLIT], (s.vocab, HIDDEN), SHIFT)
    spare = s.matrix(values[:kept, SPLIT:], (PADDED - SPLIT, kept), 0)
    in_scratch = s.matrix(np.pad(values[kept:], ((0, 64), (0, 0))), (PADDED, TOKENS - kept), 0)
    values = np.asarray(jnp.asarray(values[: s.n], jnp.bfloat16), np.float64)
    common = {"vocab_major": vocab_major, "in_scratch": in_scratch, "config": CONFIG, "interpret": INTERPRETER}

    @jax.jit
    def run():
        ref = reference_to(stash)
        both = KeptBlocks(ref, spare, SHIFT, SPLIT)
        whole = partial(products.hidden_product, s.weight, s.count, kept=both, kept_tokens=kept, **common)
        hidden = whole(tokens=TOKENS, scale=s.scale)
        chunk = partial(products.weight_product, ref, s.rows, s.count, kept=both, kept_tokens=kept, **common)
        for number in range(SPLIT // SHIFT):
            chunk(first=at(0), chunks=of(SHIFT), number=at(number), after=hidden)
        chunk(first=at(SPLIT), chunks=of(PADDED - SPLIT))
        return hidden, jax.freeze(ref)

    hidden, gradient = run()
    expected = values @ s.weight64 * s.scale[: s.n, None]
    assert relative(np.asarray(hidden)[: s.n], expected) < 1e-6
    gradient = gradient if vocab_major else gradient.T
    assert relative(gradient, values.T @ s.rows64) < 2**-8


@LAYOUTS
def test_warpgroups_take_tiles_in_turns(vocab_major):
    """Six tiles, three of each program, so that the second warpgroup has fewer; more steps than stages."""
    s = Small(vocab_major, vocab=384)
    config = replace(CONFIG, alternate=True, stages=2, staging_slots=1)
    values = np.zeros((TOKENS, PADDED))
    values[: s.n] = s.exponentials
    scratch = s.matrix(values, (PADDED, TOKENS), 0)

    @jax.jit
    def run():
        ref = reference_to(s.matrix(np.empty((0, 0)), (s.vocab, HIDDEN), 0))
        products.weight_product(
            ref, s.rows, s.count, vocab_major=vocab_major, first=at(0), chunks=of(PADDED), kept_tokens=0,
            in_scratch=scratch, inverse_grad_scale=jnp.full(1, 0.5), config=config, interpret=INTERPRETER,
        )  # fmt: skip
        return jax.freeze(ref)

    made = run() if vocab_major else run().T
    values = np.asarray(jnp.asarray(values[: s.n, : s.vocab], jnp.bfloat16), np.float64)
    assert relative(made, values.T @ s.rows64 / 2) < 2**-8


@pytest.mark.parametrize("vocab_major", [pytest.param(True, marks=pytest.mark.slow), False], ids=["VH", "HV"])
def test_slices_of_the_vocabulary(vocab_major):
    """The last one is longer than what is left of the entries; of 256 tokens 150 count."""
    s, slices = Small(vocab_major, vocab=448), 3
    values = np.zeros((TOKENS, PADDED))
    values[: s.n] = s.exponentials
    made = jax.jit(
        lambda: products.hidden_product(
            s.weight, s.count, vocab_major=vocab_major, tokens=TOKENS, scale=s.scale, slices=slices, config=CONFIG,
            recomputed=s.matrix(values, (PADDED, TOKENS), 0), interpret=INTERPRETER,
        )
    )()  # fmt: skip
    made = np.asarray(made, np.float64).reshape(slices, TOKENS, HIDDEN)[:, : s.n]
    values = np.asarray(jnp.asarray(values[: s.n, : s.vocab], jnp.bfloat16), np.float64)
    each = -(-s.vocab // (CONFIG.tile_k * slices)) * CONFIG.tile_k
    for i, part in enumerate(made):
        mine = slice(i * each, (i + 1) * each)
        assert relative(part, values[:, mine] @ s.weight64[mine] * s.scale[: s.n, None]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("vocab_major", [False], ids=["HV"])
def test_gradient_again(vocab_major):
    """With bias, softcap, smoothing weighted by class and the entropy's part, of rows behind others.

    Half of the tokens' weight gradient is from kept exponentials.
    """
    s = Small(vocab_major, vocab=448)
    rng = np.random.default_rng(1)
    inner, first, size, kept = 0.3, SPLIT, PADDED - SPLIT, 128
    x = np.tanh((s.x + s.bias[: s.vocab]) * inner)
    lse = np.log(np.exp(x * s.factor[: s.n, None]).sum(1))
    at_target, even = rng.normal(size=s.n), rng.uniform(0, 0.01, s.n)
    entropy, mean = rng.normal(size=s.n), rng.normal(size=s.n)
    z = x * s.factor[: s.n, None]
    g = np.exp(z - lse[:, None]) * (s.scale[: s.n, None] + entropy[:, None] * (z - mean[:, None]))
    g -= even[:, None] * s.class_weight[: s.vocab]
    g[np.arange(s.n), s.label[: s.n]] = at_target
    g = np.pad(g * (1 - x * x), ((0, 0), (0, PADDED - s.vocab)))[:, first:]

    def padded(x, fill=0):
        return np.pad(x, (0, TOKENS - s.n), constant_values=fill).astype(np.float32)

    common = {"vocab_major": vocab_major, "first": at(first), "config": CONFIG, "interpret": INTERPRETER}
    stash = jnp.zeros(s.weight.shape, jnp.bfloat16)
    spare = s.matrix(s.exponentials[:kept, SPLIT:], (size, TOKENS), 0)

    @jax.jit
    def run():
        # In memory for a larger chunk.
        into = reference_to(s.matrix(np.empty((0, 0)), (size + 256, TOKENS), 0))
        kernels.gradient_tiles(
            s.operands._replace(
                rows=jnp.pad(s.rows, ((kept, 0), (0, 0)), constant_values=jnp.nan), bias=s.bias,
                inner_scale=jnp.full(1, inner), class_weight=s.class_weight,
            ),
            padded(lse, np.inf), s.scale, padded(at_target), size=size + 256, entries=at(size), into=into,
            even=padded(even), first_row=kept, entropy=padded(entropy), mean=padded(mean), **common,
        )  # fmt: skip
        again = jax.freeze(into)
        hidden = products.hidden_product(
            s.weight, s.count, tokens=TOKENS, recomputed=again, entries=at(size), **common
        )  # fmt: skip
        others = again[:, kept:] if vocab_major else again[kept:]
        ref = reference_to(stash)
        products.weight_product(
            ref, s.rows, s.count, chunks=of(size), kept=KeptBlocks(None, spare, SHIFT, SPLIT), kept_tokens=kept,
            recomputed=others, **common,
        )  # fmt: skip
        return again, hidden, jax.freeze(ref)

    again, hidden, gradient = run()
    again = s.values(np.asarray(again, np.float64), 0, size + 256, TOKENS)
    assert np.isnan(again[:, size:]).all()
    again = again[:, :size]
    assert relative(again[: s.n], g) < 2**-8
    assert (again[s.n :] == 0).all()
    assert relative(np.asarray(hidden)[: s.n], again[: s.n, : s.vocab - first] @ s.weight64[first:]) < 1e-6
    gradient = np.asarray(gradient if vocab_major else gradient.T, np.float64)[first:]
    mixed = np.concatenate([s.exponentials[:kept, SPLIT : s.vocab], again[kept : s.n, : s.vocab - first]])
    assert relative(gradient, mixed.T @ s.rows64) < 2**-7


@LAYOUTS
def test_rebasing(vocab_major):
    """Of the first 128 tokens some have moved; past the last one that counts nothing may be looked at."""
    s = Small(vocab_major, vocab=448)
    rng = np.random.default_rng(2)
    room = 128  # tokens, all of which count but the last few
    n = room - 10
    maximum = rng.normal(size=(PADDED // CONFIG.part_n, room)).astype(np.float32)
    before = rng.normal(size=room).astype(np.float32)
    after = before + np.where(rng.random(room) < 0.5, rng.normal(size=room), 0).astype(np.float32)
    maximum[:, ::3] += 70  # beyond reach
    maximum[:, n:] = before[n:] = np.nan
    values = np.exp(rng.normal(size=(room, PADDED)))
    values[n:] = values[:, s.vocab :] = 0
    stash = s.matrix(values[:, :SPLIT], (s.vocab, HIDDEN), SHIFT)
    spare = s.matrix(values[:, SPLIT:], (PADDED - SPLIT, TOKENS), 0)

    @jax.jit
    def run(after):
        refs = reference_to(stash), reference_to(spare)
        rebase.rebase_exponentials(
            [KeptBlocks(*refs, SHIFT, SPLIT)], maximum, before, after, jnp.asarray([n]),
            vocab_major=vocab_major, vocab=s.vocab, config=CONFIG, interpret=INTERPRETER,
        )  # fmt: skip
        return [jax.freeze(x) for x in refs]

    got = s.kept(*run(after))[:room]
    top = np.repeat(maximum.T, CONFIG.part_n, 1)[:n].astype(np.float64)
    old, new = before[:n, None], after[:n, None]
    factor = np.where(old == new, 1, np.exp(np.where(top - old > 60, top, old) - new))
    assert relative(got[:n], values[:n] * factor) < 2**-8
    rest = (old == new)[:, 0]
    assert 0 < rest.sum() < n
    assert (got[:n][rest] == s.kept(stash, spare)[:n][rest]).all()
    assert (got[n:] == 0).all()
    for x, y in zip(run(before), (stash, spare), strict=True):  # where none has moved
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_the_gradient_with_an_entropy():
    """In the place of exponentials; what is past the last token that counts may be anything."""
    s, room = Small(vocab_major=True, vocab=448), 128
    n, rng = room - 10, np.random.default_rng(3)
    factor, entropy, middle = rng.normal(size=(3, room)).astype(np.float32)
    factor[n:] = entropy[n:] = middle[n:] = 0
    values = np.exp(3 * rng.normal(size=(room, PADDED)))
    values[n:] = values[:, s.vocab :] = values[:, ::7] = 0
    stash = s.matrix(values[:, :SPLIT], (s.vocab, HIDDEN), SHIFT)
    spare = s.matrix(values[:, SPLIT:], (PADDED - SPLIT, TOKENS), 0)

    @jax.jit
    def run():
        refs = reference_to(stash), reference_to(spare)
        rebase.gradient_with_entropy(
            [KeptBlocks(*refs, SHIFT, SPLIT)], factor, entropy, middle, jnp.asarray([n]), vocab_major=True,
            vocab=s.vocab, interpret=INTERPRETER,
        )  # fmt: skip
        return [jax.freeze(x) for x in refs]

    got, e = s.kept(*run())[:room], s.kept(stash, spare)[:room]
    logarithm = np.log(np.where(e > 0, e, 1))
    expected = e * (factor[:, None] + entropy[:, None] * (logarithm + middle[:, None]))
    assert relative(got[:n], expected[:n]) < 2**-8
    assert (got[n:] == 0).all()


@pytest.mark.parametrize(
    ("hidden", "vocab_major"), [(192, True), pytest.param(64, False, marks=pytest.mark.slow)], ids=["192-VH", "64-HV"]
)
def test_targets(vocab_major, hidden):
    """Labels with one token, with two, with one more than are summed at a time, and with many."""
    rng = np.random.default_rng(3)
    tokens, count, vocab = 64, 50, 40
    label = np.concatenate([[7] * 20, [39] * 10, [0] * 9, [8, 8, 30], rng.permutation(np.arange(10, 18))])
    label = np.pad(np.sort(label), (0, tokens - count), constant_values=NO_LABEL).astype(np.int32)
    token = rng.permutation(tokens).astype(np.int32)
    term = rng.normal(size=tokens).astype(np.float32)
    rows = rng.normal(size=(tokens, hidden)).astype(np.float32)
    rows[token[count:]] = np.nan
    token[-1] = tokens  # as past the last one that counts
    gradient = rng.normal(size=(vocab, hidden))
    rows, gradient = jnp.asarray(rows, jnp.bfloat16), jnp.asarray(gradient, jnp.bfloat16)

    @jax.jit
    def run():
        ref = reference_to(gradient if vocab_major else gradient.T)
        rebase.add_targets(ref, rows, token, label, term, vocab_major=vocab_major, interpret=INTERPRETER)
        return jax.freeze(ref)

    expected = np.asarray(gradient, np.float64)
    wide = np.asarray(rows, np.float64)
    for i in range(count):
        expected[label[i]] += term[i] * wide[token[i]]
    got = run() if vocab_major else run().T
    # Rounded once: no farther from the sum than its own rounding.
    assert (np.abs(np.asarray(got, np.float64) - expected) <= np.abs(expected) * 2**-8 + 1e-5).all()
    untouched = np.setdiff1d(np.arange(vocab), label)
    assert (got[untouched] == gradient[untouched]).all()


def test_tanh_at_any_size():
    assert_is_tanh(lambda x: np.asarray(tanh(jnp.asarray(x))))
