"""Checks and times variants of attention's kernels on one H200.  python gpu_run/attn.py; about 100 s on 16 cores."""

import itertools
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "src"))

import torch  # noqa: E402

from onchip.attention.problem import AttentionProblem  # noqa: E402
from onchip.attention.triton import launches  # noqa: E402
from onchip.attention.triton.problem import entries_of, padded, tiles_of  # noqa: E402
from onchip.masks import Causal, Documents, Full, Intervals, Tree, Window  # noqa: E402

WORKERS = 14
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEGAN = time.time()


def say(*words):
    print(*words, flush=True)


# ------------------------------------------------------------------------------------------ variants

FORWARD = {
    128: {
        "now": dict(LATE=False, AHEAD=False),
        "ahead": dict(LATE=False, AHEAD=True),
        "late": dict(LATE=True, AHEAD=False),
        "late+ahead": dict(LATE=True, AHEAD=True),
    },
    64: {
        "now (3 groups)": dict(LATE=False, AHEAD=False),
        "3 late": dict(LATE=True, AHEAD=False),
        "3 late+ahead": dict(LATE=True, AHEAD=True),
        "2 now": dict(LATE=False, AHEAD=False, GROUPS=2, REGISTERS=240, STAGES=3),
        "2 late+ahead": dict(LATE=True, AHEAD=True, GROUPS=2, REGISTERS=240, STAGES=3),
        "2 late+ahead 4 stages": dict(LATE=True, AHEAD=True, GROUPS=2, REGISTERS=240, STAGES=4),
    },
}
QUERIES = {"now": dict(AHEAD=False), "ahead": dict(AHEAD=True)}
ROWS = {
    "now": dict(HEADS_FIRST=False, ROWS=32),
    "heads first": dict(HEADS_FIRST=True, ROWS=32),
    "heads first 16": dict(HEADS_FIRST=True, ROWS=16),
    "heads first 64": dict(HEADS_FIRST=True, ROWS=64),
}
KEYS = {"now": {}}


