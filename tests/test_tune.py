"""Tuning with a toy op on the CPU: what is measured, stored, taken up again and told."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from onchip.bench import timing
from onchip.core import configs
from onchip.core.configs import format_config, read_entries
from onchip.fp8 import triton_tiles as fp8_spec
from onchip.groups.triton import tiles as grouped_spec
from onchip.tune import fp8_linear as fp8_tuning
from onchip.tune import grouped_matmul as grouped_tuning
from onchip.tune import harness, run
from onchip.tune import linear_cross_entropy as tuning
from onchip.tune import linear_cross_entropy_jax as jax_tuning
from onchip.tune.harness import Config, Machine
from onchip.tune.run import run_tune, tuned_configs
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.triton import tiling
from shared import run_cli, run_json

ROUGH, FINAL = 2 + harness.ROUGH_REPEATS, 2 + harness.FINAL_REPEATS
VERSIONS = {"triton": "3.6.0", "torch": "2.11.0"}
# What a config does is in its "kind"; its "time" and 1 ms more are what the clock says.
RIGHT, WRONG, NAN, RAISES, TIRES = range(5)


def config(time: int, kind: int = RIGHT, block: int = 16) -> dict[str, int]:
    return {"time": time, "kind": kind, "block": block}


CANDIDATES = [
    config(20), config(5), config(1), config(9), config(0, WRONG), config(0, NAN), config(0, RAISES),
    config(0, block=64), config(12),
]  # fmt: skip


class Toy(ModuleType):
    """The sum of ones; remembers which configs have run."""

    def __init__(self) -> None:
        super().__init__("toy_tuning")
        self.KERNELS = ("forward", "backward")
        self.CASES = {"small": {"tokens": 10}, "big": {"tokens": 20}, "big-too": {"tokens": 40}}
        self.DEFAULT_CASES = ("small", "big")
        self.DTYPES = ("bfloat16", "float32")
        self.all_candidates: Sequence[Config] = CANDIDATES
        self.ran: list[Config] = []
        self.problems = 0

    def candidates(self, kernel: str) -> Sequence[Config]:
        return self.all_candidates

    def shared_bytes(self, kernel: str, config: Config, dtype: str) -> int:
        return config["block"] * 20

    def make_problem(self, kernel: str, device: str, dtype: str, *, tokens: int) -> Tensor:
        self.problems += 1
        return torch.ones(tokens, dtype=getattr(torch, dtype), device=device)

    def reference(self, kernel: str, problem: Tensor) -> Sequence[Any]:
        return [torch.tensor(float(problem.numel()))]

    def step(self, kernel: str, problem: Tensor, config: Config) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            self.ran.append(config)
            if config["kind"] == RAISES:
                raise RuntimeError("no such instruction\nand this is advice")
            if config["kind"] == TIRES and self.ran.count(config) > 2:
                raise RuntimeError("tired")
            return [problem.sum() + (torch.nan if config["kind"] == NAN else config["kind"] == WRONG)]

        run.ms = 1 + config["time"]  # type: ignore[attr-defined]
        return run

    def check(self, kernel: str, reference: Sequence[Any], returned: Sequence[Tensor]) -> tuple[float, float]:
        return abs(float(returned[0]) - float(reference[0])), 1e-3

    def times_that_ran(self) -> list[int]:
        return [config["time"] for config in self.ran]

    def configs_that_ran(self) -> set[tuple[int, ...]]:
        return {tuple(config.values()) for config in self.ran}


@pytest.fixture
def toy() -> Toy:
    return Toy()


def toy_time(step: Any, device: str) -> float:
    step()
    return float(step.ms)


@pytest.fixture(autouse=True)
def toy_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time_interleaved=functools.partial(timing.time_interleaved, toy_time))
    monkeypatch.setattr(harness, "adapter", lambda framework: clock)


@pytest.fixture(autouse=True)
def toy_gpu(toy: Toy, config_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One op is tuned, the toy, on a device whose work the CPU does; there are two of its kind."""
    monkeypatch.setitem(sys.modules, "toy_tuning", toy)
    monkeypatch.setattr(run, "TUNINGS", {"torch": {"toy": "toy_tuning"}, "jax": {}})
    monkeypatch.setattr(run, "_versions", lambda framework: VERSIONS)
    monkeypatch.setattr(run, "Machine", lambda device, *rest: Machine("cpu", *rest))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(
        name="NVIDIA Toy9 80GB HBM3", total_memory=1 << 30, major=9, minor=0, shared_memory_per_block_optin=1000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)


