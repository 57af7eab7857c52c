"""Every way to call JAX's losses of a split vocabulary wrongly: the exception's type, and that it names argument and
remedy.  All errors are found while tracing, on meshes of no devices, or of one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from onchip.jax import (
    cross_entropy,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)
from onchip.ops.linear_cross_entropy import jax_op
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.xla.parallel import whole_vocab
from shared import assert_refused


def ones(shape):
    # Each operation of JAX outside of jit would be compiled, and `asarray` is one.
    return jax.device_put(np.ones(shape, np.float32))


H, W, B, Y = ones((2, 6, 8)), ones((16, 8)), ones(16), jax.device_put(np.zeros((2, 6), np.int32))
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SHARDED = {
    sharded_linear_cross_entropy: {"hidden": H, "weight": W, "target": Y, "bias": B},
    sharded_linear_log_probs: {"hidden": H, "weight": W, "ids": Y, "bias": B},
    sharded_linear_jsd: {
        "student_hidden": H,
        "student_weight": W,
        "teacher_hidden": H,
        "teacher_weight": W,
        "target": Y,
    },
}
# What is said of the mesh, whatever the op.
EVERY = {
    "no mesh": ({"mesh": None}, ValueError, "there is no mesh; pass mesh=, or call it under jax.set_mesh(...)"),
    "mesh is a name": ({"mesh": "model"}, TypeError, "mesh must be a jax.sharding.Mesh; got str"),
    "vocab_axis is a tuple": ({"vocab_axis": ("model",)}, TypeError, "vocab_axis must be the name of one mesh axis; got tuple"),
    "vocab_axis is unknown": ({"vocab_axis": "tp"}, ValueError, "vocab_axis 'tp' is not an axis of the mesh, whose axes are ('data', 'model')"),
    "token_axes are unknown": ({"token_axes": "dp"}, ValueError, "token_axes 'dp' is not an axis of the mesh"),
    "token_axes is a list": ({"token_axes": ["data"]}, TypeError, "token_axes must be the name of a mesh axis, or a tuple with a name, a tuple of names or None for each leading dimension"),
    "token_axes holds a number": ({"token_axes": (0,)}, TypeError, "token_axes must be the name of a mesh axis"),
    "too many token_axes": ({"token_axes": ("data", None, None)}, ValueError, "has an entry for each of 3 dimensions, but"),
    "an axis twice": ({"token_axes": "model"}, ValueError, "an axis can split only one dimension; got vocab_axis='model', token_axes='model'"),
    "tokens don't divide": ({"token_axes": (None, "model"), "vocab_axis": "data"}, ValueError, "has 6 at dimension 1, which 4 devices along 'model' can't share evenly; pad the tokens, with targets of ignore_index"),
}  # fmt: skip
VOCAB = {
    "scratch_bytes is too small a part of a device's logits": ({"scratch_bytes": 0.05, "token_axes": "data"}, ValueError, "scratch_bytes=4 is too small for T=6, H=8, V=4 "),
    "vocab_size is 0": ({"vocab_size": 0}, ValueError, "vocab_size=0 but 4 devices have 4 entries each; it must be between 1 and 16"),
    "vocab_size is too large": ({"vocab_size": 17}, ValueError, "vocab_size=17 but 4 devices have 4 entries each"),
    "vocab_size is a float": ({"vocab_size": 16.0}, TypeError, "vocab_size must be an int; got float"),
    "V doesn't divide": ({"weight": ones((15, 8)), "bias": ones(15)}, ValueError, "weight has V=15, which 4 devices along 'model' can't share evenly; pad it to 16 and pass vocab_size=15"),
}  # fmt: skip
OWN = {
    sharded_linear_cross_entropy: VOCAB | {
        "soft labels of a device": ({"target": ones((2, 6, 4))}, ValueError, "target has shape [2, 6, 4]; probabilities must be [..., V], [2, 6, 16]"),
        "stash of soft labels": ({"target": ones((2, 6, 16)), "strategy": "stash"}, ValueError, "soft labels are computed by strategy 'recompute'"),
        "class_weight is padded": ({"class_weight": ones(16), "vocab_size": 15}, ValueError, "class_weight has shape [16]; it must be [V], [15]"),
        "sequences are split": ({"shift": True, "token_axes": (None, "data")}, ValueError, "shift=True needs whole sequences on each device, but token_axes split them along 'data'"),
        "stash": ({"strategy": "stash"}, ValueError, "xla: strategy='stash' needs the softmax of a whole vocabulary at once; pass strategy='recompute'"),
        "kernels": ({"backend": "triton"}, ValueError, "backend must be one of 'auto', 'xla', 'mosaic_gpu'; got 'triton'"),
        "bias is of a device": ({"bias": ones(4)}, ValueError, "bias has shape [4] but weight has V=16"),
    },
    sharded_linear_log_probs: VOCAB,
    sharded_linear_jsd: {
        "vocab is too large": ({"vocab": 17}, ValueError, "vocab=17 but 4 devices have 4 entries each"),
        "V doesn't divide": ({"student_weight": ones((15, 8)), "teacher_weight": ones((15, 8))}, ValueError, "student_weight has V=15, which 4 devices along 'model' can't share evenly; pad it to 16 and pass vocab=15"),
        "V of the models differ": ({"teacher_weight": ones((20, 8))}, ValueError, "parts of a split vocabulary must have the same size; got 16 and 20 entries; pad both to one size, and pass vocab"),
        "logits of another V": ({"teacher_hidden": None, "teacher_weight": None, "teacher_logits": ones((2, 6, 20))}, ValueError, "got 16 and 20 entries"),
    },
}  # fmt: skip
WRONG = [(op, row) for op in SHARDED for row in ({**EVERY, **OWN[op]}).items()]


@pytest.mark.parametrize(("op", "row"), WRONG, ids=lambda x: x[0] if isinstance(x, tuple) else x.__name__)
def test_wrong_call_on_a_mesh(op, row):
    changes, kind, message = row[1]
    arguments = {"vocab_axis": "model", "mesh": MESH} | SHARDED[op] | changes
    with pytest.raises(kind) as caught:
        op(**arguments)
    assert message in str(caught.value)
    # What is wrong with the arrays is said in the words of the op of the whole.
    assert str(caught.value).startswith((f"{op.__name__}: ", f"{op.__name__.removeprefix('sharded_')}: "))


OPS = {
    linear_cross_entropy: {"hidden": H, "weight": W, "target": Y},
    linear_log_probs: {"hidden": H, "weight": W, "ids": Y},
    linear_jsd: {"student_hidden": H, "student_weight": W, "teacher_hidden": H, "teacher_weight": W, "target": Y},
}
SPLIT = {"weight", "student_weight", "teacher_weight"}


def on_one_device(op, *, split=SPLIT, axis="model", gradient=False, **options):
    """The op inside of a `shard_map` over one device, with the arrays of these names split."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    specs = ({name: P("model") if name in split else P() for name in OPS[op]},)
    function = partial(op, axis_name=axis)
    run = jax.shard_map(lambda given: function(**given), mesh=mesh, in_specs=specs, out_specs=P(), **options)
    run = jax.jit(run)
    return jax.grad(run, allow_int=True)(OPS[op]) if gradient else jax.eval_shape(run, OPS[op])