class Call:
    """Tensors and launches of a call."""

    def __init__(self, batch, tokens, keys, heads, key_heads, size, mask, *, all_options=False, seed=0):
        g = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, device=DEVICE, generator=g).to(dtype)

        def numbers(*shape):
            return torch.full(shape, -7, dtype=torch.int32, device=DEVICE)

        self.p = p = AttentionProblem(batch, tokens, keys, heads, key_heads, size, size)
        self.q, self.d_out = draw(batch, tokens, heads, size), draw(batch, tokens, heads, size)
        self.k, self.v = draw(batch, keys, key_heads, size), draw(batch, keys, key_heads, size)
        low = mask.lower(batch, tokens, keys, self.q)
        start, end, stop = (None if x is None else x.to(torch.int32).contiguous() for x in (low.start, low.end, low.stop))
        if all_options and stop is None:
            stop = torch.full((len(start), keys), tokens, dtype=torch.int32, device=DEVICE)
        n = len(start)
        self.mask = launches.Masked(
            start, end, stop, numbers(n, entries_of(tokens), 8), None if stop is None else numbers(n, tiles_of(keys), 2)
        )
        self.sinks = draw(heads, dtype=torch.float32) if all_options else None
        self.softcap = 8.0 if all_options else None
        self.d_lse = draw(batch, tokens, heads, dtype=torch.float32) if all_options else None
        self.scale = size**-0.5
        self.out, self.grad_q = (torch.full_like(self.q, math.nan) for _ in range(2))
        self.grad_k, self.grad_v = torch.full_like(self.k, math.nan), torch.full_like(self.v, math.nan)
        self.lse = torch.full((batch, heads, tokens), math.nan, device=DEVICE)
        self.of_rows = torch.full((batch * heads, 2, padded(tokens)), math.nan, device=DEVICE)
        self.table = numbers(n, tiles_of(keys), 4)
        self.of_sinks = None

    def tables(self):
        return launches.query_table(self.p, self.mask), launches.key_table(self.p, self.mask, self.table)

    def forward(self, flags):
        p = self.p
        made = launches.forward(
            p, self.q, self.k, self.v, self.sinks, self.mask, self.scale, self.softcap, self.out, self.lse
        )
        given = {**made.given, **flags}
        registers, grid = made.registers, made.grid
        if "GROUPS" in flags:
            given["tiles"] = -(-p.queries // (64 * flags["GROUPS"]))
            registers = 168 if flags["GROUPS"] == 2 else 128
            grid = (launches._programs(p, self.q, given["tiles"]),)
        return made._replace(given=given, registers=registers, grid=grid)

    def rows(self, flags):
        few = padded(self.p.queries) // flags["ROWS"]
        if self.sinks is not None:
            self.of_sinks = torch.full((self.p.heads, self.p.batch * few), math.nan, device=DEVICE)
        made = launches.gradient_rows(
            self.p, self.out, self.d_out, self.lse, self.d_lse, self.sinks, self.of_rows, self.of_sinks
        )
        return made._replace(given={**made.given, "tiles": few, **flags}, grid=(few * self.p.batch * self.p.heads,))

    def queries(self, flags):
        made = launches.gradient_of_queries(
            self.p, self.q, self.d_out, self.k, self.v, self.mask, self.scale, self.softcap, self.of_rows, self.grad_q
        )
        return made._replace(given={**made.given, **flags})

    def keys(self, flags):
        made = launches.gradient_of_keys(
            self.p, self.q, self.d_out, self.k, self.v, self.mask, self.scale, self.softcap, self.of_rows, self.table,
            self.grad_k, self.grad_v,
        )  # fmt: skip
        return made._replace(given={**made.given, **flags})

    def exact(self):
        """out, lse and gradients in float64, by the framework."""
        p, m = self.p, self.mask
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else self.sinks.double().requires_grad_()
        i, j = torch.arange(p.queries, device=DEVICE)[:, None], torch.arange(p.keys, device=DEVICE)
        seen = (j >= m.start[:, :, None]) & (j < m.end[:, :, None])
        if m.stop is not None:
            seen = seen & (i < m.stop[:, None, :])
        kk, vv = (x.repeat_interleave(p.group, 2) for x in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, kk) * self.scale
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        s = torch.where(seen[:, None], s, -math.inf)
        empty = ~seen.any(-1)[:, None]  # [B, 1, Tq]
        top = torch.where(empty, 0, s.amax(-1)).detach()
        if sinks is not None:
            top = torch.maximum(torch.where(empty, -math.inf, top), sinks[:, None].detach())
        e = torch.exp(s - top[..., None])
        total = e.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None] - top)
        nothing = total == 0
        lse = torch.where(nothing, -math.inf, top + torch.log(torch.where(nothing, 1, total)))
        out = torch.einsum("bhqk,bkhd->bqhd", e / torch.where(nothing, 1, total)[..., None], vv)
        loss = (out * self.d_out.double()).sum()
        if self.d_lse is not None:
            loss = loss + (torch.where(nothing, 0, lse) * self.d_lse.double().transpose(1, 2)).sum()
        grads = torch.autograd.grad(loss, [q, k, v] + ([] if sinks is None else [sinks]))
        return out.detach(), lse.detach(), *grads


def off(a, b):
    a, b = a.double(), b.double()
    if not torch.equal(a.isinf(), b.isinf()) or a.isnan().any():
        return math.inf
    there = b.isfinite()
    a, b = a[there], b[there]
    return float((a - b).norm() / b.norm().clamp_min(1e-9))


# ------------------------------------------------------------------------------------------ compile

def every_launch():
    """One launch of each variant and option set, of a small call."""
    for size, options in itertools.product((128, 64), (False, True)):
        c = Call(1, 300, 300, 4, 2, size, Causal(), all_options=options)
        yield from (c.forward(f) for f in FORWARD[size].values())
        yield from (c.queries(f) for f in QUERIES.values())
        yield from (c.keys(f) for f in KEYS.values())
        yield from (c.rows(f) for f in ROWS.values())
        yield from c.tables()
    c = Call(1, 300, 300, 4, 2, 72, Causal(), all_options=True)
    yield from (c.rows(f) for f in ROWS.values())


