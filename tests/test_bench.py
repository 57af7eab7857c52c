"""The harness with a toy op, and the files that a run writes."""

import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from onchip.bench import environment, harness, measure, plots, report, run, units
from onchip.bench.run import run_bench
from onchip.ops.cross_entropy import cases as ce_cases
from onchip.ops.fp8_linear import cases as fp8_cases
from onchip.ops.linear_cross_entropy import cases
from onchip.ops.linear_jsd import cases as jsd_cases

ROW = {
    "op", "case", "sizes", "dtype", "mode", "impl", "config", "median_ms", "p10_ms", "p90_ms", "floor_ms",
    "ratio_to_floor", "compile_s", "extra_bytes", "error", "error_bound", "errors", "ok",
}  # fmt: skip


# ------------------------------------------------------------------------------------- a toy op: the sum of the squares


@dataclass(frozen=True)
class Toy:
    """Computes the sum of squares with `total`, or not at all."""

    name: str
    total: Callable[[Tensor], Tensor]
    reason: str | None = None

    def version(self) -> str:
        return "1.2"

    def unavailable(self, device: str, dtype: str) -> str | None:
        return self.reason

    def config(self, problem: Tensor, mode: str) -> Mapping[str, Any]:
        return {"mode": mode}

    def steps(self, problem: Tensor) -> Mapping[str, Callable[[], Sequence[Tensor]]]:
        return {
            "forward": lambda: [self.total(problem)],
            "forward+backward": lambda: [self.total(problem), 2 * problem],
        }


def out_of_memory(x: Tensor) -> Tensor:
    raise MemoryError("1 TiB is too much\nand this is advice")


def add_one(problem: Tensor, mode: str) -> Callable[[], Sequence[Tensor]]:
    return lambda: [problem + 1]


def toy_module(implementations: Sequence[Toy], floor: Callable[..., Any]) -> ModuleType:
    module = ModuleType("toy_benchmark")
    module.CASES = {"size-10": 10, "size-20": 20, "other": 5, "broken": -1}
    module.DEFAULT_CASES = {"cpu": ("other",), "cuda": ()}
    module.DTYPES = ("float32", "float64")
    module.IMPLEMENTATIONS = implementations
    module.make_problem = lambda case, device, dtype: torch.ones(case, dtype=getattr(torch, dtype), device=device)
    module.reference = lambda problem: (torch.tensor(float(problem.numel())), 2 * problem)

    def check(reference: Sequence[Tensor], mode: str, returned: Sequence[Tensor]) -> dict[str, tuple[float, float]]:
        pairs = zip(("total", "grad"), reference, returned, strict=False)
        return {name: (float((a - b).abs().max()), 1e-6) for name, a, b in pairs}

    module.check = check
    module.floor = floor
    return module


GOOD = Toy("onchip good", lambda x: x.square().sum())
WRONG = Toy("peer wrong", lambda x: x.sum() + 1)
NAN = Toy("peer nan", lambda x: x.sum() * torch.nan)
RAISES = Toy("peer raises", out_of_memory)
MISSING = Toy("peer missing", out_of_memory, reason="it needs a quantum computer")


@dataclass
class Run:
    document: dict[str, Any]
    printed: str
    folder: Path

    def row(self, impl: str, mode: str = "forward+backward", case: str = "other") -> dict[str, Any]:
        (found,) = (
            r for r in self.document["rows"] if (r["impl"], r["mode"], r["case"]) == (f"{impl} 1.2", mode, case)
        )
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(environment, "_busy_cores", lambda: 1.5)  # it would look for half a second

    def run(
        *implementations: Toy, floor: Callable[..., Any] = add_one, more: Mapping[str, Any] = {}, **options: Any
    ) -> Run:
        module = toy_module(implementations, floor)
        vars(module).update(more)
        monkeypatch.setitem(sys.modules, "toy_benchmark", module)
        text = StringIO()
        settings = {"cases": None, "device": "cpu", "dtype": None, "repeats": 2, "impls": None, "out": tmp_path / "r"}
        document = run_bench("toy", "toy_benchmark", console=Console(file=text, width=200), **(settings | options))
        return Run(document, text.getvalue(), tmp_path / "r")

    return run


