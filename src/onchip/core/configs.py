"""Stored tuning configs: which block sizes a kernel runs with on which device.  Knows no op and imports no framework.

A file `<folder>/<device>/<op>.json` holds what `onchip tune` measured:

    {"op": "...", "device": "h100", "entries": [
      {"kernel": "forward", "dtype": "bfloat16", "sizes": {"tokens": 4096, "hidden": 4096, "vocab": 128256},
       "config": {"block_tokens": 128, "stages": 3}, "ms": 5.6, "versions": {"triton": "3.6.0"}, "date": "2026-11-21"}]}

The folder is the user's own.  Files are read on first use and kept; nothing here measures anything.
"""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, ParamSpec, TypeVar, cast

import msgspec
import platformdirs

from onchip.core import files

# The nearest stored config is used as long as no size is further off than by this factor: block sizes that suit a
# problem suit one of twice the tokens, but not one of a hundred times.
NEAREST_FACTOR = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CACHES: list[Callable[[], object]] = []  # what empties them


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best config of one kernel for one problem, as it was measured."""

    kernel: str
    dtype: str
    sizes: Mapping[str, Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]]
    config: Mapping[str, Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    ms: Annotated[float, msgspec.Meta(ge=0)]
    """Median time of the kernel with this config, in milliseconds."""
    versions: Mapping[str, str]
    """Versions of the packages that it was measured with, by package."""
    date: str

    def is_for(self, kernel: str, dtype: str, sizes: Mapping[str, int]) -> bool:
        """Whether it is the entry of exactly this problem; a file has one at most."""
        return (self.kernel, self.dtype, self.sizes) == (kernel, dtype, sizes)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    op: str
    device: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Found:
    """A config for a launch, and where it comes from."""

    config: Mapping[str, int]
    how: Literal["exact", "nearest", "heuristic"]
    source: str
    """For people: the sizes of the stored config, or why none is used."""


def until_cleared(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A cache of what depends on the stored configs; `clear_cache` empties it."""
    cached = functools.lru_cache(maxsize=4096)(function)
    when_cleared(cached.cache_clear)
    return cast("Callable[_P, _T]", cached)


def when_cleared(clear: Callable[[], object]) -> None:
    """Have `clear_cache` call this too."""
    _CACHES.append(clear)


def find_config(
    op: str, kernel: str, device: str, dtype: str, sizes: Mapping[str, int], heuristic: Mapping[str, int]
) -> Found:
    """The config to launch `kernel` with: a stored one for these sizes, else the nearest stored one, else `heuristic`.

    `device` is what `device_slug` makes of its name.  An exact config is of the same device, kernel, dtype and sizes.
    The nearest is the one with the smallest Euclidean distance between the base-2 logarithms of the sizes, among those
    where each size is at most `NEAREST_FACTOR` times larger or smaller; of equals the first in the file.  A stored
    config whose names aren't those of `heuristic` belongs to another version of the kernel and is passed over, and so
    is a broken file, with one warning that names it.
    """
    key = (op, kernel, device, dtype, tuple(sorted(sizes.items())), tuple(sorted(heuristic)))
    nothing = f"nothing stored for this device and dtype within {NEAREST_FACTOR} times these sizes"
    return _find_stored(*key) or Found(heuristic, "heuristic", nothing)


@until_cleared
def _find_stored(
    op: str, kernel: str, device: str, dtype: str, sizes: tuple[tuple[str, int], ...], names: tuple[str, ...]
) -> Found | None:
    wanted = dict(sizes)
    usable = [
        e for e in _usable_entries(op, device) if (e.kernel, e.dtype, sorted(e.config)) == (kernel, dtype, [*names])
    ]
    distance, nearest = min(
        ((_distance(e.sizes, wanted), e) for e in usable), key=lambda x: x[0], default=(math.inf, None)
    )
    if nearest is None or distance == math.inf:
        return None
    how: Literal["exact", "nearest"] = "exact" if nearest.sizes == wanted else "nearest"
    return Found(MappingProxyType(dict(nearest.config)), how, format_config(nearest.sizes))


@until_cleared
def _usable_entries(op: str, device: str) -> tuple[Entry, ...]:
    try:
        return read_entries(user_folder(), op, device)
    except ValueError as error:
        warnings.warn(f"onchip: {error}; none of its configs is used", stacklevel=2)
        return ()


def _distance(stored: Mapping[str, int], wanted: Mapping[str, int]) -> float:
    """Euclidean distance of the logarithms; infinite where a size is too far off or the sizes have other names."""
    if stored.keys() != wanted.keys():
        return math.inf
    steps = [math.log2(size / max(wanted[name], 1)) for name, size in stored.items()]
    return math.hypot(*steps) if all(abs(step) <= math.log2(NEAREST_FACTOR) for step in steps) else math.inf


def user_folder() -> Path:
    """The folder of the user's own configs; it need not exist."""
    return platformdirs.user_config_path("onchip") / "configs"


@functools.cache
def device_slug(name: str) -> str:
    """A short name for a GPU: "h100" for "NVIDIA H100 80GB HBM3", "rtx-4090" for "NVIDIA GeForce RTX 4090"."""
    short = re.sub(r"NVIDIA|GeForce|Tesla|\b\d+ ?GB\b|\bHBM\w*|\bSXM\w*|\bPCIe\b", " ", name, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")


def format_config(config: Mapping[str, int]) -> str:
    """Sizes or a config in one line."""
    return ", ".join(f"{name}={value}" for name, value in config.items())


def clear_cache() -> None:
    """Forget what was read, so that the next use reads the files again."""
    for clear in _CACHES:
        clear()


# ----------------------------------------------------------------------------------------------------------- the files


def config_path(folder: Path, op: str, device: str) -> Path:
    """Where `folder` keeps the op's configs for the device."""
    return folder / device / f"{op}.json"


def read_entries(folder: Path, op: str, device: str) -> tuple[Entry, ...]:
    """What the folder stores, in the file's order; nothing if there is no such file.

    Raises:
        ValueError: the file can't be read or isn't what it should be.
    """
    path = config_path(folder, op, device)
    try:
        return _decode(path.read_bytes(), op, device)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not a file of tuned configs: {e}; repair or remove it") from e


def write_entry(folder: Path, op: str, device: str, entry: Entry) -> Path:
    """Store `entry` in the folder's file in place of one for the same problem; returns the file's path.

    Entries are sorted by kernel, dtype and sizes.

    Raises:
        ValueError: the file that is there is broken, or `entry` is not fit to be stored.
        OSError: the file can't be written.
    """
    kept = [e for e in read_entries(folder, op, device) if not e.is_for(entry.kernel, entry.dtype, entry.sizes)]
    entries = sorted([*kept, entry], key=lambda e: (e.kernel, e.dtype, tuple(e.sizes.items())))
    # One entry a line, so that a changed entry is a changed line.
    lines = ",\n".join(f"  {json.dumps(msgspec.to_builtins(e), allow_nan=False)}" for e in entries)
    text = f'{json.dumps({"op": op, "device": device})[:-1]}, "entries": [\n{lines}\n]}}\n'
    _decode(text.encode(), op, device)
    path = config_path(folder, op, device)
    files.replace(path, text)
    clear_cache()
    return path


def _decode(text: bytes, op: str, device: str) -> tuple[Entry, ...]:
    """The entries of a file; ValueError says what is wrong with it."""
    file = msgspec.json.decode(text, type=_File)
    if (file.op, file.device) != (op, device):
        raise ValueError(f"it is for {file.op!r} on {file.device!r}, and its path says {op!r} on {device!r}")
    return file.entries
