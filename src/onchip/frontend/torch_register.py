"""Registration of an op with torch.library and autograd, from functions of one declared call.

An op declares its arguments as a NamedTuple or a frozen dataclass of tensors, dtypes, numbers, words and flags, and of
options objects with such fields.  `forward(call)` computes the outputs, `save(call, outputs)` selects what backward
needs, in another such object, and `gradients(kept, upstream, wanted)` computes the gradients of the call's
`differentiable` tensors.  `Operator` makes two operators of torch.library from these, for torch.compile and for
dispatch modes and subclasses of Tensor.  With plain tensors it runs the op's functions directly and attaches autograd
to the outputs, since a registered operator costs 0.2 ms of Python each way.

Two public functions, for a head's loss and for experts' products, end as `Operator.__call__` does, so that the stack
is one function shorter when `forward` runs; the others call the operator.  Calls of a kind that was seen before only
reach `connect` (torch_repeat.py).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from onchip.frontend import torch_flops, torch_library, torch_prepared
from onchip.frontend.torch_ahead import Coming, lengths, without_memory
from onchip.frontend.torch_autograd import asked_for, differentiable_once, graph_is_kept, refuse_batches
from onchip.frontend.torch_inputs import gradients_enabled
from onchip.frontend.torch_packing import LISTS, packing_of, reader
from onchip.frontend.torch_prepared import Inside, Kinds

C = TypeVar("C")
T = TypeVar("T")
O = TypeVar("O", bound=tuple[Any, ...])  # noqa: E741

Wanted = Sequence[bool]
"""Which gradients are asked for, in the order of the `differentiable` tensors."""
Made = Sequence[Tensor | None]
"""The gradients, in the same order."""


class Saving(NamedTuple):
    """What a call's autograd node keeps for backward besides tensors: the same for all calls of a kind."""

    rest: Sequence[Any]
    """Everything else that `save` selected."""
    grads: Sequence[bool]
    """Which of the differentiable tensors need a gradient."""
    edges: Sequence[int]
    """Their places among the node's edges; a tensor that is None has no edge."""
    op: str
    """The name that errors begin with."""
    packed: bool = False
    """Whether `rest` is packed as a registered operator takes it."""
    strides: Sequence[tuple[int, ...] | None] = ()
    """Of the kept tensors that are contiguous, or that the op made, the strides, on which kernels rely: hooks for saved
    tensors may give back others.  A caller's other tensors may have any."""
    link: int | None = None
    """The place of a kept tensor that is a differentiable output: it is the link of `differentiable_once`, which then
    needs none of its own."""