def test_right_result_is_timed_and_measured(bench: Callable[..., Run]) -> None:
    run = bench(GOOD)
    assert [r["mode"] for r in run.document["rows"]] == ["forward", "forward+backward"]
    row = run.row("onchip good")
    assert set(row) == ROW
    assert row["op"] == "toy"
    assert row["dtype"] == "float32"
    assert row["config"] == {"mode": "forward+backward"}
    assert row["ok"] is True
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
    assert row["extra_bytes"] >= 0
    assert row["error"] == 0
    assert row["errors"] == {"total": 0, "grad": 0}
    assert run.row("onchip good", "forward")["errors"] == {"total": 0}
    assert "onchip good 1.2" in run.printed
    assert "1.5 cores busy" in run.printed


def test_wrong_result_gets_no_time(bench: Callable[..., Run]) -> None:
    run = bench(GOOD, WRONG, NAN)
    for name, error in (("peer wrong", 1.0), ("peer nan", None)):
        row = run.row(name)
        assert row["ok"] is False
        assert row["error"] == error
        assert row["errors"] == {"total": error, "grad": 0}
        assert row["error_bound"] == 1e-6
        assert all(row[key] is None for key in ("median_ms", "p10_ms", "p90_ms", "ratio_to_floor", "extra_bytes"))
    assert run.row("onchip good")["ok"]
    assert "WRONG" in run.printed


def test_what_raises_is_reported_and_the_rest_goes_on(bench: Callable[..., Run]) -> None:
    run = bench(RAISES, GOOD)
    assert run.document["not_run"] == [
        {"impl": "peer raises", "case": "other", "mode": mode, "reason": "MemoryError: 1 TiB is too much"}
        for mode in ("forward", "forward+backward")
    ]
    assert run.row("onchip good")["ok"]


def test_what_was_measured_before_an_interruption_is_written(bench: Callable[..., Run], tmp_path: Path) -> None:
    def until_size_20(x: Tensor) -> Tensor:
        if x.numel() == 20:
            raise KeyboardInterrupt
        return x.square().sum()

    with pytest.raises(KeyboardInterrupt):
        bench(Toy("onchip good", until_size_20), cases=["size-10", "size-20", "other"])
    (path,) = (tmp_path / "r").glob("*.json")
    document = json.loads(path.read_text())
    assert [(row["case"], row["mode"]) for row in document["rows"]] == [
        ("size-10", "forward"), ("size-10", "forward+backward"),
    ]  # fmt: skip
    assert [(n["impl"], n["case"]) for n in document["not_run"]] == [("the rest", "size-20"), ("all", "other")]
    before = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        bench(Toy("onchip good", until_size_20), cases=["size-20"])
    assert path.read_text() == before  # nothing was measured that could stand in its place
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        bench(Toy("onchip good", until_size_20), cases=["size-20"])
    document = json.loads(path.read_text())
    assert document["rows"] == []
    assert document["environment"]["op"] == "toy"


