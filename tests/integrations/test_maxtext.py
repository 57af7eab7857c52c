"""MaxText's loss: the function that replaces MaxText's compared with the formula, refusals, and `install`.

Modules with the same names replace MaxText's; tools/try_stacks.py runs the integration in MaxText.
"""

import inspect
import os
import subprocess
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from onchip.integrations import maxtext as integration
from onchip.integrations import versions
from onchip.integrations.maxtext import install, uninstall, vocab_tiling_nnx_loss

B, S, H, V = 2, 12, 16, 70


def normal(*shape):
    return jax.device_put(np.float32(np.random.default_rng(0).standard_normal(shape)))


x = normal(B, S, H)
targets = jax.device_put(np.int32(np.random.default_rng(0).integers(V, size=(B, S))))
segments = jax.device_put(np.where(np.arange(S) < [[7], [6]], 1, [[0], [2]]).astype(np.int32))
data = {"targets": targets, "targets_segmentation": segments}


# ------------------------------------------------------------------------------------------------- a model of MaxText's


class ShardMode(Enum):
    AUTO = "auto"
    EXPLICIT = "explicit"


def config(**changes):
    """MaxText's, as far as the loss reads it."""
    settings = {
        "dtype": jnp.dtype("float32"),
        "enable_dropout": False,
        "final_logits_soft_cap": None,
        "logits_dot_in_fp32": False,
        "logits_via_embedding": False,
        "normalize_embedding_logits": True,
        "parameter_memory_host_offload": False,
        "shard_mode": ShardMode.AUTO,
        "vocab_size": V,
        "z_loss_multiplier": 0.0,
    }
    assert set(changes) <= set(settings)
    return SimpleNamespace(**settings | changes)


class RMSNorm(nnx.Module):
    def __init__(self, dtype):
        self.scale, self.dtype = nnx.Param(jnp.linspace(0.5, 1.5, H)), dtype

    def __call__(self, x, out_sharding=None):
        x = x.astype(jnp.float32)
        y = (x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)).astype(self.dtype)
        return y * self.scale.get_value().astype(self.dtype)[None, None]


class Dropout(nnx.Module):
    """Which drops all."""

    def __call__(self, x, deterministic):
        return x if deterministic else 0 * x


class Embed(nnx.Module):
    def __init__(self):
        self.embedding = nnx.Param(normal(V, H))


class DenseGeneral(nnx.Module):
    def __init__(self, dtype):
        self.kernel, self.dtype = nnx.Param(normal(H, V) / 4), dtype

    def __call__(self, x):
        return jnp.dot(x.astype(self.dtype), self.kernel.get_value().astype(self.dtype), precision="highest")


class NNXDecoder(nnx.Module):
    def __init__(self, config):
        self.config = config
        self.decoder_norm, self.dropout = RMSNorm(config.dtype), Dropout()
        if not config.logits_via_embedding:
            self.logits_dense = DenseGeneral(jnp.dtype("float32") if config.logits_dot_in_fp32 else config.dtype)

    def apply_output_head(self, shared_embedding, y, deterministic, model_mode):
        cfg = self.config
        y = self.dropout(self.decoder_norm(y), deterministic=deterministic)
        if not cfg.logits_via_embedding:
            return self.logits_dense(y)
        table = shared_embedding.embedding.get_value().astype(jnp.bfloat16).astype(jnp.float32)
        logits = jnp.dot(y, table.T, precision="highest")
        if cfg.normalize_embedding_logits:
            logits = logits / jnp.sqrt(H)
        if cfg.final_logits_soft_cap:
            logits = cfg.final_logits_soft_cap * jnp.tanh(logits / cfg.final_logits_soft_cap)
        return logits


class Transformer(nnx.Module):
    def __init__(self, config, mesh=None):
        self.mesh = Mesh(np.array(jax.devices()[:1]), ("data",)) if mesh is None else mesh
        self.token_embedder, self.decoder = Embed(), NNXDecoder(config)

    def logits_from_hidden_states_for_vocab_tiling(self, hidden_states, deterministic, model_mode):
        return self.decoder.apply_output_head(self.token_embedder, hidden_states, deterministic, model_mode)


Transformer.logits_from_hidden_states_for_vocab_tiling.__module__ = "maxtext.models.models"
NNXDecoder.apply_output_head.__module__ = "maxtext.layers.nnx_decoders"


def plain(model, hidden_states, data, config, is_train):
    """The formula: MaxText's `cross_entropy_with_logits` of all logits."""
    deterministic = not config.enable_dropout if is_train else True
    logits = model.logits_from_hidden_states_for_vocab_tiling(hidden_states, deterministic, "train")
    logits = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    z_loss = config.z_loss_multiplier * lse**2
    one_hot = jax.nn.one_hot(data["targets"], config.vocab_size)
    loss = lse - jnp.sum(one_hot * logits, axis=-1) + z_loss
    kept = data["targets_segmentation"] != 0
    return jnp.sum(loss * kept), jnp.sum(z_loss * kept)


