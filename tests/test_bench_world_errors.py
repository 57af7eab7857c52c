"""Wrong calls of `onchip bench --world`: each is a message, before any process is started."""

from importlib import metadata

import pytest

from onchip.ops.linear_cross_entropy import bench as linear_cross_entropy
from shared import run_cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear_cross_entropy", "--world", "1"], "--world must be 2 or more; got 1"),
        (["collective_matmul"], "collective_matmul needs --world 2 or more: that many processes, each with a GPU, share a case"),
        (["fp8_linear", "--world", "2"], "--world is for ops whose cases processes can share, which are linear_cross_entropy, collective_matmul; fp8_linear isn't one"),
        (["linear_cross_entropy", "--world", "2", "--framework", "jax"], "--world is for PyTorch; in JAX one process has all devices, so leave it out"),
        (["linear_cross_entropy", "--world", "2", "--case", "cpu"], "--case 'cpu' matches nothing; choose from: cpu-world, llama3.1-8b-t8192"),
        (["linear_cross_entropy", "--world", "2", "--suite", "users"], "--suite must be one of the op's: cpu, world; got 'users'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_wrong_calls(arguments, message):
    result = run_cli("bench", "--framework", "torch", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    result = run_cli("bench", "linear_cross_entropy", "--framework", "torch", "--world", 4)
    assert result.exit_code == 2
    assert "--world is 4, but there are only 3 GPUs; pass a smaller N, or --device cpu" in result.stderr


def test_peers_say_why_they_do_not_run(monkeypatch):
    cce = next(impl for impl in linear_cross_entropy.WORLD.IMPLEMENTATIONS if impl.name.startswith("cut-cross-entropy"))
    liger = next(impl for impl in linear_cross_entropy.WORLD.IMPLEMENTATIONS if impl.name.startswith("liger"))
    assert "cut-cross-entropy is not installed" in cce.unavailable("cuda", "bfloat16")
    monkeypatch.setattr(metadata, "version", lambda package: "25.1.1")
    monkeypatch.setattr(linear_cross_entropy, "find_spec", lambda name: None)
    assert "cut-cross-entropy 25.1.1 has no vocab_parallel" in cce.unavailable("cuda", "bfloat16")
    assert cce.unavailable("cuda", "float32") == "it takes float16 and bfloat16, not float32"
    for impl in (cce, liger):
        assert impl.unavailable("cpu", "bfloat16") == "it runs on CUDA devices only"
    assert liger.unavailable("cuda", "float32") is None