@pytest.mark.parametrize("moment", ["release", "print_rows"])
def test_an_interruption_between_cases_loses_nothing(
    bench: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure if moment == "release" else report, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench(GOOD, cases=["size-10", "size-20"])
    (path,) = (tmp_path / "r").glob("*.json")
    assert json.loads(path.read_text())["rows"][0]["case"] == "size-10"


def test_what_raises_only_later_is_reported_too(bench: Callable[..., Run]) -> None:
    calls = 0

    def at_first(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sum() if calls < 4 else out_of_memory(x)

    run = bench(Toy("peer tires", at_first), GOOD)
    assert [n["mode"] for n in run.document["not_run"]] == ["forward", "forward+backward"]
    assert run.row("onchip good")["ok"]


@pytest.mark.parametrize("error", [RuntimeError, ImportError, AttributeError])
def test_what_cannot_be_set_up_is_reported(bench: Callable[..., Run], error: type[Exception]) -> None:
    @dataclass(frozen=True)
    class NoSteps(Toy):
        def steps(self, problem: Tensor) -> Mapping[str, Callable[[], Sequence[Tensor]]]:
            raise error("no compiler")

    run = bench(NoSteps("peer", out_of_memory), GOOD)
    assert run.document["not_run"] == [
        {"impl": "peer", "case": "other", "mode": None, "reason": f"{error.__name__}: no compiler"}
    ]
    assert run.row("onchip good")["ok"]


def test_what_failed_keeps_nothing_alive(bench: Callable[..., Run]) -> None:
    left: list[weakref.ref[Tensor]] = []

    def with_buffer(x: Tensor) -> Tensor:
        buffer = x.clone()
        left.append(weakref.ref(buffer))
        return out_of_memory(buffer)

    def nothing_left(x: Tensor) -> Tensor:
        assert [r() for r in left] == [None, None]
        return x.square().sum()

    run = bench(Toy("peer raises", with_buffer), Toy("onchip good", nothing_left))
    assert run.row("onchip good")["ok"]


def test_a_case_without_reference_is_reported(bench: Callable[..., Run]) -> None:
    def no_reference(problem: Tensor) -> Any:
        raise MemoryError("1 TiB is too much")

    run = bench(GOOD, cases=["broken", "other"])
    (entry,) = run.document["not_run"]
    assert (entry["impl"], entry["case"]) == ("onchip good", "broken")
    assert entry["reason"].startswith("the problem was not made: RuntimeError: ")
    assert run.row("onchip good")["ok"]
    (entry,) = bench(GOOD, more={"reference": no_reference}).document["not_run"]
    assert entry["reason"] == "there is nothing to check against: MemoryError: 1 TiB is too much"


def test_nothing_stays_out_of_the_garbage_collectors_sight(bench: Callable[..., Run]) -> None:
    frozen: list[int] = []

    def total(x: Tensor) -> Tensor:
        frozen.append(gc.get_freeze_count())
        return x.square().sum()

    bench(Toy("onchip good", total))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0


def test_an_op_may_have_modes_of_its_own(bench: Callable[..., Run]) -> None:
    @dataclass(frozen=True)
    class Half(Toy):
        def steps(self, problem: Tensor) -> Mapping[str, Callable[[], Sequence[Tensor]]]:
            return {"half": lambda: [self.total(problem)]}

    modes = ("forward", "half", "backward")
    half = Half("peer half", GOOD.total)
    run = bench(GOOD, half, more={"MODES": modes}, floor=lambda problem, mode: None)
    assert [(r["mode"], r["impl"]) for r in run.document["rows"]] == [
        ("forward", "onchip good 1.2"), ("half", "peer half 1.2"),
    ]  # fmt: skip
    assert all(r["ok"] and r["floor_ms"] is None and r["ratio_to_floor"] is None for r in run.document["rows"])
    assert run.document["not_run"] == []
    (page,) = run.folder.glob("*.html")
    assert "half (floor: –)" in page.read_text()


SUITES = {"sizes": ("size-20", "size-10"), "rest": ("other",)}


def test_a_suite_of_cases(bench: Callable[..., Run]) -> None:
    def cases_of(**options: Any) -> list[str]:
        rows = bench(GOOD, more={"SUITES": SUITES}, **options).document["rows"]
        return list(dict.fromkeys(r["case"] for r in rows))

    assert cases_of(suite="sizes") == ["size-20", "size-10"]
    assert cases_of(suite="sizes", cases=["*10"]) == ["size-10"]
    assert cases_of() == ["other"]
    with pytest.raises(ValueError, match=re.escape("--case 'other' matches nothing; there is: size-20, size-10")):
        cases_of(suite="sizes", cases=["other"])
    with pytest.raises(ValueError, match=r"--suite must name a set .*; got 'all', and there is: sizes, rest"):
        cases_of(suite="all")
    with pytest.raises(ValueError, match="got 'all', and toy has none"):
        bench(GOOD, suite="all")


def test_a_summary_of_all_rows(bench: Callable[..., Run]) -> None:
    def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"times_faster": 1.234, "cases": len({r["case"] for r in rows})}]

    bench(GOOD, more={"summary": summary})
    run = bench(GOOD, more={"summary": summary}, cases=["size-10"], add=True)
    assert run.document["summary"] == [{"times_faster": 1.234, "cases": 2}]
    (page,) = run.folder.glob("*.html")
    for text in (run.printed, page.read_text()):
        assert "times faster" in text
        assert "1.23" in text