plain.__module__ = "maxtext.utils.vocabulary_tiling"


# ------------------------------------------------------------------------------------------------------ against formula


def run(function, cfg, is_train=True, mesh=None):
    """Loss, z-loss, and the gradients of hidden states and parameters, by names."""
    graph, state = nnx.split(Transformer(cfg, mesh))

    def total(state, x):
        loss, z_loss = function(nnx.merge(graph, state), x, data, cfg, is_train)
        return 0.5 * loss, (loss, z_loss)

    (_, (loss, z_loss)), (of_state, of_x) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(state, x)
    leaves = {"/".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(of_state)}
    return {"loss": loss, "z_loss": z_loss, "hidden_states": of_x} | leaves


def assert_close(made, expected, bound=1e-5, **bounds):
    assert made.keys() == expected.keys()
    for name, a in made.items():
        b = expected[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        error = float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30))
        assert error <= bounds.get(name.rpartition("/")[2], bound), (name, error)


TIED = {"logits_via_embedding": True}


@pytest.mark.parametrize(
    "changes",
    [
        # MaxText caps a tied head's logits alone.
        {"final_logits_soft_cap": 3.0, "parameter_memory_host_offload": True},
        pytest.param({"z_loss_multiplier": 1e-2}, marks=pytest.mark.slow),
        pytest.param(TIED | {"final_logits_soft_cap": 0.0}, marks=pytest.mark.slow),
        TIED | {"normalize_embedding_logits": False, "final_logits_soft_cap": 3.0, "z_loss_multiplier": 1e-2},
    ],
)
def test_loss_and_gradients(changes):
    cfg = config(**changes)
    made = run(vocab_tiling_nnx_loss, cfg)
    assert bool(made["z_loss"]) == ("z_loss_multiplier" in changes)
    # The gradient of the embedding passes through bfloat16, as in MaxText.
    assert_close(made, run(plain, cfg), embedding=2**-8)


def test_dropout_is_for_training():
    cfg = config(enable_dropout=True)
    model = Transformer(cfg)
    everywhere = float((segments != 0).sum() * jnp.log(V))  # the loss of logits that are all 0
    of_training, of_evaluation = (
        float(vocab_tiling_nnx_loss(model, x, data, cfg, is_train)[0]) for is_train in (True, False)
    )
    assert of_training == pytest.approx(everywhere, rel=1e-6)
    assert of_evaluation > everywhere + 1


@pytest.mark.parametrize("changes", [{}, {"logits_dot_in_fp32": True}, TIED])
def test_bfloat16(changes):
    """Logits are float32: the loss is what it is of the operands, which the model rounds to bfloat16."""
    cfg = config(dtype=jnp.dtype("bfloat16"), **changes)
    model = Transformer(cfg)
    loss, _ = vocab_tiling_nnx_loss(model, x, data, cfg, True)
    if not changes:
        head = model.decoder.logits_dense
        head.kernel.set_value(head.kernel.get_value().astype(jnp.bfloat16).astype(jnp.float32))
        head.dtype = jnp.dtype("float32")
    expected, _ = plain(model, x, data, cfg, True)
    assert_close({"loss": loss}, {"loss": expected})


def test_a_target_out_of_range_is_nan_where_it_counts():
    model = Transformer(config())

    def loss(targets):
        return vocab_tiling_nnx_loss(model, x, data | {"targets": targets}, model.decoder.config, True)[0]

    for target, place, finite in [(-100, (0, 8), True), (-100, (0, 2), False), (V, (0, 2), False)]:
        assert jnp.isfinite(jax.jit(loss)(targets.at[place].set(target))) == finite
    with pytest.raises(ValueError, match=rf"\[0, 2\] is {V}, which is neither"):
        loss(targets.at[0, 2].set(V))


# ------------------------------------------------------------------------------------------------------ several devices


