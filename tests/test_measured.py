"""README and docs show what results/ hold, and README is short."""

import importlib
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
            [],
        ),
        ("docs/guides/x.md", "It takes 39.5 ms (2026-11-26-h100-linear_cross_entropy-users.json).", ["39.5 ms"]),
    ],
)
def test_a_figure_that_no_file_has_is_found(page, text, found):
    assert measured.strangers(page, text) == found


def test_the_newest_file_is_shown(monkeypatch, tmp_path):
    """A later run's file takes the place of the one before, on whatever card."""
    before = measured.needed("linear_cross_entropy-users")
    text = before.path.read_text().replace("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    for path in measured.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "2099-01-01-h200-linear_cross_entropy-users.json").write_text(text)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.pitch("README.md").startswith("On an H200 it matches")


def test_the_readme_is_read_in_half_a_minute():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    table = text.partition("<!-- numbers: table -->")[2].partition("<!-- end -->")[0]
    assert 4 <= table.count("\n| ") - 2 <= 6