def test_a_page_of_many_cases_has_no_plots_of_them(bench: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MOST_PLOTS", 1)
    run = bench(GOOD, cases=["size-10", "other"])
    (page,) = run.folder.glob("*.html")
    assert "data:image" not in page.read_text()
    assert page.read_text().count("onchip good 1.2") == 4


def test_what_is_unavailable_is_listed_with_its_reason(bench: Callable[..., Run]) -> None:
    run = bench(GOOD, MISSING)
    reason = "it needs a quantum computer"
    assert run.document["not_run"] == [{"impl": "peer missing", "case": None, "mode": None, "reason": reason}]
    assert reason in run.printed
    (page,) = run.folder.glob("*.html")
    assert reason in page.read_text()


def test_floor_that_does_not_fit_leaves_the_ratio_out(bench: Callable[..., Run]) -> None:
    row = bench(GOOD, floor=lambda problem, mode: out_of_memory(problem)).row("onchip good")
    assert row["floor_ms"] is None
    assert row["ratio_to_floor"] is None
    assert row["median_ms"] > 0


def test_patterns_choose_cases_and_implementations(bench: Callable[..., Run]) -> None:
    rows = bench(GOOD, WRONG, NAN, cases=["size-*"], impls=["*good", "peer n*"]).document["rows"]
    assert list(dict.fromkeys(r["case"] for r in rows)) == ["size-10", "size-20"]
    assert list(dict.fromkeys(r["impl"] for r in rows)) == ["onchip good 1.2", "peer nan 1.2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["other", "sise-*"]}, "--case 'sise-*' matches nothing; there is: size-10, size-20, other"),
        ({"impls": ["liger"]}, "--impl 'liger' matches nothing; there is: onchip good"),
        ({"device": "tpu"}, "--device must be auto, cpu or cuda; got 'tpu'"),
        ({"dtype": "float8"}, "--dtype must be one of float32, float64; got 'float8'"),
        ({"repeats": 0}, "--repeats must be 1 or more; got 0"),
        ({"out": Path(__file__)}, "--out must be a folder to write to"),
        ({"out": Path(__file__) / "below"}, "--out must be a folder to write to"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    bench: Callable[..., Run], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bench(GOOD, **options)
    assert not list(tmp_path.iterdir())


def test_cuda_without_a_device_is_refused(bench: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device is cuda"):
        bench(GOOD, device="cuda")


def test_a_missing_package_is_named_with_its_extra(bench: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onchip.core.machine.find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(ImportError, match=re.escape("matplotlib") + ".*" + re.escape("onchip[torch,bench]")):
        bench(GOOD)


# ------------------------------------------------------------------------------------------------------ what is written


def test_results_file_holds_the_document(bench: Callable[..., Run]) -> None:
    run = bench(GOOD, NAN, MISSING)
    (path,) = run.folder.glob("*.json")
    assert json.loads(path.read_text()) == run.document
    assert set(run.document) == {"environment", "rows", "not_run"}
    described = run.document["environment"]
    assert path.name == f"{described['date'][:10]}-{described['device']}-toy.json"
    assert torch.__version__.startswith(described["torch"])  # one may carry "+cu130" where the other does not
    assert described["threads"] == torch.get_num_threads()
    assert described["repeats"] == 2
    assert described["framework"] == "torch"
    assert {"python", "numpy", "os", "cpu", "cores", "gpu", "driver", "cuda", "onchip", "git_commit"} <= set(described)


def test_page_is_self_contained(bench: Callable[..., Run]) -> None:
    run = bench(GOOD, WRONG, Toy("peer <b>", lambda x: x.sum()), cases=["*"])
    (path,) = run.folder.glob("*.html")
    page = path.read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|url\(|@import|<script|<link", page)
    assert page.count("data:image/svg+xml;base64,") == 4  # growth, and a plot for each case that ran
    assert "peer &lt;b&gt; 1.2" in page
    assert 'class="wrong"' in page


def fake_rows() -> list[dict[str, Any]]:
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


def test_plots_of_a_results_file(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"rows": fake_rows()}))
    command = [sys.executable, "-m", "onchip.bench.plots", str(results), str(tmp_path / "plots")]
    subprocess.run(command, check=True, capture_output=True)
    growth, scatter = ((tmp_path / "plots" / name).read_text() for name in ("growth.svg", "time-memory.svg"))
    for svg in (growth, scatter):
        assert len(svg) < 100_000
        assert "onchip 0" in svg
    assert "vocab" in growth
    assert "tokens" in growth
    assert "one: forward+backward" in scatter


def test_no_growth_without_a_sweep() -> None:
    assert plots.growth_svg([r for r in fake_rows() if r["case"] in ("one", "vocab-512")]) is None


def test_sweep_of_a_models_tokens() -> None:
    rows = [{**r, "case": f"llama3.1-8b-t{n}"} for n in (1024, 4096) for r in fake_rows() if r["case"] == f"tokens-{n}"]
    growth = plots.growth_svg([*rows, *(r for r in fake_rows() if r["case"] == "one")])
    assert growth is not None
    assert "tokens, llama3.1-8b" in growth
    assert plots._sweep_point("llama3.1-8b-t4096") == ("tokens, llama3.1-8b", 4096)
    for name in (*cases.MODELS, *(case.name for case in cases.LLAMA_VARIANTS)):
        assert plots._sweep_point(name) is None


def test_each_of_many_implementations_looks_different() -> None:
    names = [f"onchip{i} 1" for i in (" a", " b", " c", ", d", ", e", ", f")] + [f"peer {i} 1" for i in range(11)]
    looks = plots._styles([{"impl": name} for name in names]).values()
    assert len({(look["color"], look["marker"]) for look in looks}) == len(names)
    assert len({look["color"] for look in looks}) == len(names)
    assert [look["linewidth"] for look in looks].count(4) == 2


@pytest.mark.parametrize(("low", "high"), [(15.0, 70.0), (1.0, 1.1), (3.0, 9000.0), (64.0, 3.2e10)])
def test_ticks_keep_their_distance(low: float, high: float) -> None:
    axes = matplotlib.figure.Figure().subplots()
    plots._log_axis(axes, "x", [low, high], str, plots._round_numbers)
    ticks = axes.get_xticks()
    left, right_end = axes.get_xlim()
    assert len(ticks) >= 3
    assert np.diff(np.log(ticks)).min() >= 0.99 * np.log(right_end / left) / 8


@pytest.mark.parametrize("wanted", [[0.0, 0.0, 0.0], [0.1, 0.9, 0.95, 1.0], [0.2, 0.5, 0.9], [1.0, 1.0]])
def test_labels_keep_their_distance(wanted: list[float]) -> None:
    places = plots._spread_out(wanted, gap=0.2)
    assert np.diff(places).min() >= 0.2 - 1e-9
    assert max(places) <= 1


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("AMD EPYC", "cpu-amd-epyc-2c"),
        ("AMD EPYC 7B13 64-Core Processor", "cpu-amd-epyc-7b13-2c"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "cpu-intel-xeon-platinum-8480c-2c"),
    ],
)
def test_slug_of_a_cpu(model: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_cpu_model", lambda: model)
    monkeypatch.setattr(environment, "_cores", lambda: 2)
    assert environment.device_slug("cpu") == slug


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 PCIe", "h100"),
    ],
)
def test_slug_of_a_gpu(model: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_gpu", lambda framework: {"gpu": model})
    assert environment.device_slug("cuda") == slug


def test_units() -> None:
    assert [units.format_ms(x) for x in (0.0123, 1.234, 999.0, 12345.0, None)] == [
        "12.3 µs", "1.23 ms", "999 ms", "12.3 s", "–",
    ]  # fmt: skip
    assert [units.format_bytes(x) for x in (0, 2048, 33_554_432, 3 << 29)] == [
        "0.00 KiB", "2.00 KiB", "32.0 MiB", "1.50 GiB",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- adding to an earlier run


def test_add_keeps_the_rows_of_an_earlier_run() -> None:
    def document(impl: str, ms: float, **more: Any) -> dict[str, Any]:
        row = {"case": "a", "dtype": "float32", "mode": "forward", "impl": impl, "median_ms": ms} | more
        return {"environment": {"gpu": "H100"}, "rows": [row], "not_run": []}

    both = run._added(document("one", 1.0), document("two", 2.0))
    assert [r["impl"] for r in both["rows"]] == ["one", "two"]
    again = run._added(both, document("one", 3.0))
    assert {r["impl"]: r["median_ms"] for r in again["rows"]} == {"one": 3.0, "two": 2.0}
    for more in ({"dtype": "bfloat16"}, {"sizes": {"T": 8}}, {"sizes": {"T": 9}}):
        again = run._added(again, document("one", 4.0, **more))
    assert [r["median_ms"] for r in again["rows"]] == [2.0, 3.0, 4.0, 4.0, 4.0]


def test_rows_of_another_dtype_stay_and_have_names_of_their_own(bench: Callable[..., Run]) -> None:
    bench(GOOD, cases=["size-10"])
    both = bench(GOOD, cases=["size-10"], dtype="float64", add=True)
    assert [(r["dtype"], r["mode"]) for r in both.document["rows"]] == [
        (dtype, mode) for dtype in ("float32", "float64") for mode in harness.MODES
    ]
    page = next(both.folder.glob("*.html")).read_text()
    assert all(f"size-10 ({dtype})" in page for dtype in ("float32", "float64"))


def test_files_of_earlier_versions_can_be_added_to() -> None:
    """Those that `onchip bench` wrote itself; their rows have no sizes."""
    for path in (Path(__file__).parent.parent / "results").glob("2026-11-2[12]-*.json"):
        document = json.loads(path.read_text())
        if {"rows", "not_run"} <= document.keys() and "how" not in document["environment"]:
            assert run._earlier(path, document["environment"]) == document


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (cases.BENCH_CASES["cpu"], {"T": 4096, "H": 1024, "V": 32768}),
        (ce_cases.BENCH_CASES["cpu"], {"T": 2048, "V": 16384}),
        (jsd_cases.BENCH_CASES["llama3.2-1b-llama3.1-8b"], {"T": 4096, "H": 2048, "teacher_H": 4096, "V": 128256}),
        (fp8_cases.BENCH_CASES["cpu"], {"M": 512, "N": 768, "K": 640}),
    ],
    ids=lambda x: None,
)
def test_sizes_stand_in_rows(case: Any, sizes: Mapping[str, int]) -> None:
    assert harness.sizes_of(case) == sizes


def test_what_can_not_be_added_to_is_refused_before_anything_runs(
    bench: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(ValueError, match="is no result of onchip bench"):
            bench(GOOD, cases=["size-10"], add=True)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"--out must be a folder .*\.json is a folder where a file goes"):
        bench(GOOD, cases=["size-10"])
