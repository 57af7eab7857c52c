"""Hashes of the bits that kernels compute on the CPU, under Triton's interpreter or in the emulator of tests/ptx.

Run as a script, it prints them.  If a machine's own arithmetic gives other bits, sizes are compared.
"""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from onchip.ops.attention.cases import KINDS, Drawn
from onchip.torch import (
    TopK,
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
)

T, H, V = 40, 32, 300
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": "none"}


def arithmetic():
    """Of NumPy and its BLAS on this machine."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 65, 65), np.float32)
    made = [x @ y, np.exp(x), np.log(np.abs(x)), np.tanh(x), np.exp2(x), x.sum(1)]
    return hashlib.sha256(b"".join(a.tobytes() for a in made)).hexdigest()[:16]


def normal(*shape, dtype=torch.float16, grad=True, std=1.0, seed=0):
    made = np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32) * np.float32(std)
    return torch.from_numpy(made).to(dtype).requires_grad_(grad)


def whole(most, *shape):
    return torch.from_numpy(np.random.default_rng(1).integers(0, most, shape))


def labels(kind, vocab):
    if kind == "dense":
        return normal(T, vocab, grad=False, seed=3).float().softmax(-1)
    y = whole(vocab, T) if kind is None else whole(vocab, T, 4)
    if kind is None:
        y[::7] = -100
        return y
    return TopK(y, torch.full((T, 4), 0.2), "probs", "truncated")


def of_head(kind=None, dtype=torch.float16, hidden=H, **options):
    h, w = normal(T, hidden, dtype=dtype), normal(V, hidden, dtype=dtype, std=0.2)
    return linear_cross_entropy(h, w, labels(kind, V), backend="triton", **options), (h, w)


def of_logits(kind=None, **options):
    z = normal(T, V)
    return cross_entropy(z, labels(kind, V), backend="triton", **options), (z,)


def log_probs_of_head():
    h, w = normal(T, H), normal(V, H, std=0.2)
    made = linear_log_probs(h, w, labels(None, V), entropy=True, backend="triton")
    return made.log_prob + made.entropy, (h, w)


def log_probs_of_logits():
    z = normal(T, V)
    made = log_probs(z, labels(None, V), entropy=True, backend="triton")
    return made.log_prob + made.entropy, (z,)


def jsd_of_logits(beta):
    z = normal(T, V)
    return jsd(z, normal(T, V, grad=False, seed=5), beta=beta, backend="triton"), (z,)


def jsd_of_heads(beta):
    h, w = normal(T, H), normal(V, H, std=0.2)
    teacher = normal(T, H, grad=False, seed=5), normal(V, H, grad=False, std=0.2, seed=5)
    return linear_jsd(h, w, *teacher, beta=beta, backend="triton"), (h, w)


def grouped(dtype=torch.float16, k=24, **options):
    x, w = normal(T, k, dtype=dtype), normal(3, 64, k, dtype=dtype, std=0.2)
    return grouped_matmul(x, w, torch.tensor([7, 0, 33], dtype=torch.int32), backend="triton", **options), (x, w)


def quantised(dtype=torch.float16, **options):
    x, w = normal(T, 136, dtype=dtype), normal(72, 136, dtype=dtype, std=0.1)
    return fp8_linear(x, w, backend="triton", **options), (x, w)


def attended(dtype=torch.float16, mask="causal", sinks=False, tokens=150, **options):
    heads = {"q": 2, "k": 1, "v": 1}
    given = {x: normal(1, tokens, n, 64, dtype=dtype, seed=i) for i, (x, n) in enumerate(heads.items())}
    if sinks:
        given["sinks"] = normal(2, dtype=torch.float32)
    made = KINDS[mask].make(torch.from_numpy, Drawn(1, tokens, tokens))
    return attention(**given, mask=made, backend="triton", **options), (*given.values(),)


INTERPRETED = {
    "linear_cross_entropy": of_head,
    "linear_cross_entropy everything": partial(of_head, **EVERYTHING),
    "linear_cross_entropy recompute": partial(of_head, strategy="recompute"),
    "linear_cross_entropy top-k": partial(of_head, "topk"),
    "linear_cross_entropy top-k everything": partial(of_head, "topk", **EVERYTHING),
    "linear_cross_entropy dense": partial(of_head, "dense"),
    "linear_log_probs": log_probs_of_head,
    "linear_jsd": partial(jsd_of_heads, 0.3),
    "linear_jsd 0": partial(jsd_of_heads, 0.0),
    "cross_entropy": of_logits,
    "cross_entropy everything": partial(of_logits, **EVERYTHING),
    "cross_entropy dense": partial(of_logits, "dense"),
    "cross_entropy top-k": partial(of_logits, "topk"),
    "log_probs": log_probs_of_logits,
    "jsd": partial(jsd_of_logits, 0.3),
    "jsd 1": partial(jsd_of_logits, 1.0),
    "grouped_matmul": grouped,
    "grouped_matmul swiglu": partial(grouped, activation="swiglu"),
    "fp8_linear": quantised,
    "fp8_linear e5m2": partial(quantised, grad_dtype="e5m2"),
    "attention": attended,
    "attention everything": partial(attended, mask="tree", sinks=True, softcap=5.0, scale=0.3),
}
EMULATED = {
    "linear_cross_entropy": partial(of_head, dtype=torch.bfloat16, hidden=64),
    "linear_cross_entropy smoothing": partial(of_head, dtype=torch.bfloat16, hidden=64, label_smoothing=0.1),
    "grouped_matmul": partial(grouped, torch.bfloat16, k=64),
    "fp8_linear": partial(quantised, torch.bfloat16),
    "attention": partial(attended, torch.bfloat16, "causal documents", sinks=True),
}
CASES = {f"interpreted: {x}": x for x in INTERPRETED} | {f"emulated: {x}": x for x in EMULATED}


def described(run):
    """A line for the result and each gradient."""
    made, leaves = run()
    upstream = torch.linspace(-1, 2, made.numel()).view(made.shape).to(made.dtype)
    grads = torch.autograd.grad(made, leaves, upstream)
    return [_line("result", made.detach()), *(_line("gradient", x) for x in grads)]


def _line(name, x):
    bits = x.contiguous().view(torch.uint8) if x.ndim else x[None].view(torch.uint8)
    size = float(x.double().norm())
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{name} {dtype}{list(x.shape)} {hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]} of size {size:.6g}"


def same(line, other):
    """Whether two lines agree as far as another machine's arithmetic lets them."""
    (said, size), (also, other_size) = ((x[:-1], float(x[-1])) for x in (line.split(), other.split()))
    return [*said[:-3]] == [*also[:-3]] and abs(size - other_size) <= 1e-3 * abs(size)


def outputs(names):
    """The lines of these cases, computed in processes of their own."""
    found = {}
    for way in ("interpreted", "emulated"):
        wanted = [CASES[x] for x in names if x.startswith(way)]
        if wanted:
            more = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            more |= {"TRITON_INTERPRET": "1"} if way == "interpreted" else {}
            paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
            command = [sys.executable, __file__, way, *wanted]
            said = subprocess.run(command, env=os.environ | more | paths, stdout=subprocess.PIPE, check=True, text=True)
            made = json.loads(said.stdout.splitlines()[-1])
            found |= {f"{way}: {name}": lines for name, lines in made.items()}
    return {name: found[name] for name in names}


def main(way, names):
    torch.set_num_threads(1)
    if way == "interpreted":
        from interpreter import speed_up

        speed_up()
        made = {name: described(INTERPRETED[name]) for name in names}
    else:
        from emulated import emulating

        with emulating():
            made = {name: described(EMULATED[name]) for name in names}
    print(json.dumps(made))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
