"""README and docs show the numbers in results/, and README is short."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
measured = importlib.import_module("measured")


def test_pages_show_what_results_hold():
    assert measured.wrong() == []


@pytest.mark.parametrize(
    ("page", "text", "found"),
    [
        ("README.md", "It takes 3.1 ms, or 40% less.", ["3.1 ms", "40 %"]),
        ("README.md", "<!-- numbers: pitch -->\nIt takes 3.1 ms.\n<!-- end -->\nAbout 256 MiB, `7 ms`.", []),
        ("docs/guides/x.md", "It takes 12345 ms.", ["12345 ms"]),
        (
            "docs/guides/x.md",
            "It takes 39.6 ms and 492 MiB, 31% less (2026-11-26-h100-linear_cross_entropy-users.json).",
            ["31 %"],
        ),
        ("docs/guides/x.md", "It is 31% faster, and compiles in 17 s.", ["17 s", "31 %"]),
        ("docs/guides/parallelism.md", "At 80% of the data sheet's rate.", []),
        ("docs/guides/x.md", "It takes 39.5 ms (2026-11-26-h100-linear_cross_entropy-users.json).", ["39.5 ms"]),
    ],
)
def test_a_figure_that_no_file_has_is_found(page, text, found):
    assert measured.strangers(page, text) == found


QUACK = "<!-- ratio: 2026-11-22-h100-cross_entropy: quack / onchip auto: forward"
FILE = "(2026-11-26-h100-linear_cross_entropy-users.json)"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # Of two figures in the same passage.
        ("It takes 0.90 ms where the other takes 1.20 ms: 25% less, or 1.33 times as fast.", []),
        ("It takes 0.90 ms where the other takes 1.20 ms: 27% less.", ["27 %"]),
        ("It takes 0.90 ms where the other takes 1.20 ms.\n\nThat is 25% less.", ["25 %"]),
        ("With 1.50 or 1.80 ms it takes 50 to 60% of 3.00 ms.", []),
        ("With 1.50 or 1.80 ms it takes 50 to 64% of 3.00 ms.", ["64 %"]),
        # What a comment says it is: of several the least, the largest, or a mean.
        (f"It takes 4 to 28% less.\n{QUACK} -->", []),
        (f"It takes 4 to 20% less.\n{QUACK} -->", ["20 %"]),
        (f"It takes 12% less.\n{QUACK}; vocab-32000 -->", []),
        (f"It takes 12% more.\n{QUACK}; vocab-32000 -->", ["12 %"]),
        (f"It takes 12% less.\n{QUACK}; vocab-32001 -->", ["12 %"]),
        # A ratio of the file, of the case and the implementation that are named.
        (f"{FILE}\n\n| head | onchip | torch.compile |\n|---|---|---|\n| smollm T=16384 | 1.31 x | 1.60 x |", []),
        (f"{FILE}\n\n| head | onchip | torch.compile |\n|---|---|---|\n| smollm T=16384 | 1.60 x | 1.31 x |",
         ["1.6 x", "1.31 x"]),
        # Bare numbers in a column whose head says that they are ratios.
        ("| onchip | XLA | onchip / XLA |\n|---|---|---|\n| 44.0 ms | 40.0 ms | **1.10** |", []),
        ("| onchip | XLA | onchip / XLA |\n|---|---|---|\n| 44.0 ms | 40.0 ms | 1.20 |", ["1.2 x"]),
        ("| onchip | XLA | tokens |\n|---|---|---|\n| 44.0 ms | 40.0 ms | 1.20 |", []),
        # No ratios: sizes, what is computed, and a case's input.
        ("Tiles of 128 x 256, `1.5 times`, $1.5 \\times 2$, 90% ignored, with 90% of the labels ignored, 1.5 x H.", []),
    ],
)  # fmt: skip
def test_a_share_or_ratio_that_follows_from_nothing_is_found(text, found):
    assert measured.without_a_measurement(text, measured.RESULTS) == found


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A folder with the files that there are, for more of them."""
    for path in measured.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path


