"""The harness with a toy op, and the files that a run writes."""

import gc
import json
import re
import runpy
import sys
import weakref
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from onchip.bench import environment, figures, harness, report, run, torch_steps, units
from onchip.bench.peers import Implementation
from onchip.bench.run import run_bench
from onchip.ops.attention import cases as attention_cases
from onchip.ops.cross_entropy import checks as ce_cases
from onchip.ops.fp8_linear import cases as fp8_cases
from onchip.ops.linear_cross_entropy import checks
from onchip.ops.linear_jsd import checks as jsd_cases
from shared import assert_fits_schema

ROW = {
    "op", "case", "sizes", "dtype", "date", "mode", "impl", "config", "median_ms", "p10_ms", "p90_ms", "floor_ms",
    "ratio_to_floor", "compile_s", "extra_bytes", "host_ms", "kernels", "error", "error_bound", "error_name", "errors",
    "error_bounds", "ok",
}  # fmt: skip


# ------------------------------------------------------------------------------------- a toy op: the sum of the squares


def toy(name, total, reason=None, **more):
    """Computes the sum of squares with `total`, or not at all."""
    return Implementation(name, lambda: total, lambda device, dtype: reason, {"toy": True}, **more)


def squares(x):
    return x.square().sum()


def out_of_memory(x):
    raise MemoryError("1 TiB is too much\nand this is advice")


def interrupt(*_):
    raise KeyboardInterrupt


class ToyCase(NamedTuple):
    name: str
    number: int


def make(fw, case, device, dtype):
    return torch.ones(case.number, dtype=getattr(torch, dtype), device=device)


class ToyOp(harness.BenchedOp):
    def reference(self, problem):
        return torch.tensor(float(problem.numel())), 2 * problem

    def plain_steps(self, problem, total):
        return {"forward": lambda: [total(problem)], "forward+backward": lambda: [total(problem), 2 * problem]}

    def check(self, reference, mode, returned):
        pairs = zip(("total", "grad"), reference, returned, strict=False)
        return {name: (float((a - b).abs().max()), 1e-6) for name, a, b in pairs}

    def floor(self, problem, mode):
        return lambda: [problem + 1]


SUITES = {
    "sizes": (ToyCase("size-10", 10), ToyCase("size-20", 20)),
    "cpu": (ToyCase("other", 5),),
    "broken": (ToyCase("broken", -1),),
}
GOOD = toy("onchip good", squares)
WRONG = toy("peer wrong", lambda x: x.sum() + 1)
NAN = toy("peer nan", lambda x: x.sum() * torch.nan)
RAISES = toy("peer raises", out_of_memory)
MISSING = toy("peer missing", out_of_memory, reason="it needs a quantum computer")


@dataclass
class Run:
    document: dict[str, Any]
    printed: str
    folder: Path

    def row(self, impl, mode="forward+backward", case="other"):
        wanted = (impl, mode, case)
        (found,) = (r for r in self.document["rows"] if (report.short_name(r["impl"]), r["mode"], r["case"]) == wanted)
        return found

    @property
    def page(self):
        (path,) = self.folder.glob("*.html")
        return path.read_text()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_busy_cores", lambda: 1.5)  # it would look for half a second
    monkeypatch.setattr("onchip.bench.page.plotly_js", lambda: "/* 5 MB */")

    def run(*implementations, more=None, **options):
        op = ToyOp("torch", SUITES, lambda fw: implementations, make)
        vars(op).update({"DTYPES": ("float32", "float64")} | (more or {}))
        toy = SimpleNamespace(entry=lambda path: SimpleNamespace(TORCH=op))
        monkeypatch.setattr("onchip.bench.run.OPS", {"toy": toy})
        text = StringIO()
        settings = {"cases": None, "device": "cpu", "dtype": None, "repeats": 2, "impls": None, "out": tmp_path / "r"}
        settings |= {"console": Console(file=text, width=200)}
        document = run_bench("toy", "torch", **(settings | options))
        return Run(document, text.getvalue(), tmp_path / "r")

    return run


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr("onchip.bench.run.html_page", lambda document, name: "")


def only_json(folder):
    (path,) = (folder / "r").glob("*.json")
    return path


