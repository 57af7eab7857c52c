"""The command line: what each command prints, and how it answers wrong calls."""

import inspect
import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from itertools import product
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

import onchip
from onchip import check, cli, info
from onchip.core import machine
from onchip.core.names import matching
from onchip.core.sizes import DTYPE_BYTES
from onchip.core.tables import print_table
from onchip.kernels.triton import launch as triton_calls
from onchip.kernels.triton import packed, versions
from onchip.ops.cross_entropy import checks as of_logits
from onchip.ops.linear_cross_entropy import checks
from onchip.oracle.checks import Check, Checker
from onchip.registry import OPS
from onchip.vocab import jax_ways
from shared import run_cli, run_json


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(option):
    result = run_cli(option, columns=60)
    assert result.exit_code == 0
    assert all(entry.help in result.stdout for entry in cli.COMMANDS.values())
    assert "--install-completion" in result.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command(command):
    run = resolve_name(cli.COMMANDS[command].run)
    shown = run_cli(command, "-h", columns=60)
    assert shown.exit_code == 0
    assert run.__doc__.splitlines()[0] in " ".join(shown.stdout.split())
    assert "…" not in shown.stdout
    if "framework" in inspect.signature(run).parameters:
        assert "[torch|jax" in shown.stdout


def test_the_command_without_a_module_of_a_command():
    """Also `python -m onchip`: what it prints is quick, as it imports hardly anything."""
    run = "import sys; sys.argv[1:] = ['-h']; import runpy; runpy.run_module('onchip', run_name='__main__')"
    looked = f"import atexit, sys; atexit.register(lambda: print(sorted(sys.modules))); {run}"
    said = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, check=True).stdout
    assert "Usage: onchip [OPTIONS] COMMAND" in said
    assert not re.search(r"'(numpy|torch|jax|onchip\.(bench|plan|ops|check))'", said)


def test_the_version():
    assert run_cli("--version").stdout == f"onchip {onchip.__version__}\n"


