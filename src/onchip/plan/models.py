"""Sizes of models: by the names that they have on the Hugging Face Hub, and from their config files.  No framework."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """What a plan needs to know of a model.  Sizes in elements; None is what isn't known."""

    name: str
    hidden: int | None
    vocab: int | None
    softcap: float | None = None
    """The final logits'."""
    feed_forward: int | None = None
    """Of a gated layer; None where a block has none, as with experts."""
    queries: int | None = None
    """Heads times their size."""
    keys: int | None = None
    """Heads of keys times their size."""
    tied: bool = False
    """Whether the head's weight is the embedding's too."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """In and out features of a block's linear layers, as they are mostly fused; empty where they aren't known."""
        hidden, wide, queries, keys = self.hidden, self.feed_forward, self.queries, self.keys
        if hidden is None or wide is None or queries is None or keys is None:
            return {}
        return {
            "qkv": (hidden, queries + 2 * keys),
            "attention out": (queries, hidden),
            "gate and up": (hidden, 2 * wide),
            "down": (wide, hidden),
        }


# Hidden size, vocabulary; and of models whose blocks are all alike and gated: feed-forward size, heads, heads of keys,
# size of a head.
_SIZES: dict[str, tuple[int, ...]] = {
    "meta-llama/Llama-2-7b-hf": (4096, 32000, 11008, 32, 32, 128),
    "meta-llama/Llama-2-13b-hf": (5120, 32000, 13824, 40, 40, 128),
    "meta-llama/Llama-2-70b-hf": (8192, 32000, 28672, 64, 8, 128),
    "meta-llama/Meta-Llama-3-8B": (4096, 128256, 14336, 32, 8, 128),
    "meta-llama/Meta-Llama-3-70B": (8192, 128256, 28672, 64, 8, 128),
    "meta-llama/Llama-3.1-8B": (4096, 128256, 14336, 32, 8, 128),
    "meta-llama/Llama-3.1-70B": (8192, 128256, 28672, 64, 8, 128),
    "meta-llama/Llama-3.1-405B": (16384, 128256, 53248, 128, 8, 128),
    "meta-llama/Llama-3.2-1B": (2048, 128256, 8192, 32, 8, 64),
    "meta-llama/Llama-3.2-3B": (3072, 128256, 8192, 24, 8, 128),
    "meta-llama/Llama-3.3-70B": (8192, 128256, 28672, 64, 8, 128),
    "Qwen/Qwen2.5-0.5B": (896, 151936, 4864, 14, 2, 64),
    "Qwen/Qwen2.5-1.5B": (1536, 151936, 8960, 12, 2, 128),
    "Qwen/Qwen2.5-3B": (2048, 151936, 11008, 16, 2, 128),
    "Qwen/Qwen2.5-7B": (3584, 152064, 18944, 28, 4, 128),
    "Qwen/Qwen2.5-14B": (5120, 152064, 13824, 40, 8, 128),
    "Qwen/Qwen2.5-32B": (5120, 152064, 27648, 40, 8, 128),
    "Qwen/Qwen2.5-72B": (8192, 152064, 29568, 64, 8, 128),
    "Qwen/Qwen3-0.6B": (1024, 151936, 3072, 16, 8, 128),
    "Qwen/Qwen3-1.7B": (2048, 151936, 6144, 16, 8, 128),
    "Qwen/Qwen3-4B": (2560, 151936, 9728, 32, 8, 128),
    "Qwen/Qwen3-8B": (4096, 151936, 12288, 32, 8, 128),
    "Qwen/Qwen3-14B": (5120, 151936, 17408, 40, 8, 128),
    "Qwen/Qwen3-32B": (5120, 151936, 25600, 64, 8, 128),
    "Qwen/Qwen3-30B-A3B": (2048, 151936),
    "Qwen/Qwen3-235B-A22B": (4096, 151936),
    "google/gemma-2-2b": (2304, 256000, 9216, 8, 4, 256),
    "google/gemma-2-9b": (3584, 256000, 14336, 16, 8, 256),
    "google/gemma-2-27b": (4608, 256000, 36864, 32, 16, 128),
    "google/gemma-3-270m": (640, 262144, 2048, 4, 1, 256),
    "google/gemma-3-1b": (1152, 262144, 6912, 4, 1, 256),
    "google/gemma-3-4b": (2560, 262208, 10240, 8, 4, 256),
    "google/gemma-3-12b": (3840, 262208, 15360, 16, 8, 256),
    "google/gemma-3-27b": (5376, 262208, 21504, 32, 16, 128),
    "mistralai/Mistral-7B-v0.1": (4096, 32000, 14336, 32, 8, 128),
    "mistralai/Mistral-7B-v0.3": (4096, 32768, 14336, 32, 8, 128),
    "mistralai/Mistral-Nemo-Base-2407": (5120, 131072, 14336, 32, 8, 128),
    "mistralai/Mistral-Small-24B-Base-2501": (5120, 131072, 32768, 32, 8, 128),
    "mistralai/Mixtral-8x7B-v0.1": (4096, 32000),
    "deepseek-ai/DeepSeek-V2-Lite": (2048, 102400),
    "deepseek-ai/DeepSeek-V3": (7168, 129280),
    "deepseek-ai/DeepSeek-R1": (7168, 129280),
    "openai/gpt-oss-20b": (2880, 201088),
    "openai/gpt-oss-120b": (2880, 201088),
    "openai-community/gpt2": (768, 50257),
    "openai-community/gpt2-xl": (1600, 50257),
    "microsoft/Phi-3-mini-4k-instruct": (3072, 32064, 8192, 32, 32, 96),
    "microsoft/phi-4": (5120, 100352, 17920, 40, 10, 128),
    "microsoft/Phi-4-mini-instruct": (3072, 200064, 8192, 24, 8, 128),
    "HuggingFaceTB/SmolLM2-135M": (576, 49152, 1536, 9, 3, 64),
    "HuggingFaceTB/SmolLM2-360M": (960, 49152, 2560, 15, 5, 64),
    "HuggingFaceTB/SmolLM2-1.7B": (2048, 49152, 8192, 32, 32, 64),
    "HuggingFaceTB/SmolLM3-3B": (2048, 128256, 11008, 16, 4, 128),
    "allenai/OLMo-2-1124-7B": (4096, 100352, 11008, 32, 32, 128),
    "allenai/OLMo-2-1124-13B": (5120, 100352, 13824, 40, 40, 128),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (2048, 32000, 5632, 32, 4, 64),
}
_SOFTCAPS = {"google/gemma-2-2b": 30.0, "google/gemma-2-9b": 30.0, "google/gemma-2-27b": 30.0}
_TIED = (
    "Llama-3.2-1B", "Llama-3.2-3B", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-0.6B", "Qwen3-1.7B",
    "Qwen3-4B", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gemma-3-270m", "gemma-3-1b", "gemma-3-4b",
    "gemma-3-12b", "gemma-3-27b", "gpt2", "gpt2-xl", "Phi-4-mini-instruct", "SmolLM2-135M", "SmolLM2-360M",
    "SmolLM2-1.7B", "SmolLM3-3B",
)  # fmt: skip


def _model(name: str, hidden: int, vocab: int, *block: int) -> ModelSizes:
    wide, heads, of_keys, size = block or (None, 0, 0, 0)
    return ModelSizes(
        name=name,
        hidden=hidden,
        vocab=vocab,
        softcap=_SOFTCAPS.get(name),
        feed_forward=wide,
        queries=heads * size or None,
        keys=of_keys * size or None,
        tied=name.partition("/")[2] in _TIED,
    )


MODELS = {name: _model(name, *sizes) for name, sizes in _SIZES.items()}
# Endings that don't change a model's sizes.
_ENDINGS = r"([-_.](hf|base|instruct|chat|it|pt|\d{4}))+$"


def _plain(name: str) -> str:
    """The words and numbers of a name, without what people leave out: of "meta-llama/Meta-Llama-3.1-8B-Instruct"
    "llama-3-1-8-b", and of "llama3.1-8b" too.
    """
    short = re.sub(_ENDINGS, "", name.strip().lower().rpartition("/")[2]).removeprefix("meta-")
    return "-".join(re.findall(r"[a-z]+|\d+", short))


def named_model(name: str) -> ModelSizes:
    """The model of a name, written as on the Hub or shorter, in any case.

    Raises:
        ValueError: none is called so; the message names those that are nearest.
    """
    by_name = {_plain(known): model for known, model in MODELS.items()}
    if model := by_name.get(_plain(name)):
        return model
    near = [by_name[plain].name for plain in get_close_matches(_plain(name), by_name, n=3, cutoff=0.6)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(MODELS)}."
    raise ValueError(
        f"plan: no sizes are known for model {name!r}; {hint} For any other model give its config.json as config, or "
        "hidden and vocab"
    )


# Names of one thing in the config files of different models.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_VOCAB = ("vocab_size", "padded_vocab_size", "n_vocab")
_SOFTCAP = ("final_logit_softcapping", "final_logit_softcap", "logits_soft_cap")
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
# Models whose blocks are all alike, with an attention and a gated feed-forward layer.
_GATED = (
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "granite", "helium",
    "internlm2", "internlm3", "llama", "mistral", "mistral3", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm",
)  # fmt: skip


def model_of_config(path: Path) -> ModelSizes:
    """The model of a config.json as transformers writes it, or of the folder that holds one.

    Raises:
        ValueError: there is no such file, it isn't JSON, or it has no sizes in it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"plan: config {file} can't be read ({error.strerror}); give a model's config.json") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"plan: config {file} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"plan: config {file} holds no JSON object; give a model's config.json")
    nested: dict[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    if isinstance(inner := nested.get("text_config"), dict):
        nested = inner
    merged = {**config, **nested}
    hidden, vocab = _size(file, merged, _HIDDEN), _size(file, merged, _VOCAB)
    if hidden is None and vocab is None:
        raise ValueError(
            f"plan: config {file} has none of {', '.join((*_HIDDEN, *_VOCAB))}: it is no config of a language "
            "model; give hidden and vocab"
        )
    softcap = _number(file, merged, _SOFTCAP)
    name = config.get("_name_or_path") or " ".join(map(str, config.get("architectures") or ())) or str(file)
    tied = merged.get("tie_word_embeddings") is True
    model = ModelSizes(str(name), hidden, vocab, softcap, tied=tied)
    if merged.get("model_type") not in _GATED or hidden is None:
        return model
    heads, wide = _size(file, merged, ("num_attention_heads",)), _size(file, merged, ("intermediate_size",))
    if heads is None or wide is None:
        return model
    of_keys = _size(file, merged, ("num_key_value_heads",)) or heads
    size = _size(file, merged, ("head_dim",)) or hidden // heads
    return replace(model, feed_forward=wide, queries=heads * size, keys=of_keys * size)


def _number(file: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """The first of these that the config has; ValueError where that is no number above 0."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"plan: config {file}: {name} must be a number above 0; got {value!r}")
    return float(value)


def _size(file: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    value = _number(file, config, names)
    if value is not None and value != int(value):
        raise ValueError(f"plan: config {file}: {names[0]} must be a whole number; got {value}")
    return None if value is None else int(value)
