"""What a call becomes for CUDA inside of a `jax.shard_map` over one device, for which JAX tracks what varies."""

import re

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir


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
    return [readable(module) for module in re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)]


def readable(module):
    """Without places in the source, and without the numbers that JAX gives the kernels of a process."""
    escaped = re.compile(r"\\([0-9A-F]{2}|.)")
    code = escaped.sub(lambda x: chr(int(x[1], 16)) if len(x[1]) == 2 else x[1], module).encode("latin-1")
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        text = ir.Module.parse(code).operation.get_asm(enable_debug_info=False)
    name = re.search(r"module @(\w+?)(_\d+)? ", text)[1]
    return re.sub(rf"\b{name}_\d+\b", name, text)
