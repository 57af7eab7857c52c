"""Strips of rows, between device memory and the registers of a warpgroup.

A strip is a vector of N numbers: each thread has `unit` of them side by side, up to 16 bytes, and then those that are
128 * unit further on.  Strips begin at multiples of `unit`.  Mosaic's own accesses know of no such alignment, and wait
for all threads.

`most` and `sum` reduce strips to a number for each thread, [128], which takes a register; `spread` is the way back.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from onchip.kernels.mosaic.maths import LOG2E

THREADS = 128  # of a warpgroup


class Strips:
    """Vectors of `size` numbers, of which a thread has `unit` side by side.  The CPU interpreter knows no layouts."""

    def __init__(self, size: int, unit: int, interpret: Any) -> None:
        assert size % (THREADS * unit) == 0
        self.size, self.unit, self.interpret, self.interpreted = size, unit, interpret, interpret is not None
        self.layout = plgpu.Layout.WG_STRIDED((size,), vec_size=unit)

    @property
    def of_threads(self) -> "Strips":
        """Vectors of a number for each thread."""
        return Strips(THREADS, 1, self.interpret)

    def most(self, strips: Sequence[Any]) -> Any:
        """[128]: the largest number that each thread has of these strips."""
        return self._folded(jnp.maximum, jnp.max, arith.maximumf, strips)

    def sum(self, strips: Sequence[Any]) -> Any:
        """[128]: the sum of what each thread has of these strips."""
        return self._folded(jnp.add, jnp.sum, arith.addf, strips)

    def _folded(self, of_strips: Any, of_array: Any, of_numbers: Callable[..., Any], strips: Sequence[Any]) -> Any:
        x = reduce(of_strips, strips)
        if self.interpreted:
            return of_array(x.reshape(-1, THREADS, self.unit), (0, 2))
        one = self.of_threads

        @plgpu.inline_mgpu(
            arg_types=(self.layout,), return_type=plgpu.ShapeDtypeStruct((THREADS,), x.dtype, one.layout)
        )
        def folded(_: Any, x: Any) -> Any:
            numbers = [part(register, i) for register in x.registers.flat for i in range(self.unit)]
            while len(numbers) > 1:
                pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
                numbers = [of_numbers(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
            return one.array([vector_of(numbers, ir.F32Type.get())])

        return folded(x)

    def spread(self, x: Any) -> Any:
        """A strip that has each thread's number of [128] throughout."""
        if self.interpreted:
            return jnp.broadcast_to(x[None, :, None], (self._registers, THREADS, self.unit)).reshape(self.size)
        made = plgpu.ShapeDtypeStruct((self.size,), x.dtype, self.layout)

        @plgpu.inline_mgpu(arg_types=(self.of_threads.layout,), return_type=made)
        def spread(_: Any, x: Any) -> Any:
            (register,) = x.registers.flat
            element = ir.VectorType(register.type).element_type
            return self.array([vector_of([part(register, 0)] * self.unit, element)] * self._registers)

        return spread(x)

    def full(self, value: Any, dtype: Any = jnp.float32) -> Any:
        made = jnp.full((self.size,), value, dtype)
        return made if self.interpreted else plgpu.layout_cast(made, self.layout)

    def places(self) -> Any:
        """0, 1, 2, ..."""
        made = lax.broadcasted_iota(jnp.int32, (self.size,), 0)
        return made if self.interpreted else plgpu.layout_cast(made, self.layout)

    def load(self, ref: Any, *, constant: bool = True) -> Any:
        """Read device memory; `constant`: nothing writes to it while the kernel runs."""
        if self.interpreted:
            return ref[...]
        made = plgpu.ShapeDtypeStruct((self.size,), ref.dtype, self.layout)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=made)
        def load(_: Any, ref: Any) -> Any:
            element = ir.MemRefType(ref.type).element_type
            base, registers = self._first(ref, element), np.empty(self._registers, object)
            how = ".nc.L1::no_allocate" if constant else ""
            for i in range(len(registers)):
                found: list[Any] = []
                for byte, word, words in self._moves(element, i):
                    code = f"ld.global{how}{_form(word, words)} {_set(words)}, [${words} + {byte}];"
                    result = ir.Type.parse(f"!llvm.struct<({', '.join([str(word)] * words)})>") if words > 1 else word
                    constraints = ",".join([*[f"={_letter(word)}"] * words, "l"])
                    made: Any = llvm.inline_asm(result, [base], code, constraints, has_side_effects=not constant)
                    found += [made] if words == 1 else [llvm.extractvalue(word, made, [j]) for j in range(words)]
                registers[i] = as_vector(vector_of(found, word), ir.VectorType.get((self.unit,), element))
            return self.array(registers)

        return load(ref)

    def floats(self, x: Any) -> Any:
        """A strip as float32."""
        if self.interpreted or x.dtype != jnp.bfloat16 or self.unit == 1:
            return x.astype(jnp.float32)
        made = plgpu.ShapeDtypeStruct((self.size,), jnp.float32, self.layout)

        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=made)
        def widened(_: Any, x: Any) -> Any:
            word, wide = ir.IntegerType.get_signless(32), ir.F32Type.get()
            sixteen, upper = number(16), number(-0x10000)
            registers = np.empty(x.registers.shape, object)
            for i, pairs in enumerate(x.registers.flat):
                pairs, numbers = as_vector(pairs, ir.VectorType.get((self.unit // 2,), word)), []
                for j in range(self.unit // 2):
                    pair = part(pairs, j)
                    numbers += [arith.shli(pair, sixteen), arith.andi(pair, upper)]
                registers.flat[i] = vector_of([arith.bitcast(wide, x) for x in numbers], wide)
            return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

        return widened(x)

    def log2(self, x: Any) -> Any:
        """Of a strip of float32, by the device's instruction: 2^-22 off at most, and exactly 0 of 1."""
        if self.interpreted:
            return jnp.log(x) * LOG2E
        made = plgpu.ShapeDtypeStruct((self.size,), jnp.float32, self.layout)

        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=made)
        def log2(_: Any, x: Any) -> Any:
            return x.log2(approx=True)

        return log2(x)

    def store(self, ref: Any, value: Any) -> None:
        """Write to device memory, and wait for no other thread."""
        if self.interpreted:
            ref[...] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self.layout))
        def store(_: Any, ref: Any, value: Any) -> None:
            element = ir.MemRefType(ref.type).element_type
            base, void = self._first(ref, element), ir.Type.parse("!llvm.void")
            size = self.unit * utils.bitwidth(element)
            for i, x in enumerate(value.registers.flat):
                done = 0
                for byte, word, words in self._moves(element, i):
                    whole = as_vector(x, ir.VectorType.get((size // utils.bitwidth(word),), word))
                    parts = [part(whole, done + j) for j in range(words)]
                    done += words
                    code = f"st.global.cs{_form(word, words)} [${words} + {byte}], {_set(words)};"
                    constraints = ",".join([*[_letter(word)] * words, "l"])
                    llvm.inline_asm(void, [*parts, base], code, constraints, has_side_effects=True)

        store(ref, value)

    def array(self, registers: Any) -> Any:
        """A strip, inside of an inline operation, from each thread's vectors of `unit` numbers."""
        layout = fragmented_array.WGStridedFragLayout(shape=(self.size,), vec_size=self.unit)
        made = np.empty(self._registers, object)
        made[:] = registers
        return fragmented_array.FragmentedArray(_registers=made, _layout=layout, _is_signed=None)

    @property
    def _registers(self) -> int:
        return self.size // (THREADS * self.unit)

    def _moves(self, element: Any, register: int) -> list[tuple[int, Any, int]]:
        """How a thread moves a register's numbers: bytes from its first number on, the type of words, how many."""
        size = self.unit * utils.bytewidth(element)
        begin, width = register * THREADS * size, min(size, 4)
        word = ir.IntegerType.get_signless(8 * width)
        return [(begin + at, word, min(size, 16) // width) for at in range(0, size, 16)]

    def _first(self, ref: Any, element: Any) -> Any:
        """Where this thread's first number is."""
        at = arith.muli(arith.remui(utils.thread_idx(), number(THREADS)), number(self.unit))
        return utils.getelementptr(utils.memref_ptr(ref), [at], element)


def store_number(ref: Any, value: Any, interpret: Any) -> None:
    """Write one number, which all threads have, to device memory [1]."""
    if interpret is not None:
        ref[0] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def store(_: Any, ref: Any, value: Any) -> None:
        llvm.store(value.registers.item(), utils.memref_ptr(ref))

    store(ref, value)


def number(n: int) -> Any:
    """A constant of 32 bits."""
    return utils.c(n, ir.IntegerType.get_signless(32))


def _letter(word: Any) -> str:
    return {16: "h", 32: "r"}[utils.bitwidth(word)]


def _form(word: Any, words: int) -> str:
    return {1: "", 2: ".v2", 4: ".v4"}[words] + f".b{utils.bitwidth(word)}"


def _set(words: int) -> str:
    operands = ", ".join(f"${i}" for i in range(words))
    return operands if words == 1 else f"{{{operands}}}"


def part(x: Any, i: int) -> Any:
    return vector.extract(x, dynamic_position=[], static_position=[i])


def vector_of(parts: list[Any], element: Any) -> Any:
    made = llvm.mlir_undef(ir.VectorType.get((len(parts),), element))
    for i, x in enumerate(parts):
        made = llvm.insertelement(made, x, number(i))
    return made


def as_vector(x: Any, kind: Any) -> Any:
    """A vector with the same bits."""
    return x if x.type == kind else vector.bitcast(kind, x)
