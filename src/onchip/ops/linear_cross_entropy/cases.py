"""Named problems after real models and with awkward numbers, used by the tests, `onchip check` and `onchip bench`."""

from functools import partial

from onchip.oracle.cases import MODELS, Case, Inputs, loss_cases, make_inputs, named_case, softmax_cases

__all__ = ["CHECK_CASES", "MODELS", "SUITES", "Case", "Inputs", "make_inputs"]

_case = partial(named_case, Case)
CHECK_CASES = (
    *softmax_cases(_case),
    *loss_cases(_case, bias=True),
    _case("bias", 127, 64, 1000, bias=True),
)
# deepseek-v3 has the widest rows; with twice the tokens it is also the largest of the products.
MODEL_CASES = tuple(_case(name, 8192 if name == "deepseek-v3" else 4096, h, v) for name, (h, v) in MODELS.items())
LLAMA = "llama3.1-8b"
LLAMA_TOKEN_SWEEP = tuple(_case(f"{LLAMA}-t{t}", t, *MODELS[LLAMA]) for t in (1024, 4096, 8192, 16384, 32768))
# What `onchip bench` runs.
SUITES = {
    "cpu": (_case("cpu", 4096, 1024, 32768),),
    "sweeps": (
        *(_case(f"vocab-{v}", 2048, 512, v) for v in (2048, 4096, 8192, 16384, 32768)),
        *(_case(f"tokens-{t}", t, 512, 16384) for t in (256, 512, 1024, 2048, 4096)),
    ),
    "cuda": (
        *MODEL_CASES,
        _case(f"{LLAMA}-half-ignored", 4096, *MODELS[LLAMA], ignored=0.5),
        _case(f"{LLAMA}-zipf", 4096, *MODELS[LLAMA], zipf=True),
        _case(f"{LLAMA}-peaked", 4096, *MODELS[LLAMA], target_prob=0.999),
        _case(f"{LLAMA}-std30", 4096, *MODELS[LLAMA], logit_std=30.0),
        *LLAMA_TOKEN_SWEEP,
    ),
}