def test_the_newest_file_is_shown(results):
    """A later run's file takes the place of the one before, on whatever card; of two that day the H100's."""
    before = measured.needed("linear_cross_entropy-users")
    text = before.path.read_text().replace("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    (results / "2099-01-01-h200-linear_cross_entropy-users.json").write_text(text)
    assert measured.pitch("README.md").startswith("On an H200 it matches")
    (results / "2099-01-01-h100-linear_cross_entropy-users.json").write_text(before.path.read_text())
    assert measured.pitch("README.md").startswith("On an H100 it matches")


def test_a_picture_of_other_results_is_found(monkeypatch, results):
    monkeypatch.setattr(measured, "strangers", lambda *_: [])  # of pages, which takes the longest
    text = measured.needed("linear_cross_entropy-hopper-peers").path.read_text()
    document = json.loads(text)
    for row in filter(lambda row: row["ok"], document["rows"]):
        row |= {name: 2 * row[name] for name in ("median_ms", "p10_ms", "p90_ms")}
    (results / "2099-01-01-h100-linear_cross_entropy-hopper-peers.json").write_text(json.dumps(document))
    assert f"{measured.PICTURE} is not what results/ give; run python tools/measured.py" in measured.wrong()


def test_the_table_says_who_loses_and_bold_is_the_best_of_several():
    lines = measured.few_rows("README.md").splitlines()[2:8]
    assert [line.split(" | ")[0] for line in lines] == [
        "| an 8B model", "| its LoRA", "| on answers", "| varying lengths", "| packed attention", "| on two GPUs",
    ]  # fmt: skip
    others = [line.split(" | ")[3:] for line in lines]
    assert any("**" in cell for row in others for cell in row)
    assert all("**" in line or row[0] == "-" for line, row in zip(lines, others, strict=True))


def test_what_later_runs_may_bring_has_its_row(results):
    def run(name, case, mode, median, **ms):
        rows = [
            {"case": case, "mode": mode, "impl": f"{impl} 1.0", "ok": True, median: time, "extra_bytes": 1 << 20}
            for impl, time in ms.items()
        ]
        document = {"environment": {"gpu": "NVIDIA H100 80GB HBM3"}, "title": name, "rows": rows}
        (results / f"2099-01-01-h100-{name}.json").write_text(json.dumps(document))

    run("attention", "documents-2048", measured.MODE, "median_ms", **{"onchip auto": 3, "torch flex_attention": 2})
    lengths = {"onchip auto": 30, "torch.compile(dynamic=True)": 40, "liger": 35}
    run("linear_cross_entropy-lengths", "llama3.1-8b-lengths", "40 lengths, first time", "mean_ms", **lengths)
    ranks = {"onchip auto": 20, "torch, three all-reduces, float32 logits": 30}
    run("linear_cross_entropy-world2", "llama3.1-8b-t8192", measured.MODE, "median_ms", **ranks)
    lines = measured.few_rows("README.md").splitlines()[2:8]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [
        "an 8B model", "its LoRA", "on answers", "varying lengths", "packed attention", "on two GPUs",
    ]  # fmt: skip
    assert "**30.0" in lines[3]
    assert "Liger 35.0" in lines[3]
    assert "**2.00" in lines[4]  # which isn't ours
    assert "\n| 40 lengths, first time | **30.0 ms** | 40.0 ms | 35.0 ms |\n" in measured.numbers_page()
    by_script = {"environment": {"gpu": "NVIDIA H100"}, "title": "By a script", "rows": [{"call": "x", "ms": 2.5}]}
    (results / "2099-01-01-h100-linear_jsd.json").write_text(json.dumps(by_script))
    page = measured.numbers_page()
    assert "By a script:\n\n| call | ms |\n| --- | --- |\n| x | 2.5 |\n" in page
    assert all(f"\n## {title}\n" in page for title in ("attention", "Two or more GPUs"))


def test_what_was_wrong_has_no_time_and_is_named(results):
    document = json.loads(measured.needed("attention").path.read_text())
    for row in document["rows"]:
        row["ok"] = row["ok"] and (row["case"], row["impl"].split()[0]) != ("full", "onchip")
    (results / "2099-01-01-h200-attention.json").write_text(json.dumps(document))
    section = measured.numbers_page().split("\n## attention\n")[1].split("\n## ")[0]
    assert "\n| `full` | - | " in section
    assert re.search(r"why onchip has no time in .*`full`", section)


def test_a_newer_file_of_another_kind_takes_no_place(results):
    """What a script writes under a name that `onchip bench` uses, or another script."""

    def made():
        pages = measured.made_anew()
        return {page: measured._compared(page, text) for page, text in pages.items() if page != measured.NUMBERS}

    before = made()
    for name in {line.file for line in measured.LINES} | {"host", "lengths", "training-step", "grouped_matmul-layer"}:
        document = {"environment": {"gpu": "NVIDIA H200"}, "title": "Others", "rows": [{"kernel": "x", "ms": 2.5}]}
        (results / f"2099-01-01-h200-{name}.json").write_text(json.dumps(document))
        for row in document["rows"]:
            row |= {"case": "another", "mode": "forward", "impl": "onchip auto 1.0", "ok": True, "median_ms": 1.0}
        (results / f"2099-01-02-h200-{name}.json").write_text(json.dumps(document))
    assert made() == before


def test_each_of_the_numbers_has_a_card_a_date_and_versions():
    sections = measured.numbers_page().split("\n## ")[1:]
    told = r"^[^|\n]+, \d{4}-\d\d-\d\d, .*(?:PyTorch|JAX) \d+\.\d+.* \(\[file\]\(\.\./results/"
    assert [text.splitlines()[0] for text in sections if not re.search(told, text, re.MULTILINE)] == []
    assert "liger 0.8.5, quack 0.6.5 ([file]" in sections[1]


def test_the_readme_is_read_in_half_a_minute():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    table = text.partition("<!-- numbers: table -->")[2].partition("<!-- end -->")[0]
    assert 4 <= table.count("\n| ") - 2 <= 6
