"""Named problems, with real models' sizes or awkward numbers, for the tests, `onchip check` and `onchip bench`."""

from dataclasses import dataclass
from functools import partial

from onchip.oracle.cases import (
    MODELS,
    TERMS,
    Case,
    Inputs,
    class_cases,
    loss_cases,
    make_inputs,
    named_case,
    softmax_cases,
)

__all__ = ["CHECK_CASES", "MODELS", "SUITES", "Case", "Inputs", "make_inputs"]

_case = partial(named_case, Case)
CHECK_CASES = (
    *softmax_cases(_case),
    *loss_cases(_case, bias=True),
    _case("bias", 127, 64, 1000, bias=True),
)


CLASS_CASES = class_cases(_case, bias=True, softcap=15.0)


@dataclass(frozen=True)
class BenchCase(Case):
    """A problem of `onchip bench`."""

    frozen: bool = False
    """The weight gets no gradient."""
    autocast: bool = False
    """The weight is float32, and autocast casts it for the products."""


_timed = partial(named_case, BenchCase)
# deepseek-v3 has the widest rows; with twice the tokens it is also the largest of the products.
MODEL_CASES = tuple(_timed(name, 8192 if name == "deepseek-v3" else 4096, h, v) for name, (h, v) in MODELS.items())
LLAMA = "llama3.1-8b"
LLAMA_TOKEN_SWEEP = tuple(_timed(f"{LLAMA}-t{t}", t, *MODELS[LLAMA]) for t in (1024, 4096, 8192, 16384, 32768))
# Heads that many people train, (H, V).
SMOLLM, QWEN, LLAMA_1B = (576, 49152), (1024, 151936), (2048, 128256)
# What they do with these and with LLAMA's, the most frequent first.
USERS = (
    _timed("qwen3-0.6b-t8192", 8192, *QWEN),
    _timed("llama3.2-1b-t8192", 8192, *LLAMA_1B),
    _timed(f"{LLAMA}-t8192", 8192, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t8192-frozen", 8192, *MODELS[LLAMA], frozen=True),
    _timed(f"{LLAMA}-t512", 512, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t32768", 32768, *MODELS[LLAMA]),
    _timed("qwen3-0.6b-t32768", 32768, *QWEN),
    _timed("gemma2-9b-t4096-softcap", 4096, 3584, 256000, softcap=30.0),
    _timed(f"{LLAMA}-t8192-ignored", 8192, *MODELS[LLAMA], ignored=0.9),
    _timed("llama3.2-1b-t8192-smoothing-z-loss", 8192, *LLAMA_1B, **TERMS),
    _timed("qwen3-0.6b-t8192-autocast", 8192, *QWEN, autocast=True),
    _timed("llama3.2-1b-t8192-autocast", 8192, *LLAMA_1B, autocast=True),
    _timed("qwen2.5-0.5b-t16384", 16384, 896, 151936),
    _timed("gemma3-270m-t8192", 8192, 640, 262144),
    _timed("smollm-t16384", 16384, *SMOLLM),
    _timed(f"{LLAMA}-t2048", 2048, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t4096-per-token", 4096, *MODELS[LLAMA], reduction="none"),
    _timed("llama3.2-1b-t32768", 32768, *LLAMA_1B),
    _timed("qwen3-4b-t16384", 16384, 2560, 151936),
    _timed("gemma3-1b-t8192", 8192, 1152, 262144),
)
# Of vocabularies that ranks share.
WORLD = (_timed(f"{LLAMA}-t8192", 8192, *MODELS[LLAMA]), _timed("gemma3-4b-t8192", 8192, *MODELS["gemma3-4b"]))
WORLD_SUITES = {"cpu": (_timed("cpu-world", 512, 256, 8192),), "world": WORLD}
# What `onchip bench` runs.
SUITES = {
    "cpu": (_timed("cpu", 4096, 1024, 32768),),
    "sweeps": (
        *(_timed(f"vocab-{v}", 2048, 512, v) for v in (2048, 4096, 8192, 16384, 32768)),
        *(_timed(f"tokens-{t}", t, 512, 16384) for t in (256, 512, 1024, 2048, 4096)),
    ),
    "lengths": (_timed(f"{LLAMA}-lengths", 8192, *MODELS[LLAMA]),),
    "users": USERS,
    "world": WORLD,
    "cuda": (
        *MODEL_CASES,
        _timed(f"{LLAMA}-half-ignored", 4096, *MODELS[LLAMA], ignored=0.5),
        _timed(f"{LLAMA}-zipf", 4096, *MODELS[LLAMA], zipf=True),
        _timed(f"{LLAMA}-peaked", 4096, *MODELS[LLAMA], target_prob=0.999),
        _timed(f"{LLAMA}-std30", 4096, *MODELS[LLAMA], logit_std=30.0),
        *LLAMA_TOKEN_SWEEP,
    ),
}
