"""`onchip info`: shows versions, devices and backends on this machine."""

import platform
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console

import onchip
from onchip.core.machine import FRAMEWORKS, package_version
from onchip.registry import OPS


def run_info(console: Console) -> dict[str, Any]:
    """Show versions, devices, which backends can run here, and why the others can't."""
    packages = ("torch", "triton", "jax", "jaxlib", "numpy")
    versions = {"python": platform.python_version(), **{name: package_version(name) for name in packages}}
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine()}
    # By framework: why it is not here, and why it has no CUDA device.
    missing = {name: f"{FRAMEWORKS[name]} is not installed; pip install 'onchip[{name}]'" for name in FRAMEWORKS}
    missing = {name: reason for name, reason in missing.items() if versions[name] is None}
    no_cuda = dict(missing)
    if versions["torch"] is not None:
        import torch

        machine["threads"] = str(torch.get_num_threads())
        if torch.version.cuda is None:
            no_cuda["torch"] = f"torch {torch.__version__} is built without CUDA"
        elif not torch.cuda.is_available():
            no_cuda["torch"] = "PyTorch sees no CUDA device"
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            machine[f"cuda:{i}"] = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor}"
    if versions["jax"] is not None:
        import jax

        machine |= {f"jax {d.platform}:{d.id}": d.device_kind for d in jax.devices()}
        if all(d.platform != "gpu" for d in jax.devices()):
            no_cuda["jax"] = f"JAX sees no CUDA device (jaxlib {versions['jaxlib']})"
    document = {
        "onchip": onchip.__version__,
        "versions": versions,
        "machine": machine,
        "backends": [
            row
            for name in FRAMEWORKS
            for op in OPS
            for row in _backends(name, op, missing.get(name), no_cuda.get(name))
        ],
        "triton": _triton(no_cuda.get("torch")) if versions["torch"] and versions["triton"] else [],
    }
    _show(document, console)
    return document


def _show(document: Mapping[str, Any], console: Console) -> None:
    console.print(f"onchip {onchip.__version__}", style="bold", highlight=False)
    for name, value in {**document["versions"], **document["machine"]}.items():
        _say(f"{name}: {value or 'not installed'}", console)
    _show_backends(document["backends"], console)
    if document["triton"]:
        console.print("\nUses of Triton beyond its documented interface", style="bold")
        for row in document["triton"]:
            _say(f"{row['part']}: {'yes' if row['on'] else 'no'}, {row['why']}", console)


def _show_backends(backends: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the backends of each framework and device with their ops; if none can run, say why once."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in backends:
        places.setdefault((row["framework"], row["device"]), []).append(row)
    for (framework, device), rows in places.items():
        console.print(f"\n{FRAMEWORKS[framework]} on {device}", style="bold", highlight=False)
        reasons = {row["why"] for row in rows}
        if not any(row["usable"] for row in rows) and len(reasons) == 1:
            _say(f"no: {reasons.pop()}", console)
            continue
        ops: dict[tuple[str, bool, str], list[str]] = {}
        for row in rows:
            ops.setdefault((row["backend"], row["usable"], row["why"]), []).append(row["op"])
        for (backend, usable, why), names in ops.items():
            which = "all ops" if len(names) == len(OPS) else ", ".join(names)
            _say(f"{backend}: {which} ({why})" if usable else f"{backend}: no, {why} ({which})", console)


def _say(text: str, console: Console) -> None:
    """Print a line, folded between words."""
    folded = textwrap.fill(
        text, console.width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    console.print(folded, highlight=False, markup=False, soft_wrap=True)


def _triton(no_cuda: str | None) -> list[dict[str, Any]]:
    """The parts that use more of Triton than its documented interface: whether each is on, and what it costs if not."""
    versions, packed = (import_module(f"onchip.kernels.triton.{name}") for name in ("versions", "packed"))
    parts = {
        "kernels in Gluon": (
            versions.gluon_refusal,
            "on Hopper, linear losses take up to a fifth longer, most at small hidden sizes",
        ),
        "launches without Triton's search": (
            versions.direct_refusal,
            "each launch takes the CPU several times as long",
        ),
        "launches of prepared calls": (
            packed.refusal,
            "each call is checked, planned and launched anew, which takes the CPU several times as long",
        ),
    }

    rows = []
    for part, (refusal, cost) in parts.items():
        reason = no_cuda or refusal()
        why = "tried, and it works" if reason is None else reason if no_cuda else f"{reason}; so {cost}"
        rows.append({"part": part, "on": reason is None, "why": why})
    return rows


_BACKENDS = {
    "plain": "the framework's own operations",
    "xla": "matrix products and loops of XLA",
    "collective": "the framework's own products, each with one collective operation",
    "ring": "the framework's own products, with exchanges around a ring of ranks",
    "symmetric": "kernels for this device, and copies between GPUs that map each other's memory",
    "dequantize": "the framework's own operations, in float32",
    "scaled_mm": "cuBLAS's blockwise FP8 products",
}


def _backends(framework: str, op: str, missing: str | None, no_cuda: str | None) -> list[dict[str, Any]]:
    """The backends that can run a plain bfloat16 call on the CPU, and all the backends for a CUDA device."""
    reasons: dict[str, Mapping[str, str | None]]
    if missing is not None:
        plain = {"plain" if framework == "torch" else "xla": missing}
        reasons = {"cpu": plain, "cuda": plain}
    else:
        refusals = OPS[op].entry("checks:plain_refusals")
        on_cpu = refusals("cpu", "bfloat16", framework)
        # PyTorch can't be asked about a device that isn't there.
        on_gpu = on_cpu if framework == "torch" and no_cuda else refusals("cuda", "bfloat16", framework)
        reasons = {
            "cpu": {backend: None for backend, reason in on_cpu.items() if reason is None},
            "cuda": {backend: no_cuda or reason for backend, reason in on_gpu.items()},
        }
    return [
        {
            "op": op,
            "framework": framework,
            "backend": backend,
            "device": device,
            "usable": reason is None,
            "why": reason or _BACKENDS.get(backend, "kernels for this device"),
        }
        for device, by_backend in reasons.items()
        for backend, reason in by_backend.items()
    ]
