"""What a call becomes for CUDA inside of a `jax.shard_map` over one device, of which JAX tracks what varies."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def kernels(f, *shapes, check_vma):
    """The Mosaic kernels of the gradients of f's sum; the first argument, and the last, are the device's own rows."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = P("data"), *[P()] * (len(shapes) - 2), P("data")
    on_device = jax.shard_map(
        lambda *given: f(*given).astype(jnp.float32).sum()[None],
        mesh=mesh,
        in_specs=specs,
        out_specs=P("data"),
        check_vma=check_vma,
    )
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    step = jax.jit(jax.value_and_grad(lambda *given: on_device(*given).sum(), (0, 1)))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)
