"""Named problems with masks of every kind and awkward sizes, used by the tests, `onchip check` and benchmarks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.attention import masks
from onchip.attention.masks import Mask

Float32 = npt.NDArray[np.float32]
Seen = npt.NDArray[np.bool_]
Put = Callable[[npt.NDArray[Any]], Any]
"""Makes an array of a framework's."""


class Drawn(NamedTuple):
    """The numbers from which masks are made, for a batch of this many queries and keys: positions, and random draws."""

    batch: int
    queries: int
    keys: int

    @property
    def i(self) -> npt.NDArray[np.int64]:
        return np.arange(self.queries)[:, None]

    @property
    def j(self) -> npt.NDArray[np.int64]:
        return np.arange(self.keys)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[B, T]: documents of about a fifth of the row, others in each row."""
        rng = np.random.default_rng(self.keys)
        begins = rng.random((self.batch, self.keys)) < 5 / max(self.keys, 1)
        ids: npt.NDArray[np.int64] = begins.cumsum(1)
        return ids

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """[B, T]: positions in documents."""
        return np.stack([self.j - np.searchsorted(row, row) for row in self.ids])

    @property
    def images(self) -> npt.NDArray[np.int64]:
        """[B, T]: every third block of 8 tokens is an image, others have -1."""
        block = np.tile(self.j // 8, (self.batch, 1))
        return np.where(block % 3 == 1, block, -1)

    @property
    def parents(self) -> npt.NDArray[np.int64]:
        """[T]: of a tree in depth-first order whose nodes are numbered as they lie; the root's is -1."""
        rng = np.random.default_rng(self.keys)
        parents = np.full(self.keys, -1)
        path: list[int] = []
        for token in range(self.keys):
            del path[rng.integers(1, len(path) + 1) if rng.random() < 0.2 and path else len(path) :]
            parents[token] = path[-1] if path else -1
            path.append(token)
        return parents

    @property
    def ancestors(self) -> Seen:
        """[T, T]: whether token j is i itself or above it."""
        seen = np.eye(self.keys, dtype=np.bool_)
        for token, parent in enumerate(self.parents):
            if parent >= 0:
                seen[token] |= seen[parent]
        return seen

    @property
    def stops(self) -> npt.NDArray[np.int64]:
        """[T]: the position after each token's last descendant."""
        stops: npt.NDArray[np.int64] = self.keys - self.ancestors[::-1].argmax(0)
        return stops


def _same(x: npt.NDArray[Any]) -> Seen:
    made: Seen = x[..., :, None] == x[..., None, :]
    return made


class Kind(NamedTuple):
    """One kind of mask, and which keys are seen under it, written out: [B, Tq, Tk] or fewer dimensions."""

    make: Callable[[Put, Drawn], Mask]
    seen: Callable[[Drawn], Any]


