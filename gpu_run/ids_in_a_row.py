import os, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp, numpy as np
from onchip.jax import linear_cross_entropy, linear_log_probs, TopK
seed, until = int(sys.argv[1]), time.time() + float(sys.argv[2])
tokens, hidden, vocab, ids = (3999, 1024, 32768, 64) if len(sys.argv) < 4 else (39, 64, 512, 8)
B = "mosaic_gpu" if len(sys.argv) < 4 else "auto"
keys = jax.random.split(jax.random.key(0), 4)
h = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
w = jax.random.normal(keys[1], (vocab, hidden), jnp.bfloat16) * hidden**-0.5
i, v = jax.random.randint(keys[2], (tokens, ids), 0, vocab), jax.random.uniform(keys[3], (tokens, ids))
one = jax.jit(lambda h, w, i, v: linear_cross_entropy(h, w, TopK(i, v, "probs", "truncated"), backend=B))
each = jax.jit(lambda h, w, i, v: linear_cross_entropy(h, w, TopK(i, v, "probs", "truncated"), reduction="none", backend=B))
lp = jax.jit(lambda h, w, i, v: tuple(linear_log_probs(h, w, i, entropy=True, backend=B)))
hard = jax.jit(lambda h, w, i, v: linear_cross_entropy(h, w, i[:, 0], reduction="none", backend=B))
fs = {"one": one, "each": each, "lp": lp, "hard": hard}
t0 = time.time(); firsts = {}; n = dict.fromkeys(fs, 0); bad = dict.fromkeys(fs, 0); shown = 0
while time.time() < until:
    for name, f in fs.items():
        outs = [f(h, w, i, v) for _ in range(4)]
        for o in outs:
            o = [np.asarray(x) for x in jax.tree.leaves(o)]
            if name not in firsts: firsts[name] = o
            n[name] += 1
            if any(a.tobytes() != b.tobytes() for a, b in zip(o, firsts[name])):
                bad[name] += 1
                if shown < 12:
                    shown += 1
                    for q, (a, b) in enumerate(zip(o, firsts[name])):
                        where = np.argwhere(a != b)
                        if len(where):
                            d = a[tuple(where.T)] - b[tuple(where.T)]
                            print(seed, name, n[name], "leaf", q, a.shape, "differs at", len(where), "rows", len(set(where[:, 0])) if a.ndim else "", where[:3].tolist(), where[-3:].tolist(), "by", d[:4], "max", np.abs(d).max(), flush=True)
print(seed, "runs", n, "bad", bad, "%.0f s" % (time.time() - t0), flush=True)
