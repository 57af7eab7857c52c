"""Sizes of models: by the names that they have on the Hugging Face Hub, and from their config files.

Imports no framework.
"""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """What a plan needs to know about a model.  Sizes are in elements; None stands for what isn't known."""

    name: str
    hidden: int | None
    vocab: int | None
    softcap: float | None = None
    """Softcap of the final logits."""
    feed_forward: int | None = None
    """Width of a gated layer; None where a block has none, as with experts."""
    heads: int | None = None
    """Query heads."""
    key_heads: int | None = None
    head_size: int | None = None
    value_size: int | None = None
    """The size of a head of values where it isn't `head_size`, as in latent attention."""
    experts: int | None = None
    """Experts in a layer; None where there are none."""
    expert_choices: int | None = None
    """How many experts each token goes to."""
    expert_features: int | None = None
    """Features between an expert's two products."""
    tied: bool = False
    """Whether the head shares its weight with the embedding."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of a block's linear layers, fused as is usual; empty where they aren't known."""
        hidden, wide, heads, key_heads, size = (
            self.hidden, self.feed_forward, self.heads, self.key_heads, self.head_size
        )  # fmt: skip
        if hidden is None or wide is None or heads is None or key_heads is None or size is None:
            return {}
        queries, keys = heads * size, key_heads * size
        return {
            "qkv": (hidden, queries + 2 * keys),
            "attention out": (queries, hidden),
            "gate and up": (hidden, 2 * wide),
            "down": (wide, hidden),
        }

    def expert_linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of an expert's two products; empty where there are no experts."""
        hidden, wide = self.hidden, self.expert_features
        if hidden is None or wide is None:
            return {}
        return {"gate and up": (hidden, 2 * wide), "down": (wide, hidden)}


def _model(name: str, tied: str, softcap: str, **sizes: str) -> ModelSizes:
    """The model in a line of models.csv, which has `feed_forward` only where all blocks are alike and gated."""
    known: dict[str, Any] = {of: int(size) if size else None for of, size in sizes.items()}
    return ModelSizes(name=name, softcap=float(softcap) if softcap else None, tied=bool(tied), **known)


def _read() -> dict[str, ModelSizes]:
    with files("onchip.plan").joinpath("models.csv").open(encoding="utf-8") as file:
        return {line["name"]: _model(**line) for line in csv.DictReader(file)}


MODELS = _read()
# Endings that don't change a model's sizes.
_ENDINGS = r"([-_.](hf|base|instruct|chat|it|pt|\d{4}))+$"


def _plain(name: str) -> str:
    """The words and numbers of a name, without what people leave out.

    Both "meta-llama/Meta-Llama-3.1-8B-Instruct" and "llama3.1-8b" give "llama-3-1-8-b".
    """
    short = re.sub(_ENDINGS, "", name.strip().lower().rpartition("/")[2]).removeprefix("meta-")
    return "-".join(re.findall(r"[a-z]+|\d+", short))


def named_model(name: str) -> ModelSizes:
    """The model with this name, written as on the Hub or shorter, in any case.

    Raises:
        ValueError: there is none; the message names the nearest ones, or says that it is a path.
    """
    by_name = {_plain(known): model for known, model in MODELS.items()}
    if model := by_name.get(_plain(name)):
        return model
    if name.startswith((".", "/", "~")) or name.endswith(".json") or Path(name).exists():
        raise ValueError(f"plan: model is {name!r}, a path and not a name; give it as config")
    near = [by_name[plain].name for plain in get_close_matches(_plain(name), by_name, n=3, cutoff=0.6)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"the known ones are {', '.join(MODELS)}."
    raise ValueError(
        f"plan: no sizes are known for model {name!r}; {hint} For any other model give its config.json as config, or "
        "hidden and vocab"
    )


def completed_model(incomplete: str) -> list[str]:
    """What the shell offers: names as on the Hub or, if none of those matches, without the organisation."""
    short = [name.rpartition("/")[2] for name in MODELS]
    begun = [name for name in MODELS if name.startswith(incomplete)]
    return begun or [name for name in dict.fromkeys((*short, *map(str.lower, short))) if name.startswith(incomplete)]


# Each size or setting has several names in the config files of different models.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_VOCAB = ("vocab_size", "padded_vocab_size", "n_vocab")
_SOFTCAP = ("final_logit_softcapping", "final_logit_softcap", "logits_soft_cap")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
        ValueError: there is no such file, it isn't JSON, or it holds no sizes.
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
            f"plan: config {file} has none of {', '.join((*_HIDDEN, *_VOCAB))}, so it isn't a language model's config; "
            "give hidden and vocab"
        )
    softcap = _number(file, merged, _SOFTCAP)
    name = config.get("_name_or_path") or " ".join(map(str, config.get("architectures") or ())) or str(file)
    tied = merged.get("tie_word_embeddings") is True
    model = ModelSizes(str(name), hidden, vocab, softcap, tied=tied)
    wide = _size(file, merged, ("intermediate_size",))
    if experts := _size(file, merged, _EXPERTS):
        choices = _size(file, merged, ("num_experts_per_tok",))
        features = _size(file, merged, ("moe_intermediate_size",)) or wide
        model = replace(model, experts=experts, expert_choices=choices, expert_features=features)
    heads = _size(file, merged, ("num_attention_heads", "n_head"))
    if hidden is None or heads is None:
        return model
    if "kv_lora_rank" in merged:  # latent attention, whose projections `linears` doesn't have
        latent = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        of_head, rotated, values = (_size(file, merged, (name,)) for name in latent)
        if of_head is None or rotated is None or values is None:
            return model
        return replace(model, heads=heads, key_heads=heads, head_size=of_head + rotated, value_size=values)
    size = _size(file, merged, ("head_dim",)) or hidden // heads
    key_heads = _size(file, merged, ("num_key_value_heads",)) or heads
    gated = merged.get("model_type") in _GATED
    return replace(model, heads=heads, key_heads=key_heads, head_size=size, feed_forward=wide if gated else None)


def _number(file: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """The first of these that the config has; raises ValueError if that is not a number above 0."""
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
