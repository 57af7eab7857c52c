"""Benchmarks in several processes: what they check, time and write, and how they end."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from onchip.bench import environment, torch_world
from onchip.bench.torch_world import RankFailed, launch
from shared import assert_fits_schema, run_cli

NOT_HERE = "it runs on CUDA devices only"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(environment, "_busy_cores", lambda: 0.0)  # it would look for half a second
    monkeypatch.setattr("onchip.bench.page.plotly_js", lambda: "/* 5 MB */")


def bench(tmp_path, *arguments, exit_code=0):
    """The result of the command, and the document that it wrote, if it did."""
    result = run_cli("bench", *arguments, "--framework", "torch", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == exit_code, result.output
    return result, {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}


def only_run(tmp_path, op):
    """The document of a short run on two ranks, all of whose rows are right and timed."""
    options = ("--world", 2, "--mode", "forward+backward", "--repeats", 1)
    _, documents = bench(tmp_path, op, *options)
    ((name, document),) = documents.items()
    assert name.endswith(f"-{op}-world2.json")
    assert "2 processes share each case" in (tmp_path / name).with_suffix(".html").read_text()
    assert_fits_schema("bench", document)
    assert document["environment"]["world"] == 2
    for row in document["rows"]:
        assert row["ok"], row
        assert row["median_ms"] > 0
        assert row["floor_ms"] > 0
    return document


def test_linear_cross_entropy(tmp_path):
    document = only_run(tmp_path, "linear_cross_entropy")
    impls = (
        "onchip auto", "onchip auto, sequence layout", "onchip auto, 1 GiB", "onchip cross_entropy in place",
        "torch, three all-reduces, float32 logits",
    )  # fmt: skip
    assert [row["impl"].rpartition(" ")[0] for row in document["rows"]] == list(impls)
    assert all(set(row["errors"]) == {"loss", "grad_hidden", "grad_weight"} for row in document["rows"])
    assert {entry["reason"] for entry in document["not_run"]} == {NOT_HERE}
    assert len(document["not_run"]) == 7


@pytest.mark.slow
def test_collective_matmul(tmp_path):
    document = only_run(tmp_path, "collective_matmul")
    impls = ("onchip auto", "torch, one collective", "the collective alone")
    ran = [(row["case"], row["impl"].rpartition(" ")[0]) for row in document["rows"]]
    assert ran == [(case, impl) for case in ("cpu-up", "cpu-down") for impl in impls]
    assert {row["impl"].rpartition(" ")[0]: set(row["errors"]) for row in document["rows"][3:]} == {
        "onchip auto": {"out", "grad_x", "grad_weight"},
        "torch, one collective": {"out", "grad_x", "grad_weight"},
        "the collective alone": {"out", "gathered"},
    }
    assert [entry["reason"] for entry in document["not_run"]] == [NOT_HERE] * 7


# --------------------------------------------------------------------------------------------------------- how they end


def differ(world, folder):
    """What a rank that raises or is slow means to the others; then one fails, while the other waits for it."""
    rank = dist.get_rank()
    with pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError) as raised:
        world.together(lambda: 1 // rank)
    found = [str(raised.value), world.together(lambda: rank), world.every(rank)]
    found.append(world.time(lambda step, device, in_step: in_step() or 5.0 * rank, None, "cpu"))
    Path(folder, f"rank{rank}").write_text(json.dumps(found))
    if rank == 1:
        raise ValueError("enough")
    world.every(rank)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path, capfd):
    before = signal.getsignal(signal.SIGINT)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 1 failed: ValueError: enough$"):
        launch(2, "cpu", differ, str(tmp_path))
    assert time.monotonic() - start < 50  # not the time-out of a collective
    assert signal.getsignal(signal.SIGINT) == before
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    division = "integer division or modulo by zero"
    assert said == [[division, 0, [0, 1], 5.0], [f"rank 0: ZeroDivisionError: {division}", 1, [0, 1], 5.0]]
    assert "enough" not in capfd.readouterr().err


def interrupt(world):
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)


@pytest.mark.slow
def test_ctrl_c_ends_all():
    with pytest.raises(KeyboardInterrupt):
        launch(2, "cpu", interrupt)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RankFailed("rank 1 failed: SIGKILL"), 1, "rank 1 failed: SIGKILL")],
    ids=["Ctrl-C", "a rank that failed"],
)
@pytest.mark.parametrize("measured", [True, False])
def test_what_was_measured_is_kept(tmp_path, monkeypatch, error, code, reason, measured):
    row = {
        "op": "collective_matmul", "case": "cpu-up", "dtype": "float32", "mode": "forward", "impl": "onchip auto 0.1.0",
        "median_ms": 1.0, "p10_ms": 1.0, "p90_ms": 1.0, "floor_ms": 1.0, "ratio_to_floor": 1.0, "extra_bytes": 0,
        "error": 0.0, "error_bound": 1e-6, "ok": True,
    }  # fmt: skip

    def ends_early(ranks, device, work, op, given, stderr, path):
        if measured:
            Path(path).write_text(json.dumps({"done": 1, "rows": [row], "not_run": []}))
        raise error

    monkeypatch.setattr(torch_world, "launch", ends_early)
    result, documents = bench(tmp_path, "collective_matmul", "--world", 2, exit_code=code)
    ((_, document),) = documents.items()
    assert [found["case"] for found in document["rows"]] == ["cpu-up"][:measured]
    left = [(entry["impl"], entry["case"], entry["reason"]) for entry in document["not_run"]]
    first = ("the rest", "cpu-down" if measured else "cpu-up", reason)
    assert left == ([first] if measured else [first, ("all", "cpu-down", "interrupted")])
    assert result.output.count(reason) == (2 if reason == "interrupted" and not measured else 1) + (code == 130)
