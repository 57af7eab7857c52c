"""Pages of results files: what they say, and what they show in a browser."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from onchip.bench import page

RESULTS = sorted((Path(__file__).parent.parent / "results").glob("*.json"))
WIDTHS = (1200, 400)


def row(**more):
    errors = {"loss": 1e-7, "grad_hidden": 2e-3, "grad_weight": 6e-3}
    return {
        "op": "linear_cross_entropy", "case": "llama3.1-8b", "sizes": {"T": 4096, "H": 2048, "V": 128256},
        "dtype": "bfloat16", "date": "2026-11-23T06:32:27+00:00", "mode": "forward+backward",
        "impl": "onchip auto 0.1.0", "config": {"chunk": 7},
        "median_ms": 16.73, "p10_ms": 16.7, "p90_ms": 16.9, "floor_ms": 16.2,
        "ratio_to_floor": 1.03, "compile_s": None, "extra_bytes": 3 << 20, "host_ms": None, "kernels": None,
        "error": 6e-3, "error_bound": 1e-2, "error_name": "grad_weight", "errors": errors,
        "error_bounds": {"loss": 1e-2, "grad_hidden": 4e-3, "grad_weight": 1e-2}, "ok": True, **more,
    }  # fmt: skip


def wrong_row(**more):
    timeless = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "ratio_to_floor", "extra_bytes"))
    return row(impl="peer <b> 2", error=1e-2, error_name="grad_hidden", ok=False, **timeless) | more


def made(*rows, script=page.SCRIPT):
    environment = {
        "op": "linear_cross_entropy", "date": "2026-11-24T00:00:00+00:00", "device": "h100", "cpu": "Xeon",
        "gpu": "NVIDIA H100", "framework": "torch", "torch": "2.11.0", "onchip": "0.1.0", "repeats": 7,
    }  # fmt: skip
    return page.html_page({"environment": environment, "rows": list(rows), "not_run": []}, "x.json", script)


def cells(html, row):
    """The texts of a row of the table, by the columns' titles."""
    titles = []
    head = html[html.index('<table id="rows">') :]
    first, second = re.findall(r"<tr>(.*?)</tr>", head, re.S)[:2]
    below = iter(re.findall(r"<button[^>]*>(.*?)</button>", second))
    for group, title in re.findall(r'class="group">(.*?)</th>|<button[^>]*>(.*?)</button>', first):
        titles += [f"{group}: {next(below)}", f"{group}: {next(below)}"] if group else [title]
    line = re.findall(r"<tr[^>]*>(<th scope=.*?)</tr>", head)[row]
    texts = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)]
    return dict(zip(titles, texts, strict=True))


def test_a_row_says_its_sizes_its_run_its_floor_and_each_error_beside_its_bound():
    shown = cells(made(row(), wrong_row(errors={"loss": None, "grad_hidden": 1e-2, "grad_weight": 6e-3})), 0)
    assert shown == {
        "implementation": "onchip auto 0.1.0", "case": "llama3.1-8b", "median, ms": "16.7", "× floor": "1.03",
        "extra, MiB": "3.00", "verdict": "right", "T": "4096", "H": "2048", "V": "128256", "dtype": "bfloat16",
        "p10, ms": "16.7", "p90, ms": "16.9", "floor, ms": "16.2",
        "loss: error": "1.0e-07", "loss: bound": "1.0e-02",
        "hidden&#39;s gradient: error": "2.0e-03", "hidden&#39;s gradient: bound": "4.0e-03",
        "weight&#39;s gradient: error": "6.0e-03", "weight&#39;s gradient: bound": "1.0e-02",
        "run": "2026-11-23 06:32, h100", "settings": "chunk=7",
    }  # fmt: skip


def test_wrong_says_which_number_and_by_how_much():
    html = made(row(), wrong_row(errors={"loss": None, "grad_hidden": 1e-2, "grad_weight": 6e-3}))
    verdict = "loss: not finite; hidden&#39;s gradient: 1.0e-02 is 2.50 × its bound of 4.0e-03"
    shown = cells(html, 1)
    assert shown["verdict"] == f"wrong: {verdict}"
    assert (shown["median, ms"], shown["loss: error"], shown["implementation"]) == (
        "–",
        "not finite",
        "peer &lt;b&gt; 2",
    )
    listed = html[html.index("<h2>Wrong results") : html.index("</ul>", html.index("<h2>Wrong results"))]
    assert verdict in re.sub(r"</?span[^>]*>", "", listed)


