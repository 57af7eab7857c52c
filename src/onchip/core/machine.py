"""What is here: installed packages and devices.  Commands ask before they start work."""

from collections.abc import Sequence
from importlib.util import find_spec


def require_packages(command: str, packages: Sequence[str], extras: str) -> None:
    """Raise ImportError naming the extras to install unless all `packages` are there."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(
                f"onchip {command} needs {package}, which is not installed; pip install 'onchip[{extras}]'"
            )


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda" for what `--device` was given: for "auto", cuda where PyTorch sees a device.

    Raises:
        ValueError: another word, or "cuda" where there is none.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch sees no CUDA device here; `onchip info` says more")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
