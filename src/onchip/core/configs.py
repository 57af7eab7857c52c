"""Stored tuning configs: which block sizes a kernel runs with on which device.  Knows no op and imports no framework.

A file `<folder>/<device>/<op>.json` holds what `onchip tune` measured:

    {"op": "...", "device": "h100", "entries": [
      {"kernel": "forward", "dtype": "bfloat16", "sizes": {"tokens": 4096, "hidden": 4096, "vocab": 128256},
       "config": {"block_tokens": 128, "stages": 3}, "ms": 5.6, "versions": {"triton": "3.6.0"}, "date": "2026-11-21"}]}

There are two folders: the user's own, which goes first, and the one that ships with the package.  Files are read on
first use and kept; nothing here measures anything.
"""

import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import platformdirs

# The nearest stored config is used as long as no size is further off than by this factor: block sizes that suit a
# problem suit one of twice the tokens, but not one of a hundred times.
NEAREST_FACTOR = 4

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Entry:
    """The best config of one kernel for one problem, as it was measured."""

    kernel: str
    dtype: str
    sizes: Mapping[str, int]
    config: Mapping[str, int]
    ms: float
    """Median time of the kernel with this config, in milliseconds."""
    versions: Mapping[str, str]
    """Versions of the packages that it was measured with, by package."""
    date: str

    def is_for(self, kernel: str, dtype: str, sizes: Mapping[str, int]) -> bool:
        """Whether it is the entry of exactly this problem; a file has one at most."""
        return (self.kernel, self.dtype, self.sizes) == (kernel, dtype, sizes)


@dataclass(frozen=True)
class Found:
    """A config for a launch, and where it comes from."""

    config: Mapping[str, int]
    how: Literal["exact", "nearest", "heuristic"]
    source: str
    """For people: the sizes and the file of the stored config, or why none is used."""


def find_config(
    op: str, kernel: str, device: str, dtype: str, sizes: Mapping[str, int], heuristic: Mapping[str, int]
) -> Found:
    """The config to launch `kernel` with: a stored one for these sizes, else the nearest stored one, else `heuristic`.

    An exact one is of the same device, kernel, dtype and sizes; the user's goes before the shipped one.  The nearest
    is the one with the smallest Euclidean distance between the base-2 logarithms of the sizes, among those where each
    size is at most `NEAREST_FACTOR` times larger or smaller; of equals the first in the user's file, then in the
    shipped one.  A stored config whose names aren't those of `heuristic` belongs to another version of the kernel and
    is passed over.

    Args:
        op: the op's name.
        kernel: the kernel's name within the op.
        device: what `device_slug` makes of the device's name.
        dtype: such as "bfloat16".
        sizes: the problem's sizes by name.
        heuristic: what to use where nothing is stored; also says which names a config has.

    Raises:
        ValueError: a file of configs is broken; the message names it.
    """
    key = (op, kernel, device, dtype, tuple(sorted(sizes.items())), tuple(sorted(heuristic)))
    return _find_stored(*key) or Found(heuristic, "heuristic", _NOTHING_NEAR)


_NOTHING_NEAR = f"nothing stored for this device and dtype within {NEAREST_FACTOR} times these sizes"


@functools.lru_cache(maxsize=4096)
def _find_stored(
    op: str, kernel: str, device: str, dtype: str, sizes: tuple[tuple[str, int], ...], names: tuple[str, ...]
) -> Found | None:
    wanted = dict(sizes)
    nearest, smallest, source = None, math.inf, ""
    for folder in (user_folder(), SHIPPED_FOLDER):
        for entry in read_entries(folder, op, device):
            if (entry.kernel, entry.dtype) != (kernel, dtype) or sorted(entry.config) != list(names):
                continue
            where = f"{format_config(entry.sizes)} ({'shipped' if folder == SHIPPED_FOLDER else folder})"
            if entry.sizes == wanted:
                return Found(MappingProxyType(dict(entry.config)), "exact", where)
            distance = _distance(entry.sizes, wanted)
            if distance < smallest:
                nearest, smallest, source = entry, distance, where
    return Found(MappingProxyType(dict(nearest.config)), "nearest", source) if nearest else None


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
    read_entries.cache_clear()
    _find_stored.cache_clear()


