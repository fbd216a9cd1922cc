"""The output head and its loss: final norm, output projection, and a cross entropy that never holds all logits at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

IGNORE = -100  # a label that the loss ignores, as in PyTorch's cross entropy

# A loss other than the cross entropy: logits (tokens, vocab) float32 and labels (tokens,) int64 -> losses (tokens,) float32.
# Autograd differentiates it. Tokens come in chunks of any size. A token without label has label 0, and its loss is ignored.
# With a teacher it gets the keyword argument teacher_logits too, of the shape and dtype of logits.
TokenLoss = Callable[..., Tensor]
_SMALLER = 4  # chunks of a TokenLoss: its float32 logits, their gradient, and what autograd keeps exist at once


class Sizes(NamedTuple):
    """The largest temporary tensors of the head, in elements."""

    logits: int  # the logits of one chunk
    # One 16-bit product that is added to the float32 gradient of the weight. None: the product itself adds to it, without
    # rounding in between, which only CUDA offers.
    product: int | None


SIZES = {
    # Larger chunks are slightly faster, but use proportionally more memory (benchmarks/NOTES.md).
    "cpu": Sizes(logits=2**26, product=2**23),
    # 1 GiB in bfloat16, not measured yet (benchmarks/head_chunks.py). A chunk reads and writes the gradient of the weight: for
    # 8B, as long as the matmuls of 250 of its 4,186 tokens. PyTorch for CUDA adds 16-bit products to a float32 matrix since
    # 2.10 (its pull request 167931).
    "cuda": Sizes(logits=2**29, product=None),
    "meta": Sizes(logits=2**29, product=None),
}


class Outputs(NamedTuple):
    """A teacher's results for a microbatch, from which its logits are computed for a chunk of tokens at a time."""

    hidden: Tensor  # (tokens, dim), after the final norm
    weight: Tensor  # (rows, dim): this rank's rows of the vocabulary, which are those of the student's head
    softcap: float | None