def test_right_results_are_timed_and_all_else_is_reported(bench):
    run = bench(RAISES, GOOD, WRONG, NAN, MISSING)
    row = run.row("onchip good")
    assert set(row) == ROW
    assert (row["op"], row["dtype"], row["config"], row["ok"]) == ("toy", "float32", {"toy": True}, True)
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
    assert row["extra_bytes"] >= 0
    assert (row["host_ms"], row["kernels"]) == (None, None)  # on the CPU
    assert (row["error"], row["errors"]) == (0, {"total": 0, "grad": 0})
    assert row["error_bounds"] == {"total": 1e-6, "grad": 1e-6}
    assert row["date"] == run.document["environment"]["date"]
    assert run.row("onchip good", "forward")["errors"] == {"total": 0}
    for name, error in (("peer wrong", 1.0), ("peer nan", None)):
        row = run.row(name)
        assert (row["ok"], row["error"], row["error_bound"]) == (False, error, 1e-6)
        assert (row["errors"], row["error_name"]) == ({"total": error, "grad": 0}, "total")
        assert all(row[key] is None for key in ("median_ms", "p10_ms", "p90_ms", "ratio_to_floor", "extra_bytes"))
    reason = "it needs a quantum computer"
    assert run.document["not_run"] == [
        {"impl": "peer missing", "case": None, "mode": None, "reason": reason},
        *(
            {"impl": "peer raises", "case": "other", "mode": mode, "reason": "MemoryError: 1 TiB is too much"}
            for mode in harness.MODES
        ),
    ]
    assert reason in run.page
    wrong = f"peer wrong {torch.__version__.partition('+')[0]}: total: 1.0e+00 is 1000000.00 × its bound of 1.0e-06"
    for text in ("onchip good", "1.5 cores busy", "WRONG", f"wrong: {wrong}", "total: not finite", reason):
        assert text in run.printed


def test_a_case_is_shown_when_it_is_done_and_modes_can_be_chosen(bench, no_page):
    printed = []

    def printing(x):
        printed.append(text.getvalue())
        return squares(x)

    text = StringIO()
    console = Console(file=text, width=200)
    run = bench(toy("onchip good", printing), suite="sizes", modes=["forward"], console=console)
    assert [(row["case"], row["mode"]) for row in run.document["rows"]] == [
        ("size-10", "forward"),
        ("size-20", "forward"),
    ]
    assert "size-10, float32, forward" in printed[-1]
    assert "size-20, float32, forward" not in printed[-1]
    with pytest.raises(ValueError, match=r"--mode 'backward' matches nothing; choose from: forward, forward\+backward"):
        bench(GOOD, modes=["backward"])


def test_an_interruption_keeps_what_was_measured_before(bench, tmp_path, no_page):
    until_size_20 = toy("onchip good", lambda x: interrupt() if x.numel() == 20 else squares(x))
    with pytest.raises(KeyboardInterrupt):
        bench(until_size_20, cases=["size-10", "size-20", "other"])
    path = only_json(tmp_path)
    document = json.loads(path.read_text())
    assert [(row["case"], row["mode"]) for row in document["rows"]] == [("size-10", mode) for mode in harness.MODES]
    assert [(n["impl"], n["case"]) for n in document["not_run"]] == [("the rest", "size-20"), ("all", "other")]
    before = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        bench(until_size_20, cases=["size-20"])
    assert path.read_text() == before  # nothing was measured that could stand in its place
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        bench(until_size_20, cases=["size-20"])
    document = json.loads(path.read_text())
    assert (document["rows"], document["environment"]["op"]) == ([], "toy")


