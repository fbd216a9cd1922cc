"""MoE layers (mixture of experts): a router sends each token to a few of many feed-forward layers, and no token is dropped.

Rows of tokens are sorted by their expert, and each matmul multiplies every expert's rows by its own matrix (grouped.py).
Tensor parallelism does not split experts: sequence parallelism gives each rank its own tokens. With expert parallelism, tokens
are dispatched to the ranks that have their experts (exchange.py).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.all_to_all import Pairs
from models.blocks import SwiGLU, local_weight
from models.exchange import Weights, exchanged_experts
from models.grouped import Activated, ActivationName, grouped_product, mixed_biases
from models.once import once
from models.torch_private import collectives, wait_tensor

# What the compiler never recomputes; once.py has the reasons.
CHOICES = (torch.ops.aten.topk.default, torch.ops.titanlite.exchange_counts.default)
# What selective checkpointing by operation keeps of MoE layers.
KEEP = (
    *CHOICES,
    torch.ops.titanlite.grouped_product.default,
    torch.ops.titanlite.dispatch_experts.default,
    torch.ops.aten.sort.stable,
)


class _AuxiliaryLoss(torch.autograd.Function):
    """Returns x, and adds the gradient of an auxiliary loss, (), to the backward pass; the reported loss stays without it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients, gradients.new_ones(())