def compile_part(i):
    order = sorted(every_launch(), key=lambda x: x.kernel.__name__ != "attend")
    for n, launch in enumerate(order):
        if n % WORKERS == i:
            launch.ask()


# ------------------------------------------------------------------------------------------ check

def tree(tokens):
    stop = torch.full((tokens,), tokens, dtype=torch.int32)
    for first, last in ((100, 333), (120, 200), (333, 640), (400, 500), (500, 560)):
        stop[first:last] = torch.minimum(stop[first:last], torch.tensor(last, dtype=torch.int32))
    return Tree(stop.to(DEVICE))


def masks(tokens):
    at = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    spared = torch.where(at < 4, tokens, at + 150).int()
    begins = (at // 64 * 37) % max(1, tokens - 40)
    return {
        "full": Full(),
        "causal": Causal(),
        "window": Window(200),
        "both sides": Window(90, 70),
        "documents": Documents(torch.bucketize(at, torch.tensor([3, 130, 131, 300, 556], device=DEVICE))) & Causal(),
        "rows that see nothing": Intervals(begins, begins + at % 40),
        "tree": tree(tokens),
        "sink tokens and window": Causal() & Intervals(torch.zeros_like(at), torch.full_like(at, tokens), spared),
    }


def check(tokens=700, kinds=None, sizes=((128, False, 1), (128, True, 2), (64, False, 2), (64, True, 1), (72, True, 1))):
    """The largest relative error of each variant's results over all masks."""
    worst = {}

    def note(kernel, variant, *errors):
        before = worst.get((kernel, variant), (0.0,) * len(errors))
        worst[kernel, variant] = tuple(max(a, b) for a, b in zip(before, errors, strict=True))

    for size, options, batch in sizes:
        wide = 64 if size <= 64 else 128
        for kind, mask in masks(tokens).items():
            if kinds is not None and kind not in kinds:
                continue
            c = Call(batch, tokens, tokens, 6, 2, size, mask, all_options=options)
            if c.mask.stop is not None and not options:
                continue
            out, lse, grad_q, grad_k, grad_v, *grad_sinks = c.exact()
            for x in c.tables():
                x.run()
            for name, flags in FORWARD[wide].items():
                c.out.fill_(math.nan), c.lse.fill_(math.nan)
                c.forward(flags).run()
                note(f"forward {wide}", name, off(c.out, out), off(c.lse, lse))
            for name, flags in ROWS.items():
                c.of_rows.fill_(math.nan)
                c.rows(flags).run()
                c.grad_k.fill_(math.nan), c.grad_v.fill_(math.nan)
                c.keys({}).run()
                e = off(c.of_sinks.sum(1), grad_sinks[0]) if grad_sinks else 0.0
                note(f"rows {wide}", name, off(c.grad_k, grad_k), off(c.grad_v, grad_v), e)
            for name, flags in QUERIES.items():
                c.grad_q.fill_(math.nan)
                c.queries(flags).run()
                note(f"queries' gradient {wide}", name, off(c.grad_q, grad_q))
    say("\nlargest relative errors (out, lse | dk, dv, dsinks | dq); bounds 5e-3, 1e-4 | 1e-2 | 1e-2")
    for (kernel, variant), errors in worst.items():
        bound = (5e-3, 1e-4) if kernel.startswith("forward") else (1e-2,) * 3
        bad = any(not e <= b for e, b in zip(errors, bound, strict=False))
        say(f"  {kernel:24} {variant:24}", *(f"{e:.1e}" for e in errors), "WRONG" if bad else "")


# ------------------------------------------------------------------------------------------ time

FLUSH = None


def ms(launch, times=15, flushes=2):
    global FLUSH
    if FLUSH is None:
        FLUSH = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    run = launch if callable(launch) else launch.run
    run(), run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for first, last in events:
        for _ in range(flushes):
            FLUSH.zero_()
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def timed(tokens=16384):
    at = torch.arange(tokens, device=DEVICE)
    cases = {
        "causal": (128, Causal(), tokens),
        "window-1024": (128, Window(1023), tokens),
        "documents-2048": (128, Documents(at // 2048) & Causal(), tokens),
        "documents-1024": (128, Documents(at[:4096] // 1024) & Causal(), 4096),
        "causal-d64": (64, Causal(), tokens),
        "window-1024-d64": (64, Window(1023), tokens),
    }
    for case, (size, mask, length) in cases.items():
        c = Call(1, length, length, 32, 8, size, mask)
        for x in c.tables():
            x.run()
        seen = float((c.mask.end - c.mask.start).double().sum()) * 32 * size
        say(f"\n{case} (T {length}): ms, TFLOP/s, the same bits in 3 more runs")

        def row(kernel, name, launch, results, flops=None):
            launch.run()
            first = [x.clone() for x in results]
            same = True
            for _ in range(3):
                for x in results:
                    x.fill_(-7)
                launch.run()
                same &= all(torch.equal(x, y) for x, y in zip(results, first, strict=True))
            t = ms(launch)
            rate = "" if flops is None else f"{flops * seen / t / 1e9:6.0f}"
            say(f"  {kernel:18} {name:24} {t:7.3f} {rate:6} {'' if same else 'OTHER BITS'}")

        for name, flags in FORWARD[size].items():
            row("forward", name, c.forward(flags), (c.out, c.lse), 4)
        for name, flags in ROWS.items():
            row("rows", name, c.rows(flags), (c.of_rows,))
        for name, flags in QUERIES.items():
            row("queries' gradient", name, c.queries(flags), (c.grad_q,), 6)
        for name, flags in KEYS.items():
            row("keys' gradient", name, c.keys(flags), (c.grad_k, c.grad_v), 8)
        for name, launch, result in zip(("of queries", "of keys"), c.tables(), (c.mask.table, c.table), strict=True):
            row("table", name, launch, (result,))
        if case.startswith("causal"):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            q, k, v = (x.transpose(1, 2) for x in (c.q, c.k, c.v))
            try:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
                    sdpa = torch.nn.functional.scaled_dot_product_attention
                    t = ms(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
                say(f"  {'forward':18} {'cuDNN':24} {t:7.3f} {4 * seen / t / 1e9:6.0f}")
            except RuntimeError as error:
                say("  cuDNN:", str(error)[:100])
        copy = torch.empty_like(c.out)
        say(f"  {'(out copied)':18} {'':24} {ms(lambda: copy.copy_(c.out)):7.3f}")
        whole(c, mask, seen)


def whole(c, mask, seen):
    """The op, forward and both passes, as users call it."""
    from onchip.torch import attention

    low = mask.lower(1, c.p.queries, c.p.keys, c.q)
    q, k, v = (x.clone().requires_grad_() for x in (c.q, c.k, c.v))

    def both():
        torch.autograd.grad(attention(q, k, v, low), (q, k, v), c.d_out)

    def forward():
        with torch.no_grad():
            attention(q, k, v, low)

    for _ in range(3):
        both(), forward()
    for name, run, flops in (("op, forward", forward, 4), ("op, both", both, 14)):
        t = ms(run, flushes=12)  # 2 ms, in which the CPU gets ahead
        say(f"  {name:18} {'':24} {t:7.3f} {flops * seen / t / 1e9:6.0f}")


def main():
    if sys.argv[1:2] == ["--compile"]:
        compile_part(int(sys.argv[2]))
        return
    workers = [
        subprocess.Popen([sys.executable, str(HERE), "--compile", str(i)], stderr=subprocess.PIPE, text=True)
        for i in range(WORKERS)
    ]
    for w in workers:
        _, said = w.communicate()
        if w.returncode:
            say("a worker failed:", said[-2000:])
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled after {time.time() - BEGAN:.0f} s")
    check()
    say(f"checked after {time.time() - BEGAN:.0f} s")
    timed()
    say(f"\ndone after {time.time() - BEGAN:.0f} s")


if __name__ == "__main__":
    main()
