"""The pages' links, and what docs/conf.py makes of the pages: signatures of the ops, lists of results."""

import re
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from onchip.registry import OPS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def conf():
    return runpy.run_path(str(DOCS / "conf.py"))


def test_every_op_shows_its_signature_after_the_first_example(conf):
    assert {f"ops/{op}" for op in OPS} <= conf["SIGNATURES"].keys()
    for page in conf["SIGNATURES"]:
        source = [(DOCS / f"{page}.md").read_text()]
        conf["with_signatures"](SimpleNamespace(), page, source)
        blocks = re.findall(r"^```python\n(.*?)^```$", source[0], re.MULTILINE | re.DOTALL)
        assert "import" in blocks[0]
        assert re.match(r"\w+\(\n    \w+, ", blocks[1])
        assert max(map(len, blocks[1].splitlines())) <= 80
    loss = conf["signature_lines"]("torch.linear_cross_entropy")
    assert "reduction='mean'" in loss
    assert "..." not in loss


@pytest.mark.parametrize("op", [*OPS, ""])
def test_the_results_of_an_op_begin_with_those_that_the_numbers_show(conf, op):
    current, _, before = conf["results_of"](op).partition("**Before")
    shown = set(re.findall(r"results/([\w.-]+json)", (DOCS / "numbers.md").read_text()))
    names = re.findall(r'href="([\w.-]+\.json)"', current)
    assert names
    assert set(names) <= shown
    assert not set(re.findall(r'href="([\w.-]+\.json)"', before)) & shown
    dates = [name[:10] for name in re.findall(r'href="([\w.-]+\.json)"', before)]
    assert dates == sorted(dates, reverse=True)


def anchors(page):
    """What links to a page may name: its headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    made, times = set(re.findall(r'(?:name|id)="([^"]+)"', text)), Counter()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return made


def test_links_of_the_pages_lead_somewhere():
    wrong = []
    for page in [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(((?!https?:|mailto:)[^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            to = page.parent / path if path else page
            # Those of the API page are made when the site is.
            named = not anchor or to.suffix != ".md" or anchor.startswith("onchip.") or anchor in anchors(to)
            if not (to.exists() and named):
                wrong.append(f"{page.relative_to(DOCS.parent)}: {link}")
    assert wrong == []