def test_numbers_of_a_column_have_as_many_digits():
    times = [page._aligned("ms", values, 3).texts for values in ([0.0567, 1234.5, None], [150.2, 12000.0], [])]
    assert times == [["0.057", "1,234.500", "–"], ["150", "12,000"], []]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return page.write_pages(RESULTS, tmp_path_factory.mktemp("results"))


def test_every_file_with_rows_of_a_benchmark_has_a_page_and_one_script_serves_all(pages):
    folder = pages[0].parent
    benched = [path.stem for path in RESULTS if all(x in path.read_text() for x in ('"mode"', '"error_bounds"'))]
    assert [path.stem for path in pages] == benched
    assert {path.name for path in folder.glob("*.json")} == {path.name for path in RESULTS}
    assert "plotly.js" in (folder / page.SCRIPT).read_text()[:200]
    assert max(path.stat().st_size for path in pages) < 2_000_000
    assert all('<script src="plotly.min.js">' in path.read_text() for path in pages)


def test_every_file_has_a_title_in_one_line():
    for path in RESULTS:
        assert "\n" not in json.loads(path.read_text())["title"]


# ----------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROME") or shutil.which("chromium")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def new_tab(browser, width):
    """A tab, and what its console says that is an error or a warning."""
    tab = browser.new_page(viewport={"width": width, "height": 900})
    said = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("requestfailed", lambda request: said.append(request.url))
    return tab, said


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_load_without_an_error_and_fit(browser, pages, width):
    tab, said = new_tab(browser, width)  # one for all, which compiles the script once
    for path in pages:
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width, path.name
        assert tab.locator(".plot .point:visible").count() > 0, path.name
        assert said == [], path.name


@pytest.mark.browser
def test_a_page_filters_sorts_and_says_more_at_a_point(browser, tmp_path):
    rows = [
        row(case=f"llama3.1-8b-t{t}", impl=impl, median_ms=factor * t, sizes={"T": t, "H": 64, "V": 512}, mode=mode)
        for t in (512, 1024)
        for impl, factor in (("onchip auto 0.1", 1.0), ("peer <b> 2", 2.0), ("peer slow 2", 9.0))
        for mode in ("forward", "forward+backward")
    ]
    path = tmp_path / "x.html"
    path.write_text(made(*rows, wrong_row(), script=None))  # one file
    tab, said = new_tab(browser, 1200)
    tab.goto(path.as_uri())
    shown = "[...document.querySelectorAll('#rows tbody tr:not([hidden])')].map((tr) => tr.children[2].textContent)"
    assert tab.evaluate(shown) == ["512", "1,024", "4,608", "1,024", "2,048", "9,216", "–"]
    assert (
        tab.locator("#growth h2").text_content() == "Growth with T: llama3.1-8b bfloat16, H=64, V=512, forward+backward"
    )
    for expected in (
        ["512", "1,024", "1,024", "2,048", "4,608", "9,216", "–"],
        ["9,216", "4,608", "2,048", "1,024", "1,024", "512", "–"],
    ):
        tab.get_by_role("button", name="median, ms").click()
        assert tab.evaluate(shown) == expected
    tab.get_by_role("button", name="peer slow 2").click()
    assert tab.evaluate(shown) == ["2,048", "1,024", "1,024", "512", "–"]
    tab.select_option("#case", label="llama3.1-8b-t1024 (bfloat16, T=1024, H=64, V=512)")
    tab.select_option("#mode", "forward")
    assert tab.evaluate(shown) == ["2,048", "1,024"]
    assert tab.locator("#one h2").text_content() == "llama3.1-8b-t1024 bfloat16, T=1024, H=64, V=512, forward"
    tab.locator("#one .point").nth(1).hover(force=True)
    hovered = tab.locator("#one .hovertext")
    hovered.wait_for()
    assert "peer <b> 2llama3.1-8b-t1024, bfloat16, T=1024, H=64, V=512forward2.05 s" in hovered.text_content()
    tab.select_option("#case", label="llama3.1-8b (bfloat16, T=4096, H=2048, V=128256)")
    tab.select_option("#mode", "forward+backward")
    assert tab.locator("#one .none").is_visible()
    tab.select_option("#case", label="all 3 cases")
    assert tab.locator("#overview .point").count() == 4
    tab.get_by_role("button", name="none", exact=True).click()
    assert tab.locator("#overview .none").is_visible()
    assert said == []