def needed(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each needs a gradient: a call's `grads`."""
    enabled = gradients_enabled()
    return tuple([enabled and x is not None and x.requires_grad for x in tensors])


@dataclass(eq=False)
class Operator(Generic[C, O]):
    """An op, registered as `onchip::<name>` and `onchip::<name>_backward`; to call it runs a call.

    The types of the call, of the outputs and of what is kept are read from the annotations of `forward` and `save`, or
    given as `types`.  A field may be a Tensor, a torch.dtype, an int, float, bool or str, each of them `| None`; a
    tuple of any number of one of the last five; or another such object.  A tensor is called by its field's name, or,
    where several objects have a field of that name, by its path: `student_hidden`.  The call has a field `grads`, which
    says for each of the `differentiable` tensors whether it needs a gradient.

    torch.compile's cache on disk knows an operator by its name alone: a release that changes the fields of a call, of
    the outputs or of what is kept must rename the operator.
    """

    name: str
    _: KW_ONLY
    op: str | Callable[[C], str]
    """The name that errors begin with, or a function that finds it for a call."""
    forward: Callable[[C], O]
    """Computes the outputs, outside of autocast and on the call's device.  An output that isn't asked for is None; from
    the registered operator it is an empty tensor.  Outputs share no memory."""
    fake: Callable[[C], O]
    """Empty outputs of the same shapes and dtypes, which may depend on symbols."""
    save: Callable[[C, O], Any]
    """Selects what backward needs from the call and the outputs."""
    gradients: Callable[[Any, Made, Wanted], Made]
    """The gradients, given those of the first `differentiable_outputs` outputs (None: nothing depends on that output;
    at least one is given).  A gradient that isn't wanted is None.  None of them shares memory with what is kept."""
    fake_gradients: Callable[[Any, Made, Wanted], Made] | None
    """The same as empty tensors.  None: `gradients` consists of PyTorch's own operators and isn't registered, so that
    its results may be tensors that are kept."""
    differentiable: Sequence[str]
    """Names of the call's tensors that can have a gradient."""
    differentiable_outputs: int = 1
    """How many outputs, the first ones, depend on them differentiably."""
    consumed: Sequence[str] = ()
    """Names of the kept tensors, outputs of forward, that `gradients` overwrites.  They are cloned first where the
    graph is retained."""
    adds_to: Mapping[str, str] = field(default_factory=dict)
    """For a differentiable tensor, the name of a kept one in the caller's memory: if that isn't None, `gradients` adds
    the gradient to it and returns None instead."""
    collect: Callable[[Any, Made, Wanted], Made] | None = None
    """Turns what `gradients` made into the gradients, where some of them are in `consumed` tensors."""
    clone: Callable[[Tensor], Tensor] = torch.clone
    """How a consumed tensor is cloned."""
    states: bool = False
    """Whether `forward` and `gradients` state all that they do (torch_prepared.py).  Then, for a kind of call that was
    seen before, backward is prepared, and so is the registered operator's forward unless it checks values.  Other
    forwards are prepared together with the whole public function (torch_repeat.py)."""
    exchanges: Callable[[C], bool] | None = None
    """Whether `forward` and `gradients` of this call exchange numbers with other ranks, so that they can't run on
    tensors without memory: then no kernel is compiled before its launch."""
    flops: Callable[[C], int] | None = None
    """Multiplications and additions in the matrix products that `forward` stands for; None: it has none."""
    gradient_flops: Callable[[Any, Made, Wanted], int] | None = None
    """The same for `gradients`, without the products that it computes again."""
    by_token: Sequence[str] = ()
    """Names of the call's tensors whose leading dimensions are the tokens', hidden states first, if forward and
    gradients do no more than launch kernels and PyTorch's operators, for any number of tokens and without memory too:
    then the kernels of all lengths are compiled together, before the first launch."""
    ahead: Callable[[C], None] | None = None
    """With `by_token`: does on the host what calls with other numbers of tokens will need, and keeps it."""
    direct: Callable[[Any], bool] | None = None
    """Whether `gradients` is to run unregistered for this call."""
    overwrites: Callable[[Any], bool] | None = None
    """Whether `gradients` overwrites a tensor of this call: then it runs unregistered, so that autograd sees it."""
    types: tuple[Any, Any, Any] | None = None
    """The types of the call, of the outputs and of what is kept; None: those that functions are annotated with."""

    def __post_init__(self) -> None:
        types = self.types
        if types is None:
            of_forward, of_save = get_type_hints(self.forward), get_type_hints(self.save)
            types = next(iter(of_forward.values())), of_forward["return"], of_save["return"]
        self.call, self.outputs, self.kept = map(packing_of, types)
        self._grads = reader([leaf.path for leaf in self.call.of_rest if leaf.name == "grads"])
        self._places = [self.call.tensors.index(x) for x in self.differentiable]
        count = len(self.outputs.tensors) + 1
        self.forward_op = torch_library.operator(
            f"{self.name}({self.call.schema()}) -> ({', '.join(['Tensor'] * count)})",
            self._forward,
            self._fake,
            backward=self._backward,
            setup_context=self._setup_context,
        )
        self.backward_op: Any = None
        if self.fake_gradients is not None:
            mutated = [x for x in (*self.consumed, *self.adds_to.values()) if x in self.kept.tensors]
            upstream = "".join(f"Tensor? upstream_{i}, " for i in range(self.differentiable_outputs))
            made = ", ".join(["Tensor"] * len(self.differentiable))
            self.backward_op = torch_library.operator(
                f"{self.name}_backward({upstream}{self.kept.schema(mutated)}, bool[] wanted) -> ({made})",
                self._gradients,
                self._fake_gradients,
                changed=[self.differentiable_outputs + self.kept.tensors.index(x) for x in mutated],
            )
        if self.flops is not None:
            torch_flops.register(self.name, self._flops)
        if self.gradient_flops is not None:
            torch_flops.register(f"{self.name}_backward", self._gradient_flops)
        self._differentiable = reader([self.call.of_tensors[place].path for place in self._places])
        made_here = {leaf.name for leaf in self.outputs.of_tensors} - {leaf.name for leaf in self.call.of_tensors}
        self._theirs = [name in self.adds_to.values() for name in self.kept.tensors]
        # Those that may be the caller's.
        self._given = [i for i, leaf in enumerate(self.kept.of_tensors) if leaf.name not in made_here]
        self._consumed = [self.kept.tensors.index(name) for name in self.consumed]
        # Places among the differentiable tensors and among the kept ones.
        self._adds = [(self.differentiable.index(x), self.kept.tensors.index(y)) for x, y in self.adds_to.items()]
        self._forwards, self._backwards = Kinds(), Kinds()
        self._checks = reader([leaf.path for leaf in self.call.of_rest if leaf.name == "check_inputs"])
        self._node: Any = type(self.name, (_Node,), {})  # a class of its own for its name
        self._apply: Any = super(torch.autograd.Function, self._node).apply  # type: ignore[misc]

    def __call__(self, call: C) -> O:
        """The outputs of a call, connected to its tensors by autograd."""
        if not self.is_plain(call):
            return self.registered(call)
        with inside_operator(_first(self.call.tensors_of(call))), self.coming(call):
            made = self.forward(call)
        return self.attach(call, made)

    def _run(self, call: C) -> Made:
        """The outputs of `forward`, which may be prepared."""
        if not self.states or any(self._checks(call)):
            return self.outputs.tensors_of(self.forward(call))
        tensors, rest = self.call.tensors_of(call), self.call.rest_of(call)
        return self._forwards.run(lambda: self.outputs.tensors_of(self.forward(call)), tensors, rest)

    def coming(self, call: C) -> Coming:
        """A context for `forward`: if a kernel isn't compiled yet, all that such calls need are compiled, backward's
        too.
        """
        exchanges = self.exchanges is not None and self.exchanges(call)
        return Coming(partial(self._rehearse, call) if self.by_token and not exchanges else None)

    def _rehearse(self, call: C) -> None:
        """Run forward and gradients on tensors without memory, with this and with other lengths."""
        given = self.call.tensors_of(call)
        first = given[self.call.tensors.index(self.by_token[0])]
        assert first is not None
        self._rehearse_with(call, [without_memory(x) for x in given])
        lead = first.shape[:-1]
        for tokens in lengths(lead.numel(), first.shape[-1]):
            tensors = [
                without_memory(x, lead, tokens) if name in self.by_token else without_memory(x)
                for name, x in zip(self.call.tensors, given, strict=True)
            ]
            with suppress(ValueError):  # scratch_bytes may be too small
                self._rehearse_with(call, tensors)
        if self.ahead is not None:
            self.ahead(call)

    def _rehearse_with(self, call: C, tensors: Made) -> None:
        likewise = self.call.build(tensors, self.call.rest_of(call))
        made = self.forward(likewise)
        (grads,) = self._grads(call)
        if any(grads):
            # With several outputs, most losses use only the first.
            nothing: Made = [None] * (self.differentiable_outputs - 1)
            self.gradients(self.save(likewise, made), (self.outputs.tensors_of(made)[0], *nothing), grads)

    def is_plain(self, call: C) -> bool:
        """Whether a call may run the op's functions directly."""
        return are_plain(*self.call.tensors_of(call))

    def registered(self, call: C) -> O:
        """The outputs by the registered operator, which knows its derivative."""
        torch_flops.tell_counters()
        return cast(O, self.outputs.build(self.forward_op(*self.call.pack(call))[:-1], ()))

    def attach(self, call: C, made: O) -> O:
        """The outputs that `forward` itself computed, connected to the call's tensors by autograd."""
        told, saving, inputs = torch_prepared.builder(), None, self._differentiable(call)
        kept: Made = ()
        outputs: Made = self.outputs.tensors_of(made)
        before = outputs
        if any(*self._grads(call)):
            kept, saving = self.saving(call, made, inputs, range(len(inputs)))
            saving = saving._replace(link=self._link(kept, outputs))
            if saving.link is None:
                before = (*outputs, torch_prepared.empty(0, torch.float32, _first(inputs).device))
            with torch_prepared.unstated():  # hooks for saved tensors, which run each time
                outputs = self.connect(saving, kept, before, inputs)
        if told is not None:
            if not self.states:
                told.refuse(f"{self.name} doesn't state what it does")
            told.connected(self, saving, kept, inputs, before, outputs)
        return cast(O, self.outputs.build(outputs, ()))

    def connect(self, saving: Saving, kept: Made, outputs: Made, inputs: Made, *, plain: bool = False) -> Made:
        """The outputs connected to the inputs by autograd; the last may be a link of no elements: `Saving.link`.

        `plain`: no transform of torch.func is there.  `Function.apply` would look for them, 2 us of 5.
        """
        count = self.differentiable_outputs
        apply = self._apply if plain else self._node.apply
        if saving.link is not None:
            return (*apply(self, saving, kept, outputs[:count], *inputs), *outputs[count:])
        *connected, link = apply(self, saving, kept, (*outputs[:count], outputs[-1]), *inputs)
        return (*connected, *outputs[count:-1], link)

    def _link(self, kept: Made, outputs: Made) -> int | None:
        """The place of a kept tensor that is a differentiable output, and stays one: nobody may change it in place."""
        ours = outputs[: self.differentiable_outputs]
        for i, x in enumerate(kept):
            if x is not None and i not in self._consumed:
                for y in ours:
                    if x is y:
                        return i
        return None

    # What the registered operators run: the op's functions on unpacked arguments.

    def _forward(self, *args: Any) -> Any:
        with inside_operator(_first(args)):
            return _filled((*self._run(self.call.unpack_numbers(args)), None), args)

    def _fake(self, *args: Any) -> Any:
        return _filled((*self.outputs.tensors_of(self.fake(self.call.unpack(args))), None), args)

    def _gradients(self, *args: Any) -> Any:
        kept, given, wanted = self._unpack_gradients(args, self.kept.unpack_numbers)
        tensors, rest = self.kept.tensors_of(kept), self.kept.rest_of(kept)
        with inside_operator(_first(args)):
            return _filled(
                self._prepared(lambda: self.gradients(kept, given, wanted), tensors, rest, given, wanted), args
            )

    def _prepared(
        self, gradients: Callable[[], Made], tensors: Made, rest: Sequence[Any], given: Made, wanted: Wanted,
        inside: Inside | None = None,
    ) -> Made:  # fmt: skip
        """`gradients()`, which may be prepared.  With `inside` it enters that context, and collects its results."""
        if not self.states:
            return gradients()
        kind = tuple(rest), tuple(wanted), inside is None
        return self._backwards.run(gradients, (*tensors, *given), kind, inside)

    def _fake_gradients(self, *args: Any) -> Any:
        assert self.fake_gradients is not None
        return _filled(self.fake_gradients(*self._unpack_gradients(args, self.kept.unpack)), args)

    def _flops(self, *args: Any) -> int:
        assert self.flops is not None
        return self.flops(self.call.unpack(args))

    def _gradient_flops(self, *args: Any) -> int:
        assert self.gradient_flops is not None
        return self.gradient_flops(*self._unpack_gradients(args, self.kept.unpack))

    def _unpack_gradients(self, args: Sequence[Any], unpack: Callable[..., Any]) -> tuple[Any, Made, Wanted]:
        count = self.differentiable_outputs
        return unpack(args[count:-1]), args[:count], args[-1]

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, made = self.call.unpack(inputs), self.outputs.build(output[:-1], ())
        kept, saving = self.saving(call, made, self.call.tensors_of(call), self._places)
        ctx.mark_non_differentiable(*output[self.differentiable_outputs : -1])
        saving = saving._replace(rest=self.kept.encode(saving.rest), packed=True, strides=())
        self.keep(ctx, saving, kept, output[-1])

    def _backward(self, ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        grads: list[Tensor | None] = [None] * len(self.call.tensors)
        for place, grad in zip(self._places, self.backward(ctx, upstream, plain=False), strict=True):
            grads[place] = grad
        return (*grads, *[None] * len(LISTS))

    # What both ways, direct and registered, do with autograd.

    def saving(self, call: C, made: O, inputs: Made, places: Sequence[int]) -> tuple[Made, Saving]:
        """What a node is to keep: tensors, and the rest.  The differentiable tensors are at `places` of its inputs."""
        kept = self.save(call, made)
        given = [x is not None for x in inputs]
        edges = tuple([sum(given[:place]) for place in places])
        op = self.op if isinstance(self.op, str) else self.op(call)
        tensors, theirs = self.kept.tensors_of(kept), {id(x) for x in self.call.tensors_of(call)}
        fixed = [x is not None and (id(x) not in theirs or x.is_contiguous()) for x in tensors]
        strides = tuple([x.stride() if x is not None and one else None for x, one in zip(tensors, fixed, strict=True)])
        return tensors, Saving(self.kept.rest_of(kept), self._grads(call)[0], edges, op, strides=strides)

    def keep(self, ctx: Any, saving: Saving, kept: Made, link: Tensor | None) -> None:
        """Save for backward."""
        ctx.set_materialize_grads(False)  # or autograd would make a tensor of zeros for each output
        ctx.saving, ctx.used_up = saving, False
        # The caller's memory is not saved as a tensor: other micro-batches may add to it before this one does, and that
        # is right.
        # Autograd saves no tensor that was made in inference mode, where it can't see whether it is changed.
        frozen = [i for i in self._given if (x := kept[i]) is not None and x.is_inference()]
        if frozen:
            kept = [x.clone() if i in frozen and x is not None else x for i, x in enumerate(kept)]
        ctx.theirs = theirs = [(i, kept[i]) for _, i in self._adds if kept[i] is not None]
        if theirs:
            kept = [None if is_theirs else x for x, is_theirs in zip(kept, self._theirs, strict=True)]
        ctx.save_for_backward(*kept, link)

    def backward(self, ctx: Any, upstream: Made, *, plain: bool) -> Made:
        """The differentiable tensors' gradients, by the op's own function (`plain`) or by the registered operator."""
        given = [_in_memory(x) for x in upstream[: self.differentiable_outputs]]
        present = [x for x in given if x is not None]
        if not present:
            return [None] * len(self.differentiable)
        saving: Saving = ctx.saving
        rest, grads, edges, op, packed = saving.rest, saving.grads, saving.edges, saving.op, saving.packed
        refuse_batches(op, present)
        if ctx.used_up:
            _refuse_second(op, ctx)
        if not (plain or packed):
            rest = self.kept.encode(rest)
        wanted = asked_for(ctx, grads, edges)
        tensors, link = self._taken(ctx)
        theirs = [(i, x) for i, place in self._adds if (x := tensors[place]) is not None]
        kept: Any = None
        ways = self.direct, self.overwrites
        if self.fake_gradients is None or any(ways) or (self.collect is not None and not plain):
            kept = self._built(tensors, rest, plain=plain)  # otherwise left packed: compiled autograd would trace this
        direct, overwrites = [way is not None and way(kept) for way in ways]
        if not torch.compiler.is_compiling():
            adds, consumes = any(wanted[i] for i, _ in theirs), any(tensors[i] is not None for i in self._consumed)
            ctx.used_up = overwrites or adds or (consumes and not graph_is_kept())
        if self.fake_gradients is None or direct or overwrites:
            with torch.no_grad():
                made = self._collected(kept, self.gradients(kept, given, wanted), wanted)
        elif plain:
            for i, memory in theirs:
                if wanted[i]:  # nobody sees that it is overwritten
                    torch.autograd.graph.increment_version(memory)
            made = self._run_gradients(tensors, rest, given, wanted)
        else:
            made = self.backward_op(*given, *tensors, *rest, wanted)
            made = self._collected(kept, [made] if isinstance(made, Tensor) else made, wanted)
        made = [x if want else None for x, want in zip(made, wanted, strict=True)]
        for i, _ in theirs:
            made[i] = None
        if ctx.used_up and graph_is_kept():
            ctx.used_up = False
        # The link is an output that no caller can change in place (`loss /= 2`) without an error.
        return differentiable_once(op, made, *given, link)

    def _collected(self, kept: Any, made: Made, wanted: Wanted) -> Made:
        return made if self.collect is None else self.collect(kept, made, wanted)

    def _built(self, tensors: Made, rest: Sequence[Any], *, plain: bool) -> Any:
        return self.kept.build(tensors, rest) if plain else self.kept.unpack((*tensors, *rest))

    def _run_gradients(self, tensors: Made, rest: Sequence[Any], given: Made, wanted: Wanted) -> Made:
        """The gradients, as they are handed out."""

        def gradients() -> Made:
            kept = self.kept.build(tensors, rest)
            with inside_operator(_first(given)):
                return self._collected(kept, self.gradients(kept, given, wanted), wanted)

        return self._prepared(gradients, tensors, rest, given, wanted, inside_operator)

    def _taken(self, ctx: Any) -> tuple[list[Tensor | None], Tensor]:
        """The kept tensors, with clones of those that will be consumed where the graph is retained; and the link."""
        *tensors, link = ctx.saved_tensors
        for i, strides in enumerate(ctx.saving.strides):
            if strides is not None and (x := tensors[i]) is not None and x.stride() != strides:
                tensors[i] = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        if ctx.saving.link is not None:
            link = tensors[ctx.saving.link]
        for i, x in ctx.theirs:
            tensors[i] = x
        if self._consumed and graph_is_kept():
            for i in self._consumed:
                if (x := tensors[i]) is not None:
                    tensors[i] = self.clone(x)
        return tensors, link


class _Node(torch.autograd.Function):
    """Autograd's node of outputs that are already computed."""

    @staticmethod
    def forward(
        ctx: Any, op: Operator[Any, Any], saving: Saving, kept: Made, outputs: Made, *inputs: Tensor | None
    ) -> Any:
        ctx.op = op
        op.keep(ctx, saving, kept, outputs[-1] if saving.link is None else None)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        plain = torch.compiler.is_compiling() or not torch_flops.are_counted()
        return (None, None, None, None, *ctx.op.backward(ctx, upstream, plain=plain))


def stated_on(call: Any, function: Callable[..., T], *tensors: Tensor | None) -> T:
    """`function(call, *tensors)`, stated as one operator on the call's tensors and these."""
    packing = packing_of(type(call))
    count, rest = len(packing.tensors), packing.rest_of(call)

    def of_tensors(*given: Tensor | None) -> T:
        return function(packing.build(given[:count], rest), *given[count:])

    return torch_prepared.call(of_tensors, *packing.tensors_of(call), *tensors)


# ---------------------------------------------------------------------------------------------- what both ways share


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether no mode watches operators, and all are plain tensors with storage."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return torch_prepared.listed_device() is not None
    for x in tensors:  # noqa: SIM110 - half the time of all()
        if x is not None and (type(x) not in (Tensor, Parameter) or x.is_meta):
            return False
    return True


def inside_operator(x: Tensor) -> AbstractContextManager[Any]:
    """Where an op's functions run: below autograd, outside of autocast, and on the device of `x`.

    Below autograd, as operators run, or the caller couldn't change an output that is a view in place.  They run below
    autocast's dispatch too, but not outside its reach: products in there would be cast again.
    """
    device, below = x.device, torch._C._AutoDispatchBelowADInplaceOrView()
    kind = device.type  # which is made anew each time: 0.2 us
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    elsewhere = kind == "cuda" and device.index != torch.cuda.current_device()
    if not cast and not elsewhere:
        return below  # 1.7 us in place of 2.0 with a stack around it
    stack = ExitStack()
    stack.enter_context(below)
    if cast:
        stack.enter_context(torch.autocast(kind, enabled=False))
    if elsewhere:
        stack.enter_context(torch.cuda.device(device.index))
    return stack


def _refuse_second(op: str, ctx: Any) -> None:
    """Raise for a second backward of the same graph, which autograd keeps after the first one failed."""
    _ = ctx._raw_saved_tensors  # raises if the first came through
    raise RuntimeError(
        f"{op}: an earlier backward was interrupted after it had begun to overwrite its own inputs; run forward again, "
        "and set weight_grad_out anew if there is one"
    )


def _in_memory(x: Tensor | None) -> Tensor | None:
    """x, or a copy, with its numbers in memory, which kernels read: autograd may negate by a view, and have zeros
    without memory.
    """
    if x is None or torch.compiler.is_compiling():
        return x
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_neg() if x.is_neg() else x


def _first(args: Sequence[Any]) -> Tensor:
    return next(x for x in args if isinstance(x, Tensor))


def _filled(made: Sequence[Tensor | None], args: Sequence[Any]) -> Any:
    """The results as operators return them: an empty tensor for None, and a single one without a tuple."""
    first = _first(args)
    filled = tuple(first.new_empty(0, dtype=torch.float32) if x is None else x for x in made)
    return filled if len(filled) > 1 else filled[0]
