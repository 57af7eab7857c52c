"""`onchip bench --suite lengths`: first calls, and steps with ever new lengths."""

import math
import os
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from onchip.bench import lengths, torch_steps
from onchip.bench.lengths import AskedLengths
from onchip.bench.page import html_page
from onchip.bench.run import benchmark_of, run_bench
from shared import assert_fits_schema

OPS = {
    "linear_cross_entropy": {"tokens": 24, "hidden": 32, "vocab": 50},
    "linear_log_probs": {"tokens": 24, "hidden": 32, "vocab": 50},
    "linear_jsd": {"tokens": 24, "hidden": 32, "vocab": 50},
    "cross_entropy": {"tokens": 24, "vocab": 50},
    "fp8_linear": {"m": 24, "n": 32, "k": 48},
    "grouped_matmul": {"sizes": (5, 0, 19), "n": 8, "k": 16},
}
NUMBER = 3


def tiny(op):
    target = benchmark_of(op, "torch")
    assert [case.name for case in target.SUITES["lengths"]] == [x for x in target.CASES if x.endswith("-lengths")]
    return target, replace(target.SUITES["lengths"][0], name="tiny", **OPS[op])


@pytest.mark.parametrize("op", OPS)
def test_every_op(op):
    target, case = tiny(op)
    known = [impl.name for impl in lengths.implementations(target, "cpu", "float32")]
    assert known[0] == "onchip auto"
    assert ("torch.compile(dynamic=True)" in known) == (op != "grouped_matmul" or "torch F.grouped_mm" in known)
    told = []
    for impl in (known[0], *(name for name in known[1:2] if op != "grouped_matmul")):
        found = lengths.measure(AskedLengths(op, case, impl, "cpu", "float32", NUMBER), target, told.append)
        assert [len(found[x]) for x in ("first", "second", "another", "new", "again", "queued")] == [1, 1, 1, 3, 3, 1]
        assert found["device"] is None
        assert all(error <= bound for error, bound in found["errors"].values()) or op == "fp8_linear"
    assert told[:2] == ["inputs", "first call"]


def test_lengths_are_those_that_are_documented():
    drawn = lengths.lengths(8192, 1000)
    assert tuple(round(8192 * x) for x in (lengths.SHORTEST, lengths.LONGEST)) == (3000, 9000)
    assert min(drawn) >= 3000
    assert max(drawn) < 9000
    assert drawn[:40] == lengths.lengths(8192, 40)
    assert round(8192 * lengths.ANOTHER) == 7001


def test_a_process_that_ends_at_its_import_is_a_row_that_did_not_run(monkeypatch):
    monkeypatch.setattr(lengths, "serve", os._exit)  # which takes no such arguments
    _, case = tiny("cross_entropy")
    asked = AskedLengths("cross_entropy", case, "onchip auto", "cpu", "float32", NUMBER)
    with ExitStack() as stack:
        processes = lengths._Pair(stack)
        processes.wait_for_imports()
        with pytest.raises(RuntimeError, match="its process ended"):
            processes.measure(asked, lambda _: None)


def test_a_shorter_problem_shares_the_memory_of_the_whole():
    target, case = tiny("linear_jsd")
    problem = target.make_problem(case, "cpu", "float32")
    shorter = lengths.shortened(target, problem, 7)
    assert [len(x) for x in shorter.arrays] == [7, 50, 7, 50]
    assert [x.data_ptr() for x in shorter.arrays] == [x.data_ptr() for x in problem.arrays]
    assert [x.requires_grad for x in shorter.arrays] == [True, True, False, False]
    target, case = tiny("grouped_matmul")
    shorter = lengths.shortened(target, target.make_problem(case, "cpu", "float32"), 7)
    assert sum(shorter.case.sizes) == 7
    assert shorter.sizes.tolist() == list(shorter.case.sizes)


def test_rows_hold_the_mean_the_worst_and_the_devices_time():
    case = tiny("linear_cross_entropy")[1]
    asked = AskedLengths("linear_cross_entropy", case, "onchip auto", "cuda", "bfloat16", 2)
    found = {
        "first": [5000.0], "filled": [700.0], "second": [30.0], "another": [31.0], "new": [20.0, 40.0],
        "again": [20.0, 30.0], "queued": [22.0], "device": [18.0, 22.0], "version": "1", "config": {},
        "errors": {"loss": (1e-3, 2e-3), "grad_hidden": (1e-2, 1.1e-2)},
    }  # fmt: skip
    rows = {row.mode: row for row in lengths._rows(asked, found, "2026-11-28T00:00:00")}
    new = rows["2 lengths, first time"]
    assert (new.mean_ms, new.worst_ms, new.median_ms, new.floor_ms) == (30, 40, 30, 20)
    assert new.ratio_to_floor == 1.5
    assert new.worst_ratio == pytest.approx(40 / 22)
    assert (new.ok, new.error_name, new.impl) == (True, "grad_hidden", "onchip auto 1")
    assert rows["first call, empty cache"].mean_ms == 5000
    assert rows["first call, filled cache"].mean_ms == 700
    assert rows["2 lengths, queued"].ratio_to_floor == pytest.approx(1.1)
    wrong = lengths._rows(asked, found | {"errors": {"loss": (math.nan, 1.0)}}, "2026-11-28T00:00:00")
    assert {(row.ok, row.mean_ms, row.median_ms, row.error) for row in wrong} == {(False, None, None, None)}


def test_the_command(tmp_path, monkeypatch):
    """Two processes for an implementation: one finds empty caches, the other what that one left."""
    monkeypatch.setattr("onchip.bench.page.plotly_js", lambda: "")
    target, case = tiny("linear_cross_entropy")
    monkeypatch.setattr(target, "SUITES", target.SUITES | {"cpu": (case,)})
    vars(target).pop("CASES", None)
    monkeypatch.setattr(lengths, "NUMBER", 2)
    text = StringIO()
    document = run_bench(
        "linear_cross_entropy", "torch", suite="lengths", impls=["onchip*", "liger"], device="cpu", out=tmp_path,
        console=Console(file=text, width=200),
    )  # fmt: skip
    vars(target).pop("CASES", None)
    assert_fits_schema("bench", document)
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith("-linear_cross_entropy-lengths")
    modes = [row["mode"] for row in document["rows"]]
    assert modes == list(lengths.mode_names(lengths.NUMBER).values())
    assert all(row["ok"] and row["mean_ms"] > 0 for row in document["rows"])
    assert [x["impl"] for x in document["not_run"]] == ["liger"]
    for shown in ("first call, empty cache", "first call, filled cache", "worst × device"):
        assert shown in text.getvalue()
    assert "worst, ms" in html_page(document, path.name, "plotly.js")


def test_what_fails_in_its_process_is_told(tmp_path):
    asked = AskedLengths("cross_entropy", tiny("cross_entropy")[1], "nobody", "cpu", "float32", 1)
    with lengths._measuring(str(tmp_path)) as process:
        process.recv()  # it has imported
        with pytest.raises(RuntimeError, match="StopIteration"):
            lengths._answer(process, asked, print)


@pytest.mark.parametrize("given", [{"framework": "jax"}, {"world": 2}])
def test_it_is_of_pytorch_in_one_process(given, monkeypatch):
    options = {"framework": "torch", "suite": "lengths", "device": "cpu"} | given
    with pytest.raises(ValueError, match="--suite lengths is for PyTorch in one process"):
        run_bench("linear_cross_entropy", console=Console(quiet=True), **options)


def test_waiting(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    torch_steps.wait("cpu")
    torch_steps.wait("cuda")
    assert waited == [1]