class Head(nn.Module):
    """Final norm, output projection and loss, as one FSDP unit.

    With labels, the logits of all tokens never exist at once: the head computes them in chunks of at most `Sizes.logits`
    elements, uses each chunk for the loss and the gradients, and drops it. The weight is gathered once and its gradient
    reduced once, for any number of chunks. Products are in the precision of the hidden states, not of the weight.

    softcap: a logit x becomes softcap x tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2). z_loss: the loss of each
    label gets z_loss x logsumexp(logits)^2 added, which keeps the log-sum-exp near 0 (PaLM, arXiv:2204.02311, section 5).
    scale: float16's loss scale, () float32. The gradients of the logits get it before they are rounded, since a softmax over a
    large vocabulary has values below float16's smallest normal number, 6.1e-5; the backward pass divides by it.
    loss: None is the cross entropy. Another one is used where gradients are enabled; what validation reports remains the cross
    entropy, which compares runs.
    """

    def __init__(self, norm: nn.Module, dim: int, vocab_size: int, softcap: float | None = None):
        super().__init__()
        self.vocab_size, self.softcap, self.z_loss = vocab_size, softcap, 0.0
        self.sizes: Sizes | None = None  # None: SIZES[device]
        self.scale: Tensor | None = None
        self.loss: TokenLoss | None = None
        self.kernels = Kernels(logsumexp_and_target, to_gradient, accumulate)
        self.norm = norm
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None, teacher: Callable[[], Outputs] | None = None) -> Tensor:
        """Logits (batch, seq, vocab) of hidden (batch, seq, dim); with labels (batch, seq), the sum of the losses, () float32.

        Labels equal to IGNORE add nothing. Under tensor parallelism, hidden is this rank's slice of the tokens, labels
        cover the whole sequence, and every rank returns the same sum. The sum has the z-loss only when gradients are enabled.
        teacher: gathers what a `loss` that takes teacher_logits needs of the same tokens.
        """
        hidden, weight = self.norm(hidden), self.output.weight
        if labels is None:
            logits = F.linear(hidden, weight.to(hidden.dtype))
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        first, group, rows = 0, None, self.vocab_size
        if isinstance(weight, DTensor):
            assert isinstance(hidden, DTensor), "head.norm must gather the sequence: its sharding style is 'sequence'"
            mesh = weight.device_mesh
            group = mesh.get_group()
            rows = -(-self.vocab_size // mesh.size())  # Shard gives all ranks but the last ones this
            first = mesh.get_local_rank() * rows
            # The hidden states' gradient is the sum over ranks, each of which has the part of its own vocabulary rows.
            hidden = hidden.to_local(grad_placements=[Partial()])
            weight = weight.to_local(grad_placements=[Shard(0)])
        sizes = self.sizes or SIZES[hidden.device.type]
        training = torch.is_grad_enabled()
        loss = self.loss if training else None
        if loss is not None:
            sizes = sizes._replace(logits=sizes.logits // (_SMALLER if teacher is None else 2 * _SMALLER))
            rows = self.vocab_size  # all of them, for each token
        chunk = chunk_of(labels.numel(), rows, sizes)
        known = None if teacher is None or loss is None else teacher()
        options = _Options(self, first, group, chunk, sizes.product, loss, known, training)
        return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, labels.flatten(), options)

    @torch.no_grad()
    def outputs(self, hidden: Tensor) -> Outputs:
        """As a teacher's head, whose parameters are gathered: what a student's head needs of hidden (batch, seq, dim)."""
        hidden, weight = self.norm(hidden), self.output.weight
        if isinstance(weight, DTensor) and isinstance(hidden, DTensor):
            hidden, weight = hidden.to_local(), weight.to_local()
        return Outputs(hidden.flatten(0, 1), weight.to(hidden.dtype), self.softcap)


def chunk_of(tokens: int, rows: int, sizes: Sizes) -> int:
    """Tokens per chunk: as many as `sizes` allows, or somewhat fewer if that makes all chunks equal.

    rows: of the vocabulary, on the rank that has the most.
    """
    most = max(1, sizes.logits // rows)
    fewest = -(-tokens // most)
    # a last chunk of another size would be compiled separately
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // count)


# ------------------------------------------------------------------------------------- elementwise kernels on a chunk of logits


def logsumexp_and_target(logits: Tensor, column: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Each row's log-sum-exp and its logit in `column`, (chunk,) float32 each. logits: (chunk, rows); column: (chunk,)."""
    wide = _capped(logits.to(torch.float32, copy=True), softcap)
    target_logit = wide.gather(1, column[:, None])[:, 0]
    largest = wide.amax(dim=-1)
    return wide.sub_(largest[:, None]).exp_().sum(dim=-1).log_().add_(largest), target_logit


def to_gradient(logits: Tensor, logsumexp: Tensor, factor: Tensor, softcap: float | None) -> None:
    """Overwrites logits x (chunk, rows) with the gradient of factor x logsumexp; logsumexp and factor are (chunk,)."""
    gradient = _capped(logits.float(), softcap)  # no copy of float32: the logits themselves
    of_cap = None if softcap is None else 1 - (gradient / softcap).square_()
    gradient.sub_(logsumexp[:, None]).exp_().mul_(factor[:, None])
    if of_cap is not None:
        gradient.mul_(of_cap)
    if gradient is not logits:
        logits.copy_(gradient)


def accumulate(total: Tensor, part: Tensor) -> None:
    """Adds part to a float32 total, in place."""
    total.add_(part)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class Kernels(NamedTuple):
    """The functions above, eager or compiled. Compiled, each reads the logits once and writes no float32 copy of them."""

    logsumexp_and_target: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    to_gradient: Callable[[Tensor, Tensor, Tensor, float | None], None]
    accumulate: Callable[[Tensor, Tensor], None]


# -------------------------------------------------------------------------------------------------- the autograd function


class _Options(NamedTuple):
    """The arguments of `_LinearCrossEntropy` that are not tensors."""

    head: Head
    first: int  # this rank's first row of the vocabulary
    group: dist.ProcessGroup | None  # the ranks that the vocabulary is split over
    chunk: int  # tokens per chunk
    product: int | None  # as in Sizes
    loss: TokenLoss | None  # None: the cross entropy
    teacher: Outputs | None  # for such a loss
    training: bool  # whether autograd records; inside a Function is_grad_enabled() is always False


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of `hidden @ weight.T`, with the rows of weight split over a group.

    The forward pass computes the gradients too, chunk by chunk, while the logits exist; the backward pass only scales them
    (idea: Liger kernel's fused linear cross entropy, arXiv:2410.10989). The gradient of a chunk overwrites its logits, and all
    chunks share one buffer.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options) -> Tensor:
        """hidden (tokens, dim); weight (rows, dim), the vocabulary from row `first` on; labels (tokens,) -> () float32."""
        with_gradient = options.training and any(ctx.needs_input_grad[:2])
        used = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if with_gradient else None
        # a frozen weight has no gradient
        grad_weight = _WeightGradient(used, options) if with_gradient and ctx.needs_input_grad[1] else None
        buffer = hidden.new_empty(min(options.chunk, len(hidden)), len(used))
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), options.chunk):
            part, label = hidden[start : start + options.chunk], labels[start : start + options.chunk]
            logits = torch.mm(part, used.T, out=buffer[: len(part)])
            if options.loss is None:
                loss += _loss_and_gradient(logits, label, options, with_gradient)
            else:
                loss += _own_loss_and_gradient(options.loss, logits, label, options, start)
            if grad_hidden is not None:
                torch.mm(logits, used, out=grad_hidden[start : start + options.chunk])
            if grad_weight is not None:
                grad_weight.add(logits, part)
        if with_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight and grad_weight.total)
        ctx.weight_dtype, ctx.scale = weight.dtype, options.head.scale
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.scale is not None:
            scale = scale / ctx.scale  # 1 where the loss gets the same scale
        grad_hidden = (grad_hidden * scale).to(grad_hidden.dtype)
        if grad_weight is not None:  # in place: autograd refuses a second backward pass, so nothing reads it again
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _loss_and_gradient(logits: Tensor, label: Tensor, options: _Options, with_gradient: bool) -> Tensor:
    """The summed loss of a chunk, () float32. with_gradient: overwrites the logits (chunk, rows) with the loss's gradient."""
    head, valid = options.head, label != IGNORE
    column = label - options.first
    mine = valid & (column >= 0) & (column < logits.shape[1])
    column = torch.where(mine, column, 0)
    logsumexp, target_logit = head.kernels.logsumexp_and_target(logits, column, head.softcap)
    local_target = target_logit
    if options.group is not None:
        logsumexp, target_logit = _combine(logsumexp, torch.where(mine, target_logit, 0.0), options.group)
    loss = logsumexp - target_logit
    factor = valid.float()
    if head.z_loss and options.training:
        loss = loss + head.z_loss * logsumexp.square()
        factor = factor * (1 + 2 * head.z_loss * logsumexp)
    if with_gradient:
        scale = 1.0 if head.scale is None else head.scale
        head.kernels.to_gradient(logits, logsumexp, factor * scale, head.softcap)
        # The gradient of the target logit is recomputed: softmax - 1 of a rounded softmax loses all digits near 1.
        gradient = ((local_target - logsumexp).exp() * factor - 1) * scale
        if head.softcap is not None:
            gradient = gradient * (1 - (local_target / head.softcap).square())
        where = (torch.arange(len(logits), device=logits.device), column)  # not scatter_: on CPU it copies all logits
        logits[where] = torch.where(mine, gradient.to(logits.dtype), logits[where])
    return torch.where(valid, loss, 0.0).sum()


def _own_loss_and_gradient(token_loss: TokenLoss, logits: Tensor, label: Tensor, options: _Options, start: int) -> Tensor:
    """As `_loss_and_gradient`, of another loss, whose gradient autograd computes from the logits of the whole vocabulary.

    start: the chunk's first token. Every rank of the group computes the same losses, and keeps the gradient of its own logits.
    """
    head, valid = options.head, label != IGNORE
    whole = logits if options.group is None else _gathered(logits, head.vocab_size, options.group)
    with torch.enable_grad():
        leaf = whole.float().detach().requires_grad_()
        capped = leaf if head.softcap is None else head.softcap * torch.tanh(leaf / head.softcap)
        losses = token_loss(capped, torch.where(valid, label, 0), **_of_teacher(options, start, len(label)))
        if fault := token_loss_fault(losses, label):
            raise ValueError(f"the head's loss {fault}")
        if head.z_loss:
            losses = losses + head.z_loss * capped.logsumexp(dim=-1).square()
        loss = torch.where(valid, losses.float(), 0.0).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
    logits.copy_(gradient[:, options.first : options.first + logits.shape[1]] * (1.0 if head.scale is None else head.scale))
    return loss.detach()


@torch.no_grad()
def _of_teacher(options: _Options, start: int, count: int) -> dict[str, Tensor]:
    """A teacher's logits (count, vocab) float32 of the tokens from `start` on, if there is one."""
    if (teacher := options.teacher) is None:
        return {}
    logits = torch.mm(teacher.hidden[start : start + count], teacher.weight.T)
    whole = (logits if options.group is None else _gathered(logits, options.head.vocab_size, options.group)).float()
    return {"teacher_logits": whole if teacher.softcap is None else teacher.softcap * torch.tanh(whole / teacher.softcap)}


def distilled(logits: Tensor, labels: Tensor, teacher_logits: Tensor, weight: float, temperature: float) -> Tensor:
    """The TokenLoss of a student: (1 - weight) x cross entropy + weight x temperature^2 x KL(teacher || student).

    Both distributions of the divergence are softmaxes of logits / temperature; the square keeps the size of its gradient
    (Hinton et al., arXiv:1503.02531, section 2).
    """
    known = (teacher_logits / temperature).log_softmax(dim=-1)
    guessed = (logits / temperature).log_softmax(dim=-1)
    divergence = F.kl_div(guessed, known, reduction="none", log_target=True).sum(dim=-1)
    return (1 - weight) * F.cross_entropy(logits, labels, reduction="none") + weight * temperature**2 * divergence


def token_loss_fault(losses: object, labels: Tensor) -> str:
    """What is wrong with the result of a TokenLoss; "" if nothing is."""
    if not isinstance(losses, Tensor) or losses.shape != labels.shape:
        what = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"{losses!r}"
        return f"returns {what} for {len(labels)} tokens, not one loss for each"
    return "" if losses.requires_grad else "does not depend on the logits, or hides that from autograd"


def _gathered(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """The logits (chunk, vocab) of the whole vocabulary, from each rank's (chunk, rows)."""
    ranks = dist.get_world_size(group)
    rows = -(-vocab_size // ranks)  # the last ranks may have fewer, or none
    mine = F.pad(logits, (0, rows - logits.shape[1]))
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=1)[:, :vocab_size]


class _WeightGradient:
    """The sum over chunks of gradient.T @ hidden: `total` (rows, dim), float32 for every precision of the products."""

    def __init__(self, weight: Tensor, options: _Options):
        self.total = torch.empty_like(weight, dtype=torch.float32)
        self._accumulate, self._begun = options.head.kernels.accumulate, False
        self._product: Tensor | None = None
        self._wide: dict[str, Any] = {} if weight.dtype == torch.float32 else {"out_dtype": torch.float32}
        if weight.dtype != torch.float32 and options.product is not None:
            # few enough rows at a time that the product is still in the CPU's cache when it is added
            rows = min(len(weight), max(1, options.product // weight.shape[1]))
            self._product = weight.new_empty(rows, weight.shape[1])

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """gradient: (chunk, rows), of the logits. hidden: (chunk, dim)."""
        if self._product is None and not self._begun:
            torch.mm(gradient.T, hidden, **self._wide, out=self.total)
        elif self._product is None:  # in place, since `addmm_` takes no dtype of the result
            torch.addmm(self.total, gradient.T, hidden, **self._wide, out=self.total)
        else:
            rows = len(self._product)
            for part, total in zip(gradient.T.split(rows), self.total.split(rows), strict=True):
                product = torch.mm(part, hidden, out=self._product[: len(part)])
                if self._begun:
                    self._accumulate(total, product)
                else:
                    total.copy_(product)
        self._begun = True


def _combine(logsumexp: Tensor, target_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Combines each rank's log-sum-exp and target logit, (tokens,) each, into those of the whole vocabulary: one collective."""
    mine = torch.stack([logsumexp, target_logit])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    ranks = torch.stack(parts)  # (ranks, 2, tokens)
    return ranks[:, 0].logsumexp(dim=0), ranks[:, 1].sum(dim=0)
