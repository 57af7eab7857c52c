"""How the Triton backend's kernels cut their products: tiles, and waves of them.  Imports no framework."""

from functools import lru_cache

from onchip.core.sizes import up
from onchip.vocab.chunks import waves

TOKEN_TILE = 128
VOCAB_TILE = 256
# Bytes of a tile's exponentials of one token.
EXPONENTIALS_ROW = 2 * VOCAB_TILE
# What Triton compiles a kernel for: addresses in bytes, and numbers, that 16 divides.  So what depends on the tokens is
# hidden from it (`do_not_specialize`, and `odd` of blocks.py), or always such: vectors begin at multiples of 16 bytes.
ALIGNED = 16
VECTOR = ALIGNED // 4
# Columns of a tile of the kernels that take turns: turns.py.
IN_TURNS = 128
# An H100's multiprocessors, whose waves a plan fills.
PROGRAMS = 132


def hidden_columns(hidden: int) -> int:
    """Columns of a gradient's tile on Hopper.

    Columns beyond H are computed in vain, so tiles are half as wide if that saves a tenth.  On an H200, with H from 576
    to 1152, weight's product then took 8 to 15% less, and hidden's 12 to 19% less for T > 4096.
    """
    wide, narrow = up(hidden, 256), up(hidden, 128)
    return 128 if 10 * (wide - narrow) >= wide else 256


def takes_turns(hidden: int) -> bool:
    """Whether the softmax of logits is faster by the kernel of turns.py, whose partials are of IN_TURNS columns."""
    return hidden <= 896


def staggers(hidden: int) -> bool:
    """Whether the softmax and the recomputed gradient of logits are faster by the kernels of staggered.py: on an H100
    they were, by 8 and 9% with H = 1024, 8 and 5% with 1152, 4 and 2% with 2048, 6 and 4% with 2560, and by 0 to 3%
    with 4096.
    """
    return 896 < hidden <= 4096


def hidden_apart(hidden: int) -> bool:
    """Whether hidden's gradient is made by the kernel of apart.py, where that can run: if tiles of 256 columns don't
    suit H.

    On an H100 it took a third less with H = 576 and 640, 5% less with 1152, as long with 896, and 1 to 2% more with
    1024 to 4096.
    """
    return hidden_columns(hidden) == 128


def heuristic_tiles(shared: int, hidden: int = 256) -> dict[str, dict[str, int]]:
    """The kernels' tiles, by the device's shared memory per block in bytes."""
    # Four stages of 48 KiB and a piece of the result: what was fastest on an H100 at all shapes, or within 2%.
    depth, most = (64, 4) if shared >= 227 * 1024 else (64, 3) if shared >= 160 * 1024 else (32, 3)

    def tiles(parts: int, group: int = 8, stages: int = most) -> dict[str, int]:
        return {
            "rows": 128,
            "columns": 256,
            "depth": depth,
            "group": group,
            "warps": 8,
            "stages": stages,
            "parts": parts if depth == 64 else 2 * parts,
        }

    # Of logits, with the whole vocabulary in one launch: forward on an H200 took 1 to 4% longer in groups of 8 with 4
    # stages.  With 64 tiles of the vocabulary there is no difference.
    made = {
        "softmax_tiles": tiles(2, group=16, stages=3),
        "gradient_tiles": tiles(2, group=16, stages=3),
        "weight_gradient": tiles(2),
        "hidden_gradient": tiles(4),
    }
    if most == 4 and hidden_columns(hidden) == 128:
        made["weight_gradient"] |= {"rows": 256, "columns": 128, "group": 4, "stages": 3, "parts": 1}
        made["hidden_gradient"] |= {"columns": 128, "stages": 6}
    return made