@pytest.mark.parametrize(("module", "moment"), [(torch_steps, "release"), (report, "print_rows")])
def test_an_interruption_between_cases_loses_nothing(bench, tmp_path, monkeypatch, no_page, module, moment):
    monkeypatch.setattr(module, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench(GOOD, cases=["size-10", "size-20"])
    assert json.loads(only_json(tmp_path).read_text())["rows"][0]["case"] == "size-10"


def test_what_raises_only_later_or_cannot_be_set_up_is_reported_too(bench, no_page):
    calls = []

    def at_first(x):
        calls.append(x)
        return x.sum() if len(calls) < 4 else out_of_memory(x)

    def no_steps(problem, function):
        raise AttributeError("no compiler")

    run = bench(toy("peer tires", at_first), toy("peer", squares, steps=no_steps), GOOD)
    by_name = {n["impl"]: (n["mode"], n["reason"]) for n in run.document["not_run"]}
    assert [n["mode"] for n in run.document["not_run"] if n["impl"] == "peer tires"] == list(harness.MODES)
    assert by_name["peer"] == (None, "AttributeError: no compiler")
    assert run.row("onchip good")["ok"]


def test_what_failed_keeps_nothing_alive(bench, no_page):
    left = []

    def with_buffer(x):
        buffer = x.clone()
        left.append(weakref.ref(buffer))
        return out_of_memory(buffer)

    def nothing_left(x):
        assert [r() for r in left] == [None, None]
        return squares(x)

    assert bench(toy("peer raises", with_buffer), toy("onchip good", nothing_left)).row("onchip good")["ok"]


def test_a_case_without_reference_and_a_floor_that_does_not_fit(bench, no_page):
    too_large = {"floor": lambda problem, mode: out_of_memory(problem)}
    run = bench(GOOD, cases=["broken", "other"], more=too_large)
    (entry,) = run.document["not_run"]
    assert (entry["impl"], entry["case"]) == ("onchip good", "broken")
    assert entry["reason"].startswith("the problem was not made: RuntimeError: ")
    row = run.row("onchip good")
    assert (row["ok"], row["floor_ms"], row["ratio_to_floor"]) == (True, None, None)
    assert row["median_ms"] > 0
    (entry,) = bench(GOOD, more={"reference": out_of_memory}).document["not_run"]
    assert entry["reason"] == "there is nothing to check against: MemoryError: 1 TiB is too much"


def test_nothing_stays_out_of_the_garbage_collectors_sight(bench, no_page):
    gc.unfreeze()
    frozen = []

    def total(x):
        frozen.append(gc.get_freeze_count())
        return squares(x)

    bench(toy("onchip good", total))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as conftest.py left it


def test_a_case_may_be_of_one_dtype(bench, no_page):
    class Narrow(ToyCase):
        dtype = "float64"

    cases = {"size-10": ToyCase("size-10", 10), "narrow": Narrow("narrow", 5)}
    run = bench(GOOD, MISSING, more={"CASES": cases}, cases=["*"])
    dtypes = {(r["case"], r["dtype"]) for r in run.document["rows"]}
    assert dtypes == {("size-10", "float32"), ("narrow", "float64")}
    assert len(run.document["not_run"]) == 1


def test_an_op_may_have_modes_of_its_own(bench):
    half = toy("peer half", squares, steps=lambda problem, total: {"half": lambda: [total(problem)]})
    modes = ("forward", "half", "backward")
    run = bench(GOOD, half, more={"MODES": modes, "floor": lambda problem, mode: None})
    ran = [(r["mode"], report.short_name(r["impl"])) for r in run.document["rows"]]
    assert ran == [("forward", "onchip good"), ("half", "peer half")]
    assert all(r["ok"] and r["floor_ms"] is None and r["ratio_to_floor"] is None for r in run.document["rows"])
    assert run.document["not_run"] == []
    assert "half (floor: –)" in run.printed


def test_patterns_and_suites_choose(bench, no_page):
    def ran(*implementations, **options):
        rows = bench(*implementations, **options).document["rows"]
        return [list(dict.fromkeys(r[key] for r in rows)) for key in ("case", "impl")]

    chosen, impls = ran(GOOD, WRONG, NAN, cases=["size-*"], impls=["*good", "peer n*"])
    assert chosen == ["size-10", "size-20"]
    assert [report.short_name(impl) for impl in impls] == ["onchip good", "peer nan"]
    assert ran(GOOD, suite="sizes")[0] == ["size-10", "size-20"]
    assert ran(GOOD, suite="sizes", cases=["*10"])[0] == ["size-10"]
    with pytest.raises(ValueError, match=re.escape("--case 'other' matches nothing; choose from: size-10, size-20")):
        ran(GOOD, suite="sizes", cases=["other"])
    with pytest.raises(ValueError, match=r"--suite must be one of the op's: sizes, cpu, broken; got 'all'"):
        ran(GOOD, suite="all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["other", "sise-*"]}, "--case 'sise-*' matches nothing; choose from: size-10, size-20, other"),
        ({"impls": ["liger"]}, "--impl 'liger' matches nothing; choose from: onchip good"),
        ({"device": "tpu"}, "--device must be auto, cpu or cuda; got 'tpu'"),
        ({"device": "cuda"}, "--device is cuda"),
        ({"dtype": "float8"}, "--dtype must be one of float32, float64; got 'float8'"),
        ({"repeats": 0}, "--repeats must be 1 or more; got 0"),
        ({"out": Path(__file__)}, "--out must be a folder to write to"),
        ({"out": Path(__file__) / "below"}, "--out must be a folder to write to"),
    ],
)
def test_bad_options_are_refused_before_any_work(bench, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(message)):
        bench(GOOD, **options)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_extra(bench, monkeypatch):
    monkeypatch.setattr("onchip.core.machine.find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(ImportError, match=re.escape("plotly") + ".*" + re.escape("onchip[torch,bench]")):
        bench(GOOD)


# ------------------------------------------------------------------------------------------------------ what is written


def test_the_files_of_a_run(bench, monkeypatch):
    run = bench(GOOD, WRONG, MISSING, toy("peer <b>", lambda x: x.sum()), cases=["*"])
    (path,) = run.folder.glob("*.json")
    assert json.loads(path.read_text()) == run.document
    assert_fits_schema("bench", run.document)
    assert set(run.document) == {"environment", "rows", "not_run"}
    described = run.document["environment"]
    assert path.name == f"{described['date'][:10]}-{described['device']}-toy.json"
    assert torch.__version__.startswith(described["torch"])  # one may carry "+cu130" where the other does not
    assert described["threads"] == torch.get_num_threads()
    assert (described["repeats"], described["framework"]) == (2, "torch")
    assert {"python", "numpy", "os", "cpu", "cores", "gpu", "driver", "cuda", "onchip", "git_commit"} <= set(described)
    page = run.page
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)(?!\d)|url\(|@import|<script src", page)
    assert f'href="{path.name}"' in page
    assert "/* 5 MB */" in page
    assert "peer &lt;b&gt;" in page
    assert '<tr class="wrong">' in page


def test_a_run_without_rows_has_a_page_too(bench):
    page = bench(MISSING).page
    assert "it needs a quantum computer" in page
    assert "<script" not in page


def fake_rows():
    sizes = {f"{swept}-{n}": n for swept in ("vocab", "tokens") for n in (512, 1024, 2048, 4096)}
    scales = {f"onchip {i} 0.1": 1 + i / 10 for i in range(3)} | {f"peer {i} 2": float(i) for i in range(2, 6)}
    return [
        {
            "case": case, "mode": mode, "impl": impl, "ok": True, "median_ms": scale * n, "p10_ms": scale * n * 0.9,
            "p90_ms": scale * n * 1.2, "floor_ms": float(n), "extra_bytes": n * 1000,
        }
        for case, n in ({"one": 3000} | sizes).items()
        for mode in ("forward", "forward+backward")
        for impl, scale in scales.items()
    ]  # fmt: skip


PLOTS = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "plots.py"))