def sharding_module(monkeypatch, spec):
    """MaxText's, with rules by which [B, S] lie along these axes."""

    def create_sharding(mesh, logical_names):
        assert logical_names == ("activation_embed_and_logits_batch", "activation_length")
        return SimpleNamespace(spec=spec)

    for name in ("maxtext", "maxtext.utils", "maxtext.utils.sharding"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["maxtext.utils.sharding"].create_sharding = create_sharding


@pytest.mark.slow
def test_on_four_devices():
    """A script, whose process has four from the start."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def main():
    cfg = config(z_loss_multiplier=1e-2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "context"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        sharding_module(monkeypatch, P(("fsdp",), "context"))
        assert_close(run(vocab_tiling_nnx_loss, cfg, mesh=mesh), run(plain, cfg))


# -------------------------------------------------------------------------------------------------------------- refused


def other_decoder(model):
    class Own(NNXDecoder):
        def apply_output_head(self, *given):
            return 2 * super().apply_output_head(*given)

    model.decoder.__class__ = Own


def other_model(model):
    class Own(Transformer):
        def logits_from_hidden_states_for_vocab_tiling(self, *given):
            return 2 * super().logits_from_hidden_states_for_vocab_tiling(*given)

    model.__class__ = Own


def lora(model):
    model.decoder.logits_dense.kernel_lora_a = nnx.LoRAParam(jnp.ones((H, 2)))
    model.decoder.logits_dense.kernel_lora_b = nnx.LoRAParam(jnp.ones((2, V)))


def tied_lora(model):
    model.token_embedder.embedding_lora_a = nnx.LoRAParam(jnp.ones((V, 2)))


def fp8(model):
    model.decoder.logits_dense.kernel_scale = nnx.Param(jnp.ones(()))


def headless(model):
    del model.decoder


@pytest.mark.parametrize(
    ("settings", "change", "given", "message"),
    [
        ({"shard_mode": ShardMode.EXPLICIT}, None, {}, "this loss doesn't support explicit sharding; set shard_mode"),
        ({}, other_decoder, {}, "Own has no apply_output_head of maxtext.layers.nnx_decoders, so its logits"),
        ({}, other_model, {}, "Own has no logits_from_hidden_states_for_vocab_tiling of maxtext.models.models, so"),
        ({}, headless, {}, "NoneType has no apply_output_head of"),
        ({}, lora, {}, "the head has kernel_lora_a, kernel_lora_b besides kernel, as .* LoRA"),
        ({}, fp8, {}, "the head has kernel_scale besides kernel"),
        (TIED, tied_lora, {}, "the head has embedding_lora_a besides embedding"),
        ({}, None, {"hidden_states": x[0]}, r"hidden_states are \[12, 16\], targets \[2, 12\] and"),
        ({}, None, {"data": data | {"targets": targets[:, 1:]}}, r"targets \[2, 11\] and"),
        ({}, None, {"data": data | {"targets_segmentation": segments[:1]}}, r"_segmentation \[1, 12\]; they must be"),
    ],
)  # fmt: skip
def test_refused(settings, change, given, message):
    cfg = config(**settings)
    model = Transformer(cfg)
    if change:
        change(model)
    call = {"model": model, "hidden_states": x, "data": data, "config": cfg, "is_train": True} | given
    with pytest.raises(ValueError, match=f"^onchip.integrations.maxtext: .*{message}"):
        vocab_tiling_nnx_loss(**call)


def test_targets_that_are_no_integers():
    model = Transformer(config())
    with pytest.raises(TypeError, match="must hold integers; got float32"):
        vocab_tiling_nnx_loss(model, x, data | {"targets": x[..., 0]}, model.decoder.config, True)


@pytest.mark.parametrize("spec", [P(), P(None, None), P("data", None), P(("data", "fsdp"), "context")])
def test_axes_that_shard_something_else_than_tokens(spec, monkeypatch):
    sharding_module(monkeypatch, spec)
    mesh = SimpleNamespace(size=8, shape={"data": 4, "fsdp": 1, "tensor": 2})
    axes = "tensor .of 2." if any(spec) else "data .of 4., tensor .of 2."
    with pytest.raises(
        ValueError, match=f"shards only tokens, but the mesh has {axes}; set the parallelism of that axis"
    ):
        integration._token_axes(mesh)


# -------------------------------------------------------------------------------------------------------------- install


def test_install_and_uninstall(monkeypatch, stand_in):
    monkeypatch.setattr(versions, "installed_version", lambda distribution: "0.2.5")
    home = stand_in("maxtext.utils.vocabulary_tiling", {"vocab_tiling_nnx_loss": plain})
    assert str(install()) == (
        "MaxText 0.2.5 with num_vocab_tiling above 1 runs through onchip, which replaced\n"
        "  maxtext.utils.vocabulary_tiling.vocab_tiling_nnx_loss"
    )
    assert home.vocab_tiling_nnx_loss is vocab_tiling_nnx_loss
    # Ours takes the same arguments.
    assert tuple(inspect.signature(vocab_tiling_nnx_loss).parameters) == tuple(inspect.signature(plain).parameters)
    uninstall()
    assert home.vocab_tiling_nnx_loss is plain


if __name__ == "__main__":
    main()
