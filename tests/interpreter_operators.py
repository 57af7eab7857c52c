"""Operators of Triton's interpreter in one step each, for operands that need no conversion.

Its own take ten calls for a sum, most of the time of the checks.  What is computed is the same to the bit: operands of
one dtype go to the same NumPy function, which broadcasts them as Triton would, and all others go the old way.
"""

import functools
import inspect

import numpy as np
from triton.runtime import interpreter

tl, core = interpreter.tl, interpreter.tl.core
Handle, tensor, block = interpreter.TensorHandle, core.tensor, core.block_type

WHOLE = {id(x): np.dtype(y) for x, y in ((tl.int32, np.int32), (tl.int64, np.int64))}
FLOATS = {id(x): np.dtype(y) for x, y in ((tl.float16, np.float16), (tl.float32, np.float32), (tl.float64, np.float64))}
WIDE = {x: y for x, y in FLOATS.items() if x != id(tl.float16)}
MASKS = {id(tl.int1): np.dtype(bool)}
NUMBERS = WHOLE | FLOATS
# Of two dtypes, the one that both are computed in, as NumPy does too.
WIDER = {
    (id(x), id(y)): wide
    for narrow, wide in ((tl.int32, tl.int64), (tl.float16, tl.float32))
    for x, y in ((narrow, wide), (wide, narrow))
}
CASTS = {
    (id(x), id(y)): NUMBERS[id(y)]
    for x, y in (
        (tl.int32, tl.int64), (tl.int64, tl.int32), (tl.int1, tl.int32), (tl.int32, tl.float32),
        (tl.float16, tl.float32), (tl.float32, tl.float16),
    )
}  # fmt: skip
# By the name of a method: what computes it, for which dtypes, and whether it says yes or no.
OPERATORS = {
    "__add__": (np.add, NUMBERS, False),
    "__sub__": (np.subtract, NUMBERS, False),
    "__mul__": (np.multiply, NUMBERS, False),
    "__truediv__": (np.divide, WIDE, False),
    "__and__": (np.bitwise_and, WHOLE | MASKS, False),
    "__or__": (np.bitwise_or, WHOLE | MASKS, False),
    "__lt__": (np.less, NUMBERS, True),
    "__le__": (np.less_equal, NUMBERS, True),
    "__gt__": (np.greater, NUMBERS, True),
    "__ge__": (np.greater_equal, NUMBERS, True),
    "__eq__": (np.equal, NUMBERS, True),
    "__ne__": (np.not_equal, NUMBERS, True),
}
# a + b and a * b are b + a and b * a, but b - a needs its operands the other way around.
TURNED = {"__radd__": "__add__", "__rmul__": "__mul__", "__rsub__": "__sub__"}


@functools.cache
def constant(value, kind, dtype):
    """A Python number as an operand of tensors of a dtype; None if its own dtype would decide, or it doesn't fit."""
    numpy = NUMBERS.get(dtype)
    if numpy is None or (kind is float and dtype not in FLOATS):
        return None
    fits = np.iinfo(numpy if dtype in WHOLE else np.int64)
    if kind is int and not fits.min <= value <= fits.max:
        return None
    return np.array([value or 0], numpy)


@functools.cache
def compared_with(value, kind, dtype):
    """The same for comparisons, where a number has a dtype of its own: int32, or float32."""
    whole = kind is int and dtype in WHOLE and -(2**31) <= value < 2**31
    single = kind is float and dtype == id(tl.float32) and (value == 0 or 2**-126 <= abs(value) < 2**127)
    return np.array([value or 0], NUMBERS[dtype]) if whole or single else None


def type_of(x, y, element, made):
    """Of what two operands give; None if Triton has to say."""
    if x is y:
        return x
    of_x, of_y = x.__class__ is block, y.__class__ is block
    if of_x and of_y:
        if x.shape is not y.shape:
            return block(element, list(made.shape)) if len(x.shape) == len(y.shape) else None
    elif not of_x and not of_y:
        return element
    larger = x if of_x else y
    return larger if larger.element_ty is element else block(element, larger.shape)