def tune(toy: Toy, folder: Path | None, text: StringIO | None = None, **options: Any) -> dict[str, Any]:
    options = {"cases": ["small"], "kernels": ["forward"], "out": folder} | options
    return run_tune("toy", console=Console(file=text or StringIO(), width=200), **options)


def only_row(document: Mapping[str, Any]) -> dict[str, Any]:
    (row,) = document["rows"]
    return dict(row)


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "toy9" / "toy.tune.jsonl").read_text().splitlines() if line]


def test_the_fastest_right_candidate_is_stored_and_the_others_are_logged(toy: Toy, tmp_path: Path) -> None:
    text = StringIO()
    document = tune(toy, tmp_path, text)
    row = only_row(document)
    assert document["ok"]
    assert document["path"] == str(tmp_path / "toy9" / "toy.json")
    assert (row["status"], row["config"], row["candidates"]) == ("tuned", config(1), 9)
    assert row["outcomes"] == {"right": 5, "wrong": 2, "failing": 1, "shared memory": 1}
    assert (row["best_ms"], row["heuristic_ms"], row["gain_percent"]) == (2, 21, 950)
    (entry,) = read_entries(tmp_path, "toy", "toy9")
    assert (entry.kernel, entry.dtype, entry.sizes) == ("forward", "bfloat16", {"tokens": 10})
    assert (entry.config, entry.ms, entry.versions) == (config(1), row["best_ms"], VERSIONS)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date)
    for said in ("time=1, kind=0, block=16", "+950.0%", "1, 2, 1 of 9"):
        assert said in text.getvalue()
    json.dumps(document, allow_nan=False)
    by_config = {tuple(line["config"].values()): line for line in logged(tmp_path)}
    assert len(by_config) == len(logged(tmp_path)) == 8  # all but the one that was dropped by shared memory
    reasons = {
        WRONG: ("wrong", "error 1.00e+00 is above 1.00e-03"),
        NAN: ("wrong", "error nan is above 1.00e-03"),
        RAISES: ("failing", "RuntimeError: no such instruction"),
    }
    for kind, (outcome, reason) in reasons.items():
        line = by_config[0, kind, 16]
        assert (line["outcome"], line["reason"], line["ms"]) == (outcome, reason, None)
        assert toy.ran.count(config(0, kind)) == 1  # it is never timed
    assert (0, RIGHT, 64) not in toy.configs_that_ran()


def test_the_heuristic_is_in_the_final(toy: Toy, tmp_path: Path) -> None:
    toy.all_candidates = [config(40), *(config(i) for i in range(5)), config(30)]
    assert only_row(tune(toy, tmp_path))["heuristic_ms"] == 41
    assert toy.times_that_ran().count(40) == ROUGH + FINAL
    assert toy.times_that_ran().count(30) == ROUGH  # too slow for the final
    assert toy.times_that_ran().count(0) == ROUGH + FINAL


