"""What docs/conf.py makes of the pages: signatures of the ops, lists of results."""

import re
import runpy
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