def in_one_step(name, old):
    """A method of tensors: `old` where it takes more than one step."""
    turned = name in TURNED
    function, dtypes, decides = OPERATORS[TURNED.get(name, name)]
    known, adds = compared_with if decides else constant, function is np.add

    def operator(self, other, **options):
        dtype, kind = self.dtype, other.__class__
        key = id(dtype)
        if kind is core.constexpr:
            other = other.value
            kind = other.__class__
        if key in dtypes:
            x, right = self.handle.data, None
            if kind is tensor:
                if other.dtype is not dtype:
                    dtype = WIDER.get((key, id(other.dtype)))
                    key = id(dtype)
                if key in dtypes:
                    right, other_type = other.handle.data, other.type
            elif kind is int or kind is float:
                right, other_type = known(other, kind, key), dtype
            if right is not None:
                made = function(right, x) if turned else function(x, right)
                type = type_of(self.type, other_type, dtype, made)
                if type is not None and (decides or made.dtype is dtypes[key]):
                    if decides:
                        type = block(tl.int1, type.shape) if type.__class__ is block else tl.int1
                    return tensor(Handle(made, dtype), type)
        elif adds and kind is tensor and dtype.__class__ is core.pointer_type and id(other.dtype) in WHOLE:
            handle = self.handle
            size = max(1, handle.get_element_ty().primitive_bitwidth // 8)
            made = handle.data + size * other.handle.data.astype(np.uint64)
            type = type_of(self.type, other.type, dtype, made)
            if type is not None:
                return tensor(Handle(made, dtype), type)
        return old(self, other, **options)

    return operator


# ------------------------------------------------------------------------------------------------ around operators


def builtins(pkg, builder):
    """By name, the functions of a part of the language as a kernel calls them."""
    semantic, wrapper = interpreter.TritonSemantic(builder), core.builtin(max).__code__
    made = {}
    for name, member in inspect.getmembers(pkg):
        if core.is_builtin(member):
            inner = member.__wrapped__ if member.__code__ is wrapper else member  # which checks that _semantic is given
            made[name] = with_semantic(inner, semantic)
            if pkg is tensor and (name in OPERATORS or name in TURNED):
                made[name] = in_one_step(name, made[name])
    return made


def with_semantic(member, semantic):
    def operation(*arguments, **options):
        options["_semantic"] = semantic
        return member(*arguments, **options)

    return operation


def put():
    """In place of the interpreter's own, in this process."""
    known, own_equal, own_unwrap = {}, core.dtype.__eq__, core._unwrap_if_constexpr
    own_check, own_to_tensor, own_cast, own_broadcast = (getattr(interpreter.TritonSemantic, x) for x in CHANGED)
    plain = {int, float, bool, str, tensor, core.dtype, type(None)}

    def patch_builtin(pkg, builder, scope):
        if pkg not in known:
            known[pkg] = builtins(pkg, builder)
        for name, operation in known[pkg].items():
            scope.set_attr(pkg, name, operation)

    def equal(self, other):
        return self is other or own_equal(self, other)

    def unwrap(x):
        return x if x.__class__ in plain else own_unwrap(x)

    def to_tensor(self, x, check_type=True):
        return x if x.__class__ is tensor else own_to_tensor(self, x, check_type)

    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        source, wanted = input.dtype, dst_ty.scalar
        numpy = CASTS.get((id(source), id(wanted))) if fp_downcast_rounding is None else None
        if numpy is None:
            return own_cast(self, input, dst_ty, fp_downcast_rounding)
        type = block(wanted, input.type.shape) if input.type.__class__ is block else wanted
        return tensor(Handle(input.handle.data.astype(numpy), wanted), type)

    def check(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if lhs.__class__ is rhs.__class__ is tensor and not div_or_mod:
            x, y = lhs.type, rhs.type
            alike = x is y or (x.__class__ is y.__class__ is block and x.shape is y.shape)
            if alike and lhs.dtype is rhs.dtype and id(lhs.dtype) in NUMBERS:
                return lhs, rhs
        return own_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast(self, lhs, rhs):
        x, y = lhs.type, rhs.type
        if x is y or (x.__class__ is y.__class__ is block and x.shape is y.shape):
            return lhs, rhs
        return own_broadcast(self, lhs, rhs)

    def start_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        most = sizes.get(id(dtype))
        if most is None or data.itemsize > most:
            self.__post_init__()

    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
    sizes = {id(getattr(tl, x)): getattr(tl, x).primitive_bitwidth // 8 for x in names} | {id(tl.int1): 1}
    signed, unsigned, floats = (frozenset(getattr(core.dtype, f"{x}_TYPES")) for x in ("SINT", "UINT", "FP"))
    whole, kinds = signed | unsigned, core.dtype.KIND
    core.dtype.is_int = lambda self: self.name in whole
    core.dtype.is_int_signed = lambda self: self.name in signed
    core.dtype.is_int_unsigned = lambda self: self.name in unsigned
    core.dtype.is_floating = lambda self: self.name in floats
    core.dtype.__eq__ = equal
    of = dict.fromkeys(whole, kinds.INTEGRAL) | dict.fromkeys(floats, kinds.FLOATING) | {"int1": kinds.BOOLEAN}
    core.dtype.kind = lambda self: of[self.name]
    interpreter._patch_builtin, core._unwrap_if_constexpr = patch_builtin, unwrap
    for name, changed in zip(CHANGED, (check, to_tensor, cast, broadcast), strict=True):
        setattr(interpreter.TritonSemantic, name, changed)
    Handle.__init__ = start_handle


CHANGED = ("binary_op_type_checking_impl", "to_tensor", "cast", "broadcast_impl_value")