INSIDE = {
    "weight is whole": ({"split": ()}, ValueError, "weight is the same on all devices of axis 'model', but axis_name says that each has its own entries of the vocabulary; put 'model' into its in_specs, or leave axis_name out"),
    "hidden is split": ({"split": SPLIT | {"hidden", "student_hidden"}}, ValueError, "hidden varies over axis 'model', but it must be the same on all devices that share a vocabulary; leave 'model' out of its in_specs, or gather it by jax.lax.all_gather(..., 'model', to='invarying')"),
    "targets are split": ({"split": SPLIT | {"target", "ids"}}, ValueError, "varies over axis 'model'"),
    "another axis": ({"axis": "data"}, ValueError, "axis_name='data' is not an axis of a jax.shard_map around the call (['model']); call it inside of one, or call sharded_"),
    "axis_name is a tuple": ({"axis": ("model",)}, TypeError, "axis_name must be the name of one mesh axis; got tuple"),
    "a gradient without check_vma": ({"check_vma": False, "gradient": True}, ValueError, "inside of jax.shard_map(..., check_vma=False) the scale of gradients along 'model' isn't known; leave check_vma out, or call sharded_"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("op", OPS)
def test_wrong_call_inside_of_shard_map(op, name):
    options, kind, message = INSIDE[name]
    assert_refused(op.__name__, partial(on_one_device, op, **options), kind, message)


def test_what_kernels_refuse(monkeypatch):
    """On a GPU that has them."""
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_op, "refusal", lambda *_: None)
    call = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=MESH, vocab_size=15, backend="mosaic_gpu")
    for options in ({"softcap": 5.0}, {"label_smoothing": 0.1}):
        message = "it takes padding of a split vocabulary only without softcap, label_smoothing and labels for every entry; leave those out, or pass backend='xla'"
        assert_refused(
            "linear_cross_entropy", partial(jax.eval_shape, partial(call, **options), H, W, Y), ValueError, message
        )


def test_lists_are_no_arrays():
    given = {"hidden": H, "weight": W, "vocab_axis": "model", "mesh": MESH}
    for changes, name in (({"target": Y.tolist()}, "target"), ({"target": Y, "weight": W.tolist()}, "weight")):
        message = f"{name} must be a jax.Array or numpy.ndarray; got list; pass jax.numpy.asarray({name})"
        assert_refused(
            "linear_cross_entropy", partial(sharded_linear_cross_entropy, **given | changes), TypeError, message
        )


