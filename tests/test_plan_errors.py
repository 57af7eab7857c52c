"""Every wrong call of `onchip plan` and of `onchip.plan.plan` says what to do."""

import inspect
import re

import pytest

from onchip.plan import plan
from shared import run_cli

EXPERTS = ("--tokens", "8", "--experts", "2", "--in-features", "8", "--out-features", "8")
LLAMA = ("plan", "--tokens", "16384", "--model", "llama-3.1-8b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax", "--tokens", "8", "--vocab", "8"], "plan: op must be one of 'linear_cross_entropy', 'linear_log_probs', "),
        (["cross_entropy", "--tokens", "8"], "plan: give --vocab, or --model"),
        (["cross_entropy", *LLAMA[1:], "--hidden", "8"], "plan: cross_entropy has no --hidden, which is for linear_cross_entropy, "),
        (["cross_entropy", *LLAMA[1:], "--weight-dtype", "float32"], "plan: cross_entropy has no weight; leave --weight-dtype out"),
        (["linear_jsd", *LLAMA[1:], "--teacher-hidden", "0"], "--teacher-hidden must be positive; got 0"),
        ([*LLAMA[1:], "--teacher-hidden", "8"], "linear_cross_entropy has no --teacher-hidden, which is for linear_jsd; leave it out"),
        ([*LLAMA[1:], "--entropy"], "has no --entropy, which is for linear_log_probs; leave it out"),
        (["cross_entropy", *LLAMA[1:], "--frozen"], "has no --frozen, which is for linear_cross_entropy, linear_log_probs"),
        (["linear_log_probs", *LLAMA[1:], "--weight-grad-out"], "has no --weight-grad-out, which is for linear_cross_entropy"),
        ([*LLAMA[1:], "--frozen", "--weight-grad-out"], "a frozen weight has no gradient to add"),
        ([*LLAMA[1:], "--frozen", "--forward"], "forward alone has no gradients"),
        ([*LLAMA[1:], "--weight-grad-out", "--framework", "jax"], "in JAX linear_cross_entropy has no --weight-grad-out"),
        (["--tokens", "0", "--model", "llama-3.1-8b"], "--tokens must be positive; got 0"),
        (["--tokens", "8", "--hidden", "8"], "plan: give --hidden and --vocab, or --model"),
        (["--tokens", "8", "--model", "lama-3.1-8b"], "did you mean meta-llama/Llama-3.1-8B or "),
        (["--hidden", "8", "--vocab", "8"], "plan: give --tokens, or --batch and --sequence"),
        ([*LLAMA[1:], "--batch", "2", "--sequence", "8"], "plan: give --tokens, or --batch and --sequence, not both"),
        (["--tokens", "8", "--model", "./config.json"], "--model is './config.json', a path and not a name; give it as --config"),
        ([*LLAMA[1:], "--scratch", "banana"], "linear_cross_entropy: --scratch as a text must be like '1GiB'"),
        (["grouped_matmul", *LLAMA[1:]], "Llama-3.1-8B is no mixture of experts; give --in-features, --out-features and --experts"),
        (["attention", "--tokens", "8", "--heads", "32", "--key-heads", "5", "--head-size", "64"], "plan: --heads is 32, but --key-heads is 5, which must divide it"),
        (["attention", "--tokens", "8"], "plan: give --heads, --key-heads, --head-size, or --model"),
        (["attention", *LLAMA[1:], "--framework", "jax", "--backend", "mosaic_gpu", "--dtype", "float32"], "it is for bfloat16 and float16, not float32"),
        (["attention", "--tokens", "8", "--framework", "jax", "--backend", "mosaic_gpu", "--heads", "8", "--key-heads", "2", "--head-size", "264"], "heads have at most 256 numbers, not 264"),
        (["attention", *LLAMA[1:], "--framework", "jax", "--backend", "mosaic_gpu", "--gpu", "a100"], "the A100 SXM 80GB has 8.0"),
        (["--tokens", "8", "--model", "xyz"], "the known ones are meta-llama/Llama-2-7b-hf, "),
        ([*LLAMA[1:], "--config", "config.json"], "give --model or --config, not both"),
        (["--tokens", "8", "--hidden", "8", "--vocab", "-1"], "--vocab must be positive; got -1"),
        ([*LLAMA[1:], "--dtype", "int8"], "--dtype must be one of 'float32', 'bfloat16', 'float16'; got 'int8'"),
        ([*LLAMA[1:], "--weight-dtype", "fp8"], "--weight-dtype must be one of"),
        ([*LLAMA[1:], "--device", "tpu"], "--device must be one of 'cuda', 'cpu'; got 'tpu'"),
        ([*LLAMA[1:], "--gpu", "v100"], "--gpu must be one of 'h100', 'h200', 'a100', 'l40s', '4090', 'b200'; got 'v100'"),
        ([*LLAMA[1:], "--gpu", "h100", "--device", "cpu"], "--gpu is 'h100', but --device is 'cpu'; leave one of them out"),
        ([*LLAMA[1:], "--backend", "cuda"], "--backend must be one of 'auto', 'triton', 'plain'; got 'cuda'"),
        ([*LLAMA[1:], "--device", "cpu", "--backend", "triton"], "its kernels don't run in bfloat16 on cpu"),
        ([*LLAMA[1:], "--precision", "int8"], "--precision must be one of 'full', 'fp8'; got 'int8'"),
        ([*LLAMA[1:], "--precision", "fp8", "--framework", "jax"], "in JAX with precision 'fp8'; there is one for PyTorch,"),
        (["linear_jsd", *LLAMA[1:], "--precision", "fp8"], "there is one for PyTorch, JAX"),
        ([*LLAMA[1:], "--framework", "tf"], "--framework must be torch or jax; got 'tf'"),
        ([*LLAMA[1:], "--framework", "jax", "--backend", "triton"], "one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'"),
        ([*LLAMA[1:], "--framework", "jax", "--backend", "mosaic_gpu", "--device", "cpu"], "it runs on NVIDIA GPUs"),
        ([*LLAMA[1:], "--framework", "jax", "--backend", "mosaic_gpu", "--gpu", "a100"], "the A100 SXM 80GB has 8.0"),
        ([*LLAMA[1:], "--framework", "jax", "--weight-dtype", "float32"], "in JAX weight has hidden's dtype; leave --weight-dtype out"),
        ([*LLAMA[1:], "--scratch", "0MiB"], "--scratch must be positive; got 0"),
        ([*LLAMA[1:], "--scratch", "1.5"], "--scratch=1.5 is a float, a part of the float32 logits"),
        ([*LLAMA[1:], "--scratch", "1G"], "--scratch as a text must be like '1GiB'"),
        ([*LLAMA[1:], "--tp", "0"], "--tp must be positive; got 0"),
        (["--tokens", "8", "--hidden", "8", "--vocab", "4", "--tp", "5"], "there are 4 entries to share"),
        ([*LLAMA[1:], "--sequence-parallel"], "are for ranks that share a vocabulary; leave them out or give --tp"),
        ([*LLAMA[1:], "--link", "50"], "are for ranks that share a vocabulary; leave them out or give --tp"),
        ([*LLAMA[1:], "--tp", "2", "--link", "0"], "--link must be above 0; got 0"),
        ([*LLAMA[1:], "--tp", "3", "--sequence-parallel"], "--tokens must be a multiple of 3"),
        (["cross_entropy", *LLAMA[1:], "--tp", "2", "--sequence-parallel"], "cross_entropy has no hidden states to gather"),
        (["fp8_linear", "--tokens", "8"], "give --in-features and --out-features, or --model"),
        (["fp8_linear", "--tokens", "8", "--in-features", "8"], "give --in-features and --out-features, both"),
        (["fp8_linear", "--tokens", "8", "--model", "deepseek-v3"], "aren't all of the usual kind; give --in-features and --out-features"),
        (["fp8_linear", *LLAMA[1:], "--scratch", "1GiB"], "fp8_linear has no --scratch; leave --scratch out"),
        (["fp8_linear", *LLAMA[1:], "--tp", "2"], "which fp8_linear doesn't have; leave it out"),
        (["fp8_linear", *LLAMA[1:], "--gpu", "a100"], "FP8 needs compute capability 8.9"),
        (["fp8_linear", *LLAMA[1:], "--framework", "jax"], "there is no plan for fp8_linear in JAX; there is one for PyTorch"),
        (["grouped_matmul", "--tokens", "8", "--in-features", "8", "--out-features", "8"], "give --in-features, --out-features and --experts"),
        (["grouped_matmul", *LLAMA[1:], "--experts", "8"], "give --in-features, --out-features and --experts"),
        (["grouped_matmul", *EXPERTS, "--experts", "0"], "--experts must be positive; got 0"),
        (["grouped_matmul", *EXPERTS, "--rows", "-1"], "--rows must be positive; got -1"),
        (["grouped_matmul", *EXPERTS, "--device", "cpu"], "its kernels don't run on cpu"),
        (["grouped_matmul", *EXPERTS, "--framework", "jax"], "there is no plan for grouped_matmul in JAX; there is one for PyTorch"),
        (["collective_matmul", *LLAMA[1:], "--tp", "3"], "--tokens are 16384, which 3 ranks can't share evenly"),
        (["collective_matmul", "--tokens", "6", *EXPERTS[4:], "--tp", "3"], "--out-features of column parallel are 8, which 3 ranks can't"),
        (["collective_matmul", *EXPERTS[4:], "--tokens", "8200", "--tp", "4", "--precision", "fp8"], "each rank's tokens must be a multiple of 128; 8200 by 4 ranks are 2050"),
        (["collective_matmul", "--tokens", "8"], "give --in-features and --out-features, or --model"),
        (["collective_matmul", *LLAMA[1:], "--framework", "jax"], "there is no plan for collective_matmul in JAX; there is one for PyTorch"),
        (["fp8_linear", *EXPERTS], "fp8_linear has no --experts, which is for grouped_matmul; leave it out"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_a_wrong_call_is_a_message_and_exit_code_2(arguments, message):
    result = run_cli("plan", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    arguments_of_the_function = {name for name in inspect.signature(plan).parameters if "_" in name} | {"scratch_bytes"}
    assert not arguments_of_the_function & set(re.findall(r"\w+", result.stderr))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": 8.0}, "tokens must be an int; got float"),
        ({"gradients": 1}, "gradients must be True or False; got int"),
        ({"scratch": "1GiB"}, "scratch must be a list of budgets; got str"),
        ({"scratch": 1 << 30}, "scratch must be a list of budgets; got int"),
        ({"scratch": [None]}, "scratch_bytes must be an int; got NoneType"),
        ({"model": 8}, "model must be a name; got int"),
    ],
)
def test_a_wrong_type_is_a_type_error(given, message):
    with pytest.raises(TypeError, match=message):
        plan(**{"tokens": 8, "hidden": 8, "vocab": 8, **given})


def test_a_row_that_is_not_there():
    with pytest.raises(KeyError):
        plan(tokens=8, hidden=8, vocab=8).row("largest")
