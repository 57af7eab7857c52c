"""Stored configs: which one a launch gets, and what a broken file says."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onchip.core import configs
from onchip.core.configs import Entry, device_slug, find_config, read_entries, write_entry

HEURISTIC = {"block": 1, "warps": 1}
SIZES = {"tokens": 4096, "hidden": 1024}


def entry(block: int, sizes: Mapping[str, int] = SIZES, kernel: str = "forward", dtype: str = "bfloat16") -> Entry:
    versions = {"triton": "3.6.0", "torch": "2.11.0"}
    return Entry(kernel, dtype, sizes, {"block": block, "warps": 4}, 5.6, versions, "2026-11-21")


@pytest.fixture(autouse=True)
def folder(config_folder: Path) -> Path:
    return config_folder


def find(
    sizes: Mapping[str, int] = SIZES, heuristic: Mapping[str, int] = HEURISTIC, **other: str
) -> tuple[int, str, str]:
    words = {"op": "toy", "kernel": "forward", "device": "h100", "dtype": "bfloat16"} | other
    found = find_config(**words, sizes=sizes, heuristic=heuristic)
    return found.config["block"], found.how, found.source


def test_without_files_it_is_the_heuristic() -> None:
    found = find_config("toy", "forward", "h100", "bfloat16", SIZES, HEURISTIC)
    assert found.config == HEURISTIC
    assert found.how == "heuristic"
    assert found.source == "nothing stored for this device and dtype within 4 times these sizes"


@pytest.mark.parametrize("other", [{"op": "x"}, {"kernel": "x"}, {"device": "x"}, {"dtype": "x"}])
def test_another_op_kernel_device_or_dtype_does_not_count(folder: Path, other: dict[str, str]) -> None:
    write_entry(folder, "toy", "h100", entry(128))
    assert find() == (128, "exact", "tokens=4096, hidden=1024")
    assert find(dict(reversed(SIZES.items())))[:2] == (128, "exact")
    assert find(**other)[:2] == (1, "heuristic")


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        # By logarithm: 2100 is nearer to 4096, though nearer to 1024 by difference.  Of equals the first in the file.
        (((1024, 1024), (4096, 1024)), (2000, 1024), 0),
        (((1024, 1024), (4096, 1024)), (2100, 1024), 1),
        (((1024, 1024), (4096, 1024)), (2048, 1024), 0),
        # All sizes count: √(1 + 1) against 2.
        (((1024, 1024), (2048, 512)), (4096, 1024), 1),
        # Each size is at most 4 times off.
        (((4096, 1024),), (4 * 4096, 1024 // 4), 0),
        (((4096, 1024),), (4 * 4096 + 1, 1024), None),
        (((4096, 1024),), (4096, 255), None),
        (((4096, 1024),), (0, 1024), None),
        (((4096, 1024),), (4096,), None),
        (((4096, 1024),), (4096, 1024, 10), None),
    ],
)
def test_the_nearest_is_found(
    folder: Path, stored: tuple[tuple[int, int], ...], asked: tuple[int, ...], found: int | None
) -> None:
    names = ("tokens", "hidden", "vocab")
    for i, sizes in enumerate(stored):
        write_entry(folder, "toy", "h100", entry(16 + i, dict(zip(names, sizes, strict=False))))
    expected = (1, "heuristic") if found is None else (16 + found, "nearest")
    assert find(dict(zip(names, asked, strict=False)))[:2] == expected


def test_config_of_another_version_of_the_kernel_is_passed_over(folder: Path) -> None:
    write_entry(folder, "toy", "h100", entry(128))
    assert find(heuristic={"block": 7, "warps": 1, "stages": 2})[:2] == (7, "heuristic")


def test_found_config_cannot_be_changed(folder: Path) -> None:
    write_entry(folder, "toy", "h100", entry(128))
    found = find_config("toy", "forward", "h100", "bfloat16", SIZES, HEURISTIC)
    with pytest.raises(TypeError):
        found.config["block"] = 3  # type: ignore[index]
    assert dict(**found.config) == {"block": 128, "warps": 4}


def test_files_are_read_once(folder: Path) -> None:
    path = write_entry(folder, "toy", "h100", entry(128))
    find()
    path.unlink()
    assert find()[1] == "exact"
    assert find({"tokens": 4096, "hidden": 1025})[1] == "nearest"
    configs.clear_cache()
    assert find()[1] == "heuristic"


# ----------------------------------------------------------------------------------------------------------- the files


def test_written_file(folder: Path) -> None:
    user = folder
    written = [entry(3, kernel="z"), entry(2, dtype="float16"), entry(1), entry(0, {"tokens": 512, "hidden": 1024})]
    paths = {write_entry(user, "toy", "h100", e) for e in written}
    assert paths == {user / "h100" / "toy.json"}
    assert list(read_entries(user, "toy", "h100")) == written[::-1]
    write_entry(user, "toy", "h100", entry(9))
    assert [e.config["block"] for e in read_entries(user, "toy", "h100")] == [0, 9, 2, 3]
    assert [p.name for p in (user / "h100").iterdir()] == ["toy.json"]
    document = json.loads((user / "h100" / "toy.json").read_text())
    assert (document["op"], document["device"]) == ("toy", "h100")
    assert document["entries"][1] == {
        "kernel": "forward", "dtype": "bfloat16", "sizes": SIZES, "config": {"block": 9, "warps": 4}, "ms": 5.6,
        "versions": {"triton": "3.6.0", "torch": "2.11.0"}, "date": "2026-11-21",
    }  # fmt: skip


def test_what_another_process_wrote_is_kept(folder: Path) -> None:
    path = write_entry(folder, "toy", "h100", entry(1))
    theirs = json.loads(path.read_text())
    theirs["entries"][0]["kernel"] = "backward"
    path.write_text(json.dumps(theirs))
    write_entry(folder, "toy", "h100", entry(2))
    assert [e.kernel for e in read_entries(folder, "toy", "h100")] == ["backward", "forward"]


def test_nothing_is_left_of_a_write_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_entry(folder, "toy", "h100", entry(1))
    before = path.read_text()

    def full(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(configs.files.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_entry(folder, "toy", "h100", entry(2))
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]


def test_an_entry_that_could_not_be_read_back_is_not_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="Expected `int` >= 1"):
        write_entry(folder, "toy", "h100", entry(1, {"tokens": 0}))
    assert not folder.exists()


RIGHT = {
    "kernel": "forward", "dtype": "bfloat16", "sizes": SIZES, "config": {"block": 9}, "ms": 5.6,
    "versions": {"triton": "3.6.0"}, "date": "2026-11-21",
}  # fmt: skip


def document(**changes: Any) -> str:
    changed = {name: value for name, value in (RIGHT | changes).items() if value is not None}
    return json.dumps({"op": "toy", "device": "h100", "entries": [RIGHT, changed]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Input data was truncated"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        (
            json.dumps({"op": "other", "device": "h100", "entries": []}),
            "'other' on 'h100', and its path says 'toy'",
        ),
        (json.dumps({"op": "toy", "device": "a100", "entries": []}), "it is for 'toy' on 'a100'"),
        (json.dumps({"op": "toy", "device": "h100"}), "missing required field `entries`"),
        (document(kernel=None, ms=None), "missing required field `kernel` - at `$.entries[1]`"),
        (document(note="mine"), "unknown field `note`"),
        (document(sizes={"tokens": 0}), "Expected `int` >= 1"),
        (document(sizes={"tokens": 10**400}), "Expected `int` <= "),
        (document(config={"block": True}), "Expected `int`, got `bool`"),
        (document(config={"block": -1}), "Expected `int` >= 0"),
        (document(ms="fast"), "Expected `float`, got `str` - at `$.entries[1].ms`"),
        (document(ms=-1), "Expected `float` >= 0"),
        (document(ms=float("nan")), "JSON is malformed"),
    ],
)
def test_a_broken_file_is_named_and_so_is_what_is_wrong(folder: Path, text: str, message: str) -> None:
    path = folder / "h100" / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match=re.escape(str(path)) + ".*" + re.escape(message)) as warned:
        assert find()[1] == find({"tokens": 5, "hidden": 5})[1] == "heuristic"
    assert len(warned) == 1
    with pytest.raises(ValueError, match=re.escape(str(path))):
        write_entry(folder, "toy", "h100", entry(1))
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_device_slug(name: str, slug: str) -> None:
    assert device_slug(name) == slug


def test_import_reads_no_environment_and_no_framework() -> None:
    code = (
        "import os, sys; before = dict(os.environ); os.environ.clear(); os.environ['XDG_CONFIG_HOME'] = 'early';"
        "from onchip.core import configs; os.environ['XDG_CONFIG_HOME'] = '/late';"
        "print(configs.user_folder(), [m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    if sys.platform.startswith("linux"):
        assert out == "/late/onchip/configs []\n"