class _Reordered(torch.autograd.Function):
    """Row `order[i] // copies` of x as row i: a permutation of its rows, each of which occurs `copies` times.

    inverse: of the permutation. Autograd would scatter the gradients one by one; a permutation can gather them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradients.index_select(0, inverse).unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


def _wide_mm(left: Tensor, right: Tensor) -> Tensor:
    """The matmul of two bfloat16 matrices on CUDA, accumulated and returned in float32: tensor cores round no product."""
    return torch.mm(left, right, out_dtype=torch.float32)


class _WideLinear(torch.autograd.Function):
    """x @ weight.T in float32, of bfloat16 x (tokens, dim) and weight (experts, dim) on CUDA, at the speed of tensor cores.

    Float32 matmuls have a 15th of their speed. Only the gradient of the result does not fit bfloat16, so it becomes a sum of
    two bfloat16 numbers: 2e-6 from float32, below what rounding to bfloat16 at the end adds (1.7e-3; benchmarks/NOTES.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide_mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        high = gradients.to(x.dtype)
        low = (gradients - high).to(x.dtype)
        both = torch.cat((high, low), dim=1)  # (tokens, 2 experts)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _wide_mm(both, torch.cat((weight, weight))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = _wide_mm(both.t(), x).unflatten(0, (2, -1)).sum(dim=0).to(weight.dtype)
        return to_x, to_weight


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in float32 -> (tokens, experts)."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        logits = _WideLinear.apply(x, weight)
        return logits if bias is None else logits + bias.float()
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


# ---------------------------------------------------------------------------------------------------------------- modules


def check_choice(n_experts: int, top_k: int, groups: int = 1, top_groups: int = 1) -> None:
    """Raises ValueError for a choice that a `Router` cannot make."""
    if not 0 < top_k <= n_experts:
        raise ValueError(f"top_k = {top_k}: must be between 1 and n_experts = {n_experts}")
    if n_experts % groups or not 0 < top_groups <= groups:
        raise ValueError(f"groups = {groups}: must divide n_experts = {n_experts}, and be at least top_groups = {top_groups}")
    if groups > 1 and (n_experts // groups < 2 or top_k > top_groups * (n_experts // groups)):
        raise ValueError(f"groups = {groups}: {top_groups} of them must hold top_k = {top_k} experts, and each at least 2")


def experts_from_hf(json: dict[str, Any]) -> int:
    """The number of experts in a Hugging Face config.json; transformers 5 writes and reads two names. Raises ValueError."""
    found: list[int] = [json[key] for key in ("num_experts", "num_local_experts") if json.get(key) is not None]
    if len(set(found)) != 1:
        raise ValueError(f"num_experts, or num_local_experts, must be one number, and is {found or 'missing'}")
    return found[0]


class RouterLosses(NamedTuple):
    """The auxiliary losses of each router. They are the same on every mesh, because both are sums over sequences."""

    balance: float  # weight of a sequence's balance loss, divided by the number of sequences in a global batch
    z: float  # weight of a token's squared log-sum-exp of the logits, divided by the number of tokens in a global batch
    ranks: int  # among which the sequences of a microbatch are split
    group_name: str  # of these ranks; "" for one
    # Tensor parallelism cuts the tokens of a microbatch, one sequence after the other, into so many slices; this rank's number
    slices: int = 1
    slice: int = 0

    def sequences(self, rows: int, device: torch.device) -> Tensor:
        """The sequence that each row of a rank's (rows, tokens) is a part of, (rows,) int64, of `rows` sequences."""
        return (self.slice * rows + torch.arange(rows, device=device)) // self.slices


class Router(nn.Module):
    """Chooses `top_k` experts for each token, and the weights of their results.

    score: of the logits, a softmax over all experts or a sigmoid of each. normalised: the weights of a token sum to 1.
    scale: a factor of the weights. groups, top_groups: the experts are in so many groups of equal size, and only those in the
    `top_groups` best groups, by the sum of their two best scores, can be chosen. bias: a buffer that is added to the scores for
    the choice alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). logit_bias: a parameter that is added to the logits.
    """

    bias: Tensor | None
    logit_bias: Tensor | None
    # Training sets these.
    losses: RouterLosses | None = None
    bias_update_speed = 0.0
    counts: Tensor | None = None  # (experts,) int64: this rank's rows of a step, also of recomputations that choose

    def __init__(
        self,
        dim: int,
        n_experts: int,
        top_k: int,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        bias: bool = False,
        logit_bias: bool = False,
    ):
        super().__init__()
        self.top_k, self.score, self.normalised, self.scale = top_k, score, normalised, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.logit_bias = nn.Parameter(torch.empty(n_experts)) if logit_bias else None
        self.register_buffer("bias", torch.empty(n_experts) if bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (batch, seq, dim) -> two of (batch x seq, top_k)
        """The weights, float32, and the numbers of the chosen experts. Scores are float32: rounding can change the choice."""
        bias = None if self.logit_bias is None else local_weight(self.logit_bias)
        logits = _wide_linear(x.flatten(0, 1), local_weight(self.weight), bias)
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        chosen = once(lambda: self.choose_and_count(scores.detach()))
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.losses is not None and torch.is_grad_enabled():
            weights = _AuxiliaryLoss.apply(weights, self.auxiliary_loss(logits, scores, chosen, len(x), self.losses))
        return weights * self.scale, chosen

    def auxiliary_loss(self, logits: Tensor, scores: Tensor, chosen: Tensor, rows: int, losses: RouterLosses) -> Tensor:
        """This rank's summand of the auxiliary losses of a step, () float32. logits, scores: (tokens, experts).

        The z-loss keeps logits from drifting (Zoph et al., arXiv:2202.08906, equation 5). The balance loss of a sequence
        (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20) is lowest when all experts get as many of its tokens. It is a
        product of shares: those of the choices, which have no gradient and are of the whole sequence, and of the scores.
        """
        total = losses.z * logits.logsumexp(dim=-1).square().sum()
        if losses.balance:
            counts = torch.zeros_like(scores).scatter(1, chosen, 1.0).unflatten(0, (rows, -1)).sum(dim=1)
            if losses.group_name:
                sequence = losses.sequences(rows, counts.device)
                counts = torch.zeros_like(counts).index_add(0, sequence, counts)
                counts = wait_tensor(collectives.all_reduce(counts, "sum", losses.group_name))[sequence]
            length = len(scores) // rows * losses.ranks
            shares = (scores / scores.sum(dim=-1, keepdim=True)).unflatten(0, (rows, -1)).sum(dim=1) / length
            total = total + losses.balance * (counts * (scores.shape[1] / (self.top_k * length)) * shares).sum()
        return total

    def choose_and_count(self, scores: Tensor) -> Tensor:  # (tokens, experts) -> (tokens, top_k)
        """The choice, added to the counts of the step. A recomputation that chooses again, as by operation, adds the same again
        in every block, which changes no share of an expert.
        """
        chosen = self.choose(scores)
        if self.counts is not None and torch.is_grad_enabled():
            experts = torch.arange(len(self.counts), device=chosen.device)
            self.counts.add_((chosen.flatten()[:, None] == experts).sum(dim=0))
        return chosen

    def choose(self, scores: Tensor) -> Tensor:  # (tokens, experts) -> (tokens, top_k)
        """The numbers of the experts with the best scores."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups > 1:
            grouped = scores.unflatten(1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices
            admitted = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0) > 0  # (tokens, groups)
            scores = grouped.masked_fill(~admitted[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices


class Exchange(NamedTuple):
    """The ranks that experts are split over, equally and in order, and how many rows a rank receives at a time."""

    groups: str  # of `models.all_to_all.hops_of`
    ranks: int
    factor: float  # the limit at a time, relative to the rows of a rank under balanced routing

    def capacity(self, rows: int) -> int:
        """The most rows that a rank receives at a time. rows: of each rank's own tokens."""
        return min(math.ceil(rows * self.factor), rows * self.ranks)


class Experts(nn.Module):
    """The gated feed-forward layer of every expert; w1, w3: (experts, hidden, dim); w2: (experts, dim, hidden).

    activation: of ACTIVATIONS. bias: each matmul has one; w1_bias, w3_bias: (experts, hidden); w2_bias: (experts, dim).
    """

    exchange: Exchange | None = None  # with expert parallelism

    def __init__(self, n_experts: int, dim: int, hidden: int, activation: ActivationName = "swiglu", bias: bool = False):
        super().__init__()
        self.n_experts, self.activation = n_experts, activation
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        if bias:
            self.w1_bias = nn.Parameter(torch.empty(n_experts, hidden))
            self.w2_bias = nn.Parameter(torch.empty(n_experts, dim))
            self.w3_bias = nn.Parameter(torch.empty(n_experts, hidden))

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(tokens, dim); twice (tokens, top_k), the second int64 -> the weighted sum of each token's experts, (tokens, dim)."""
        matrices = [local_weight(parameter) for parameter in self.parameters()]  # in the order of `Weights`
        mix = weights.float()
        if self.exchange is not None:
            groups, ranks, _ = self.exchange
            capacity = self.exchange.capacity(chosen.numel())
            return exchanged_experts(tokens, chosen, mix, matrices, ranks, capacity, self.activation, groups)
        own, copies = Weights(*matrices), chosen.shape[1]
        _, order, positions, ends = Pairs.of(chosen, self.n_experts, chosen.numel())
        inverse = positions.flatten()
        gate, up = own.gate_up(_Reordered.apply(tokens, order, inverse, copies), ends)
        hidden = Activated.apply(gate, up, _Reordered.apply(mix.flatten()[:, None], order, inverse, 1), self.activation)
        results = _Reordered.apply(grouped_product(hidden, own.w2, ends, True, None), inverse, order, 1)
        mixed = results.unflatten(0, (-1, copies)).sum(dim=1)
        if own.b2 is None:
            return mixed
        by_expert = mix.new_zeros(len(tokens), self.n_experts).scatter(1, chosen, mix)
        return mixed + mixed_biases(by_expert.type_as(mixed), own.b2)


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of all MoE layers of a model."""
    return [module for module in model.modules() if isinstance(module, Router)]


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of all MoE layers of a model."""
    return [module for module in model.modules() if isinstance(module, Experts)]


class MoE(nn.Module):
    """A feed-forward layer of experts; `shared` is one that every token uses in addition."""

    def __init__(self, router: Router, experts: Experts, shared: SwiGLU | None = None):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.shared_input = nn.Identity() if shared is not None else None  # tensor parallelism gathers the sequence here

    def active_parameters(self) -> int:
        """The parameters of router and experts that each token is multiplied by."""
        stacks = sum(parameter.numel() for parameter in self.experts.parameters() if parameter.ndim == 3)
        return self.router.weight.numel() + stacks * self.router.top_k // self.experts.n_experts

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim) -> the same
        # the shared expert comes first, so that the device has work while the host waits for the counts of the dispatch
        shared = self.shared(self.shared_input(x)) if self.shared is not None and self.shared_input is not None else None
        weights, chosen = self.router(x)
        mixed = self.experts(x.flatten(0, 1), weights, chosen).view_as(x)
        return mixed if shared is None else mixed + shared
