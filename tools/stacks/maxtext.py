"""MaxText: its loss and its train step, with stand-ins for what it imports."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stacks.common import PAGE, Checked, StandIns, agreed, section, tests, tokens


def maxtext() -> Checked:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    # What the model of the check doesn't use; the modules of MaxText's own need Python 3.12, JAX 0.11 or more packages.
    sys.meta_path.insert(
        0,
        StandIns(  # type: ignore[arg-type]
            (
                *("aqt", "drjax", "grain", "pathwaysutils", "qwix", "tokamax"),
                *("maxtext.input_pipeline", "maxtext.kernels.attention.jax_flash_attention", "maxtext.kernels.mhc"),
            )
        ),
    )
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import Mesh

    with contextlib.redirect_stdout(None):
        from maxtext.common.train_state_nnx import TrainStateNNX
        from maxtext.configs import pyconfig
        from maxtext.models.models import Transformer
        from maxtext.trainers.pre_train import train
        from maxtext.utils.sharding import nnx_construct_named_sharding

    from onchip.integrations import maxtext as integration

    jax.config.update("jax_disable_most_optimizations", True)
    base = Path(train.__file__).parents[2] / "configs" / "base.yml"
    size = {"base_emb_dim": 32, "head_dim": 16, "base_num_query_heads": 2, "base_num_kv_heads": 2, "base_mlp_dim": 32}
    size |= {"vocab_size": 96, "base_num_decoder_layers": 1, "max_target_length": 16, "per_device_batch_size": 1}
    plain = {"attention": "dot_product", "dtype": "float32", "enable_checkpointing": False, "hardware": "cpu"}
    plain |= {"dataset_type": "synthetic", "run_name": "check", "skip_jax_distributed_system": True}
    ids = jnp.asarray(torch.cat([tokens(), tokens().flip(0)]).numpy(), jnp.int32)
    data = {"inputs": ids, "inputs_position": jnp.arange(16) + 0 * ids, "inputs_segmentation": jnp.ones_like(ids)}
    data |= {"targets": jnp.roll(ids, -1, 1), "targets_segmentation": jnp.ones_like(ids).at[0, 10:].set(0)}

    @contextlib.contextmanager
    def built(axes: dict[str, int], **settings: Any) -> Iterator[tuple[Any, Any, Any]]:
        settings = {"num_vocab_tiling": 4, "z_loss_multiplier": 1e-2} | settings | size | plain
        with contextlib.redirect_stdout(None):
            config = pyconfig.initialize([None, str(base)], **settings)
        shape = [axes.get(name, 1) for name in config.mesh_axes]
        mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), config.mesh_axes)
        with mesh, logical_axis_rules(config.logical_axis_rules):
            yield config, mesh, Transformer(config, mesh, quant=None, rngs=nnx.Rngs(params=0, dropout=1))

    def step(tied: bool, **axes: int) -> list[Any]:
        """The loss and the gradients of one batch, by MaxText's `loss_fn`; for a tied head, the embedding's last."""
        with built(axes, logits_via_embedding=tied, final_logits_soft_cap=3.0) as (config, _, model):
            graph, parameters, rest = nnx.split(model, nnx.Param, ...)

            def loss(parameters: Any) -> Any:
                value, aux = train.loss_fn(nnx.merge(graph, parameters, rest, copy=True), config, {**data}, None, None)
                return value, aux["z_loss"]

            made = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
        return [np.asarray(x) for x in jax.tree.leaves(made)]

    def steps() -> list[Any]:
        """The losses and gradient norms of 3 steps on 4 devices, each of 2 batches, by MaxText's `train_step`."""
        with built({"fsdp": 4}, gradient_accumulation_steps=2) as (config, mesh, model):
            parameters = nnx.state(model, nnx.Param)
            shards = nnx_construct_named_sharding(parameters, mesh)
            nnx.update(model, jax.device_put(parameters, shards))
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            graph, state = nnx.split(TrainStateNNX(model, optimizer))
            two = {name: jnp.concatenate([x, x[::-1]]) for name, x in data.items()}
            run = jax.jit(lambda state: train.train_step(graph, config, None, shards, state, {**two}))
            made = []
            for _ in range(3):
                state, metrics = run(state)
                made += [np.asarray(metrics["scalar"][f"learning/{name}"]) for name in ("loss", "grad_norm")]
        return made

    ways: list[dict[str, Any]] = [{"tied": False}, {"tied": True}, {"tied": False, "fsdp": 2, "context": 2}]
    theirs = [*(step(**way) for way in ways), steps()]
    own = train.vocab_tiling_nnx_loss
    code, printed = re.findall(r"^```(?:python|text)\n(.*?)^```", section("MaxText"), flags=re.MULTILINE | re.DOTALL)[
        :2
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, PAGE.name, "exec"), {})
    if said.getvalue() != printed or train.vocab_tiling_nnx_loss is not integration.vocab_tiling_nnx_loss:
        raise AssertionError(f"install() printed {said.getvalue()!r}")
    ours = [*(step(**way) for way in ways), steps()]
    integration.uninstall()
    if train.vocab_tiling_nnx_loss is not own:
        raise AssertionError("uninstall left onchip's")
    # MaxText rounds the gradient of a tied head to bfloat16, and so does onchip.
    rounded = agreed([ours[1].pop()], [theirs[1].pop()], bound=2**-8)
    errors = [agreed(*pair) for pair in zip(ours, theirs, strict=True)]
    how = (
        "its `loss_fn` of a Transformer with stand-ins for packages that it imports, against its own, head of its own "
        f"and tied, loss and gradients: {max(errors[:2]):.0e}, of the tied embedding, which MaxText rounds to "
        f"bfloat16: {rounded:.0e}; with tokens on 4 devices by FSDP and context parallelism: {errors[2]:.0e}; 3 "
        "steps of its `train_step` with FSDP on 4 devices and accumulated gradients, losses and gradient norms: "
        f"{errors[3]:.0e}; {tests('maxtext')}"
    )
    return "`vocab_tiling_nnx_loss`", how
