"""What a call takes the host on a GPU, before and after, and whether results are right.

    python gpu_run/host.py [--before gpu_run/before] [--json OUT.json]

Each tree runs in a process of its own, and rounds of the two alternate.  --fake: without a GPU, times only, to try it.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAKE = "HOST_FAKE" in os.environ
DEVICE = "cpu" if FAKE else "cuda"


# ------------------------------------------------------------------------------------------------ in a tree's process


def sync():
    if not FAKE:
        import torch

        torch.cuda.synchronize()


def normal(*shape, grad=True, seed=None):
    """bf16, not a leaf, as activations are."""
    import torch

    g = None if seed is None else torch.Generator(DEVICE).manual_seed(seed)
    x = (torch.randn(*shape, device=DEVICE, generator=g) / shape[-1] ** 0.5).bfloat16()
    return x.requires_grad_() * 1 if grad else x


def cases():
    """name, [call], differentiable tensors of each call (None: forward alone), calls before the device is awaited."""
    import torch
    from torch.nn import functional

    from onchip.masks import Causal, Documents
    from onchip.torch import attention, fp8_linear, grouped_matmul, linear_cross_entropy

    def qkv(t, hq, hk, d=128):
        return normal(1, t, hq, d), normal(1, t, hk, d), normal(1, t, hk, d)

    def att(sets, mask):
        return [lambda x=x: attention(*x, mask, backend="triton") for x in sets], sets

    one, eight = [qkv(256, 4, 2)], [qkv(256, 4, 2) for _ in range(8)]
    low = Causal().lower(1, 256, 256, one[0][0])
    yield "attention T256 lowered", *att(one, low), 40
    yield "attention T256 lowered, 8 layers", *att(eight, low), 40
    yield "attention T256 Causal()", *att(one, Causal()), 40
    yield "attention T256 Documents & Causal", *att(one, Documents(torch.arange(256, device=DEVICE)[None] // 64) & Causal()), 20
    fused = normal(1, 256, 3, 4, 128)
    yield "attention T256 lowered, one qkv", *att([fused.unbind(2)], low), 40
    if not FAKE:
        yield "attention T2048 32/8 lowered", *att([qkv(2048, 32, 8)], Causal().lower(1, 2048, 2048, one[0][0])), 20
        sdpa = [x.transpose(1, 2).detach().requires_grad_() * 1 for x in qkv(256, 4, 4)]
        yield "SDPA T256", [lambda: functional.scaled_dot_product_attention(*sdpa, is_causal=True)], [sdpa], 40
    x, w = normal(256, 1024), normal(1024, 1024)
    xn, wn = x.detach(), w.detach()
    if not FAKE:
        yield "F.linear 256", [lambda: functional.linear(xn, wn)], None, 40
    yield "fp8_linear 256x1024x1024", [lambda: fp8_linear(xn, wn, backend="triton")], None, 40
    yield "fp8_linear 256x1024x1024, grads", [lambda: fp8_linear(x, w, backend="triton")], [(x, w)], 40
    if not FAKE:
        yield "fp8_linear 256x1024x1024, default", [lambda: fp8_linear(xn, wn)], None, 40
        yield "fp8_linear 256x1024x1024, default, grads", [lambda: fp8_linear(x, w)], [(x, w)], 40
        e4m3, kind = torch.float8_e4m3fn, functional.ScalingType
        a8, b8 = xn.to(e4m3), wn.to(e4m3).T
        sa, sb = torch.ones(8, 256, device=DEVICE).T, torch.ones(8, 8, device=DEVICE).T
        yield "F.scaled_mm alone", [
            lambda: functional.scaled_mm(a8, b8, sa, kind.BlockWise1x128, sb, kind.BlockWise128x128)
        ], None, 40  # fmt: skip
        x2, w2 = normal(2048, 2048, grad=False), normal(2048, 2048, grad=False)
        yield "fp8_linear 2048^3", [lambda: fp8_linear(x2, w2, backend="triton")], None, 40
        yield "fp8_linear 2048^3, default", [lambda: fp8_linear(x2, w2)], None, 40
    e, sizes = normal(8, 1024, 1024), torch.full((8,), 32, device=DEVICE)
    en = e.detach()
    yield "grouped_matmul 256 of 8", [lambda: grouped_matmul(xn, en, sizes, backend="triton")], None, 40
    yield "grouped_matmul 256 of 8, grads", [lambda: grouped_matmul(x, e, sizes, backend="triton")], [(x, e)], 40
    hidden, vocab = (4096, 128256) if not FAKE else (512, 4096)
    h, wv, ids = normal(512, hidden), normal(vocab, hidden), torch.randint(vocab, (512,), device=DEVICE)
    yield "linear_cross_entropy T512", [lambda: linear_cross_entropy(h, wv, ids, backend="triton")], [(h, wv)], 15


def timed(calls, leaves, number, most, wait):
    """Microseconds of each forward and backward."""
    import torch

    forward, backward, out = [], [], None
    for i in range(number):
        if wait or i % most == 0:
            sync()
        call = calls[i % len(calls)]
        t0 = time.perf_counter()
        out = call()
        t1 = time.perf_counter()
        forward.append(1e6 * (t1 - t0))
        if leaves:
            up = UP.setdefault((out.shape, out.dtype), torch.ones_like(out))
            if wait:
                sync()
            t1 = time.perf_counter()
            torch.autograd.grad(out, leaves[i % len(calls)], up)
            backward.append(1e6 * (time.perf_counter() - t1))
    del out
    sync()
    return forward, backward


UP = {}


def floor(name, function, number=300):
    times = []
    for i in range(number):
        if i % 50 == 0:
            sync()
        t0 = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - t0))
    return {name: round(statistics.median(times), 2)}


def stages():
    """The stages of a prepared attention call, and what the driver's calls take."""
    import torch

    from onchip.frontend import torch_prepared, torch_repeat
    from onchip.kernels.triton import packed
    from onchip.masks import Causal
    from onchip.torch import attention

    torch_prepared.forget()
    seen, launches, run, init = {}, [], torch_repeat._Known.run, packed.Packed.__init__

    def spy(self, given):
        seen.update(known=self, given=given)
        return run(self, given)

    def made(self, *args):
        init(self, *args)
        launches.append((self, [x for _, x in self.given.descriptors]))

    torch_repeat._Known.run, packed.Packed.__init__ = spy, made
    q, k, v = normal(1, 256, 4, 128), normal(1, 256, 2, 128), normal(1, 256, 2, 128)
    low = Causal().lower(1, 256, 256, q)
    for _ in range(5):
        attention(q, k, v, low, backend="triton")
    torch_repeat._Known.run, packed.Packed.__init__ = run, init
    found = {}
    if "known" not in seen:
        return {"NOT PREPARED": 1}
    known, given = seen["known"], seen["given"]
    prepared = known.prepared

    def connect():
        there = (*prepared.run(given), *given, None)
        known.operator.connect(known.saving, known.kept(there), there[: known.outputs], known.inputs(there), plain=True)

    found |= floor("key", lambda: torch_repeat._kind((q, k, v, low), {"backend": "triton"}, []))
    found |= floor("conditions", prepared.may_run)
    found |= floor("steps", lambda: prepared.run(given))
    found |= floor("steps + autograd", connect)
    for p, maps in launches:
        found |= floor(f"send {p.name}", p.send, 100)
        if maps:
            x, at = maps[0], [maps[0].address, maps[0].address + 4096]

            def put():
                at.reverse()
                x.put(at[0])

            before, address = bytes(p.words), x.address
            found |= floor(f"descriptor by the driver ({p.name})", put)
            ctypes.memmove(ctypes.addressof(p.memory) + p.start, before, len(before))
            x.address = address
    found |= floor("torch.empty 4 KiB", lambda: torch.empty(4096, dtype=torch.uint8, device=DEVICE))
    found |= floor("current_device", (lambda: 0) if FAKE else torch.cuda.current_device)
    return found