def test_the_shell_completes_words():
    def asked(line, word):
        return {"_ONCHIP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}

    def completed(line, word):
        return CliRunner(env=asked(line, word)).invoke(cli.app, [], prog_name="onchip").stdout.split()

    run = [sys.executable, "-m", "onchip"]  # as a shell does it
    done = subprocess.run(run, env=os.environ | asked("onchip ch", 1), capture_output=True, text=True)
    assert done.stdout.split() == completed("onchip ch", 1) == ["check"]
    assert completed("onchip plan --gpu h", 3) == ["h100", "h200"]
    assert completed("onchip check linear_l", 2) == ["linear_log_probs"]
    assert completed("onchip plan --model mistralai/Mix", 3) == ["mistralai/Mixtral-8x7B-v0.1"]
    assert completed("onchip plan --model Mix", 3) == ["Mixtral-8x7B-v0.1"]
    assert completed("onchip warm-up --model mix", 3) == ["mixtral-8x7b-v0.1"]
    assert completed("onchip bench linear_cross_entropy --case gpt-oss", 4) == ["gpt-oss-120b"]
    assert completed("onchip bench linear_cross_entropy --suite us", 4) == ["users"]
    assert completed("onchip bench fp8_linear --mode wg", 4) == ["wgrad-product"]
    assert completed("onchip bench linear_cross_entropy --impl torch-eager", 4) == [
        "torch-eager", "torch-eager-float32-logits",
    ]  # fmt: skip
    assert completed("onchip bench linear_cross_entropy --framework jax --impl XLA", 6)


def test_options_of_known_values_complete():
    """Each that lists its words in help, and those whose values depend on the op."""
    for name in cli.COMMANDS:
        for option in cli._loaded(name).params:
            listed = "|" in (option.metavar or "")
            known = option.name in ("model", "cases", "suite", "impls", "modes", "op", "ops")
            assert (option._custom_shell_complete is not None) == (listed or known), f"{name} {option.name}"


def interrupted(*, console):
    """A command that the user ends."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_ctrl_c_is_a_message_and_exit_code_130(command, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, command, cli.COMMANDS[command]._replace(run="test_cli:interrupted"))
    result = run_cli(command)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "onchip: interrupted\n"


def test_names_with_commas_are_listed_apart():
    with pytest.raises(ValueError, match=r"choose from:\n  eager, float32\n  onchip$"):
        matching("--impl", ["liger"], ["eager, float32", "onchip"])
    with pytest.raises(ValueError, match=r"choose from: a, b$"):
        matching("--case", ["c"], ["a", "b"])
    assert matching("--impl", ["eager-float32"], ["eager, float32", "eager"]) == ["eager, float32"]
    assert matching("--impl", ["eager,*"], ["eager, float32", "eager"]) == ["eager, float32"]


@pytest.mark.parametrize("columns", [20, 40, 60, 200])
def test_a_table_cuts_no_word(columns):
    console = Console(width=columns, file=io.StringIO())
    row = ["linear_cross_entropy", "some words that wrap", Text("loss 1.0e-06"), "ok"]
    print_table(console, ["op", "reason", "error", ""], [row], title="title", right=("error",))
    printed = console.file.getvalue()
    assert all(len(line.rstrip()) <= columns for line in printed.splitlines())
    assert set(" ".join(map(str, row)).split()) <= set(printed.replace("|", " ").split())


@pytest.mark.parametrize("columns", range(40, 90))
def test_a_table_of_several_wide_columns_cuts_no_word(columns):
    console = Console(width=columns, file=io.StringIO())
    rows = [["all but one ignored", "bfloat16", "plain entropy", "log_sum_sq_probs", "6.7e-08", Text("ok")]]
    print_table(console, ["case", "dtype", "implementation", "worst of", "error", ""], rows, right=("error",))
    printed = console.file.getvalue()
    assert all(len(line.rstrip()) <= columns for line in printed.splitlines())
    assert set(" ".join(map(str, rows[0])).split()) <= set(printed.replace("|", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "softmax"], "no op 'softmax'; choose from: linear_cross_entropy, linear_log_probs, "),
        (["check", "--device", "tpu"], "--device must be auto, cpu or cuda; got 'tpu'"),
        (["check", "--framework", "tf"], "--framework must be torch, jax or all; got 'tf'"),
        (["plna"], "No such command 'plna'. Did you mean 'plan'?"),
        (["bench", "linear_cross_entropy", "--framework", "all"], "--framework must be torch or jax; got 'all'"),
        (["bench", "linear_cross_entropy", "--framework", "jax", "--dtype", "int8"], "--dtype must be one of float32"),
        (["bench", "softmax"], "no op 'softmax'; choose from: linear_cross_entropy"),
        (["bench", "linear_cross_entropy", "--case", "nope"], "--case 'nope' matches nothing"),
        (["demo", "--steps", "0"], "steps"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_call_is_a_message_and_exit_code_2(arguments, message):
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output


def test_a_benchmark_that_is_terminated_ends_as_by_ctrl_c(monkeypatch):
    def terminated(*args, **kwargs):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt

    monkeypatch.setattr("onchip.bench.run.choose_framework", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert run_cli("bench", "fp8_linear").exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (["check"], "PyTorch"),
        (["check", "--framework", "jax"], "JAX"),
        (["bench", "linear_cross_entropy", "--framework", "jax"], "JAX"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_cuda_that_is_not_there(monkeypatch, command, title):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("jax.devices", list)
    result = run_cli(*command, "--device", "cuda")
    assert result.exit_code == 2
    assert f"{title} sees no CUDA device here" in result.stderr


def test_info():
    document = run_json("info")
    assert document["onchip"] == onchip.__version__
    assert document["versions"]["torch"]
    assert document["versions"]["jax"]
    assert document["versions"]["jaxlib"]
    assert any(name.startswith("jax ") for name in document["machine"])
    assert {(b["framework"], b["backend"], b["device"]) for b in document["backends"]} == {
        ("torch", "plain", "cpu"), ("torch", "plain", "cuda"), ("torch", "triton", "cuda"),
        ("torch", "ring", "cpu"), ("torch", "ring", "cuda"), ("torch", "symmetric", "cuda"),
        ("torch", "collective", "cpu"), ("torch", "collective", "cuda"),
        ("torch", "dequantize", "cpu"), ("torch", "dequantize", "cuda"), ("torch", "scaled_mm", "cuda"),
        ("jax", "xla", "cpu"), *(("jax", backend, "cuda") for backend in jax_ways.BACKENDS["gpu"]),
    }  # fmt: skip
    assert {(b["framework"], b["op"]) for b in document["backends"]} == {
        (framework, op) for framework in ("torch", "jax") for op in OPS
    }
    assert all(b["why"] for b in document["backends"])
    assert all(b["usable"] for b in document["backends"] if b["device"] == "cpu")
    shown = run_cli("info", columns=80).stdout
    assert onchip.__version__ in shown
    assert "  xla: all ops (matrix products and loops of XLA)\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_info_on_what_stands_on_a_version_of_triton(monkeypatch):
    monkeypatch.setattr(versions, "gluon_refusal", lambda: None)
    monkeypatch.setattr(versions, "direct_refusal", lambda: "Triton passes other arguments to what it compiled")
    monkeypatch.setattr(packed, "refusal", lambda: "CUDA's driver is older than 12.4")
    assert all(not row["on"] and row["why"] == "no CUDA" for row in info._triton("no CUDA"))
    gluon, direct, prepared = info._triton(None)
    assert gluon == {"part": "kernels in Gluon", "on": True, "why": "tried, and it works"}
    assert not direct["on"]
    assert "to what it compiled; so each launch takes the CPU several times as long" in direct["why"]
    assert not prepared["on"]
    assert "older than 12.4; so each call is checked" in prepared["why"]


def backend_of(document, framework, backend):
    """What `onchip info` says of a backend on a GPU."""
    wanted = {"framework": framework, "backend": backend, "device": "cuda", "op": "linear_cross_entropy"}
    (row,) = (row for row in document["backends"] if wanted.items() <= row.items())
    return row["usable"], row["why"]


@pytest.mark.parametrize(
    ("capability", "usable", "why"),
    [
        ("9.0", True, "kernels for this device"),
        ("8.0", False, "it is for compute capability 9.0 (Hopper); this is 8.0"),
    ],
)
def test_info_on_the_jax_backends_of_a_gpu(monkeypatch, capability, usable, why):
    gpu = SimpleNamespace(platform="gpu", id=0, device_kind="NVIDIA X100", compute_capability=capability)
    monkeypatch.setattr("jax.devices", lambda: [gpu])
    document = run_json("info")
    assert document["machine"]["jax gpu:0"] == "NVIDIA X100"
    assert backend_of(document, "jax", "xla")[0]
    assert backend_of(document, "jax", "mosaic_gpu") == (usable, why)


@pytest.mark.parametrize(
    ("capability", "installed", "usable", "why"),
    [
        ((9, 0), True, True, "kernels for this device"),
        ((8, 6), True, True, "kernels for this device"),
        ((7, 5), True, False, "it needs compute capability 8.0 or later; this is 7.5"),
        ((9, 0), False, False, "Triton is not installed"),
    ],
)
def test_info_on_the_triton_backend(monkeypatch, capability, installed, usable, why):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(triton_calls, "find_spec", lambda name: object() if installed else None)
    assert backend_of(run_json("info"), "torch", "triton") == (usable, why)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_info_without_a_framework_says_what_to_install(monkeypatch, framework):
    from importlib import metadata

    version = metadata.version

    def missing(name):
        if name == framework:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    document = run_json("info")
    assert document["versions"][framework] is None
    rows = [b for b in document["backends"] if b["framework"] == framework]
    assert rows
    assert all(not b["usable"] and f"pip install 'onchip[{framework}]'" in b["why"] for b in rows)
    assert f"pip install 'onchip[{framework}]'" in run_cli("info").stdout


@pytest.fixture
def few_cases(monkeypatch):
    for module in (checks, of_logits):
        monkeypatch.setattr(module, "CHECK_CASES", [c for c in module.CHECK_CASES if c.name == "one class"])


QUANTITIES = {"loss", "lse", "log_prob", "entropy", "correct", "grad_logits"}


def test_check_of_a_sample_in_both_frameworks(few_cases):
    document = run_json("check", "cross_entropy", "--device", "cpu")
    assert document["ok"]
    assert {(r["framework"], r["device"]) for r in document["rows"]} == {("torch", "cpu"), ("jax", "cpu")}
    assert all(
        r["implementation"].split()[0] == {"torch": "plain", "jax": "xla"}[r["framework"]] for r in document["rows"]
    )
    assert {r["quantity"] for r in document["rows"]} >= QUANTITIES


@pytest.mark.slow
def test_check_of_all_dtypes_and_strategies(few_cases):
    document = run_json("check", "linear_cross_entropy", "--full", "--framework", "torch", "--device", "cpu")
    assert document["ok"]
    assert {(r["framework"], r["dtype"], r["implementation"]) for r in document["rows"]} == {
        ("torch", dtype, f"plain {how}") for dtype in DTYPE_BYTES for how in ("stash", "recompute", "stash loss_alone")
    }


@pytest.fixture
def pretended(monkeypatch):
    """Every check of every op is right at once; gives the checks that ran, as (framework, op)."""
    ran = []

    def planned(op, number):
        return lambda device, framework: (
            [lambda: ran.append((framework, op)) or [Check("case", "float32", "torch", "loss", 0.0, 1e-6)]] * number
        )

    for op in OPS:
        checker = SimpleNamespace(planned_checks=planned(op, 62), session=Checker.session)
        monkeypatch.setattr(import_module(f"onchip.ops.{op}.checks"), "CHECKER", checker)
    return ran


def test_check_runs_a_sample_of_every_op_in_every_framework(pretended):
    document = run_json("check", "--framework", "all")
    assert document["ok"]
    assert {(r["framework"], r["op"]) for r in document["rows"]} == set(product(("torch", "jax"), OPS))
    counts = Counter(pretended)
    assert set(counts.values()) == {6, 3}  # one in 11 of PyTorch's, one in 29 of JAX's


def test_check_of_some_ops(pretended):
    run_cli("check", "cross_entropy", "linear_jsd", "--framework", "torch", "--full")
    assert Counter(pretended) == {("torch", "cross_entropy"): 62, ("torch", "linear_jsd"): 62}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_sample_of_the_checks_has_all_dtypes(framework, op):
    planned = import_module(f"onchip.ops.{op}.checks").CHECKER.planned_checks("cpu", framework)
    step = check._ONE_IN[framework]
    sample = planned[::-step]
    assert sample[0] is planned[-1]  # with all options at once
    assert len({str(run.args[1]) for run in sample}) == 3


def test_check_takes_the_frameworks_that_are_installed(pretended, monkeypatch):
    monkeypatch.setattr("onchip.core.machine.find_spec", lambda name: None if name == "torch" else name)
    document = run_json("check")
    assert {r["framework"] for r in document["rows"]} == {"jax"}
    result = run_cli("check", "--framework", "all")
    assert result.exit_code == 2
    assert "pip install 'onchip[torch]'" in result.stderr


def test_the_default_framework_is_the_first_that_is_installed(monkeypatch):
    assert machine.choose_framework(None) == "torch"
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "torch" else name)
    assert machine.choose_framework(None) == "jax"
    assert machine.choose_framework("torch") == "torch"


@pytest.mark.parametrize(("framework", "title"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_check_that_fails_ends_with_1(few_cases, monkeypatch, framework, title):
    wrong = Check("case", "float32", "stash", "loss", float("nan"), 1e-6)
    monkeypatch.setattr(Checker, "check_case", lambda *args, **how: [wrong])
    result = run_cli("check", "linear_cross_entropy", "--framework", framework, "--device", "cpu")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert f"linear_cross_entropy in {title} on cpu" in result.stdout
    document = run_json("check", "linear_cross_entropy", "--framework", framework, "--device", "cpu", exit_code=1)
    assert {row["error"] for row in document["rows"]} == {None}