@pytest.mark.parametrize(
    ("candidates", "status", "reason", "problems"),
    [
        ([config(0, WRONG), config(1)], "tuned", None, 1),  # the heuristic's is wrong
        ([config(0, WRONG), config(1, RAISES), config(2, RAISES)], "failed", "RuntimeError: no such instruction", 1),
        ([config(0, block=64)], "failed", "needs 1280 bytes of shared memory; there are 1000", 0),
    ],
)
def test_without_a_right_candidate_nothing_is_stored(
    toy: Toy, tmp_path: Path, candidates: Sequence[Config], status: str, reason: str | None, problems: int
) -> None:
    toy.all_candidates = candidates
    document = tune(toy, tmp_path)
    row = only_row(document)
    assert (row["status"], row["heuristic_ms"], row["gain_percent"]) == (status, None, None)
    assert row["reason"] == (reason and f"no candidate is right; most often: {reason}")
    assert document["ok"] == bool(read_entries(tmp_path, "toy", "toy9")) == (status == "tuned")
    assert toy.problems == problems


def test_a_problem_that_cannot_be_made_does_not_stop_the_others(toy: Toy, tmp_path: Path) -> None:
    make = toy.make_problem

    def make_small(kernel: str, device: str, dtype: str, *, tokens: int) -> Tensor:
        if tokens == 20:
            raise MemoryError("1 TiB is too much")
        return make(kernel, device, dtype, tokens=tokens)

    toy.make_problem = make_small  # type: ignore[method-assign]
    document = tune(toy, tmp_path, cases=["small", "big"])
    assert [r["status"] for r in document["rows"]] == ["tuned", "failed"]
    assert document["rows"][1]["reason"] == "MemoryError: 1 TiB is too much"
    assert not document["ok"]


def test_a_step_that_fails_only_when_timed_is_left_out(toy: Toy, tmp_path: Path) -> None:
    toy.all_candidates = [config(20), config(5), config(1, TIRES)]
    row = only_row(tune(toy, tmp_path))
    assert row["config"] == config(5)
    assert row["outcomes"] == {"right": 2, "failing": 1}


def test_a_lost_device_ends_the_run_but_not_the_log(toy: Toy, tmp_path: Path) -> None:
    class Gone(float):
        def sum(self) -> float:
            raise RuntimeError("illegal memory access")

    reference = toy.reference
    toy.reference = lambda kernel, problem: [Gone(problem.numel())]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="time=0, kind=3, block=16 has left the device unusable"):
        tune(toy, tmp_path)
    assert logged(tmp_path)[-1]["outcome"] == "failing"
    toy.reference = reference  # type: ignore[method-assign]
    toy.ran.clear()
    assert only_row(tune(toy, tmp_path))["status"] == "tuned"
    assert (0, RAISES, 16) not in toy.configs_that_ran()


# ------------------------------------------------------------------------------------------------------ going on


