"""Rings of chunks in shared memory, one for each warp, which copies to them and from them by itself.

A row is cut into rounds: in each, every warp of a program has a chunk of so many strips, one warp's behind another's.
A lane has `unit` numbers side by side of each 32 * unit.  As arrays, strips are those of `strips.Strips`; only where
their numbers are in the row is different.  Copies are bulk copies, which take whole runs of 16 bytes and need no other
warp, so no warp waits for another here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from onchip.kernels.mosaic.ptx import run_ptx
from onchip.kernels.mosaic.strips import THREADS, Strips, as_vector, number, part, vector_of

WARP = 32  # lanes
NUMBER = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()
_FILL = {"bfloat16": 0xFF80FF80, "float16": 0xFC00FC00, "float32": 0xFF800000}  # -inf
# Of a lane, whose number is operand {0}: whether it is the first.
_FIRST = ".reg .pred first; setp.eq.s32 first, {}, 0;"
# Lanes have read or written, and copies may come behind them.
_AFTER_ALL = "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;"


@dataclass(frozen=True)
class WarpRings:
    """The rings of a program's warps.  `memory` is shared memory for the chunks, [words()] float32, and `barriers`,
    [2 * warps * slots, or more] float32, for their barriers; rows are in device memory."""

    dtype: Any
    warpgroups: int
    strips: int
    """Of a chunk."""
    slots: int
    """Chunks of a warp."""
    cluster: int = 1
    """Programs that share rows: the warps of all of them have chunks of a round."""

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def unit(self) -> int:
        return 16 // self.size

    @property
    def warps(self) -> int:
        return THREADS // WARP * self.warpgroups

    @property
    def chunk(self) -> int:
        """Numbers of a chunk."""
        return WARP * self.unit * self.strips

    @property
    def width(self) -> int:
        """Numbers of a round."""
        return self.cluster * self.warps * self.chunk

    def words(self) -> int:
        return self.slots * self.warps * self.chunk * self.size // 4

    def of_strips(self) -> Strips:
        return Strips(THREADS * self.unit, self.unit, None)

    # -------------------------------------------------------------------------------------------------------- copies

    def begin(self, barriers: Any) -> None:
        """Before all else."""
        lines = [_FIRST.format("$1")]
        lines += [f"@first mbarrier.init.shared::cta.b64 [$0 + {8 * i}], 1;" for i in range(self.slots)]
        lines += ["@first fence.mbarrier_init.release.cluster;", _AFTER_ALL]

        @plgpu.inline_mgpu(arg_types=(_REF,))
        def run(_: Any, barriers: Any) -> None:
            run_ptx(_scope(*lines), "r,r", [self._barrier(barriers, number(0)), lane_of_warp()])

        run(barriers)

    def fetch(self, memory: Any, barriers: Any, row: Any, start: Any, left: Any, slot: Any) -> None:
        """Begin to copy the chunk of the round that starts at column `start` to a slot that nobody reads; `left`: how
        many numbers there are from there on, 0 to copy nothing."""
        lines = _scope(
            _FIRST.format("$4"),
            ".reg .pred some; setp.gt.and.s32 some, $3, 0, first;",
            "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $3;",
            "@some cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$0];",
        )

        @plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, NUMBER, NUMBER, NUMBER))
        def run(_: Any, memory: Any, barriers: Any, row: Any, *numbers: Any) -> None:
            start, left, slot = _items(numbers)
            to = self._barrier(barriers, slot), self._slot(memory, slot)
            run_ptx(lines, "r,r,l,r,r", [*to, self._far(row, start), self._bytes(left), lane_of_warp()])

        run(memory, barriers, row, start, left, slot)

    def wait(self, barriers: Any, slot: Any, parity: Any) -> None:
        """Until the slot's chunk has come; the parity is that of how many have come to it before."""
        again = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; @there bra DONE; bra AGAIN; DONE:"
        lines = _scope(".reg .pred there;", again)

        @plgpu.inline_mgpu(arg_types=(_REF, NUMBER, NUMBER))
        def run(_: Any, barriers: Any, *numbers: Any) -> None:
            slot, parity = _items(numbers)
            run_ptx(lines, "r,r", [self._barrier(barriers, slot), parity])

        run(barriers, slot, parity)

    def send(self, memory: Any, row: Any, start: Any, left: Any, slot: Any) -> None:
        """Begin to copy a slot's chunk to the row, as a group of its own."""
        lines = _scope(
            _FIRST.format("$3"),
            f".reg .pred some; setp.gt.and.s32 some, $2, 0, first; {_AFTER_ALL}",
            "@some cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2; @first cp.async.bulk.commit_group;",
        )

        @plgpu.inline_mgpu(arg_types=(_REF, _REF, NUMBER, NUMBER, NUMBER))
        def run(_: Any, memory: Any, row: Any, *numbers: Any) -> None:
            start, left, slot = _items(numbers)
            run_ptx(
                lines, "l,r,r,r", [self._far(row, start), self._slot(memory, slot), self._bytes(left), lane_of_warp()]
            )

        run(memory, row, start, left, slot)

    def sent(self, but: int) -> None:
        """Wait until what was sent has been read, but for the last so many groups."""
        _run_alone(f"cp.async.bulk.wait_group.read {but};")

    def done(self) -> None:
        """The warp has read what copies may overwrite."""
        _run_alone(_AFTER_ALL)

    # ------------------------------------------------------------------------------------------------ shared memory

    def load(self, memory: Any, slot: Any, left: Any = None) -> list[Any]:
        """The strips of a chunk; with `left`, as in `fetch`, -inf behind the last number."""

        @plgpu.inline_mgpu(arg_types=(_REF, *[NUMBER] * (1 if left is None else 2)), return_type=self._made())
        def run(_: Any, memory: Any, slot: Any, *left: Any) -> list[Any]:
            at = [arith.addi(self._slot(memory, slot.registers.item()), _times(lane_of_warp(), 16))]
            at += [arith.subi(self._bytes(x.registers.item()), _times(lane_of_warp(), 16)) for x in left]
            fills = "".join(f"mov.b32 ${i}, {_FILL[jnp.dtype(self.dtype).name]};" for i in range(4))
            found = []
            for j in range(self.strips):
                code = f"ld.shared.v4.b32 {_FOUR}, [$4 + {512 * j}];"
                if left:
                    code = f".reg .pred there; setp.gt.s32 there, $5, {512 * j}; {fills} @there {code}"
                found.append(_four(_scope(code), ",".join("r" * len(at)), at))
            return self._arrays(found)

        made: list[Any] = run(memory, slot, *([] if left is None else [left]))
        return made

    def store(self, memory: Any, slot: Any, values: Sequence[Any]) -> None:
        """Overwrite the strips of a chunk."""
        strips = self.of_strips()

        @plgpu.inline_mgpu(arg_types=(_REF, NUMBER, *[strips.layout] * self.strips))
        def run(_: Any, memory: Any, slot: Any, *values: Any) -> None:
            at = arith.addi(self._slot(memory, slot.registers.item()), _times(lane_of_warp(), 16))
            for j, x in enumerate(values):
                run_ptx(f"st.shared.v4.b32 [$4 + {512 * j}], {_FOUR};", "r,r,r,r,r", [*_words(x), at])

        run(memory, slot, *values)

    def put(self, memory: Any, slot: Any, place: Any, value: Any) -> None:
        """Write to the place-th number of a round, if it is the warp's, behind what its lane has stored."""
        self._put(memory, slot, place, value, far=False)

    # ------------------------------------------------------------------------------------------------ device memory

    def load_far(self, row: Any, start: Any) -> list[Any]:
        """The strips of the warp's chunk of a whole round that starts at this column; nothing writes to the row."""

        @plgpu.inline_mgpu(arg_types=(_REF, NUMBER), return_type=self._made())
        def run(_: Any, row: Any, start: Any) -> list[Any]:
            at = self._far(row, arith.addi(start.registers.item(), _times(lane_of_warp(), self.unit)))
            code = [f"ld.global.nc.L1::no_allocate.v4.b32 {_FOUR}, [$4 + {512 * j}];" for j in range(self.strips)]
            return self._arrays([_four(x, "l", [at]) for x in code])

        made: list[Any] = run(row, start)
        return made

    def store_far(self, row: Any, start: Any, values: Sequence[Any]) -> None:
        """Write them."""
        strips = self.of_strips()

        @plgpu.inline_mgpu(arg_types=(_REF, NUMBER, *[strips.layout] * self.strips))
        def run(_: Any, row: Any, start: Any, *values: Any) -> None:
            at = self._far(row, arith.addi(start.registers.item(), _times(lane_of_warp(), self.unit)))
            for j, x in enumerate(values):
                run_ptx(f"st.global.cs.v4.b32 [$4 + {512 * j}], {_FOUR};", "r,r,r,r,l", [*_words(x), at])

        run(row, start, *values)

    def put_far(self, row: Any, start: Any, place: Any, value: Any) -> None:
        """As `put`, behind `store_far`."""
        self._put(row, start, place, value, far=True)

    # ------------------------------------------------------------------------------------------------- what they use

    def _put(self, ref: Any, at: Any, place: Any, value: Any, *, far: bool) -> None:
        bits, letter = 8 * self.size, {2: "h", 4: "r"}[self.size]
        space, wide, kind, word = ("global", "wide", "l", 64) if far else ("shared", "lo", "r", 32)
        lines = _scope(
            f".reg .pred mine; .reg .b32 lane; .reg .b{word} at;",
            f"div.u32 lane, $1, {self.unit}; and.b32 lane, lane, 31; setp.eq.u32 mine, lane, $3;",
            f"mad.{wide}.u32 at, $1, {self.size}, $0; setp.lt.and.u32 mine, $1, {self.chunk}, mine;",
            f"@mine st.{space}.b{bits} [at], $2;",
        )

        @plgpu.inline_mgpu(arg_types=(_REF, NUMBER, NUMBER, plgpu.Layout.WG_SPLAT((self.of_strips().size,))))
        def run(_: Any, ref: Any, at: Any, place: Any, value: Any) -> None:
            at, place = _items([at, place])
            own = arith.subi(place, _times(self.warp(), self.chunk))
            bits_of = utils.bitcast(value.registers.item(), ir.IntegerType.get_signless(bits))
            address = self._far(ref, at) if far else self._slot(ref, at)
            run_ptx(lines, f"{kind},r,{letter},r", [address, own, bits_of, lane_of_warp()])

        run(ref, at, place, value)

    def warp(self) -> Any:
        """This warp's number among all that share a row."""
        mine = warp_of_program()
        return mine if self.cluster == 1 else arith.addi(_times(program_of_cluster(), self.warps), mine)

    def _number(self, slot: Any) -> Any:
        return arith.addi(_times(warp_of_program(), self.slots), slot)

    def _slot(self, memory: Any, slot: Any) -> Any:
        return arith.addi(shared_address(memory), _times(self._number(slot), self.chunk * self.size))

    def _barrier(self, barriers: Any, slot: Any) -> Any:
        return arith.addi(shared_address(barriers), _times(self._number(slot), 8))

    def _far(self, row: Any, start: Any) -> Any:
        """The address of the warp's chunk, or what lies behind it by as many numbers as `start` by its round's."""
        wide = ir.IntegerType.get_signless(64)
        at = arith.extsi(wide, arith.addi(start, _times(self.warp(), self.chunk)))
        return arith.addi(llvm.ptrtoint(wide, utils.memref_ptr(row)), arith.muli(at, utils.c(self.size, wide)))

    def _bytes(self, left: Any) -> Any:
        """How many of the chunk's bytes there are, if there are `left` numbers from the round's first on."""
        mine = arith.subi(left, _times(self.warp(), self.chunk))
        return _times(arith.minsi(arith.maxsi(mine, number(0)), number(self.chunk)), self.size)

    def _made(self) -> list[Any]:
        strips = self.of_strips()
        return [plgpu.ShapeDtypeStruct((strips.size,), self.dtype, strips.layout)] * self.strips

    def _arrays(self, found: Sequence[Any]) -> list[Any]:
        kind = ir.VectorType.get((self.unit,), utils.dtype_to_ir_type(self.dtype))
        return [self.of_strips().array([as_vector(x, kind)]) for x in found]


