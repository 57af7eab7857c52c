"""`onchip.torch.warm_up` and `onchip warm-up`."""

import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fake_cuda
import onchip.torch
from onchip import cli
from onchip.frontend.warm_up import calls
from onchip.kernels.triton.launch import interpreted
from onchip.torch import warm, warm_up
from onchip.warm_up import _options, run_warm_up
from shared import assert_fits_schema
from warm_ups import on_the_cpu

TINY = {"hidden": 32, "vocab": 50, "in_features": 128, "out_features": 128, "experts": 2}


def ran(op, kind):
    return json.loads(fake_cuda.run(str(Path(__file__).with_name("warm_ups.py")), op, kind).splitlines()[-1])


@fake_cuda.possible
@pytest.mark.parametrize("op", ["cross_entropy", pytest.param("linear_cross_entropy", marks=pytest.mark.slow)])
def test_another_process_finds_all_kernels(op, tmp_path, monkeypatch):
    """Those of any number of tokens."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first = ran(op, "warm")
    _, compiled, found, seconds = first["made"]
    assert compiled == sorted(compiled)
    assert len(compiled) >= 3
    assert found == 0
    assert seconds > 0
    assert first["lacked"] == []
    assert ran(op, "cold") == {"made": None, "lacked": []}


@pytest.mark.parametrize("op", calls())
@pytest.mark.parametrize("gradients", [True, False])
def test_the_call_of_every_op(op, gradients, monkeypatch):
    """On the CPU, where nothing is compiled."""
    called = []
    function = getattr(onchip.torch, op)

    def noting(**given):
        called.append(given)
        return function(**given)

    monkeypatch.setattr(onchip.torch, op, noting)
    with on_the_cpu():
        made = warm_up(op, tokens=4, **TINY, dtype=torch.float32, gradients=gradients, frozen=op == "linear_log_probs")
    assert made[:3] == ("cpu", (), 0)
    (given,) = called
    needing = [name for name, x in given.items() if x.requires_grad]
    assert needing
    assert not any(name.startswith("teacher") for name in needing)
    if op == "linear_log_probs":
        assert needing == ["hidden"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(warm, "interpreted", lambda: False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"op": "softmax"}, "warm_up: op must be one of linear_cross_entropy, .*; got 'softmax'"),
        ({"vocab": None}, "warm_up: linear_cross_entropy needs hidden and vocab; vocab is missing"),
        ({"hidden": 0}, "warm_up: hidden must be an int of 1 or more; got 0"),
        ({"tokens": 1.5}, "warm_up: tokens must be an int of 1 or more; got 1.5"),
        ({"experts": True}, "warm_up: experts must be an int of 1 or more; got True"),
        ({"device": "cpu"}, "warm_up: device must be a CUDA device; got 'cpu'"),
    ],
)
def test_what_is_refused(gpu, given, message):
    with pytest.raises(ValueError, match=message):
        warm_up(**{"op": "linear_cross_entropy", "hidden": 64, "vocab": 100} | given)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="compiled for the GPU of this machine, but PyTorch sees no CUDA device"):
        warm_up("cross_entropy", vocab=100)
    result = CliRunner().invoke(cli.app, ["warm-up", "--hidden", "64", "--vocab", "100"])
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device" in result.stderr


def test_the_command_hands_on_what_it_is_given(monkeypatch):
    asked = {}

    def noting(op, **given):
        asked.update(given, op=op)
        return warm.WarmUp("GPU", ("a", "b", "b"), 3, 1.5)

    monkeypatch.setattr(onchip.torch, "warm_up", noting)
    document = run_warm_up(
        "linear_log_probs", model="llama-3.1-8b", weight_dtype="float32", forward=True, vocab=1000,
        options=["entropy=true", "softcap=30"], console=Console(quiet=True),
    )  # fmt: skip
    assert document == {
        "op": "linear_log_probs", "device": "GPU", "compiled": ["a", "b", "b"], "found": 3, "seconds": 1.5
    }  # fmt: skip
    assert_fits_schema("warm-up", document)
    assert (asked["hidden"], asked["vocab"], asked["dtype"], asked["weight_dtype"]) == (
        4096, 1000, torch.bfloat16, torch.float32
    )  # fmt: skip
    assert (asked["gradients"], asked["entropy"], asked["softcap"]) == (False, True, 30)


def test_options_of_the_command():
    given = ["a=1", "b=0.5", "c=none", "d=False", "e=mean"]
    assert _options(given) == {"a": 1, "b": 0.5, "c": None, "d": False, "e": "mean"}
    for bad in ("softcap", "=3", "a b=3"):
        with pytest.raises(
            ValueError, match=re.escape(f"--option must be NAME=VALUE, such as softcap=30; got {bad!r}")
        ):
            _options([bad])


@pytest.mark.gpu
@pytest.mark.skipif(interpreted(), reason="kernels are compiled")
def test_on_a_gpu(tmp_path, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    made = warm_up("cross_entropy", vocab=777, tokens=100, label_smoothing=0.1)
    assert made.device == torch.cuda.get_device_name()
    assert made.seconds > 0
    with pytest.raises(ValueError, match="softcap"):
        warm_up("cross_entropy", vocab=777, softcap=-1.0)