# ----------------------------------------------------------------------------------------------------------- the files


def config_path(folder: Path, op: str, device: str) -> Path:
    """Where `folder` keeps the op's configs for the device."""
    return folder / device / f"{op}.json"


@functools.lru_cache(maxsize=256)
def read_entries(folder: Path, op: str, device: str) -> tuple[Entry, ...]:
    """What the folder stores, in the file's order; nothing if there is no such file.

    Raises:
        ValueError: the file can't be read or isn't what it should be.
    """
    path = config_path(folder, op, device)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _parse(document, op, device)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as e:  # JSON and UTF-8 errors are ValueErrors
        raise ValueError(f"{path} is not a file of tuned configs: {e}; repair or remove it") from e


def write_entry(folder: Path, op: str, device: str, entry: Entry) -> Path:
    """Store `entry` in the folder's file in place of one for the same problem; returns the file's path.

    Entries are sorted by kernel, dtype and sizes.  A reader sees the old file or the new one, never half of one; of two
    processes that write at once, one loses what it wrote.

    Raises:
        ValueError: the file that is there is broken, or `entry` is not fit to be stored.
        OSError: the file can't be written.
    """
    read_entries.cache_clear()  # another process may have written since
    kept = [e for e in read_entries(folder, op, device) if not e.is_for(entry.kernel, entry.dtype, entry.sizes)]
    entries = sorted([*kept, entry], key=lambda e: (e.kernel, e.dtype, tuple(e.sizes.items())))
    document = {"op": op, "device": device, "entries": [asdict(e) for e in entries]}
    _parse(document, op, device)
    path = config_path(folder, op, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as file:
        try:
            file.write(_as_text(document))
            file.flush()
            os.chmod(file.name, 0o644)  # temporary files are the user's alone; these may be shared or shipped
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    clear_cache()
    return path


def _as_text(document: Mapping[str, Any]) -> str:
    """JSON with one entry a line, so that a changed entry is a changed line."""
    entries = ",\n".join(f"  {json.dumps(entry, allow_nan=False)}" for entry in document["entries"])
    head = json.dumps({"op": document["op"], "device": document["device"]})[:-1]
    return f'{head}, "entries": [\n{entries}\n]}}\n'


def _parse(document: Any, op: str, device: str) -> tuple[Entry, ...]:
    """The entries of a file's document; ValueError says what is wrong with it."""
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    for name, expected in (("op", op), ("device", device)):
        if document.get(name) != expected:
            raise ValueError(f"{name!r} must be {expected!r}, as the file's path says; got {document.get(name)!r}")
    entries = document.get("entries")
    if not isinstance(entries, list):
        raise ValueError("'entries' must be a list")
    return tuple(_parse_entry(entry, f"entries[{i}]") for i, entry in enumerate(entries))


def _parse_entry(entry: Any, where: str) -> Entry:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    fields = Entry.__dataclass_fields__
    missing = [name for name in fields if name not in entry]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}")
    for name in ("kernel", "dtype", "date"):
        if not isinstance(entry[name], str):
            raise ValueError(f"{where}: {name!r} must be a string; got {entry[name]!r}")
    for name in ("sizes", "config"):
        _check_mapping(entry[name], _is_int, f"{where}: {name!r}", "whole numbers")
    if any(size < 1 for size in entry["sizes"].values()):
        raise ValueError(f"{where}: 'sizes' must be 1 or more; got {entry['sizes']!r}")
    _check_mapping(entry["versions"], lambda value: isinstance(value, str), f"{where}: 'versions'", "strings")
    ms = entry["ms"]
    if not (_is_int(ms) or isinstance(ms, float)) or not 0 <= ms < math.inf:
        raise ValueError(f"{where}: 'ms' must be a time in milliseconds; got {ms!r}")
    return Entry(**{name: entry[name] for name in fields})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_mapping(value: Any, is_right: Callable[[Any], bool], where: str, what: str) -> None:
    if not isinstance(value, dict) or not all(is_right(v) for v in value.values()):
        raise ValueError(f"{where} must map names to {what}; got {value!r}")