_FOUR = "{$0, $1, $2, $3}"


def _four(code: str, constraints: str, arguments: Sequence[Any]) -> Any:
    """A vector of four words that PTX puts into its first four operands."""
    word = ir.IntegerType.get_signless(32)
    result = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    # No operand may share a register with a result.
    found = run_ptx(code, f"=&r,=&r,=&r,=&r,{constraints}", arguments, result)
    return vector_of([llvm.extractvalue(word, found, [i]) for i in range(4)], word)


def _words(x: Any) -> list[Any]:
    whole = as_vector(x.registers.item(), ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
    return [part(whole, i) for i in range(4)]


def shared_address(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _items(numbers: Sequence[Any]) -> list[Any]:
    return [x.registers.item() for x in numbers]


def _times(x: Any, n: int) -> Any:
    return arith.muli(x, number(n))


def program_of_cluster() -> Any:
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [], "mov.u32 $0, %cluster_ctarank;", "=r", has_side_effects=False)


def warp_of_program() -> Any:
    return arith.shrui(utils.thread_idx(), number(5))


def lane_of_warp() -> Any:
    return arith.andi(utils.thread_idx(), number(WARP - 1))


def _scope(*lines: str) -> str:
    return "{" + "\n".join(lines) + "}"


def _run_alone(code: str) -> None:
    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        run_ptx(code, "", [])

    run()
