"""What this machine has: installed packages and devices.  Commands ask before they start work."""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}
"""Names as `--framework` takes them, and as people write them."""


def require_packages(command: str, packages: Sequence[str], extras: str) -> None:
    """Raise an ImportError that names the extras to install, unless all `packages` are installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(
                f"onchip {command} needs {package}, which is not installed; pip install 'onchip[{extras}]'"
            )


@contextmanager
def naming_extra(module: str, extra: str) -> Iterator[None]:
    """If an import inside fails for want of a package, say which extra of onchip installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{module} needs {error.name}, which is not installed; pip install 'onchip[{extra}]'", name=error.name
        ) from error


def package_version(package: str) -> str | None:
    """The package's version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_frameworks() -> list[str]:
    """Those of "torch" and "jax" that are installed."""
    return [name for name in FRAMEWORKS if find_spec(name) is not None]


def choose_framework(framework: str | None) -> str:
    """The framework that `--framework` names; for None, the first one that is installed.

    Raises:
        ValueError: it names no framework.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ValueError(f"--framework must be {' or '.join(FRAMEWORKS)}; got {framework!r}")
    return framework or (installed_frameworks() or list(FRAMEWORKS))[0]


def resolve_device(device: str, framework: str = "torch") -> str:
    """The device that `--device` names, "cpu" or "cuda"; for "auto", "cuda" if the framework sees such a device.

    Raises:
        ValueError: it names no device, or "cuda" where the framework sees none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {device!r}")
    if device == "cpu":
        return device
    if framework == "torch":
        import torch

        sees_cuda = torch.cuda.is_available()
    else:
        import jax

        sees_cuda = any(found.platform == "gpu" for found in jax.devices())
    if device == "cuda" and not sees_cuda:
        name = FRAMEWORKS[framework]
        raise ValueError(f"--device is cuda, but {name} sees no CUDA device here; `onchip info` says more")
    return "cuda" if sees_cuda else "cpu"


@functools.cache
def device_slug(name: str) -> str:
    """A short name for a GPU: "h100" for "NVIDIA H100 80GB HBM3", "rtx-4090" for "NVIDIA GeForce RTX 4090"."""
    short = re.sub(r"NVIDIA|GeForce|Tesla|\b\d+ ?GB\b|\bHBM\w*|\bSXM\w*|\bPCIe\b", " ", name, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