def test_indices_of_the_vocabulary_go_as_float32():
    with pytest.raises(ValueError, match="op: a vocabulary that is split may have 16777216 entries; got 16777220"):
        whole_vocab("op", "vocab_size", None, 2**22 + 1, 4)


def test_a_gathered_hidden_may_be_split():
    def run(h, w):
        h = jax.lax.all_gather(h, "model", axis=1, tiled=True, to="invarying")
        return linear_cross_entropy(h, w, Y, axis_name="model")

    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P())
    assert jax.eval_shape(jax.grad(jax.jit(run)), H, W).shape == H.shape


CALLS = {
    "vocab_size alone": (linear_cross_entropy, {"vocab_size": 15}, "vocab_size=15 is for a vocabulary that is split over devices; pass axis_name too, or cut the padding off weight and bias"),
    "vocab_size of log-probabilities": (linear_log_probs, {"vocab_size": 15}, "pass axis_name too"),
    "outside of shard_map": (linear_cross_entropy, {"axis_name": "model"}, "axis_name='model' is not an axis of a jax.shard_map around the call ([])"),
    "vocab_size of logits": (cross_entropy, {"vocab_size": 15}, "pass axis_name too, or cut the padding off logits"),
    "logits outside of shard_map": (cross_entropy, {"axis_name": "model"}, "is not an axis of a jax.shard_map around the call ([]); call it inside of one"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_outside(name):
    op, changes, message = CALLS[name]
    given = OPS[op] if op in OPS else {"logits": ones((2, 6, 16)), "target": Y}
    assert_refused(op.__name__, partial(op, **given | changes), ValueError, message)


def test_arrays_of_an_explicit_mesh_are_split_as_the_call_says():
    explicit = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def array(x, *spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(explicit, P(*spec)))

    with jax.sharding.use_abstract_mesh(explicit):
        call = partial(sharded_linear_cross_entropy, vocab_axis="model", token_axes="data")
        message = "weight is sharded as P(None, 'model'); it must be P('model', None): pass jax.sharding.reshard(weight, P('model', None))"
        given = array(H, "data"), array(W, None, "model"), array(Y, "data")
        assert_refused("sharded_linear_cross_entropy", lambda: jax.eval_shape(call, *given), ValueError, message)
        given = array(H, "data"), array(W, "model"), array(Y)
        assert_refused(
            "sharded_linear_cross_entropy", lambda: jax.eval_shape(call, *given), ValueError, "target is sharded as"
        )
        assert jax.eval_shape(call, array(H, "data"), array(W, "model"), array(Y, "data")).shape == ()
        labels = jax.ShapeDtypeStruct((2, 6, 16), jnp.float32)
        given = array(H, "data"), array(W, "model"), array(labels, "data")
        message = "target is sharded as P('data', None, None); it must be P('data', None, 'model')"
        assert_refused("sharded_linear_cross_entropy", lambda: jax.eval_shape(call, *given), ValueError, message)
        given = array(H, "data"), array(W, "model"), array(labels, "data", None, "model")
        assert jax.eval_shape(call, *given).shape == ()


@pytest.mark.parametrize("op", SHARDED)
def test_arrays_that_are_not_on_an_explicit_mesh(op):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Explicit,))
    first = next(name for name in SHARDED[op] if "weight" in name)
    message = f"{first} isn't on the mesh, whose axes are explicit; pass jax.device_put({first}, jax.sharding.NamedSharding(mesh, P('model', None)))"
    call = partial(op, **SHARDED[op], mesh=mesh, vocab_axis="model")
    assert_refused(op.__name__, call, ValueError, message)


def test_inside_of_a_shard_map_over_another_axis():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        call = partial(sharded_linear_cross_entropy, vocab_axis="model", reduction="none")
        run = jax.shard_map(call, in_specs=(P("data"), P(), P("data")), out_specs=P("data"), axis_names={"data"})
        message = "inside jax.shard_map the call can't say over which axes its results vary; call it outside, or call linear_cross_entropy with axis_name inside a jax.shard_map over 'model' too"
        assert_refused("sharded_linear_cross_entropy", lambda: jax.eval_shape(run, H, W, Y), ValueError, message)


def test_inside_of_a_shard_map_over_its_axis():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda w: sharded_linear_cross_entropy(H, w, Y, vocab_axis="model"), mesh=mesh, in_specs=P(), out_specs=P()
    )
    message = "vocab_axis 'model' is an axis of a jax.shard_map around the call; inside that call linear_cross_entropy with axis_name"
    assert_refused("sharded_linear_cross_entropy", lambda: jax.eval_shape(run, W), ValueError, message)
