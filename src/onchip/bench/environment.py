"""What a benchmark ran on: recorded in results, and part of their file names."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import onchip
from onchip.bench.harness import adapter
from onchip.core import machine
from onchip.core.machine import package_version


def describe(device: str, framework: str = "torch") -> dict[str, Any]:
    """Versions, hardware and date; what does not exist here is None."""
    fw = adapter(framework)
    gpu = _gpu(framework) if device == "cuda" else {"gpu": None, "gpu_bytes": None, "driver": None, "cuda": None}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_slug(device, framework),
        "onchip": onchip.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "framework": framework,
        **{name: package_version(name) for name in fw.PACKAGES},
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": _cores(),
        "threads": fw.threads(),
        "busy_cores": _busy_cores(),
        **gpu,
    }


def device_slug(device: str, framework: str = "torch") -> str:
    """A short name such as 'cpu-amd-epyc-2c' or 'h100'."""
    if device == "cpu":
        # "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "AMD EPYC 7B13 64-Core Processor"
        model = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\b\d+-Core\b|\bProcessor\b", " ", _cpu_model(), flags=re.I)
        return f"cpu-{machine.device_slug(model)}-{_cores()}c"
    return machine.device_slug(_gpu(framework)["gpu"])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)):
        return found[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy_cores() -> float:
    """How many cores other work keeps busy, seen over half a second of doing nothing here."""
    import psutil  # type: ignore[import-untyped]

    percent: float = psutil.cpu_percent(interval=0.5)
    return round(percent / 100 * (os.cpu_count() or 1), 2)


def _gpu(framework: str) -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    return {
        "gpu_bytes": int(memory.total),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        **adapter(framework).gpu(),
    }


def _git_commit() -> str | None:
    """The commit of this source tree, with '-dirty' if files differ from it."""
    here = Path(onchip.__file__).parent
    if _output(["git", "-C", str(here), "ls-files", "__init__.py"]) is None:
        return None  # installed, perhaps into somebody else's repository
    return _output(["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _output(command: list[str]) -> str | None:
    """What `command` prints, or None if it fails or prints nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