def test_what_has_a_winner_is_skipped(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = only_row(tune(toy, tmp_path))
    toy.ran.clear()
    row = only_row(tune(toy, tmp_path))
    assert (row["status"], row["config"], row["best_ms"]) == ("stored before", first["config"], first["best_ms"])
    assert toy.ran == []
    assert only_row(tune(toy, tmp_path, again=True))["status"] == "tuned"
    assert len(toy.configs_that_ran()) == 8
    assert len(logged(tmp_path)) == 16
    # Other versions are tuned anew.
    toy.ran.clear()
    monkeypatch.setattr(run, "_versions", lambda framework: VERSIONS | {"triton": "3.7.0"})
    assert only_row(tune(toy, tmp_path))["status"] == "tuned"
    assert len(toy.configs_that_ran()) == 8
    (entry,) = read_entries(tmp_path, "toy", "toy9")
    assert entry.versions["triton"] == "3.7.0"


def test_an_interrupted_run_goes_on(toy: Toy, tmp_path: Path) -> None:
    check = toy.check

    def interrupted(kernel: str, reference: Any, returned: Sequence[Tensor]) -> tuple[float, float]:
        if len(toy.configs_that_ran()) == 3:
            raise KeyboardInterrupt
        return check(kernel, reference, returned)

    toy.check = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tune(toy, tmp_path)
    assert [line["config"]["time"] for line in logged(tmp_path)] == [20, 5]
    toy.check = check  # type: ignore[method-assign]
    with (tmp_path / "toy9" / "toy.tune.jsonl").open("a") as file:
        file.write('\n{"kernel": "forw')  # what a process leaves that is killed while it writes
    toy.ran.clear()
    row = only_row(tune(toy, tmp_path))
    assert row["config"] == config(1)
    assert row["outcomes"] == {"right": 5, "wrong": 2, "failing": 1, "shared memory": 1}
    assert toy.times_that_ran().count(20) == toy.times_that_ran().count(5) == FINAL  # only the final
    assert toy.times_that_ran().count(1) == ROUGH + FINAL


def test_the_limit_leaves_the_rest_to_the_next_run(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(harness.time, "monotonic", lambda: now)
    check = toy.check

    def slow(kernel: str, reference: Any, returned: Sequence[Tensor]) -> tuple[float, float]:
        nonlocal now
        now += 1
        return check(kernel, reference, returned)

    toy.check = slow  # type: ignore[method-assign]
    document = tune(toy, tmp_path, cases=["small", "big"], limit_seconds=3)
    first, second = document["rows"]
    assert (first["status"], second["status"]) == ("unfinished", "unfinished")
    assert sum(first["outcomes"].values()) == 4  # three that ran, and one that needs no run
    assert first["reason"] == "the time was up after 4 candidates; the same command goes on from there"
    assert document["ok"]
    assert read_entries(tmp_path, "toy", "toy9") == ()
    assert [line["config"] for line in logged(tmp_path)] == CANDIDATES[:3]
    assert only_row(tune(toy, tmp_path))["status"] == "tuned"
    assert [line["config"] for line in logged(tmp_path)[3:] if line["outcome"] == "right"] == [config(9), config(12)]


def test_a_config_that_was_right_before_the_kernel_changed_is_not_stored(toy: Toy, tmp_path: Path) -> None:
    tune(toy, tmp_path)
    (tmp_path / "toy9" / "toy.json").unlink()
    configs.clear_cache()
    check = toy.check

    def changed(kernel: str, reference: Any, returned: Sequence[Tensor]) -> tuple[float, float]:
        return (1.0, 1e-3) if toy.ran[-1]["time"] == 1 else check(kernel, reference, returned)

    toy.check = changed  # type: ignore[method-assign]
    row = only_row(tune(toy, tmp_path))
    assert row["config"] == config(5)
    assert row["outcomes"]["wrong"] == 3


def test_comparing_times_what_a_launch_takes_against_the_heuristic_and_stores_nothing(toy: Toy, tmp_path: Path) -> None:
    none = only_row(tune(toy, None, compare=True))
    assert (none["status"], none["config"], none["gain_percent"]) == ("heuristic", config(20), 0)
    tune(toy, None)
    tune(toy, None, dtype="float32", kernels=["backward"])
    before = read_entries(configs.user_folder(), "toy", "toy9")
    toy.ran.clear()
    row = only_row(tune(toy, None, compare=True, cases=["big"]))
    assert (row["status"], row["config"], row["best_ms"], row["heuristic_ms"]) == ("nearest", config(1), 2, 21)
    assert row["gain_percent"] == 950
    assert row["reason"] == "tokens=10"
    assert toy.configs_that_ran() == {tuple(config(20).values()), tuple(config(1).values())}
    # Without cases, every stored config on its own problem.
    rows = tune(toy, None, compare=True, cases=None, kernels=None)["rows"]
    assert [(r["kernel"], r["dtype"], r["case"], r["status"], r["gain_percent"]) for r in rows] == [
        ("backward", "float32", "tokens=10", "exact", 950), ("forward", "bfloat16", "tokens=10", "exact", 950),
    ]  # fmt: skip
    assert read_entries(configs.user_folder(), "toy", "toy9") == before


# ------------------------------------------------------------------------------------------------------ options


def test_defaults_and_patterns(toy: Toy, tmp_path: Path) -> None:
    toy.all_candidates = [config(0)]
    rows = tune(toy, tmp_path, cases=None, kernels=None)["rows"]
    assert [(r["kernel"], r["case"]) for r in rows] == [
        ("forward", "small"), ("forward", "big"), ("backward", "small"), ("backward", "big"),
    ]  # fmt: skip
    rows = tune(toy, tmp_path, cases=["big*"], kernels=["b*"], dtype="float32")["rows"]
    assert [(r["kernel"], r["case"], r["dtype"]) for r in rows] == [
        ("backward", "big", "float32"), ("backward", "big-too", "float32"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["small", "huge*"]}, "--case 'huge*' matches nothing; there is: small, big, big-too"),
        ({"kernels": ["sideways"]}, "--kernel 'sideways' matches nothing; there is: forward, backward"),
        ({"dtype": "int8"}, "--dtype must be one of bfloat16, float32; got 'int8'"),
        ({"limit_seconds": 0}, "--limit-seconds must be above 0; got 0"),
        ({"out": Path(__file__)}, "--out must be a folder to write to"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    toy: Toy, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(toy, tmp_path / "out", **options)
    assert toy.problems == 0
    assert not (tmp_path / "out").exists()


def test_a_broken_file_is_found_before_any_work(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = configs.config_path(configs.user_folder(), "toy", "toy9")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"toy\.json is not a file of tuned configs"):
        tune(toy, None)
    assert toy.problems == 0
    # `onchip info` notes it, and a module that can't be imported.
    monkeypatch.setattr(run, "TUNINGS", {"torch": {"gone": "onchip.ops.no_such_op.tuning", "toy": "toy_tuning"}})
    tuned = tuned_configs({"torch": ["toy9"]})
    assert tuned["notes"][0] == "gone: ModuleNotFoundError: No module named 'onchip.ops.no_such_op'"
    assert tuned["notes"][1].startswith(f"toy: ValueError: {path} is not a file of tuned configs")


# ------------------------------------------------------------------------------------------------------ commands


def test_command(toy: Toy, tmp_path: Path) -> None:
    document = run_json("tune", "toy", "--case", "small", "--case", "b*o", "--kernel", "f*", "--out", tmp_path)
    assert [(r["case"], r["config"]) for r in document["rows"]] == [("small", config(1)), ("big-too", config(1))]
    assert document["device"] == "toy9"
    assert document["versions"] == VERSIONS
    assert len(read_entries(tmp_path, "toy", "toy9")) == 2
    toy.all_candidates = [config(0, WRONG)]
    result = run_cli("tune", "toy", "--case", "small", "--again", "--out", tmp_path)
    assert result.exit_code == 1
    assert "no candidate is right" in result.stdout


def test_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["softmax"], "no op 'softmax'; there is: toy"),
        (["toy", "--case", "nope"], "--case 'nope' matches nothing; there is: small, big, big-too"),
    ):
        result = run_cli("tune", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(run.TUNINGS, "jax", {"toy": "toy_tuning"})
    for framework, name in (("torch", "PyTorch"), ("jax", "JAX")):
        result = run_cli("tune", "toy", "--framework", framework)
        assert result.exit_code == 2
        assert f"tune needs a CUDA device, and {name} sees none here" in result.stderr


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    versions = run._versions("torch")
    assert torch.__version__.startswith(versions["torch"])
    assert set(versions) <= {"torch", "triton"}
    assert set(run._versions("jax")) == {"jax", "jaxlib"}


def test_info_tells_which_configs_are_tuned(toy: Toy) -> None:
    tune(toy, None, kernels=["forward"])
    tuned = run_json("info")["tuned"]
    assert tuned["notes"] == []
    assert len(tuned["rows"]) == 8  # two kernels, cases and dtypes; of the two equal devices, one
    rows = {(r["kernel"], r["case"], r["dtype"]): r for r in tuned["rows"]}
    exact, near, none = (
        rows[key]
        for key in (("forward", "small", "bfloat16"), ("forward", "big", "bfloat16"), ("backward", "big", "float32"))
    )
    assert (exact["how"], exact["config"], exact["device"]) == ("exact", config(1), "toy9")
    assert (near["how"], near["config"]) == ("nearest", config(1))
    assert near["source"] == "tokens=10"
    assert (none["how"], none["config"]) == ("heuristic", config(20))
    printed = run_cli("info").stdout
    assert "tuned configs" in printed
    assert all(how in printed for how in ("exact", "nearest", "heuristic", "bfloat16, float32"))


def test_info_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tuned = run_json("info")["tuned"]
    assert tuned["rows"] == []
    (note,) = tuned["notes"]
    assert note.startswith("none apply, as there is no CUDA device here (")
    assert note in run_cli("info").stdout


# ------------------------------------------------------------------------------------------ the ops' own


@pytest.mark.parametrize(
    ("module", "heuristics"),
    [
        (tuning, tiling.heuristic_tiles(tuning.HOPPER_SHARED)),
        (jax_tuning, mosaic_spec.heuristic_tiles()),
        (
            fp8_tuning,
            {k: vars(fp8_spec.heuristic_product(tuning.HOPPER_SHARED, k == "product")) for k in fp8_tuning.KERNELS},
        ),
        (
            grouped_tuning,
            {
                k: vars(
                    grouped_spec.gradient_config(tuning.HOPPER_SHARED, 1 + (k[:3] != "fp8"))
                    if k.endswith("weight_gradient")
                    else grouped_spec.product_config(tuning.HOPPER_SHARED, 1 + (k[:3] != "fp8"), short=False)
                )
                for k in grouped_tuning.KERNELS
            },
        ),
    ],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else "",
)
def test_candidates(module: Any, heuristics: Mapping[str, Config]) -> None:
    assert set(module.KERNELS) == set(heuristics)
    for kernel in module.KERNELS:
        tried = module.candidates(kernel)
        assert tried[0] == heuristics[kernel]
        assert len({format_config(c) for c in tried}) == len(tried) <= 40
        assert {tuple(sorted(c)) for c in tried} == {tuple(sorted(tried[0]))}
        for dtype in module.DTYPES:
            needed = [module.shared_bytes(kernel, c, dtype) for c in tried]
            assert sum(n <= tuning.HOPPER_SHARED for n in needed) >= len(needed) / 2
            assert needed[0] <= tuning.HOPPER_SHARED
            assert min(needed) <= 100 * 1024 or module is jax_tuning  # something for smaller devices
    assert set(module.DEFAULT_CASES) <= set(module.CASES)
    assert all(min(sizes.values()) >= 1 for sizes in module.CASES.values())


# Triton reads TRITON_INTERPRET when it is imported, so this needs a process of its own; float16, since the interpreter
# computes bfloat16 wrongly.  The vocabulary's last tile is not full, nor is the last block of tokens.
INTERPRETED = """
import json, torch
from interpreter import speed_up
from onchip.tune import linear_cross_entropy as tuning

speed_up()
said = {}
for kernel in tuning.KERNELS:
    problem = tuning.make_problem(kernel, "cpu", "float16", tokens=200, hidden=72, vocab=600)
    reference = tuning.reference(kernel, problem)
    tried = tuning.candidates(kernel)
    first, last = (tuning.step(kernel, problem, config) for config in (tried[0], tried[-1]))
    poisoned = tuning.check(kernel, reference, tuning._outputs(kernel, problem))
    right = [tuning.check(kernel, reference, step()) for step in (last, first)]
    wrong = tuning.check(kernel, reference, [1.05 * out for out in tuning._outputs(kernel, problem)])
    said[kernel] = [poisoned, right, wrong]
print(json.dumps(said))
"""


@pytest.mark.slow
def test_every_kernel_of_linear_cross_entropy_is_right_under_the_interpreter() -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert list(said) == list(tuning.KERNELS)
    for kernel, (poisoned, right, wrong) in said.items():
        assert math.isnan(poisoned[0]), kernel
        assert all(error <= bound / 10 for error, bound in right), kernel
        assert wrong[0] > wrong[1], kernel
