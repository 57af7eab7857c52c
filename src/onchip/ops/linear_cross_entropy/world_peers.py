"""How others compute the loss of a vocabulary that ranks share: functions of hidden [T, H], this rank's rows of the
weight, target, where these rows begin, and the size of the vocabulary."""

from collections.abc import Callable
from typing import Any

from onchip.bench.peers import IGNORED, imported
from onchip.oracle.checks import op_in

Loss = Callable[..., Any]


def on_every_rank() -> Any:
    """A function that returns hidden, and sums its gradient over the ranks."""
    import torch
    import torch.distributed as dist

    class OnEveryRank(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any) -> Any:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            gradient = grads[0].contiguous()
            dist.all_reduce(gradient)
            return gradient

    return OnEveryRank.apply


def three_reductions() -> Loss:
    """What Megatron-LM (arXiv:1909.08053) and torchtitan do: this rank's logits in float32, and all-reduces for their
    maximum, the sum of exponentials and the target's logit; backward all-reduces hidden's gradient."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    shared = on_every_rank()

    class OfRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, target: Any, start: int) -> Any:
            z = logits.float()
            top = z.amax(-1)
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
            z = z - top[:, None]
            here = (target >= start) & (target < start + z.shape[1])
            index = torch.where(here, target - start, 0)[:, None]
            own = z.gather(1, index)[:, 0] * here
            dist.all_reduce(own)
            exponentials = z.exp_()
            total = exponentials.sum(-1)
            dist.all_reduce(total)
            kept = target != IGNORED
            count = kept.sum()
            ctx.save_for_backward(exponentials.div_(total[:, None]), index, here, kept / count)
            ctx.dtype = logits.dtype
            return ((total.log() - own) * kept).sum() / count

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            softmax, index, here, weight = ctx.saved_tensors
            gradient = softmax.scatter_add(1, index, -here[:, None].to(softmax.dtype))
            return gradient.mul_((grads[0] * weight)[:, None]).to(ctx.dtype), None, None

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        return OfRanks.apply(functional.linear(shared(hidden), weight), target, start)

    return loss


def of_own_logits(fw: Any) -> Loss:
    """One product, and this library's loss of its logits, with the gradient written over them."""
    import torch.distributed as dist
    from torch.nn import functional

    shared, op = on_every_rank(), op_in(fw, "cross_entropy")

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        shard = {"vocab_group": dist.group.WORLD, "vocab_start": start, "vocab_size": vocab}
        return op(functional.linear(shared(hidden), weight), target, inplace_backward=True, **shard)

    return loss


def loss_in_parallel(*, compiled: bool = False) -> Loss:
    """torchtitan's way: a DTensor of logits, and PyTorch's `loss_parallel` on them in float32."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional

    def of_logits(logits: Any, target: Any) -> Any:
        return functional.cross_entropy(logits.float(), target, ignore_index=IGNORED)

    function = torch.compile(of_logits) if compiled else of_logits

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        group: Any = dist.group.WORLD
        mesh = DeviceMesh.from_group(group, hidden.device.type)
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        size: dict[str, Any] = {"shape": torch.Size((vocab, weight.shape[1])), "stride": (weight.shape[1], 1)}
        logits = functional.linear(whole, DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, **size))
        with loss_parallel():
            return function(logits, target).to_local()

    return loss


def liger_of_logits() -> Loss:
    import torch.distributed as dist
    from torch.nn import functional

    shared = on_every_rank()
    of = imported("liger_kernel.ops.vocab_parallel_cross_entropy:LigerVocabParallelCEFunction.apply")

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        logits = functional.linear(shared(hidden), weight)[:, None]
        losses = of(logits, target[:, None], dist.group.WORLD, IGNORED, 0.0, "pytorch", "global")
        return losses.sum() / (target != IGNORED).sum()

    return loss


def liger_sharded() -> Loss:
    import torch.distributed as dist

    ops = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    per_token = imported(f"{ops}:LigerFusedLinearScaledCrossEntropyTPFunction.apply")

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        return per_token(hidden, weight, target, dist.group.WORLD).sum() / (target != IGNORED).sum()

    return loss


def cce_sharded(filter_eps: str | None) -> Loss:
    import torch.distributed as dist
    from cut_cross_entropy import linear_cross_entropy
    from cut_cross_entropy.vocab_parallel import VocabParallelOptions

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int) -> Any:
        shard = VocabParallelOptions(start, start + len(weight), dist.group.WORLD)
        return linear_cross_entropy(hidden, weight, target, filter_eps=filter_eps, vocab_parallel_options=shard)

    return loss
