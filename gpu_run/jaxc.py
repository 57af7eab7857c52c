"""Times and checks linear_cross_entropy's Mosaic kernels of several trees on one GPU.

    python gpu_run/jaxc.py [--trees base,new] [--heads all] [--rounds 2] [--xla]

Each tree is gpu_run/jaxc_trees/NAME.tar.gz (its src/).  Processes alternate: base, new, new, base, ...  Each traces,
lowers, compiles and times every head; outputs are compared with XLA in float32, and their bits with the first tree's.
"""

import argparse, json, os, subprocess, sys, tarfile, tempfile, time  # noqa: E401
from pathlib import Path

HERE = Path(__file__).parent
HEADS = {
    "llama3.1-8b": (8192, 4096, 128256), "llama3.2-1b": (8192, 2048, 128256), "qwen3-0.6b": (8192, 1024, 151936),
    "gemma3-4b": (4096, 2560, 262144),
}


def worker(heads, check, xla):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from onchip.jax import linear_cross_entropy

    def plain(h, w, y, dtype=None):
        z = jnp.einsum("th,vh->tv", h, w).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None], 1)[:, 0])

    jnp.zeros(8).block_until_ready()
    # imports, and what is traced once in a process
    small = [jax.ShapeDtypeStruct(s, d) for s, d in (((256, 256), jnp.bfloat16), ((1024, 256), jnp.bfloat16), ((256,), jnp.int32))]
    jax.jit(jax.value_and_grad(lambda h, w, y: linear_cross_entropy(h, w, y, backend="mosaic_gpu"), (0, 1))).lower(*small)
    for head in heads:
        t, h, v = HEADS[head]
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (t, h), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (v, h), jnp.bfloat16) * (3 / h**0.5)
        target = jax.random.randint(keys[2], (t,), 0, v).at[::17].set(-100)
        out = {"head": head}
        given = (hidden, weight, target)
        step = jax.jit(jax.value_and_grad(lambda h, w, y: linear_cross_entropy(h, w, y, backend="mosaic_gpu"), (0, 1)))
        t0, c0 = time.perf_counter(), time.process_time()
        traced = step.trace(*given)
        t1, c1 = time.perf_counter(), time.process_time()
        lowered = traced.lower()
        t2, c2 = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
        t3 = time.perf_counter()
        out |= {"trace": t1 - t0, "lower": t2 - t1, "compile": t3 - t2, "trace cpu": c1 - c0, "lower cpu": c2 - c1}
        out["temp MB"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
        loss, (gh, gw) = jax.block_until_ready(compiled(*given))
        bits = lambda x: int(jax.jit(lambda x: jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) * (jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape) % 65521 + 1), dtype=jnp.uint32))(x))  # noqa: E501
        out["bits"] = [np.float32(loss).tobytes().hex(), bits(gh), bits(gw)]
        for _ in range(3):
            jax.block_until_ready(compiled(*given))
        times = []
        for _ in range(8):
            t0 = time.perf_counter()
            for _ in range(4):
                made = compiled(*given)
            jax.block_until_ready(made)
            times.append((time.perf_counter() - t0) / 4e-3)
            del made
        out["ms"] = sorted(times)[len(times) // 2]
        out["ms min"] = min(times)
        if check:
            keep = target >= 0
            rows = jnp.nonzero(keep)[0]
            with jax.default_matmul_precision("highest"):
                l, (a, b) = jax.jit(jax.value_and_grad(plain, (0, 1)))(
                    hidden[rows].astype(jnp.float32), weight.astype(jnp.float32), target[rows])
            gap = lambda x, y: float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))  # noqa: E731
            out["errors"] = [abs(float(loss) - float(l)) / float(l), gap(gh[rows], a), gap(gw, b)]
            out["ignored"] = bool((gh[jnp.nonzero(~keep)[0]] == 0).all())
            del l, a, b
        if xla:
            f = jax.jit(jax.value_and_grad(plain, (0, 1)))
            t0 = time.perf_counter()
            lowered = f.lower(*given)
            t1 = time.perf_counter()
            lowered.compile()
            out["xla"] = [t1 - t0, time.perf_counter() - t1]
        print("ROW " + json.dumps(out), flush=True)
        del hidden, weight, target, given, gh, gw, loss, compiled


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--trees", default="base,new")
    a.add_argument("--heads", default=",".join(HEADS))
    a.add_argument("--rounds", type=int, default=2)
    a.add_argument("--xla", action="store_true")
    a.add_argument("--worker", default="")
    a = a.parse_args()
    if a.worker:
        worker(a.heads.split(","), "check" in a.worker, "xla" in a.worker)
        return
    trees, found, folder = a.trees.split(","), {}, Path(tempfile.mkdtemp())
    for tree in trees:
        with tarfile.open(HERE / "jaxc_trees" / f"{tree}.tar.gz") as file:
            file.extractall(folder / tree)
    for r in range(a.rounds):
        for tree in trees if r % 2 == 0 else trees[::-1]:
            env = os.environ | {"PYTHONPATH": str(folder / tree / "src"), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            what = "run" + ("check" if r == 0 else "") + ("xla" if a.xla and r == 0 and tree == trees[0] else "")
            t = time.time()
            made = subprocess.run([sys.executable, __file__, "--worker", what, "--heads", a.heads], env=env, capture_output=True, text=True)
            rows = [json.loads(x[4:]) for x in made.stdout.splitlines() if x.startswith("ROW ")]
            print(f"# {tree} round {r}: {time.time() - t:.0f} s, rc {made.returncode}", flush=True)
            if made.returncode:
                print(made.stderr[-3000:], flush=True)
            for row in rows:
                found.setdefault(row["head"], {}).setdefault(tree, []).append(row)
    for head, by_tree in found.items():
        first = by_tree[trees[0]][0] if trees[0] in by_tree else None
        for tree, rows in by_tree.items():
            best = lambda name: min(x[name] for x in rows)  # noqa: B023, E731
            same = "same bits" if first and all(x["bits"] == first["bits"] for x in rows) else f"BITS DIFFER {rows[0]['bits']}"
            errors = rows[0].get("errors", [])
            print(
                f"{head:12s} {tree:6s} trace {best('trace'):.2f} lower {best('lower'):.2f} compile {best('compile'):.2f} s; "
                f"{best('ms'):.3f} ms (min {best('ms min'):.3f}); temp {rows[0]['temp MB']:.1f} MB; {same}; "
                f"errors {' '.join(f'{x:.2e}' for x in errors)} ignored {rows[0].get('ignored')} {rows[0].get('xla', '')}"
            )
    Path(os.environ.get("OUT", "/tmp")).joinpath("jaxc.json").write_text(json.dumps(found, indent=1))


main()