def refusals():
    from onchip.frontend import torch_prepared

    reasons = [x for known in torch_prepared._ALL for x in known._known.values() if isinstance(x, str)]
    marker = getattr(torch_prepared, "SHARED", None)  # then the kind is told apart by how its tensors lie
    return sorted({x for x in reasons if x not in (torch_prepared.SEEN_ONCE, marker)})


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def steps():
    """By op: a step of a backend for a seed and a size, (outputs, gradients)."""
    import torch

    from onchip.masks import Causal, Documents
    from onchip.torch import attention, fp8_linear, grouped_matmul, linear_cross_entropy

    def ended(out, leaves, seed):
        up = normal(*out.shape, grad=False, seed=seed + 99) if out.ndim else torch.ones_like(out)
        return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]

    def apart(seed, *shapes):
        gap = torch.empty((seed % 7 + 1) << 19, device=DEVICE, dtype=torch.uint8)
        made = [normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
        del gap
        return made

    def att(mask, fused=False):
        def step(backend, seed, size):
            t = 96 * size
            if fused:
                (x,) = apart(seed, (2, t, 3, 4, 128))
                q, k, v = x.unbind(2)
            else:
                q, k, v = apart(seed, (2, t, 4, 128), (2, t, 2, 128), (2, t, 2, 128))
            return ended(attention(q, k, v, mask(t, q), backend=backend), (q, k, v), seed)

        return step

    def fp8(kernels):
        def step(backend, seed, size):
            x, w = apart(seed, (128 * size, 512), (384, 512))
            chosen = kernels if backend == "triton" else "dequantize"
            return ended(fp8_linear(x, w, backend=chosen), (x, w), seed)

        return step

    def grouped(backend, seed, size):
        x, e = apart(seed, (96 * size, 512), (3, 384, 512))
        sizes = torch.tensor([64 * size, 0, 32 * size], device=DEVICE)
        return ended(grouped_matmul(x, e, sizes, backend=backend), (x, e), seed)

    def lce(backend, seed, size):
        h, w = apart(seed, (128 * size, 512), (5000, 512))
        ids = torch.randint(5000, (128 * size,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
        return ended(linear_cross_entropy(h, w, ids, backend=backend), (h, w), seed)

    return {
        "attention lowered": att(lambda t, q: Causal().lower(2, t, t, q)),
        "attention Causal()": att(lambda t, q: Causal()),
        "attention documents": att(lambda t, q: Documents(torch.arange(t, device=DEVICE)[None] // 50) & Causal()),
        "attention one qkv": att(lambda t, q: Causal(), fused=True),
        "fp8_linear": fp8("triton"), "fp8_linear default": fp8("triton" if FAKE else "auto"), "grouped_matmul": grouped, "linear_cross_entropy": lce,
    }  # fmt: skip


def descriptors(launches):
    """How many descriptors there are, how many may be written, and whether those are as the driver makes them."""
    import random

    count, written, wrong, r = 0, 0, 0, random.Random(0)
    for packed, maps in launches:
        for x in maps:
            count += 1
            if x.word is None:
                continue
            written += 1
            saved, before = bytes(packed.words), x.address
            for _ in range(50):
                address = r.randrange(1 << 20, 1 << 47) & ~15
                x.put(address)
                by_driver = bytes(packed.words)
                x.put(r.randrange(1 << 20, 1 << 47) & ~15)
                packed.words[x.word] = address
                wrong += bytes(packed.words) != by_driver
            ctypes.memmove(ctypes.addressof(packed.memory) + packed.start, saved, len(saved))
            x.address = before
    return {"descriptors": count, "written without the driver": written, "wrong": wrong}


def checks():
    import torch

    from onchip.frontend import torch_builder, torch_prepared
    from onchip.kernels.triton import packed

    launches, init, run, found = [], packed.Packed.__init__, torch_builder.Prepared.run, {}
    counted = [0]

    def made(self, *args):
        init(self, *args)
        launches.append((self, [x for _, x in self.given.descriptors]))

    def spy(self, given):
        counted[0] += 1
        return run(self, given)

    packed.Packed.__init__, torch_builder.Prepared.run = made, spy
    for name, step in steps().items():
        if FAKE and name == "linear_cross_entropy":
            continue
        first = {}
        for size in (2, 4):
            for seed in (0, 1, 2):
                torch_prepared.forget()
                first[seed, size] = step("triton", seed, size)
        plain = step("plain", 1, 2)
        error = max(relative(a, b) for a, b in zip(first[1, 2], plain, strict=True))
        torch_prepared.forget()
        counted[0], wrong, hold = 0, 0, []
        for i in range(100):
            seed, size = i % 3, (2, 4)[i // 3 % 2]
            got = step("triton", seed, size)
            wrong += not all(map(torch.equal, got, first[seed, size]))
            hold = (hold + got)[-(i % 11) :]  # so that addresses change
        if not FAKE:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                wrong += not all(map(torch.equal, step("triton", 2, 4), first[2, 4]))
            torch.cuda.current_stream().wait_stream(side)
        found[name] = {"error": round(error, 5), "other bits": wrong, "prepared runs": counted[0], "refused": refusals()}
    packed.Packed.__init__, torch_builder.Prepared.run = init, run
    if launches and hasattr(launches[0][1][0] if launches[0][1] else packed.Map, "address_word"):
        found["descriptors"] = descriptors(launches)
    return found


def child():
    import torch

    if FAKE:
        import fake_cuda

        scope = fake_cuda.gpu()
    else:
        scope = nullcontext()
    with scope as gpu:
        if FAKE:
            gpu.library.c.fake_logging(1)
        began, known = time.perf_counter(), []
        for name, calls, leaves, most in cases():
            try:
                for _ in range(6):
                    for i, call in enumerate(calls):
                        out = call()
                        if leaves:
                            torch.autograd.grad(out, leaves[i], torch.ones_like(out))
            except Exception as error:  # noqa: BLE001 - one case of many
                print(name, "left out:", error, file=sys.stderr)
                continue
            if FAKE:
                gpu.library.take()
            known.append((name, calls, leaves, most))
            sync()
        del out
        sync()
        if FAKE:
            gpu.library.c.fake_logging(0)
        print(json.dumps({"ready_s": round(time.perf_counter() - began, 1), "refused": refusals()}), flush=True)
        for line in sys.stdin:
            what, *rest = line.split()
            if what == "round":
                made = {}
                for name, calls, leaves, most in known:
                    for way in ("in a row", "after a wait"):
                        number = 2 * most if way == "in a row" else 30
                        made[f"{name}|{way}"] = timed(calls, leaves, number, most, way == "after a wait")
                print(json.dumps(made), flush=True)
            elif what == "stages":
                print(json.dumps(stages()), flush=True)
            elif what == "checks":
                if FAKE:
                    gpu.library.c.fake_logging(1)
                print(json.dumps(checks()), flush=True)


# --------------------------------------------------------------------------------------------------- in the first one


class Tree:
    def __init__(self, path, fake):
        paths = [str(Path(path).resolve() / "src"), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOST_CHILD": "1"}
        env |= fake and {"HOST_FAKE": "1", **fake}
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = None

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a tree's process ended")
        return json.loads(line)

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--before")
    parser.add_argument("--json")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    began, fake, folder = time.perf_counter(), {}, None
    if args.fake:
        import tempfile

        sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests")]
        import fake_cuda

        folder = tempfile.TemporaryDirectory()
        library = str(fake_cuda.build(Path(folder.name)))
        fake = {"TRITON_LIBCUDA_PATH": folder.name, "LD_PRELOAD": library, "FAKE_CUDA": library}
    trees = {"before": Tree(args.before, fake)} if args.before else {}
    trees["after"] = Tree(HERE.parent, fake)
    for name, tree in trees.items():  # both compile at once
        tree.ready = tree.answer()
        print(name, tree.ready)
    times = {}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            for case, (forward, backward) in tree.ask("round").items():
                for kind, found in (("forward", forward), ("backward", backward)):
                    times.setdefault((case, kind), {}).setdefault(name, []).extend(found)
    rows = []
    print(f"\n{'us, median (p10)':58s}" + "".join(f"{name:>20s}" for name in trees))
    for (case, kind), by in times.items():
        if not all(by.get(name) for name in trees):
            continue
        what, way = case.split("|")
        values = {n: (statistics.median(by[n]), sorted(by[n])[len(by[n]) // 10]) for n in trees}
        print(f"{what + ', ' + kind:44s}{way:14s}" + "".join(f"{f'{m:.0f} ({t:.0f})':>20s}" for m, t in values.values()))
        rows += [
            {"call": what, "pass": kind, "way": way, "tree": n, "median_us": round(m, 1), "p10_us": round(t, 1)}
            for n, (m, t) in values.items()
        ]
    of_stages = {name: tree.ask("stages") for name, tree in trees.items()}
    print("\nstages of attention's forward, T256, lowered, us")
    for stage in dict.fromkeys(x for by in of_stages.values() for x in by):
        print(f"{stage:58s}" + "".join(f"{of_stages[n].get(stage, float('nan')):>20.2f}" for n in trees))
    checked = {} if args.fake and "CHECKS" not in os.environ else trees["after"].ask("checks")
    for name, found in checked.items():
        print("check", name, found)
    bad = [
        n for n, x in checked.items()
        if x.get("wrong") or x.get("other bits") or x.get("refused") or not x.get("error", 0) <= 0.03
        or ("prepared runs" in x and x["prepared runs"] < 100)
    ]  # fmt: skip
    seconds = time.perf_counter() - began
    print("CHECKS", "FAILED: " + ", ".join(bad) if bad else "passed" if checked else "not run", f"{seconds:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "stages": of_stages, "checks": checked}, indent=1) + "\n")
    for tree in trees.values():
        tree.process.stdin.close()
    sys.exit(bool(bad))


if __name__ == "__main__":
    child() if "HOST_CHILD" in os.environ else main()
