"""PTX for boxes in shared memory, run instruction by instruction: which bytes each thread reads or writes."""

import operator
import re

import pytest

from onchip.kernels.mosaic import ptx

_OPERATIONS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "shr": operator.rshift}


def run(code, thread, operands):
    """The memory operations of a thread: the address, and the operands that are read or written."""
    at = {"%tid.x": thread} | operands
    found = []

    def value(x):
        x = x.strip("[] ")
        if "+" in x:
            return sum(map(value, x.split("+")))
        return int(x) if x.isdigit() else at[x.strip()]

    for line in filter(None, (x.strip() for x in code.replace("\n", " ").split(";"))):
        condition, said = re.match(r"(?:@(\w+) )?(.*)", line).groups()
        if said.startswith(".reg") or (condition and not at[condition]):
            continue
        name, rest = said.split(" ", 1)
        name = name.split(".")[0]
        if name in ("stmatrix", "ldmatrix"):
            words = re.search(r"\{(.*)\}", rest)[1].split(", ")
            found.append((value(re.search(r"\[(.*?)\]", rest)[1]), words))
            continue
        to, *given = rest.split(", ")
        if name == "st":
            found.append((value(to), [at[given[0]]]))
        elif name == "selp":
            at[to] = given[0] if at[given[2]] else given[1]
        elif name == "mov":
            at[to] = value(given[0])
        elif name == "mad":
            at[to] = value(given[0]) * value(given[1]) + value(given[2])
        elif name == "setp":
            at[to] = value(given[0]) != value(given[1])
        else:
            at[to] = _OPERATIONS[name](*map(value, given))
    return found


def place(row, byte, stride):
    """Where a byte of a row lies, in memory that TMA writes with a swizzle of 128 bytes."""
    return row // 8 * stride + row % 8 * 128 + ((byte // 16) ^ (row % 8)) * 16 + byte % 16


@pytest.mark.parametrize(("operation", "first"), [("stmatrix [at], {words};", 1), ("ldmatrix {words}, [at];", 0)])
@pytest.mark.parametrize("stride", [1024, 4096])
def test_matrices_of_16_bits(operation, first, stride):
    code = ptx._matrix(operation, first, "$b", stride)
    for warp in range(8):  # of two warpgroups
        runs = [run(code, 32 * warp + lane, {"$b": 0}) for lane in range(32)]
        for i in range(4):
            words = runs[0][i][1]
            for lane in range(32):
                for j, word in enumerate(words):
                    # Lane 8 j + r says where row r of the j-th block is.
                    address = runs[8 * j + lane // 4][i][0] + lane % 4 * 4
                    number = int(word[1:]) - first  # of a thread's registers: two rows of each 8 columns
                    row = warp % 4 * 16 + number % 2 * 8 + lane // 4
                    assert address == place(row, (number // 2 * 8 + lane % 4 * 2) * 2, stride)
        assert {x for r in runs[0] for x in r[1]} == {f"${first + x}" for x in range(16)}


def test_pairs_of_32_bits():
    for warp in range(8):
        runs = [run(ptx._pairs(), 32 * warp + lane, {"$0": 0}) for lane in range(32)]
        for lane, found in enumerate(runs):
            assert sorted(int(x[1:]) for _, [x] in found) == list(range(1, 9))
            for address, [word] in found:
                number = int(word[1:]) - 1
                row = warp % 4 * 16 + number % 2 * 8 + lane // 4
                assert address == place(row, (number // 2 * 8 + lane % 4 * 2) * 4, 1024)
        for i in range(8):  # half a warp at a time: each bank once
            for half in (runs[:16], runs[16:]):
                assert len({found[i][0] // 8 % 16 for found in half}) == 16