def test_plots_of_a_results_file(tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"rows": fake_rows()}))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(results), str(tmp_path / "plots")])
    PLOTS["main"]()
    growth, scatter = ((tmp_path / "plots" / name).read_text() for name in ("growth.svg", "time-memory.svg"))
    for svg in (growth, scatter):
        assert len(svg) < 100_000
        assert "onchip 0" in svg
    assert "vocab" in growth
    assert "tokens" in growth
    assert "one: forward+backward" in scatter
    assert all(len(re.findall(r">[\d.]+ m?s<", svg)) >= 3 for svg in (growth, scatter))  # ticks of the time


def test_sweeps():
    assert PLOTS["growth_svg"]([r for r in fake_rows() if r["case"] in ("one", "vocab-512")]) is None
    rows = [{**r, "case": f"llama3.1-8b-t{n}"} for n in (1024, 4096) for r in fake_rows() if r["case"] == f"tokens-{n}"]
    growth = PLOTS["growth_svg"]([*rows, *(r for r in fake_rows() if r["case"] == "one")])
    assert growth is not None
    assert "tokens, llama3.1-8b" in growth
    assert report.sweep_point("llama3.1-8b-t4096") == ("tokens, llama3.1-8b", 4096)
    for name in (*checks.MODELS, "llama3.1-8b-zipf", "llama3.1-8b-std30"):
        assert report.sweep_point(name) is None


def test_each_of_many_implementations_looks_different():
    names = [f"onchip{i} 1" for i in (" a", " b", " c", ", d", ", e", ", f")] + [f"peer {i} 1" for i in range(11)]
    looks = figures.styles_of([{"impl": name} for name in names]).values()
    assert len({(look["color"], look["marker"]) for look in looks}) == len(names)
    assert len({look["color"] for look in looks}) == len(names)
    assert [look["linewidth"] for look in looks].count(4) == 2


def test_slugs(monkeypatch):
    monkeypatch.setattr(environment, "_cores", lambda: 2)
    for model, slug in {
        "AMD EPYC": "cpu-amd-epyc-2c",
        "AMD EPYC 7B13 64-Core Processor": "cpu-amd-epyc-7b13-2c",
        "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz": "cpu-intel-xeon-platinum-8480c-2c",
    }.items():
        monkeypatch.setattr(environment, "_cpu_model", lambda model=model: model)
        assert environment.device_slug("cpu") == slug
    for model, slug in {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA H100 PCIe": "h100",
    }.items():
        monkeypatch.setattr(environment, "_gpu", lambda framework, model=model: {"gpu": model})
        assert environment.device_slug("cuda") == slug


