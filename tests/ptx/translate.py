"""Translates PTX to Python: each straight run of a kernel's instructions becomes a function of a warp and its block.

A register is an array of 32 lanes.  Only the instructions in the kernels' PTX are known; any other is an error that
names it.  Their meaning is that of NVIDIA's "Parallel Thread Execution ISA", version 8.7.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from ptx import operations
from ptx.machine import LANES, PARAM_BASE, PARAM_STEP, SHARED_BASE
from ptx.parse import Statement, parse

BITS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
TYPES = {
    "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "b32": "u4", "u32": "u4",
    "s32": "i4", "f32": "f4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "pred": "?",
}  # fmt: skip
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
           "hs": ">=", "neu": "!="}  # fmt: skip


# What is done number by number, all of one type.
ELEMENTWISE = {
    "add": "{} + {}", "sub": "{} - {}", "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "min": "np.fmin({}, {})",
    "max": "np.fmax({}, {})", "not": "~{}", "neg": "-{}", "abs": "np.abs({})", "ex2": "np.exp2({})",
    "lg2": "np.log2({})", "rcp": "1 / {}", "div": "_div({}, {})", "rem": "_rem({}, {})",
}  # fmt: skip
# Of pairs of bfloat16.
PAIRS = {"max.NaN.xorsign.abs.bf16x2": "_largest", "add.bf16x2": "_sum_of_pairs"}
TO_INTEGERS = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
# What else an instruction's name may say.
ROUNDING = {"rn", "ftz", "approx", "full"}
MODIFIERS = {
    **dict.fromkeys(ELEMENTWISE, ROUNDING),
    "min": {"relu", "NaN"},
    "max": {"NaN"},
    **{name: set() for name in ("shl", "shr", "bfe", "selp", "mov", "prmt", "popc")},
    "fma": ROUNDING,
    "mul": {"lo", "hi", "wide", *ROUNDING},
    "mad": {"lo", "wide"},
    "cvt": {"rn", "ftz", *TO_INTEGERS, "bf16", "bf16x2", "f16x2", "e4m3x2", "satfinite", *TYPES},
    "setp": {*COMPARE, "num", "nan", "and", "or"},
    "ld": {"global", "shared", "param", "v2", "v4", "acquire", "gpu"},
    "st": {"global", "shared", "v2", "v4", "release", "gpu"},
    "atom": {"global", "gpu", "relaxed", "acq_rel", "add", "f32", "v2"},
    "shfl": {"sync", "idx", "up", "down", "bfly"},
    "redux": {"sync", "add", "max", "min"},
}


class Program(NamedTuple):
    """A kernel that `machine.run` can run."""

    code: list[Any]
    lines: list[str]
    """The first instruction of each piece of code."""
    registers: int
    threads: int
    params: dict[str, int]
    """Numbers of the parameters."""
    waits: bool
    """Whether a block waits for others."""


def translate(text):
    declared, params, threads, statements = parse(text)
    return _Translator(declared, params, threads).translate(statements)


class _Translator:
    def __init__(self, declared, params, threads):
        self.kinds = declared
        self.numbers = {name: i for i, name in enumerate(declared)}
        self.params, self.threads = params, threads
        self.constants, self.names = {}, {}
        self.lanes = "ON"  # those that take part

    def translate(self, statements):
        pieces, labels, tables, lines = [[]], {}, {}, [""]

        def begin():
            if pieces[-1]:
                pieces.append([])
                lines.append("")

        for s in statements:
            if isinstance(s, str):
                begin()
                labels[s] = len(pieces) - 1
            elif not isinstance(s, Statement):
                tables[s[0]] = s[1]
            else:
                if _may_wait(s.name):
                    begin()
                pieces[-1].append(s)
                lines[-1] = lines[-1] or s.text[:100]
                if s.name.split(".")[0] in LEAVES or _may_wait(s.name):
                    begin()
        self.labels, self.tables, self.pieces = labels, tables, pieces
        source = []
        for i, piece in enumerate(pieces):
            source += self.function(f"b{i}(w, block)", piece, i)
            if not _leaves(piece):
                source.append(f"    return {i + 1 if i + 1 < len(pieces) else -1}")
            if self.is_skipped(i):
                self.lanes = "_on"
                source += self.function(f"b{i}_of(w, block, _on)", piece, i)
                self.lanes = "ON"
        scope = {**vars(operations), **self.constants}
        exec(compile("\n".join(source), "<ptx>", "exec"), scope)
        return Program(
            [scope[f"b{i}"] for i in range(len(pieces))], lines, len(self.numbers), self.threads, self.params,
            any(isinstance(s, Statement) and s.name.startswith("ld.acquire") for s in statements),
        )  # fmt: skip

    def function(self, head, piece, i):
        return [f"def {head}:", "    R = w.R", *(f"    {line}" for s in piece for line in self.one(s, i))]

    def is_skipped(self, i):
        """Whether only some lanes of a warp may run this piece: the branch before it leads the others past it."""
        branch = self.pieces[i - 1][-1] if i > 0 and self.pieces[i - 1] else None
        past = branch is not None and branch.name == "bra" and branch.guard and self.labels[branch.operands[0]] == i + 1
        return past and not any(_may_wait(s.name) or s.name.split(".")[0] in LEAVES for s in self.pieces[i])

    # -------------------------------------------------------------------------------------------------------- operands

    def constant(self, value, dtype):
        bits = np.dtype(dtype).str, np.array(value, dtype).tobytes()
        name = self.names.setdefault(bits, f"K{len(self.names)}")
        if name not in self.constants:
            self.constants[name] = np.full(LANES, value, dtype)
            self.constants[name].flags.writeable = False
        return name

    def read(self, x, kind):
        """An operand as numbers of a kind."""
        dtype = np.dtype(TYPES[kind])
        negative = x.startswith("!")
        x = x.lstrip("!")
        if x in self.numbers:
            own = np.dtype(BITS[self.kinds[x]])
            said = f"R[{self.numbers[x]}]"
            if own.itemsize > dtype.itemsize and dtype.kind != "b":
                said = f"{said}.astype('u{dtype.itemsize}')"
                own = np.dtype(f"u{dtype.itemsize}")
            elif own.itemsize < dtype.itemsize:
                raise KeyError(f"{x} is narrower than {kind}")
            if own != dtype:
                said = f"{said}.view('{dtype.str[1:]}')"
            return f"(~{said})" if negative else said
        return self.immediate(x, dtype)

    def immediate(self, x, dtype):
        special = {"%tid.x": "(LANE + np.uint32(32 * w.number))", "%laneid": "LANE", "%tid.y": None, "%tid.z": None}
        for i, axis in enumerate("xyz"):
            special[f"%ctaid.{axis}"] = f"np.full({LANES}, block.position[{i}], 'u4')"
            special[f"%nctaid.{axis}"] = f"np.full({LANES}, block.grid[{i}], 'u4')"
        special["%ntid.x"] = f"np.full({LANES}, {self.threads}, 'u4')"
        if x in special:
            return special[x] or self.constant(0, np.uint32)
        if x in self.params:
            return self.constant(PARAM_BASE + PARAM_STEP * self.params[x], np.uint64)
        if x == "global_smem":
            return self.constant(SHARED_BASE, dtype)
        value = int(x[2:], 16) if x.startswith("0f") else int(x.rstrip("U"), 0)
        bits = np.array([value & (2 ** (8 * dtype.itemsize) - 1)], np.uint64).astype(f"u{dtype.itemsize}")
        return self.constant(bits.view(dtype)[0] if dtype.kind != "b" else bool(value), dtype)

    def address(self, x):
        """[base + offset], as 64-bit numbers; in shared memory they wrap around at 32 bits."""
        base, _, offset = x.strip("[]").partition("+")
        base, offset = base.strip(), int(offset or 0)
        if base not in self.numbers:
            start = SHARED_BASE if base == "global_smem" else int(base)
            return self.constant(start + offset, np.uint64)
        kind = np.uint32 if self.kinds[base] == "b32" else np.uint64
        said = f"R[{self.numbers[base]}]"
        if offset:
            said = f"({said} + {self.constant(offset % 2 ** np.iinfo(kind).bits, kind)})"
        return said if kind == np.uint64 else f"{said}.astype('u8')"

    def write(self, s, register, value, kind=None):
        """The lines that put a value, as an array of its own, where the guard says."""
        if register == "_":
            return [f"_ = {value}"]
        own = np.dtype(BITS[self.kinds[register]])
        number = self.numbers[register]
        if kind is not None:
            dtype = np.dtype(TYPES[kind])
            if dtype.itemsize < own.itemsize:
                value = f"({value}).astype('{'i' if dtype.kind == 'i' else 'u'}{own.itemsize}')"
                dtype = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{own.itemsize}")
            if dtype != own:
                value = f"({value}).view('{own.str[1:]}')"
        if self.mask(s) == "ON":
            return [f"R[{number}] = {value}"]
        return [
            f"_v = {value}",
            f"R[{number}] = _v if R[{number}] is None else np.where({self.mask(s)}, _v, R[{number}])",
        ]

    def mask(self, s):
        if s.guard is None:
            return self.lanes
        said = f"R[{self.numbers[s.guard]}]"
        said = f"(~{said})" if s.negated else said
        return said if self.lanes == "ON" else f"({said} & {self.lanes})"

    # ---------------------------------------------------------------------------------------------------- instructions

    def one(self, s, piece):
        """The lines of an instruction."""
        words = [x for x in s.name.split(".") if not x.startswith(("L1::", "L2::"))]  # how long caches keep it
        if s.name == "abs.bf16x2":
            return self.write(s, s.operands[0], f"{self.read(s.operands[1], 'b32')} & 0x7FFF7FFF")
        if s.name in PAIRS:
            given = ", ".join(self.read(x, "b32") for x in s.operands[1:])
            return self.write(s, s.operands[0], f"{PAIRS[s.name]}({given})")
        if words[0] in MODIFIERS and not set(words[1:-1]) <= MODIFIERS[words[0]]:
            raise NotImplementedError(s.text)
        if words[0] in ELEMENTWISE:
            if words[-1] not in TYPES:
                raise NotImplementedError(s.text)
            said = ELEMENTWISE[words[0]].format(*(self.read(x, words[-1]) for x in s.operands[1:]))
            if "relu" in words:
                said = f"np.fmax({said}, 0)"
            if "NaN" in words:
                said = said.replace("fmax", "maximum").replace("fmin", "minimum")
            return self.write(s, s.operands[0], said, words[-1])
        known = getattr(self, f"i_{words[0]}", None)
        if known is None:
            raise NotImplementedError(s.text)
        return known(s, words, *([piece] if words[0] in NEED_PIECE else []))

    def i_createpolicy(self, s, words):
        return self.write(s, s.operands[0], "LANE", "u32")

    def i_mul(self, s, words):
        """And mad, which adds a third operand."""
        kind = words[-1]
        a, b = (self.read(x, kind) for x in s.operands[1:3])
        if words[1] in ("wide", "hi"):
            wide = kind[0] + str(2 * int(kind[1:]))
            a, b = (f"{x}.astype('{TYPES[wide]}')" for x in (a, b))
            if words[1] == "hi":
                return self.write(s, s.operands[0], f"(({a} * {b}) >> {kind[1:]}).astype('{TYPES[kind]}')", kind)
            kind = wide
        more = f" + {self.read(s.operands[3], kind)}" if words[0] == "mad" else ""
        return self.write(s, s.operands[0], f"{a} * {b}{more}", kind)

    i_mad = i_mul

    def i_fma(self, s, words):
        a, b, c = (f"{self.read(x, 'f32')}.astype('f8')" for x in s.operands[1:4])
        return self.write(s, s.operands[0], f"({a} * {b} + {c}).astype('f4')", "f32")

    def i_popc(self, s, words):
        return self.write(s, s.operands[0], f"np.bitwise_count({self.read(s.operands[1], words[-1])})", "u8")

    def i_bfe(self, s, words):
        kind = words[-1]
        a = self.read(s.operands[1], kind)
        position, length = (int(x) for x in s.operands[2:4])
        width = int(kind[1:])
        said = f"(({a} << {width - position - length}) >> {width - length})"
        return self.write(s, s.operands[0], said, kind)

    def i_shl(self, s, words):
        return self._shift(s, words[-1], words[-1].replace("b", "u"), "<<")

    def i_shr(self, s, words):
        return self._shift(s, words[-1], words[-1].replace("b", "u"), ">>")

    def _shift(self, s, kind, as_kind, sign):
        a = self.read(s.operands[1], as_kind)
        width = int(kind[1:])
        if s.operands[2] in self.numbers:
            by = self.read(s.operands[2], "u32")
            return self.write(s, s.operands[0], f"_shift({a}, {by}, {sign == '<<'})", as_kind)
        by = int(s.operands[2], 0)
        if by >= width:
            by = width - 1
            if sign == "<<" or as_kind[0] == "u":
                return self.write(s, s.operands[0], f"{a} ^ {a}", as_kind)
        return self.write(s, s.operands[0], f"{a} {sign} {by}", as_kind)

    def i_setp(self, s, words):
        kind = words[-1]
        a, b = (self.read(x, kind) for x in s.operands[1:3])
        said = numbers = f"({a} == {a}) & ({b} == {b})"
        if words[1] != "num":
            said = f"~({numbers})" if words[1] == "nan" else f"{a} {COMPARE[words[1]]} {b}"
        if kind == "f32" and words[1] == "ne":
            said = f"({said}) & {numbers}"
        if len(words) == 4 and words[2] in ("and", "or"):
            said = f"({said}) {'&' if words[2] == 'and' else '|'} {self.read(s.operands[3], 'pred')}"
        first, _, second = s.operands[0].partition("|")
        made = self.write(s, first, said)
        return made + self.write(s, second, f"~({said})") if second else made

    def i_selp(self, s, words):
        a, b = (self.read(x, words[-1]) for x in s.operands[1:3])
        return self.write(s, s.operands[0], f"np.where({self.read(s.operands[3], 'pred')}, {a}, {b})", words[-1])

    def i_mov(self, s, words):
        to, what = s.operands
        if isinstance(to, list):
            width = int(words[-1][1:]) // len(to)
            value = self.read(what, f"b{words[-1][1:]}")
            made = []
            for i, register in enumerate(to):
                made += self.write(s, register, f"({value} >> {i * width}).astype('u{width // 8}')")
            return made
        if isinstance(what, list):
            width, size = int(words[-1][1:]) // len(what), int(words[-1][1:]) // 8
            parts = [f"({self.read(x, f'b{width}')}.astype('u{size}') << {i * width})" for i, x in enumerate(what)]
            return self.write(s, to, " | ".join(parts))
        if what == "%tid.x":
            return self.write(s, to, "LANE + np.uint32(32 * w.number)")
        return self.write(s, to, self.read(what, words[-1]), words[-1])

    def i_cvta(self, s, words):
        return self.write(s, s.operands[0], self.read(s.operands[1], "u64"))

    def i_cvt(self, s, words):
        to, source = words[-2], words[-1]
        if to == "e4m3x2":
            high, low = (f"_eight_bits({self.read(x, 'f32')})" for x in s.operands[1:3])
            return self.write(s, s.operands[0], f"({high} << 8) | {low}")
        if to in ("bf16x2", "f16x2"):
            high, low = (self.read(x, "f32") for x in s.operands[1:3])
            return self.write(s, s.operands[0], f"_pack({high}, {low}, {to!r})")
        value = s.operands[1]
        if source == "bf16":
            return self.write(s, s.operands[0], f"({self.read(value, 'b16')}.astype('u4') << 16)")
        if to == "bf16":
            return self.write(s, s.operands[0], f"_round({self.read(value, 'f32')}).astype('u2')")
        x = self.read(value, source)
        for how in set(words) & set(TO_INTEGERS):
            x = f"np.{TO_INTEGERS[how]}({x})"
        return self.write(s, s.operands[0], f"{x}.astype('{TYPES[to]}')", to)

    def i_prmt(self, s, words):
        a, b, selector = (self.read(x, "b32") for x in s.operands[1:4])
        return self.write(s, s.operands[0], f"_permute({a}, {b}, {selector})")

    def i_shfl(self, s, words):
        value, b, c = (self.read(x, "b32") for x in s.operands[1:4])
        first, _, second = s.operands[0].partition("|")
        made = [f"_s, _t = machine.shuffle({words[2]!r}, {value}, {b}, {c})", *self.write(s, first, "_s")]
        return made + self.write(s, second, "_t") if second else made

    def i_redux(self, s, words):
        x = self.read(s.operands[1], words[-1])
        how = {"add": "sum", "max": "max", "min": "min"}[words[2]]
        return self.write(s, s.operands[0], f"np.full({LANES}, {x}.{how}(), '{TYPES[words[-1]]}')", words[-1])

    def i_elect(self, s, words):
        first, _, second = s.operands[0].partition("|")
        made = self.write(s, first, f"np.full({LANES}, w.leader, 'u4')") if first != "_" else []
        return made + self.write(s, second, "LANE == w.leader")

    # ---------------------------------------------------------------------------------------------------------- memory

    def i_ld(self, s, words):
        kind = words[-1]
        to = s.operands[0] if isinstance(s.operands[0], list) else [s.operands[0]]
        if words[1] == "param":
            name = s.operands[1].strip("[]")
            return self.write(s, to[0], f"_param(block.params[{self.params[name]}], '{TYPES[kind]}')", kind)
        made, size = [], np.dtype(TYPES[kind]).itemsize
        if "acquire" in words:
            made.append("block.acquire()")
        if "global" in words:
            made.append(
                f"_x = block.memory.load({self.address(s.operands[1])}, {self.mask(s)}, '{TYPES[kind]}', {len(to)})"
            )
        else:
            parts = (f"block.load_shared(w, _a + np.uint64({i * size}), _m, '{TYPES[kind]}')" for i in range(len(to)))
            made += [f"_a = {self.address(s.operands[1])}", f"_m = {self.mask(s)}", f"_x = [{', '.join(parts)}]"]
        for i, register in enumerate(to):
            made += self.write(s, register, f"_x[{i}]", kind)
        return made

    def i_st(self, s, words):
        kind = words[-1]
        values = s.operands[1] if isinstance(s.operands[1], list) else [s.operands[1]]
        size, values = np.dtype(TYPES[kind]).itemsize, [self.read(x, kind) for x in values]
        if "global" in words:
            first = ["block.release(w)"] if "release" in words else []
            return [*first, f"block.memory.store({self.address(s.operands[0])}, {self.mask(s)}, [{', '.join(values)}])"]
        made = [f"_a = {self.address(s.operands[0])}", f"_m = {self.mask(s)}"]
        return made + [f"block.store_shared(w, _a + np.uint64({i * size}), _m, {x})" for i, x in enumerate(values)]

    def i_atom(self, s, words):
        kind = "f32" if words[-1] == "v2" else words[-1]
        if words[1] != "global" or "add" not in words:
            raise NotImplementedError(s.text)
        many = isinstance(s.operands[0], list)
        to, given = (s.operands[0], s.operands[2]) if many else ([s.operands[0]], [s.operands[2]])
        values = ", ".join(self.read(x, kind) for x in given)
        made = [f"_x = block.memory.add_to({self.address(s.operands[1])}, {self.mask(s)}, [{values}])"]
        for i, register in enumerate(to):
            made += self.write(s, register, f"_x[{i}]", kind)
        return made

    def i_prefetch(self, s, words):
        return [f"block.memory.load({self.address(s.operands[0])}, {self.mask(s)}, 'u1')"]

    def i_stmatrix(self, s, words):
        values = ", ".join(self.read(x, "b32") for x in s.operands[1])
        return [f"_stmatrix(w, block, {self.address(s.operands[0])}, [{values}], {'trans' in words})"]

    def i_ldmatrix(self, s, words):
        to = s.operands[0]
        made = [f"_l = _ldmatrix(w, block, {self.address(s.operands[1])}, {len(to)}, {'trans' in words})"]
        for i, register in enumerate(to):
            made += self.write(s, register, f"_l[{i}]")
        return made

    # ------------------------------------------------------------------------------------------- warps and what waits

    def i_bra(self, s, words, piece):
        target = self.labels[s.operands[0]]
        if s.guard is None:
            return [f"return {target}"]
        part = f"    b{piece + 1}_of(w, block, ~_m)", f"    return {target}"
        if not self.is_skipped(piece + 1):
            part = (f"    raise machine.Fault({('lanes of a warp part: ' + s.text)!r})",)
        return [f"_m = {self.mask(s)}", "if _m.all():", f"    return {target}", "if _m.any():", *part]

    def i_brx(self, s, words, piece):
        targets = [self.labels[x] for x in self.tables[s.operands[1]]]
        return [f"return {targets}[int({self.read(s.operands[0], 'u32')}[0])]"]

    def i_ret(self, s, words):
        return ["return -1"] if s.guard is None else [f"if {self.mask(s)}.all():", "    return -1"]

    def i_bar(self, s, words, piece):
        if words[1] == "warp":
            return []
        if s.guard is not None:
            raise NotImplementedError(s.text)
        count = "None" if len(s.operands) == 1 else f"int({self.read(s.operands[1], 'u32')}[0]) // {LANES}"
        number = f"int({self.read(s.operands[0], 'u32')}[0])"
        if words[1] == "arrive":
            return [f"block.come({number}, {count})"]
        return [f"if not block.meet(w, {number}, {count}):", f"    return {piece}"]

    i_barrier = i_bar

    def i_mbarrier(self, s, words, piece):
        what, m = words[1], self.mask(s)
        if what == "init":
            a, n = self.address(s.operands[0]), int(s.operands[1])
            return [f"for _x in {a}[{m}]:", f"    block.barriers[int(_x)] = machine.Barrier({n})"]
        if what == "inval":
            return [f"for _x in {self.address(s.operands[0])}[{m}]:", "    del block.barriers[int(_x)]"]
        if what == "arrive":
            bytes_ = f"int({self.read(s.operands[2], 'u32')}[0])" if "expect_tx" in words else "0"
            times = 1 if "expect_tx" in words or len(s.operands) < 3 else int(s.operands[2])
            a = self.address(s.operands[1])
            return [f"for _x in {a}[{m}]:", f"    block.barrier(_x).arrive({times}, {bytes_})"]
        if what == "try_wait":
            a, parity = self.address(s.operands[1]), self.read(s.operands[2], "u32")
            return [
                f"if not block.wait(w, {a}[0], int({parity}[0])):",
                f"    return {piece}",
                *self.write(s, s.operands[0], "ON"),
            ]
        raise NotImplementedError(s.text)

    def i_fence(self, s, words):
        return ["block.fence(w)"] if words[1] == "proxy" else []

    def i_setmaxnreg(self, s, words):
        return []

    # ------------------------------------------------------------------------------------------------- TMA, products

    def i_cp(self, s, words, piece):
        if words[1] == "async" and words[2] == "bulk":
            return self._bulk(s, words, piece)
        if words[1] == "reduce":
            return self._bulk(s, ["cp", *words[2:]], piece, add=True)
        if words[2] == "commit_group":
            return ["w.commit_fetches()"]
        if words[2].startswith("wait_group"):
            return [f"w.wait_fetches({int(s.operands[0])})"]
        if words[2] in ("ca", "cg"):
            to, source, size = *(self.address(x) for x in s.operands[:2]), int(s.operands[2], 0)
            given = self.read(s.operands[3], "s32") if len(s.operands) > 3 else f"np.full({LANES}, {size})"
            return [f"block.fetch(w, {to}, {source}, {size}, {self.mask(s)}, {given})"]
        raise NotImplementedError(s.text)

    def _bulk(self, s, words, piece, *, add=False):
        if words[3] == "commit_group":
            return ["w.commit_stores()"]
        if words[3].startswith("wait_group"):
            return [f"if not block.wait_stores(w, {int(s.operands[0])}):", f"    return {piece}"]
        if words[3] != "tensor":
            raise NotImplementedError(s.text)
        loads = words[5].startswith("shared")
        shared, tensor = (s.operands[0], s.operands[1]) if loads else (s.operands[1], s.operands[0])
        inside = re.match(r"\[([^,]+),\s*\{(.*)\}\]", tensor)
        coordinates = [f"int({self.read(x.strip(), 's32')}[_i])" for x in inside.group(2).split(",")][::-1]
        tensor_map = f"{self.read(inside.group(1).strip(), 'u64')}[_i]"
        made = [f"for _i in np.flatnonzero({self.mask(s)}):"]
        where = f"({', '.join(coordinates)},), {self.address(shared)}[_i]"
        if loads:
            return [*made, f"    block.copy_in({tensor_map}, {where}, {self.address(s.operands[2])}[_i])"]
        return [*made, f"    block.copy_out(w, {tensor_map}, {where}, add={add})"]

    def i_wgmma(self, s, words):
        what = words[1]
        if what == "fence":
            return []
        if what == "commit_group":
            return ["w.commit()"]
        if what == "wait_group":
            return [f"w.wait_products({int(s.operands[0])})"]
        shape = re.match(r"m64n(\d+)k(16|32)", words[4])
        if shape is None or words[5] != "f32" or words[6] not in ("bf16", "f16", "e4m3") or words[7] != words[6]:
            raise NotImplementedError(s.text[:80])
        key = tuple(self.numbers[x] for x in s.operands[0])
        a, b, add, scale_a, scale_b, *transposed = s.operands[1:]
        if (scale_a, scale_b) != ("1", "1"):
            raise NotImplementedError(s.text[-80:])
        a = f"[{', '.join(self.read(x, 'b32') for x in a)}]" if isinstance(a, list) else self.read(a, "u64")
        transposed = [bool(int(x)) for x in transposed]
        a_transposed, b_transposed = (False, False, *transposed)[-2:]
        return [
            f"machine.wgmma(w, block, {key}, {a}, {self.read(b, 'u64')}, bool({self.read(add, 'pred')}[0]), "
            f"{shape.group(1)}, {words[6]!r}, {a_transposed}, {b_transposed})"
        ]


LEAVES = ("bra", "brx", "ret")
NEED_PIECE = ("bra", "brx", "bar", "barrier", "mbarrier", "cp")


def _may_wait(name):
    return name.startswith(
        ("bar.", "barrier.", "mbarrier.try_wait", "cp.async.bulk.wait_group")
    ) and not name.startswith("bar.warp")


def _leaves(piece):
    """Whether all lanes go elsewhere at its end."""
    return bool(piece) and piece[-1].name.split(".")[0] in LEAVES and piece[-1].guard is None