KINDS: Mapping[str, Kind] = {
    "full": Kind(lambda put, d: masks.Full(), lambda d: np.ones((d.queries, d.keys), np.bool_)),
    "causal": Kind(lambda put, d: masks.Causal(), lambda d: d.j <= d.i),
    "causal, last sees last": Kind(
        lambda put, d: masks.Causal(d.keys - d.queries), lambda d: d.j <= d.i + d.keys - d.queries
    ),
    "window": Kind(lambda put, d: masks.Window(15), lambda d: (d.j <= d.i) & (d.j > d.i - 16)),
    "window of both sides": Kind(
        lambda put, d: masks.Window(9, 4), lambda d: (d.j >= d.i - 9) & (d.j <= d.i + 4)
    ),
    "documents": Kind(lambda put, d: masks.Documents(put(d.ids)), lambda d: _same(d.ids)),
    "causal documents": Kind(
        lambda put, d: masks.Documents.from_position_ids(put(d.places)) & masks.Causal(),
        lambda d: _same(d.ids) & (d.j <= d.i),
    ),
    "window in documents": Kind(
        lambda put, d: masks.Documents(put(d.ids)) & masks.Window(11),
        lambda d: _same(d.ids) & (d.j <= d.i) & (d.j > d.i - 12),
    ),
    "padding": Kind(
        lambda put, d: masks.Documents(put(np.minimum(d.ids, 3)), padding=3) & masks.Causal(),
        lambda d: _same(np.minimum(d.ids, 3)) & (d.ids < 3)[:, None] & (d.j <= d.i),
    ),
    "chunks": Kind(
        lambda put, d: masks.Chunked(24) & masks.Causal(), lambda d: (d.i // 24 == d.j // 24) & (d.j <= d.i)
    ),
    "chunks of documents": Kind(
        lambda put, d: masks.Chunked(24, within=masks.Documents(put(d.ids))) & masks.Causal(),
        lambda d: _same(d.ids) & _same(d.places // 24) & (d.j <= d.i),
    ),
    "prefixes": Kind(
        lambda put, d: masks.PrefixLM(put(9 + np.arange(d.batch))),
        lambda d: (d.j <= d.i) | (d.j < 9 + np.arange(d.batch)[:, None, None]),
    ),
    "prefixes of documents": Kind(
        lambda put, d: masks.PrefixLM(put(np.full((d.batch, d.keys), 7)), within=masks.Documents(put(d.ids))),
        lambda d: _same(d.ids) & ((d.j <= d.i) | (d.places < 7)[:, None]),
    ),
    "images": Kind(
        lambda put, d: masks.Blocks(put(d.images)),
        lambda d: (d.j <= d.i) | (_same(d.images) & (d.images >= 0)[:, None]),
    ),
    "images and window": Kind(
        lambda put, d: masks.Blocks(put(d.images)) & masks.Window(19, None),
        lambda d: ((d.j <= d.i) | (_same(d.images) & (d.images >= 0)[:, None])) & (d.j > d.i - 20),
    ),
    "blocks": Kind(lambda put, d: masks.Blocks(put(d.j // 7)), lambda d: d.j // 7 <= d.i // 7),
    "tree": Kind(lambda put, d: masks.Tree(put(d.stops)), lambda d: d.ancestors),
    "shared prompt": Kind(
        lambda put, d: masks.Tree(
            put(np.where(d.ids == 0, d.keys, d.j + 1 + _left(d)))
        ),
        lambda d: (d.j <= d.i) & (_same(d.ids) | (d.ids == 0)[:, None]),
    ),
    "sink tokens and window": Kind(
        lambda put, d: masks.Causal() & masks.Intervals(
            put(np.zeros(d.queries, np.int32)),
            put(np.full(d.queries, d.keys)),
            put(np.where(d.j < 4, d.queries, d.j + 16)),
        ),
        lambda d: (d.j <= d.i) & ((d.j > d.i - 16) | (d.j < 4)),
    ),
    "blocked": Kind(
        lambda put, d: masks.Blocked(put(_blocks(d)), 16) & masks.Causal(),
        lambda d: _blocks(d)[..., d.i // 16, d.j // 16] & (d.j <= d.i),
    ),
    "rows that see nothing": Kind(
        lambda put, d: masks.Intervals(put(np.where(d.i[:, 0] % 3 == 1, 5, 0)), put(np.minimum(d.i[:, 0] + 1, 5))),
        lambda d: (d.j <= d.i) & (d.j < 5) & (d.i % 3 != 1),
    ),
}  # fmt: skip


def _left(d: Drawn) -> npt.NDArray[np.int64]:
    """[B, T]: how many tokens of each token's document follow it."""
    made: npt.NDArray[np.int64] = (_same(d.ids) & (d.j > d.j[:, None])).sum(2)
    return made


def _blocks(d: Drawn) -> Seen:
    """[B, Tq / 16, Tk / 16]."""
    rng = np.random.default_rng(d.keys)
    made: Seen = rng.random((d.batch, -(-d.queries // 16), -(-d.keys // 16))) < 0.6
    return made


@dataclass(frozen=True)
class AttentionCase:
    """One problem: its sizes, its mask, and the options that it passes to the op."""

    name: str
    mask: str
    batch: int = 2
    queries: int = 90
    keys: int = 90
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    value_size: int = 16
    sinks: bool = False
    std: float = 1.0
    """Standard deviation of q and k; that of the scores is its square."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the op: softcap, scale."""

    def __str__(self) -> str:
        return self.name

    @property
    def drawn(self) -> Drawn:
        return Drawn(self.batch, self.queries, self.keys)

    def make_mask(self, put: Put) -> Mask:
        return KINDS[self.mask].make(put, self.drawn)

    def seen(self) -> Seen:
        """[B, Tq, Tk]: what each query sees, from the mask's meaning."""
        return np.broadcast_to(KINDS[self.mask].seen(self.drawn), (self.batch, self.queries, self.keys))


class AttentionInputs(NamedTuple):
    """The arrays of one case; None where the case has no such array."""

    q: Float32  # [B, Tq, Hq, D]
    k: Float32  # [B, Tk, Hk, D]
    v: Float32  # [B, Tk, Hk, Dv]
    sinks: Float32 | None  # [Hq]
    grad_out: Float32
    grad_lse: Float32


def make_inputs(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Random inputs of `case`, ~ N(0, 1) except q and k."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 1.0) -> Float32:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    rows = case.batch, case.queries, case.heads
    return AttentionInputs(
        q=normal(*rows, case.size, std=case.std),
        k=normal(case.batch, case.keys, case.key_heads, case.size, std=case.std),
        v=normal(case.batch, case.keys, case.key_heads, case.value_size),
        sinks=normal(case.heads) if case.sinks else None,
        grad_out=normal(*rows, case.value_size),
        grad_lse=normal(*rows),
    )


# `onchip check`: small enough for two CPU cores, awkward on purpose.
CHECK_CASES = (
    *(AttentionCase(name, name) for name in KINDS),
    AttentionCase("more keys", "causal, last sees last", queries=40, keys=90),
    AttentionCase("more queries", "causal", queries=90, keys=33),
    AttentionCase("window of the last", "window of both sides", queries=40, keys=90),
    AttentionCase("many tiles", "causal documents", 1, 600, 600, heads=2, key_heads=1, size=8, value_size=8),
    AttentionCase("one token", "causal", batch=3, queries=1, keys=1),
    AttentionCase("no keys", "full", queries=5, keys=0),
    AttentionCase("no groups", "causal", heads=3, key_heads=3),
    AttentionCase("groups of 3", "causal documents", heads=6, key_heads=2, sinks=True),
    AttentionCase("groups of 5", "window", heads=5, key_heads=1, size=20, value_size=20),
    AttentionCase("groups of 7", "causal", heads=7, key_heads=1, size=31, value_size=9),
    AttentionCase("other values", "causal documents", size=24, value_size=16),
    AttentionCase("small scores", "causal", std=0.1),
    AttentionCase("large scores", "causal", std=6.0),
    AttentionCase("sinks", "window in documents", sinks=True),
    AttentionCase("sinks alone", "rows that see nothing", sinks=True),
    AttentionCase("softcap", "causal", std=4.0, options={"softcap": 10.0}),
    AttentionCase("scale", "causal documents", options={"scale": 0.7}),
    AttentionCase("everything", "images and window", heads=6, key_heads=2, size=24, value_size=12, sinks=True, std=3.0,
         options={"softcap": 20.0, "scale": 0.3}),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionBenchCase:
    """A problem of a benchmark, of one batch row unless `batch` says otherwise."""

    name: str
    mask: str
    tokens: int
    heads: int = 32
    key_heads: int = 8
    size: int = 128
    value_size: int = 128
    batch: int = 1
    sinks: bool = False
    length: int = 0
    """Length of the window or of each document."""
    dtype: str | None = None


def bench_mask(case: AttentionBenchCase, put: Put) -> Mask:
    """The mask of a benchmark's case."""
    at = np.arange(case.tokens)
    made: dict[str, Callable[[], Mask]] = {
        "full": masks.Full,
        "causal": masks.Causal,
        "window": lambda: masks.Window(case.length - 1),
        "documents": lambda: masks.Documents(put(at // case.length)) & masks.Causal(),
        "mixed": lambda: masks.Documents(put(_mixed(case))) & masks.Causal(),
        "tree": lambda: masks.Tree(put(_answers(case))),
        "images": lambda: masks.Blocks(put(np.where(at % 1024 < 256, at // 1024, -1))),
    }
    return made[case.mask]()


def _mixed(case: AttentionBenchCase) -> npt.NDArray[np.int64]:
    """[T]: ids of documents whose lengths are distributed like a corpus's, with `length` on average."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(case.length) - 0.72, 1.2, 4 * case.tokens // case.length).astype(int) + 1
    return np.searchsorted(lengths.cumsum(), np.arange(case.tokens), side="right")


def _answers(case: AttentionBenchCase) -> npt.NDArray[np.int64]:
    """[T]: stops of one prompt, a quarter of the tokens, and four answers to it."""
    at, prompt = np.arange(case.tokens), case.tokens // 4
    answer = -(-(case.tokens - prompt) // 4)
    return np.where(at < prompt, case.tokens, prompt + ((at - prompt) // answer + 1) * answer)


_T = 16384
# What `onchip bench` runs.
SUITES = {
    "cpu": (
        AttentionBenchCase("cpu-causal", "causal", 512, 4, 2, 32, 32),
        AttentionBenchCase("cpu-documents", "documents", 512, 4, 2, 32, 32, length=64),
        AttentionBenchCase("cpu-sinks", "window", 384, 4, 2, 32, 32, sinks=True, length=64),
    ),
    "cuda": (
        AttentionBenchCase("causal", "causal", _T),
        AttentionBenchCase("full", "full", _T),
        AttentionBenchCase("window-1024", "window", _T, length=1024),
        AttentionBenchCase("documents-2048", "documents", _T, length=2048),
        AttentionBenchCase("documents-mixed", "mixed", 4 * _T, length=218),
        AttentionBenchCase("tree", "tree", _T),
        AttentionBenchCase("images", "images", _T),
        AttentionBenchCase("causal-d64", "causal", _T, size=64, value_size=64),
        AttentionBenchCase("causal-d192-128", "causal", _T, 16, 16, size=192),
        AttentionBenchCase("gpt-oss-window", "window", _T, 64, 8, 64, 64, sinks=True, length=128),
        AttentionBenchCase("gpt-oss-full", "causal", _T, 64, 8, 64, 64, sinks=True),
    ),
    "by-length": tuple(
        AttentionBenchCase(f"causal-{65536 // tokens}x{tokens}" if tokens < 65536 else f"causal-{tokens}", "causal",
                           tokens, batch=max(1, 65536 // tokens))
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    ),
}  # fmt: skip