def hidden_units(rows: int, hidden: int, apart: bool) -> int:
    """Units of work of hidden's gradient, for so many rows of tiles: what a program takes at a time.

    `apart`: by the kernel of apart.py.
    """
    if not apart:
        return rows * -(-hidden // hidden_columns(hidden))
    wide, odd = divmod(up(hidden, 128) // 128, 2)
    return rows * wide + -(-rows // 2) * odd


def hidden_cut(units: int, most: int, programs: int) -> int:
    """The slices of the vocabulary that `apart.hidden_apart` cuts units of the last wave into, if so many are allowed.

    It takes as long as if all were cut.  More slices are worth it if that saves 3%.
    """
    best, least = 1, -(-units // programs)
    for cut in range(2, most + 1):
        taken = -(-units * cut // programs)
        if 103 * taken * best < 100 * least * cut:
            best, least = cut, taken
    return best


def chunk_hidden(tokens: int, hidden: int, room: int | None = None) -> tuple[bool, int]:
    """How a chunk's hidden gradient is made: whether by the kernel of apart.py, where that can run, which cuts the last
    wave better; and in how many sums over slices of the vocabulary, if units don't fill whole waves.

    `room`: positions that there are sums for; by default as many as it takes.  Two slices need no memory of their own:
    0 + a + b has the same bits in either order.
    """
    apart, slices = _hidden_way(-(-tokens // TOKEN_TILE), hidden)
    return apart, slices if room is None else max(1, min(slices, room // tokens))


def hidden_sums(tokens: int, hidden: int) -> int:
    """As many sums as `chunk_hidden` says."""
    rows = -(-tokens // TOKEN_TILE)
    # To cut the last of more than 34 waves saves less than 3%.
    return 1 if rows * hidden > 34 * PROGRAMS * 256 else _hidden_way(rows, hidden)[1]


@lru_cache(maxsize=1 << 14)
def _hidden_way(rows: int, hidden: int) -> tuple[bool, int]:
    """`chunk_hidden` for so many rows of tiles, if there is room enough."""
    whole = max(1, PROGRAMS // hidden_units(rows, hidden, False))
    most = max(4, PROGRAMS // hidden_units(rows, hidden, True))
    cut = hidden_cut(hidden_units(rows, hidden, True), most, PROGRAMS)
    apart = hidden_apart(hidden)
    if not apart:
        # If tiles of 256 columns suit H, it takes up to 2% more.
        tritons, others = (hidden_evenness(rows, hidden, x, n) for x, n in ((False, max(2, whole)), (True, cut)))
        apart = 1.03 * others < tritons
    slices = cut if apart else whole
    return apart, slices if slices > 2 else 1


@lru_cache(maxsize=1 << 14)
def hidden_time(rows: int, hidden: int, slices: int, programs: int = PROGRAMS) -> float:
    """`hidden_evenness` of a chunk's hidden gradient in at most so many sums, with what the kernel adds."""
    apart = _hidden_way(rows, hidden)[0]
    slower = 1.02 if apart and not hidden_apart(hidden) else 1.0
    return slower * hidden_evenness(rows, hidden, apart, max(2, slices), programs)


@lru_cache(maxsize=1 << 14)
def even_step(tokens: int, hidden: int, room: int) -> int:
    """For how many positions of a chunk of so many tokens to make hidden's gradient at a time, if there are sums for
    `room` positions: the number with which all tiles are done soonest.
    """

    rows = -(-tokens // TOKEN_TILE)
    best, soonest = 0, float("inf")
    for step in range(min(room // TOKEN_TILE, rows), 0, -1):
        number, rest = divmod(tokens, step * TOKEN_TILE)
        if soonest <= rows + 0.5 * (number + (rest > 0)):  # as long as this and all shorter ones take at least
            break
        taken = number * _step_time(step, hidden, room // (step * TOKEN_TILE))
        if rest and taken < soonest:
            taken += _step_time(-(-rest // TOKEN_TILE), hidden, room // rest)
        if taken < soonest:
            best, soonest = step * TOKEN_TILE, taken
    return best


@lru_cache(maxsize=1 << 14)
def _step_time(rows: int, hidden: int, most: int) -> float:
    """What so many positions' hidden gradient takes in at most so many sums, in rows of tiles; a launch is half of
    one.
    """
    apart, slices = _hidden_way(rows, hidden)
    return 0.5 + rows * hidden_evenness(rows, hidden, apart, max(2, min(slices, most)))


def evenness(tiles: int, programs: int = PROGRAMS, *, halves: bool = False) -> float:
    """The time of so many equal tiles, divided by that of the same work spread evenly."""
    if not halves:
        return -(-tiles // programs) * programs / max(1, tiles)
    return waves(tiles, programs, halves=True) * programs / max(1, tiles)


@lru_cache(maxsize=1 << 14)
def hidden_evenness(rows: int, hidden: int, apart: bool, most: int, programs: int = PROGRAMS) -> float:
    """The time of hidden's gradient for so many rows of tiles, in up to `most` slices, divided by that of the same work
    spread evenly, without what tiles have beyond H.
    """
    units = hidden_units(rows, hidden, apart)
    if apart:
        cut, columns = hidden_cut(units, most, programs), 256
        time = evenness(units * cut, programs)
    elif most > 2:
        columns, time = hidden_columns(hidden), evenness(units * most, programs)
    else:
        columns, time = hidden_columns(hidden), evenness(units, programs, halves=most == 2)
    return time * units * columns / (rows * hidden)
