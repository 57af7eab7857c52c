"""What the Mosaic kernels compute, in plain JAX: stand-ins with the launchers' signatures, for the CPU.

They keep exponentials where the kernels do, and what the kernels leave unwritten is NaN here.
"""

import jax
import jax.numpy as jnp
from jax import lax

from onchip.kernels.mosaic.product import BOX
from onchip.ops.linear_cross_entropy import jax_op
from onchip.ops.linear_log_probs import jax_op as llp_jax_op
from onchip.vocab.mosaic import kernels, products, rebase, sums
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.blocks import REACH
from onchip.vocab.mosaic.positions import LOWEST, NO_LABEL, MosaicPartials
from onchip.vocab.mosaic.sums import MosaicSum

TILE = 128  # tokens
WIDE = 256  # vocabulary entries


def turned(kept, vocab_major):
    """[tokens, entries] as they are kept, or the reverse: under a [V, H] weight 64 x 64 blocks change their place."""
    if not vocab_major:
        return kept
    rows, columns = kept.shape
    blocks = kept.reshape(rows // 64, 64, columns // 64, 64)
    return blocks.transpose(2, 1, 0, 3).reshape(columns, rows)


def tokens_done(tokens, count):
    """[T]: in a tile with a token that counts."""
    return jnp.arange(tokens) < -(-count[0] // TILE) * TILE


def rows_of(weight, vocab_major, vocab):
    """[vocab, H] float32, zeros beyond V."""
    w = (weight if vocab_major else weight.T).astype(jnp.float32)
    return jnp.pad(w, ((0, vocab - len(w)), (0, 0)))


def kept_in(matrix, first, size, vocab_major, tokens):
    """[tokens, size] of what a matrix keeps from entry `first` on; zeros outside."""
    axis = 0 if vocab_major else 1
    matrix = lax.slice_in_dim(matrix, 0, tokens, axis=1 - axis)
    pad = [(0, 0), (0, 0)]
    pad[axis] = (0, size + -matrix.shape[axis] % 64)
    return turned(lax.dynamic_slice_in_dim(jnp.pad(matrix, pad), first, size, axis), vocab_major)


def unscaled(operands, vocab_major, padded):
    rows, weight, *_, bias, inner_scale, _ = operands
    x = rows.astype(jnp.float32) @ rows_of(weight, vocab_major, padded).T
    if bias is not None:
        x += bias[None]
    return x if inner_scale is None else jnp.tanh(x * inner_scale[0])


def labels_of(labels, tokens, padded):
    """[tokens, padded] float32: soft labels of these positions; zeros outside of the matrix."""
    values = labels.values.astype(jnp.float32)
    values = jnp.pad(values, ((0, tokens), (0, padded - values.shape[1])))
    return lax.dynamic_slice_in_dim(values, labels.first[0], tokens, 0)


def softmax_tiles(
    into, operands, *, vocab_major, wanted, shift=None, exponential_scale=1.0, begin=None, labels=None, config=None,
):  # fmt: skip
    rooms, partials = into or ((), None)
    rows, weight, label, factor, count, *_ = operands
    tokens, vocab = len(rows), weight.shape[0 if vocab_major else 1]
    padded, done = -(-vocab // WIDE) * WIDE, tokens_done(tokens, count)
    mine = jnp.arange(tokens) >= (0 if begin is None else begin[0])
    x = unscaled(operands, vocab_major, padded)
    inside = jnp.arange(padded) < vocab
    x = jnp.where(inside[None], x, -jnp.inf).reshape(tokens, -1, config.part_n)
    top = jnp.maximum(x.max(2), LOWEST)
    below = (x - top[:, :, None]) * factor[:, None, None]
    e = jnp.exp(below)
    moment = (e * jnp.maximum(below, -1e30)).sum(2)
    own = (jnp.arange(padded)[None] == label[:, None]).reshape(x.shape)
    if labels is not None:  # each part's largest
        own = jnp.arange(config.part_n)[None, None] == x.argmax(2)[:, :, None]
    e = jnp.where(own, 0, e)
    maximum = top * factor[:, None]

    def part(value):
        unwritten = jnp.iinfo(jnp.int32).max if value.dtype == jnp.int32 else jnp.nan
        return jnp.where(done[None], value.T, unwritten)

    if rooms:
        above = maximum - shift[:, None]
        f = jnp.where(above > REACH, 1.0, jnp.exp(above)) * exponential_scale
        value = (e * f[:, :, None]).reshape(tokens, padded)
        if operands.inner_scale is not None:
            value *= 1 - jnp.minimum(jnp.square(x.reshape(tokens, padded)), 1)
        value = value.astype(rows.dtype)
        value = jnp.where(done[:, None], value, jnp.nan)
        start = 0
        for kept in rooms:
            size = min(tokens_of(kept.spare, vocab_major), tokens - start)
            of_room = slice(start, start + size)
            start += size

            def write(ref, first, entries, of_room=of_room, size=size):
                at = slice(first, first + entries.stop - entries.start), slice(0, size)
                at = at if vocab_major else at[::-1]
                old = turned(ref[at], vocab_major)
                ref[at] = turned(jnp.where(mine[of_room, None], value[of_room, entries], old), vocab_major)

            write(kept.spare, 0, slice(kept.split, padded))
            if kept.in_weight_grad is not None:
                write(kept.in_weight_grad, kept.shift, slice(0, kept.split))
    made = MosaicPartials(
        part(maximum),
        part(e.sum(2)),
        part(offset_sum(below, inside, operands.class_weight)) if wanted.even else None,
        part(moment) if wanted.entropy else None,
        part(x.argmax(2).astype(jnp.int32) + config.part_n * jnp.arange(x.shape[1], dtype=jnp.int32)[None])
        if wanted.argmax
        else None,
        squares=part((e * e).sum(2)) if wanted.sum_sq else None,
    )
    if labels is not None:
        q, weight = labels_of(labels, tokens, padded).reshape(x.shape), operands.class_weight
        taken = [(q if weight is None else q * weight.reshape(1, *x.shape[1:]), "cost", "mass")]
        taken += [(q, "plain_cost", "plain_mass")] if weight is not None and wanted.entropy else []
        for q, cost, mass in taken:
            each = jnp.where(q == 0, 0, q * -below)
            made = made._replace(**{cost: part(each.sum(2)), mass: part(q.sum(2))})
    if partials is None:
        return made
    jax.tree.map(lambda ref, x: ref.__setitem__(..., jnp.where(mine, x, ref[...])), partials, made)
    return None


def offset_sum(below, inside, class_weight):
    if class_weight is None:
        return jnp.where(inside.reshape(1, *below.shape[1:]), below, 0).sum(2)
    w = class_weight.reshape(1, *below.shape[1:])
    return jnp.where(w > 0, w * below, 0).sum(2)


def gradient_tiles(
    operands, lse, scale, at_target, *, vocab_major, first, size, entries=None, into=None, even=None, labels=None,
    by_labels=None, entropy=None, mean=None, first_row=0, config=None,
):  # fmt: skip
    operands = operands._replace(rows=operands.rows[first_row:])
    rows, weight, label, factor, count, _, inner_scale, class_weight = operands
    tokens, vocab = len(rows), weight.shape[0 if vocab_major else 1]
    padded = -(-vocab // WIDE) * WIDE
    x = unscaled(operands, vocab_major, padded)
    g = jnp.exp(x * factor[:, None] - lse[:, None])
    more = 0 if entropy is None else entropy[:, None] * jnp.maximum(x * factor[:, None] - mean[:, None], -1e30)
    g *= scale[:, None] + more
    if even is not None:
        g -= even[:, None] * (1.0 if class_weight is None else class_weight[None])
    if labels is not None:
        q = labels_of(labels, tokens, padded)
        g -= by_labels[:, None] * (q if class_weight is None else q * class_weight[None])
    g = jnp.where(jnp.arange(padded)[None] == label[:, None], at_target[:, None], g)
    if inner_scale is not None:
        g *= 1 - x * x
    g = jnp.where(jnp.arange(padded)[None] < vocab, g, 0)
    g = lax.dynamic_slice_in_dim(jnp.pad(g, ((0, 0), (0, size))), first[0], size, 1)
    made = jnp.where(tokens_done(tokens, count)[:, None], g.astype(rows.dtype), jnp.nan)
    if entries is not None:
        made = jnp.where(jnp.arange(size)[None] < entries[0], made, jnp.nan)
    if into is None:
        return turned(made, vocab_major)
    into[...] = turned(made, vocab_major)
    return None


def tokens_of(matrix, vocab_major):
    return matrix.shape[1 if vocab_major else 0]


def kept_entries(kept, vocab, vocab_major, tokens):
    """[tokens, entries]: all that is kept of some tokens."""
    padded, first = -(-vocab // WIDE) * WIDE, kept.in_weight_grad[...]
    parts = [kept_in(first, kept.shift, kept.split, vocab_major, tokens)] if kept.split else []
    return jnp.concatenate([*parts, kept_in(kept.spare, 0, padded - kept.split, vocab_major, tokens)], 1)


def hidden_product(
    weight, count, *, vocab_major, tokens, first_token=None, kept=None, kept_tokens=0, in_digits=None, in_scratch=None,
    recomputed=None, first=None, entries=None, scale=None, add_to=None, second=None, halves=False, slices=1,
    config=None,
):  # fmt: skip
    vocab = weight.shape[0 if vocab_major else 1]
    padded = -(-vocab // WIDE) * WIDE
    if recomputed is not None:
        e = turned(recomputed, vocab_major)
    else:
        parts = [] if kept is None else [kept_entries(kept, vocab, vocab_major, kept_tokens)]
        if in_digits is not None:
            parts.append(kept_entries(in_digits, vocab, vocab_major, tokens_of(in_digits.spare, vocab_major)))
        if in_scratch is not None:
            parts.append(kept_in(in_scratch, 0, padded, vocab_major, tokens_of(in_scratch, vocab_major)))
        e = jnp.concatenate(parts)
        if first_token is not None:
            begin, count = first_token[0], jnp.clip(count - first_token, 0, tokens)
            e, scale = (
                lax.dynamic_slice_in_dim(jnp.pad(x, [(0, tokens)] + [(0, 0)] * (x.ndim - 1)), begin, tokens)
                for x in (e, scale)
            )
        e = e[:tokens]
    first = 0 if first is None else first[0]
    size, done = e.shape[1], tokens_done(tokens, count)
    w = lax.dynamic_slice_in_dim(rows_of(weight, vocab_major, padded + size), first, size, 0)
    there = size if entries is None else entries[0]
    e = jnp.where(done[:, None] & (jnp.arange(size)[None] < there), e.astype(jnp.float32), 0)

    def product(part, where_not_done):
        made = e[:, part] @ w[part] * (1 if scale is None else scale[:, None])
        return jnp.where(done[:, None], made, where_not_done)

    if add_to is None:
        each = -(-size // TILE // slices) * TILE
        return jnp.concatenate([product(slice(i * each, (i + 1) * each), jnp.nan) for i in range(slices)])
    cut = size if second is None else size // 2
    for ref, part in ((add_to, slice(0, cut)), (second, slice(cut, size))):
        if ref is not None:
            ref[...] += product(part, 0)
    return None


def weight_product(
    out, rows, count, *, vocab_major, begin=None, first, chunks, number=None, kept=None, kept_tokens=None,
    in_digits=None, in_scratch=None, recomputed=None, begins=None, half=None, even=None, inverse_grad_scale=None,
    after=None, config=None,
):  # fmt: skip
    total, out = (out, out.first) if isinstance(out, MosaicSum) else (None, out)
    chunks = jnp.asarray(chunks)
    before = chunks[0] + (0 if number is None else number[0] * chunks[1])
    first = first[0] + before
    tokens, kept_tokens = len(rows), len(rows) if kept_tokens is None else kept_tokens
    axis = 0 if vocab_major else 1
    vocab = out.shape[axis]
    whole = -(-vocab // WIDE) * WIDE  # of which the chunk is the first part

    def of_kept(memory, kept, tokens):
        in_memory = kept_in(memory[...], first + kept.shift, whole, vocab_major, tokens)
        in_spare = kept_in(kept.spare, first - kept.split, whole, vocab_major, tokens)
        return jnp.where(first < kept.split, in_memory, in_spare)

    parts = []
    if kept_tokens:
        parts.append(of_kept(out, kept, kept_tokens))
    if in_digits is not None:
        parts.append(of_kept(total.digits, in_digits, tokens_of(in_digits.spare, vocab_major)))
    if in_scratch is not None:
        parts.append(kept_in(in_scratch, first, whole, vocab_major, in_scratch.shape[1 if vocab_major else 0]))
    if recomputed is not None:
        recomputed = turned(recomputed, vocab_major)
        parts.append(lax.dynamic_slice_in_dim(jnp.pad(recomputed, ((0, 0), (0, whole))), before, whole, 1))
    done = jnp.arange(tokens) < -(-count[0] // config.tile_k) * config.tile_k
    some = count[0] > 0
    if begin is not None:
        done, some = done & (jnp.arange(tokens) >= begin[0]), count[0] > begin[0]
    inside = jnp.arange(whole) < chunks[1]
    # In scratch there may be more than there are tokens.
    e = jnp.concatenate(parts)[:tokens].astype(jnp.float32)
    e = jnp.where(done[:, None] & inside[None], e, 0)
    product = e.T @ jnp.where(done[:, None], rows, 0).astype(jnp.float32)
    if even is not None:
        product -= even[None, : rows.shape[1]] * (1 if begins is None else begins[0])
    product *= 1.0 if inverse_grad_scale is None else inverse_grad_scale[0]
    if total is not None:
        add_to_sum(total, product if vocab_major else product.T, begins, half, first, chunks[1], axis, config, some)
        return
    made = product.astype(rows.dtype) if vocab_major else product.T.astype(rows.dtype)
    write_part(out, made, first, chunks[1], axis, some)


def write_part(ref, made, first, size, axis, some):
    """If there are `some` tokens, write the first `size` rows or columns of `made` to those from `first` on, and
    nothing outside.
    """
    pad = [(0, made.shape[axis]) if a == axis else (0, 0) for a in range(2)]
    old = jnp.pad(ref[...], pad)
    there = lax.dynamic_slice_in_dim(old, first, made.shape[axis], axis)
    mine = jnp.arange(made.shape[axis]) < size
    new = jnp.where(mine[:, None] if axis == 0 else mine, made, there)
    new = lax.dynamic_update_slice_in_dim(old, new, first, axis)[: ref.shape[0], : ref.shape[1]]
    ref[...] = jnp.where(some, new, ref[...])


def add_to_sum(total, product, begins, half, first, size, axis, config, some):
    """As the kernel does it, for all rows as one tile's part after the other; the chunk begins with entry `first`."""
    words = total.digits.shape[1] // -(-total.first.shape[1] // config.tile_n)
    whole, columns = product.shape[axis], product.shape[1]
    starts = first, first if axis == 0 else first // config.tile_n * words
    lengths = whole, whole if axis == 0 else whole // config.tile_n * words
    pads = ([(0, length if a == axis else 0) for a in range(2)] for length in lengths)
    wide = [jnp.pad(ref[...], pad) for ref, pad in zip(total, pads, strict=True)]
    part = [lax.dynamic_slice_in_dim(*x, axis) for x in zip(wide, starts, lengths, strict=True)]
    new = product + (0 if begins is None else jnp.where(begins[0], 0, MosaicSum(*part).value(config)))
    new = jnp.pad(new, ((0, 0), (0, -columns % config.tile_n)))
    firsts, digits = [], []
    for tile in range(0, new.shape[1], config.tile_n):
        blocks = [new[:, n : n + BOX] for n in range(tile, tile + config.tile_n, BOX)]
        together = 16 // sums.bits_of(total.first.dtype)
        for start in range(0, len(blocks), together):
            rounding = None if half is None else half[0]
            *first_bits, words_made = sums.as_stored(blocks[start : start + together], total.first.dtype, rounding)
            firsts += first_bits
            digits.append(words_made)
    sizes = size, size if axis == 0 else -(-size // config.tile_n) * words
    made = jnp.concatenate(firsts, 1)[:, :columns], jnp.concatenate(digits, 1)
    for ref, value, start, length in zip(total, made, starts, sizes, strict=True):
        write_part(ref, value, start, length, axis, some)


def rebase_exponentials(rooms, maximum, before, after, count, *, vocab_major, vocab, config):
    (all_tokens,) = before.shape
    moved = (before != after) & (jnp.arange(all_tokens) < count[0])
    top = jnp.repeat(maximum.T, config.part_n, 1)
    used = jnp.where(top - before[:, None] > REACH, top, before[:, None])
    factors = jnp.where(moved[:, None], jnp.exp(used - after[:, None]), 1)

    def rebased(value, tokens, of):
        f = factors[tokens, of]
        return jnp.where(f == 1, value, value * f)

    change_kept(rooms, all_tokens, factors.shape[1], rebased, vocab_major)


def gradient_with_entropy(rooms, factor, entropy, middle, count, *, vocab_major, vocab):
    def made(value, tokens, of):
        a, b, m = (x[tokens, None] for x in (factor, entropy, middle))
        there = (value > 0) & (jnp.arange(len(factor)) < count[0])[tokens, None]
        return jnp.where(there, value * (a + b * (jnp.log(value) + m)), value)

    change_kept(rooms, len(factor), -(-vocab // WIDE) * WIDE, made, vocab_major)


def change_kept(rooms, all_tokens, padded, new, vocab_major):
    def change(ref, first, tokens, of):
        value = kept_in(ref[...], first, of.stop - of.start, vocab_major, tokens.stop - tokens.start)
        value = turned(new(value.astype(jnp.float32), tokens, of).astype(ref.dtype), vocab_major)
        at, to = slice(first, first + of.stop - of.start), slice(0, tokens.stop - tokens.start)
        ref[(at, to) if vocab_major else (to, at)] = value

    start = 0
    for kept in rooms:
        tokens = slice(start, min(start + tokens_of(kept.spare, vocab_major), all_tokens))
        start = tokens.stop
        if kept.in_weight_grad is not None and kept.split:
            change(kept.in_weight_grad, kept.shift, tokens, slice(0, kept.split))
        change(kept.spare, 0, tokens, slice(kept.split, padded))


def scale_sum(out, digits, factor, *, config):
    rows, columns = out.shape
    words = sums.to_bits(digits).reshape(rows, -1, 1, BOX) >> jnp.arange(0, 16, 4, jnp.uint32)[None, None, :, None]
    words = (words & 15).reshape(rows, -1, 256)[..., : config.tile_n].reshape(rows, -1)[:, :columns]
    scaled = (sums.join(out[...], words, 4, nearest=True) * factor).astype(out.dtype)
    out[...] = jnp.where(factor == 1, out[...], scaled)


def add_targets(out, hidden, token, label, term, *, vocab_major):
    vocab = out.shape[0 if vocab_major else 1]
    terms = term[:, None] * hidden[token].astype(jnp.float32)
    there = (label >= 0) & (label != NO_LABEL)
    # The kernel adds up neighbours.
    terms = jnp.where((there & (jnp.diff(label, append=NO_LABEL) >= 0))[:, None], terms, 0)
    sums = jnp.zeros((vocab, terms.shape[1]), jnp.float32).at[jnp.where(there, label, 0)].add(terms)
    out[...] = (out[...].astype(jnp.float32) + (sums if vocab_major else sums.T)).astype(out.dtype)


def forget():
    """What was compiled for other kernels, or other plans."""
    for function in (*jax_op._op.jitted, *llp_jax_op.OPERATOR.jitted):
        function.clear_cache()


def on_a_gpu(monkeypatch):
    """Let the 'mosaic_gpu' backend take all calls."""
    for op in (jax_op, llp_jax_op):
        monkeypatch.setattr(op, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_op, "refusal", lambda *_: None)


def stand_in(monkeypatch):
    """Let the 'mosaic_gpu' backend run on the CPU, with these in the place of its kernels."""
    on_a_gpu(monkeypatch)
    for module, names in (
        (kernels, ("softmax_tiles", "gradient_tiles")),
        (products, ("hidden_product", "weight_product")),
        (rebase, ("rebase_exponentials", "gradient_with_entropy", "scale_sum", "add_targets")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, globals()[name])
    forget()