def test_units():
    assert [units.format_ms(x) for x in (0.0123, 1.234, 999.0, 12345.0, None)] == [
        "12.3 µs", "1.23 ms", "999 ms", "12.3 s", "–",
    ]  # fmt: skip
    assert [units.format_bytes(x) for x in (0, 2048, 33_554_432, 3 << 29)] == [
        "0.00 KiB", "2.00 KiB", "32.0 MiB", "1.50 GiB",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- adding to an earlier run


def test_add_keeps_the_rows_of_an_earlier_run():
    def document(impl, ms, **more):
        row = {"case": "a", "dtype": "float32", "mode": "forward", "impl": impl, "median_ms": ms} | more
        return {"environment": {"gpu": "H100"}, "rows": [row], "not_run": []}

    both = run._added(document("one", 1.0), document("two", 2.0))
    assert [r["impl"] for r in both["rows"]] == ["one", "two"]
    again = run._added(both, document("one", 3.0))
    assert {r["impl"]: r["median_ms"] for r in again["rows"]} == {"one": 3.0, "two": 2.0}
    for more in ({"dtype": "bfloat16"}, {"sizes": {"T": 8}}, {"sizes": {"T": 9}}):
        again = run._added(again, document("one", 4.0, **more))
    assert [r["median_ms"] for r in again["rows"]] == [3.0, 2.0, 4.0, 4.0, 4.0]


def test_rows_of_another_dtype_stay_and_have_names_of_their_own(bench):
    bench(GOOD, cases=["size-10"])
    both = bench(GOOD, cases=["size-10"], dtype="float64", add=True)
    assert [(r["dtype"], r["mode"]) for r in both.document["rows"]] == [
        (dtype, mode) for dtype in ("float32", "float64") for mode in harness.MODES
    ]
    assert all(f'"kind":"{dtype}"' in both.page for dtype in ("float32", "float64"))


def test_adding_keeps_the_title_and_the_dates_of_the_runs(bench, no_page):
    first = bench(GOOD, cases=["size-10"])
    (path,) = first.folder.glob("*.json")
    path.write_text(json.dumps({"title": "Squares", **first.document}))
    second = bench(GOOD, cases=["size-20"], add=True)
    assert second.document["title"] == "Squares"
    assert second.row("onchip good", case="size-10")["date"] == first.document["environment"]["date"]
    assert second.row("onchip good", case="size-20")["date"] == second.document["environment"]["date"]


def test_files_of_earlier_versions_can_be_added_to():
    """Those that `onchip bench` wrote itself; their rows have neither dates nor a bound for each error."""
    for path in (Path(__file__).parent.parent / "results").glob("2026-11-2[12]-*.json"):
        document = json.loads(path.read_text())
        if {"rows", "not_run"} <= document.keys() and "how" not in document["environment"]:
            assert run._earlier(path, document["environment"]) == document


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (checks.SUITES["cpu"][0], {"T": 4096, "H": 1024, "V": 32768}),
        (ce_cases.SUITES["cpu"][0], {"T": 2048, "V": 16384}),
        (jsd_cases.SUITES["cuda"][-1], {"T": 4096, "H": 2048, "teacher_H": 4096, "V": 128256}),
        (fp8_cases.SUITES["cpu"][0], {"M": 512, "N": 768, "K": 640}),
        (attention_cases.SUITES["cuda"][0], {"B": 1, "T": 16384, "Hq": 32, "Hk": 8, "D": 128, "Dv": 128}),
    ],
    ids=lambda x: None,
)
def test_sizes_stand_in_rows(case, sizes):
    assert harness.sizes_of(case) == sizes


def test_what_can_not_be_added_to_is_refused_before_anything_runs(bench, monkeypatch, no_page):
    first = bench(GOOD, cases=["size-10"])
    (path,) = first.folder.glob("*.json")
    monkeypatch.setattr(harness, "run_cases", lambda *_, **__: pytest.fail("it ran"))
    written = path.read_text()
    for name in ("gpu", "jax"):
        made = json.loads(written)
        made["environment"][name] = "of old"
        path.write_text(json.dumps(made))
        with pytest.raises(ValueError, match=f"--add: .* was made with {name} of old; choose another --out"):
            bench(GOOD, cases=["size-10"], add=True)
    without_impl = json.loads(written)
    del without_impl["rows"][0]["impl"]
    for broken in ("[]", "{}", json.dumps(without_impl), "[" * 100_000):
        path.write_text(broken)
        with pytest.raises(ValueError, match="onchip bench didn't write"):
            bench(GOOD, cases=["size-10"], add=True)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"--out must be a folder .*\.json is a folder where a file should go"):
        bench(GOOD, cases=["size-10"])
