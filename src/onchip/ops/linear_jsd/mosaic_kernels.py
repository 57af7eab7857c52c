"""Hopper kernels of linear_jsd and jsd in Pallas Mosaic GPU: the divergence of each token's two rows of logits.

`softmax` reads a model's rows once, `terms` both models' for the loss and the means that gradients subtract, and
`gradients` once more for the gradients by logits.  The maths is explained in triton_kernels.py; all logarithms are to
base 2.

They are bound by device memory: one warpgroup per program, several programs per multiprocessor.  A program takes one
block of a row after the other, in strips, some of them at a time; each thread has a few neighbours of a strip, and
maxima and sums of its own until the block ends.  XLA adds up a row's blocks, in a fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from onchip.kernels.mosaic.launch import Refs, launch, multiprocessors
from onchip.kernels.mosaic.maths import LN2, LOG2E
from onchip.kernels.mosaic.order import ceil_div
from onchip.kernels.mosaic.strips import THREADS, Strips
from onchip.ops.linear_jsd import JsdOptions
from onchip.ops.linear_jsd.divergence import NEAR, nearly_equal

# Log-probabilities are at least this, so that no difference of two is NaN; one above INFINITE tells that one of the two
# probabilities is 0.
FLOOR, INFINITE = -1.0e30, 1.0e29
LOWEST = -8.5e37  # below each logit, and finite
NO_ID = 2**31 - 1  # behind all ids of a token


class Tuning(NamedTuple):
    """How a kernel goes over rows."""

    ahead: int  # entries that a thread reads at a time
    block: int  # a thread's entries of a block, a multiple of that
    programs: int = 0  # per multiprocessor, which take one block after the other; 0: one for each block


# By the bytes of a logit, the wider one of two models': the fastest that were tried on an H200.
TUNING = {
    ("softmax", 2): Tuning(32, 512),
    ("softmax", 4): Tuning(16, 256),
    ("terms", 2): Tuning(32, 512),
    ("terms", 4): Tuning(16, 256),
    ("gradients", 2): Tuning(16, 128, 6),
    ("gradients", 4): Tuning(16, 64, 4),
}
_WORD = 16  # bytes that a thread moves at a time, at most


class _Rows:
    """How rows of `vocab` entries are read: in strips, of which a row's last may overlap with the one before."""

    def __init__(self, kernel: str, logits: Sequence[Array], end: Array | None, interpret: Any) -> None:
        (self.count, vocab), self.kernel, self.interpret = logits[0].shape, kernel, interpret
        self.end = end  # [1] int32: entries from this one on are padding, and read as -inf
        sizes = [x.dtype.itemsize for x in logits]
        self.vocab, tuning, unit = vocab, TUNING[kernel, max(sizes)], _WORD // min(sizes)
        while vocab % unit or vocab < THREADS * unit:
            unit //= 2
        self.strips = Strips(THREADS * unit, unit, interpret)
        self.ahead = max(1, min(tuning.ahead // unit, vocab // self.strips.size))
        self.block = -(-tuning.block // (self.ahead * unit)) * self.ahead * self.strips.size
        self.blocks = -(-vocab // self.block)
        self.programs = tuning.programs * (multiprocessors() if interpret is None else 1)

    def launch(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], do: Callable[[Refs, "_Block"], None]
    ) -> dict[str, Any]:
        """Do this for each block of each row."""

        inputs, name = {**inputs, "end": self.end}, f"jsd_{self.kernel}"
        of_kernel = {"warpgroups": None, "name": name, "interpret": self.interpret}
        if not self.programs:

            def one(refs: Refs) -> None:
                do(refs, _Block(self, lax.axis_index("row"), lax.axis_index("block"), refs.get("end")))

            return launch(one, inputs, outputs, (), grid={"row": self.count, "block": self.blocks}, **of_kernel)

        def body(refs: Refs) -> None:
            program = lax.axis_index("program")

            def item(n: Any, _: None) -> None:
                number = program + n * self.programs
                i = lax.div(number, jnp.int32(self.blocks))
                do(refs, _Block(self, i, number - i * self.blocks, refs.get("end")))

            lax.fori_loop(0, ceil_div(self.count * self.blocks - program, self.programs), item, None)

        return launch(body, inputs, outputs, (), grid={"program": self.programs}, **of_kernel)

    def sums(self, *names: str) -> dict[str, Any]:
        """Outputs: a number for each block of each row."""
        return dict.fromkeys(names, jax.ShapeDtypeStruct((self.count, self.blocks), jnp.float32))


class _Block:
    """A block of a row."""

    def __init__(self, of: _Rows, row: Any, number: Any, end: Any) -> None:
        self.of, self.strips, self.row, self.number, self.end = of, of.strips, row, number, end

    def store(self, ref: Any, row: Any, column: Any, value: Any) -> None:
        self.strips.store(ref.at[row, pl.ds(column, self.strips.size)], value.astype(ref.dtype))

    def vectors(self, *values: float) -> tuple[Any, ...]:
        """A number for each thread."""
        return tuple(self.strips.of_threads.full(value) for value in values)

    def put(self, refs: Refs, **numbers: Any) -> None:
        for name, x in numbers.items():
            refs[name][self.row, self.number] = x

    def over(self, sources: Sequence[Any], step: Callable[..., Any], carry: Any) -> Any:
        """carry = step(columns, strips, new, carry) for strips that begin at these columns, in float32 for each source.

        new: which entries of the one strip were in none before; None for all.
        """
        of, strips, size = self.of, self.strips, self.strips.size
        first = self.number * of.block
        end = lax.min(first + of.block, jnp.int32(of.vocab))
        together = of.ahead * size
        whole = lax.div(end - first, jnp.int32(together))

        def read(column: Any, count: int) -> list[list[Any]]:
            return [
                [strips.load(ref.at[self.row, pl.ds(column + k * size, size)]) for k in range(count)] for ref in sources
            ]

        def of_entries(column: Any, raw: Any) -> Any:
            x = strips.floats(raw)
            return x if self.end is None else jnp.where(strips.places() < self.end[0] - column, x, -jnp.inf)

        def taken(column: Any, raw: list[list[Any]], new: Any, carry: Any) -> Any:
            columns = [column + k * size for k in range(of.ahead if new is None else 1)]
            rows = [[of_entries(at, x) for at, x in zip(columns, each, strict=True)] for each in raw]
            return step(columns, rows, new, carry)

        def several(n: Any, carry: Any) -> Any:
            column = first + n * together
            return taken(column, read(column, of.ahead), None, carry)

        def last(n: Any, carry: Any) -> Any:
            begin = first + whole * together + n * size
            column = lax.min(begin, jnp.int32(of.vocab - size))
            return taken(column, read(column, 1), strips.places() >= begin - column, carry)

        carry = lax.fori_loop(0, whole, several, carry)
        if of.vocab % together == 0:
            return carry
        return lax.fori_loop(0, ceil_div(end - first - whole * together, size), last, carry)


class JsdSoftmax(NamedTuple):
    """Of each row of a model's logits, [T] float32: log2 p = (z - maximum) log2(e) / temperature - log_sum."""

    maximum: Any
    log_sum: Any
    others: Any = None  # with labels: the sum of exp(z - maximum), at temperature 1, but the label's

    def merged(self, temperature: float) -> "JsdSoftmax":
        """That of all parts of the vocabulary, from those of each, [n, T]."""
        top = jnp.max(self.maximum, 0)
        drop = self.maximum - top[None]
        log_sum = jnp.log2(jnp.sum(jnp.exp2(self.log_sum + drop * (LOG2E / temperature)), 0))
        return JsdSoftmax(top, log_sum, None if self.others is None else jnp.sum(self.others * jnp.exp(drop), 0))


class JsdTerms(NamedTuple):
    """Of each row, [T] float32."""

    value: Any  # the divergence in nats, without options' factors
    student_mean: Any  # what the gradient subtracts, to base 2; None if it wasn't asked for
    teacher_mean: Any


class JsdHard(NamedTuple):
    """What the gradient by the cross-entropy with hard labels is made of, [T] float32."""

    label: Any  # int32, as of `softmax`
    shift: Any  # the logarithm of the sum of exponentials of the student's logits at temperature 1
    factor: Any  # of p
    at_label: Any


def softmax(
    logits: Array,  # [T, V], of any float dtype but float64
    token: Array,  # [T] int32: negative for a row that doesn't count, of which nothing is read or written
    label: Array | None,  # [T] int32: in [0, V), or negative for an entry that isn't here
    temperature: float,
    *,
    end: Array | None = None,  # [1] int32: entries from this one on are padding
    ids: Array | None = None,  # [T, K] int32, ascending: entries that are left out; negative for those that aren't here
    interpret: Any = None,
) -> JsdSoftmax:
    of, scale = _Rows("softmax", (logits,), end, interpret), LOG2E / temperature

    def block(refs: Refs, b: _Block) -> None:
        y = None if label is None else refs["label"][b.row]

        def without_ids(column: Any, z: Any, state: Any) -> Any:
            """A strip without its ids, of which the first is the row's k-th; and the state for the next strip."""

            def leave_out(state: Any) -> Any:
                (k, following), z = state
                z = jnp.where(b.strips.places() == following - column, -jnp.inf, z)
                return (k + 1, refs["ids"][b.row, k + 1]), z

            state, z = lax.while_loop(lambda state: state[0][1] < column + b.strips.size, leave_out, (state, z))
            return z, state

        def step(columns: Sequence[Any], rows: Any, new: Any, carry: Any) -> Any:
            state, top, soft, *hard = carry
            (z,) = rows
            if ids is not None:
                for i, column in enumerate(columns):
                    z[i], state = without_ids(column, z[i], state)
            z = z if new is None else [jnp.where(new, x, -jnp.inf) for x in z]
            largest = jnp.maximum(top, b.strips.most(z))
            drop, at = top - largest, b.strips.spread(largest)
            below = [x - at for x in z]
            soft = soft * jnp.exp2(drop * scale) + b.strips.sum([jnp.exp2(x * scale) for x in below])
            if hard:
                others = [
                    jnp.where(b.strips.places() == y - column, 0.0, jnp.exp2(x * LOG2E))
                    for column, x in zip(columns, below, strict=True)
                ]
                hard = [hard[0] * jnp.exp2(drop * LOG2E) + b.strips.sum(others)]
            return state, largest, soft, *hard

        state = None
        if ids is not None:
            k = refs["first_id"][b.row, b.number]
            state = k, refs["ids"][b.row, k]
        carry = state, *b.vectors(LOWEST, 0.0, *([] if y is None else [0.0]))
        _, top, soft, *hard = b.over([refs["logits"]], step, carry)
        maximum = jnp.max(top)
        drop = top - maximum
        b.put(refs, maximum=maximum, soft=jnp.sum(soft * jnp.exp2(drop * scale)))
        for x in hard:
            b.put(refs, hard=jnp.sum(x * jnp.exp2(drop * LOG2E)))

    names = ("maximum", "soft", *(() if label is None else ("hard",)))
    inputs = {"logits": logits, "token": token, "label": label}
    if ids is not None:
        before = ids[:, :, None] < jnp.arange(of.blocks, dtype=jnp.int32)[None, None] * of.block
        inputs |= {"ids": jnp.pad(ids, ((0, 0), (0, 1)), constant_values=NO_ID)}
        inputs |= {"first_id": jnp.sum(before, 1, dtype=jnp.int32)}
    made = of.launch(inputs, of.sums(*names), _of_counted(block))
    maximum = jnp.max(made["maximum"], 1)
    drop = made["maximum"] - maximum[:, None]
    log_sum = jnp.log2(jnp.sum(made["soft"] * jnp.exp2(drop * scale), 1))
    others = None if label is None else jnp.sum(made["hard"] * jnp.exp2(drop * LOG2E), 1)
    return JsdSoftmax(maximum, log_sum, others)


def terms(
    student: Array,  # [T, V], as of `softmax`
    teacher: Array,
    token: Array,
    softmaxes: tuple[JsdSoftmax, JsdSoftmax],
    options: JsdOptions,
    *,
    means: tuple[bool, bool] = (True, True),  # of which models
    end: Array | None = None,  # as of `softmax`
    summed: Callable[[Any], Any] | None = None,  # adds up rows' sums over the devices of a split vocabulary
    interpret: Any = None,
) -> JsdTerms:
    of, beta = _Rows("terms", (student, teacher), end, interpret), options.beta
    scale, near = LOG2E / options.temperature, nearly_equal(beta)
    names = ["losses", *(("by_s", "s") if means[0] else ()), *(("by_t", "t") if means[1] else ())]

    def block(refs: Refs, b: _Block) -> None:
        known = _numbers(refs, b.row, _SOFTMAXES)

        def step(columns: Sequence[Any], rows: Any, new: Any, carry: Any) -> Any:
            for log_s, log_t in _both(rows, known, scale):
                if new is not None:
                    log_s, log_t = (jnp.where(new, x, FLOOR) for x in (log_s, log_t))
                term, by_s, by_t, s, t = _terms(log_s, log_t, beta, near, b.strips.log2)
                made = [term, *((by_s, s) if means[0] else ()), *((by_t, t) if means[1] else ())]
                carry = tuple(x + b.strips.sum([each]) for x, each in zip(carry, made, strict=True))
            return carry

        sums = b.over(_models(refs), step, b.vectors(*[0.0] * len(names)))
        b.put(refs, **{name: jnp.sum(x) for name, x in zip(names, sums, strict=True)})

    inputs = {"student": student, "teacher": teacher, "token": token, **_named(softmaxes)}
    made = of.launch(inputs, of.sums(*names), _of_counted(block))
    made = {name: jnp.sum(x, 1) for name, x in made.items()}
    made = made if summed is None else summed(made)
    value = made["losses"] * LN2

    def mean(by: str, p: str) -> Array | None:
        # Over the sums of the probabilities as they are: where both models are certain, all of a gradient cancels.
        return jnp.where(value == jnp.inf, value, made[by] / made[p]) if by in made else None

    return JsdTerms(value, mean("by_s", "s"), mean("by_t", "t"))


def gradients(
    student: Array,  # [T, V], as of `softmax`, like the next two
    teacher: Array | None,  # None: the student's gradient is its scale times its probabilities
    token: Array,
    softmaxes: tuple[JsdSoftmax, ...],
    means: tuple[Array | None, Array | None],  # of `terms`; a gradient that is a plain difference has none
    scales: tuple[Array | None, Array | None],  # [T] float32: each row's factors of the models' gradients, if wanted
    hard: JsdHard | None,
    options: JsdOptions,
    into: tuple[Any, Any] = (None, None),  # references to [rows, V], where a gradient is written from row `first` on
    first: Array | None = None,  # [1] int32
    dtypes: tuple[Any, Any] = (jnp.float32, jnp.float32),  # of those that have no reference
    *,
    end: Array | None = None,  # as of `softmax`
    interpret: Any = None,
) -> tuple[Array | None, Array | None]:
    """The gradients by both models' logits that have no reference; rows that don't count are 0, and so is padding."""
    of = _Rows("gradients", (student, *(() if teacher is None else (teacher,))), end, interpret)
    beta, scale = options.beta, LOG2E / options.temperature
    wanted = [k for k in (0, 1) if scales[k] is not None]
    vectors = {**_named(softmaxes), "student_mean": means[0], "teacher_mean": means[1]}
    vectors |= {"student_scale": scales[0], "teacher_scale": scales[1], **({} if hard is None else hard._asdict())}
    vectors = {name: x for name, x in vectors.items() if x is not None}

    def block(refs: Refs, b: _Block) -> None:
        targets = [refs.get(f"{who}_gradient") for who in _MODELS]
        to = [b.row if x is None else b.row + refs["first"][0] for x in into]

        def zeros(columns: Sequence[Any], rows: Any, new: Any, carry: Any) -> Any:
            for column in columns:
                for k in wanted:
                    b.store(targets[k], to[k], column, b.strips.full(0.0))
            return carry

        def of_row() -> None:
            known, log2 = _numbers(refs, b.row, vectors), b.strips.log2

            def step(columns: Sequence[Any], rows: Any, new: Any, carry: Any) -> Any:
                logs = _both(rows, known, scale)
                for column, x, (log_s, log_t) in zip(columns, rows[0], logs, strict=True):
                    if 0 in wanted:
                        mean = known.get("student_mean")
                        g = jnp.exp2(log_s) if log_t is None else _gradient(log_s, log_t, mean, beta, log2)
                        g = known["student_scale"] * g
                        if hard is not None:
                            p = known["factor"] * jnp.exp2((x - known["shift"]) * LOG2E)
                            g = g + jnp.where(b.strips.places() == known["label"] - column, known["at_label"], p)
                        b.store(targets[0], to[0], column, g)
                    if 1 in wanted:
                        g = _gradient(log_t, log_s, known.get("teacher_mean"), 1 - beta, log2)
                        b.store(targets[1], to[1], column, known["teacher_scale"] * g)
                return carry

            b.over(_models(refs), step, None)

        lax.cond(refs["token"][b.row] >= 0, of_row, lambda: b.over([], zeros, None))

    inputs: dict[str, Any] = {"student": student, "teacher": teacher, "token": token, **vectors, "first": first}
    outputs = {}
    for k in wanted:
        name = f"{_MODELS[k]}_gradient"
        if into[k] is not None:
            inputs[name] = into[k]
        else:
            outputs[name] = jax.ShapeDtypeStruct(student.shape, dtypes[k])
    made = of.launch(inputs, outputs, block)
    return made.get("student_gradient"), made.get("teacher_gradient")


_MODELS = ("student", "teacher")
_SOFTMAXES = tuple(f"{who}_{name}" for who in _MODELS for name in ("maximum", "log_sum"))


def _named(softmaxes: tuple[JsdSoftmax, ...]) -> dict[str, Any]:
    return dict(zip(_SOFTMAXES, (x for softmax in softmaxes for x in softmax[:2]), strict=False))


def _numbers(refs: Refs, row: Any, names: Any) -> dict[str, Any]:
    return {name: refs[name][row] for name in names}


def _of_counted(block: Callable[[Refs, _Block], None]) -> Callable[[Refs, _Block], None]:
    return lambda refs, b: pl.when(refs["token"][b.row] >= 0)(lambda: block(refs, b))


def _models(refs: Refs) -> list[Any]:
    return [refs[who] for who in _MODELS if who in refs]


def _both(rows: Any, known: Mapping[str, Any], scale: float) -> list[tuple[Any, Any]]:
    """log2 of both models' probabilities, of each strip; None without a teacher."""

    def log2_probs(who: str, x: Any) -> Any:
        return _log2_probs(x, known[f"{who}_maximum"], known[f"{who}_log_sum"], scale)

    made = [[log2_probs(who, x) for who, x in zip(_MODELS, strips, strict=False)] for strips in zip(*rows, strict=True)]
    return [(logs[0], logs[1] if len(logs) > 1 else None) for logs in made]


# ------------------------------------------------------------------------------------------------------- of each entry


def _log2_probs(z: Any, maximum: Any, log_sum: Any, scale: float) -> Any:
    """log2 of probabilities, at least FLOOR."""
    return jnp.maximum((z - maximum) * scale - log_sum, FLOOR)


def _log2(x: Any) -> Any:
    return jnp.log(x) * LOG2E


def _mixture(d: Any, beta: float, log2: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Of d = log2(t / s): whether s is the larger, the weight w of the smaller one, its ratio to the larger, m / hi,
    and its log2."""
    below = d <= 0
    w: Any = 0.5 if beta == 0.5 else jnp.where(below, beta, 1 - beta)
    other: Any = 0.5 if beta == 0.5 else jnp.where(below, 1 - beta, beta)
    e = jnp.exp2(-jnp.abs(d))
    share = w * e + other
    return below, w, e, share, log2(share)


def _terms(
    log_s: Any, log_t: Any, beta: float, near: Sequence[float], log2: Callable[[Any], Any] = _log2
) -> tuple[Any, Any, Any, Any, Any]:
    """Of each entry, from log2 of both probabilities: its part of the loss, what the gradients' means are made of, both
    probabilities.  All but these over log(2), as logarithms to base 2 give them.
    """
    if beta == 1:
        term, by_t, by_s, t, s = _terms(log_t, log_s, 0.0, near, log2)
        return term, by_s, by_t, s, t
    d = log_t - log_s
    size = jnp.abs(d)
    if beta == 0:
        s, t = jnp.exp2(log_s), jnp.exp2(log_t)
        by_s, by_t = s - t, t * d
        far = by_s * LOG2E + by_t
        far = jnp.where((d > INFINITE) & (t > 0), jnp.inf, far)
        x, of = -d, t
    else:
        below, w, e, share, log_share = _mixture(d, beta, log2)
        hi = jnp.exp2(jnp.maximum(log_s, log_t))
        lo = hi * e
        s, t = jnp.where(below, hi, lo), jnp.where(below, lo, hi)
        by_s = -s * (log_share + jnp.maximum(d, 0.0))
        by_t = -t * (log_share - jnp.minimum(d, 0.0))
        far = -(hi * share) * log_share - (w * lo) * size
        x, of = d, s
    series = near[-1]
    for c in near[-2::-1]:
        series = c + x * series
    return jnp.where(size < NEAR, of * (d * d) * series, jnp.maximum(far, 0.0)), by_s, by_t, s, t


def _gradient(log_own: Any, log_other: Any, mean: Any, beta: float, log2: Callable[[Any], Any] = _log2) -> Any:
    """A model's probability p times (log2(p / q) - mean), where q is the mixture or, with `beta` 1, the other model's.

    `beta` is the weight of the other model in the mixture.  With 0 it is the two probabilities' difference.
    """
    p = jnp.exp2(log_own)
    if beta == 0:
        return p - jnp.exp2(log_other)
    d = log_other - log_own
    if beta == 1:
        return p * (-d - mean)
    log_share = _mixture(d, beta, log2)[-1]
    return p * (-(log_share + jnp.maximum(d, 0.0)) - mean)
