"""What `titanlite check-model` requires of a small model's forward pass: causality, documents, generation, bfloat16.

One process on the CPU, without a process group. Each function takes a family with its flavor and returns the faults as
sentences. A fault names the first module, in the order of the forward pass, whose result is wrong.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from models.attention import SeqInfo
from models.decoder import Decoder
from models.head import IGNORE
from titanlite.data.batch import Batch
from titanlite.inference.generate import Sampling, generate, score
from titanlite.loop.loss import sequence_of, summed_loss
from titanlite.registry.family import Family
from titanlite.transforms.cast import cast_where_used
from titanlite.transforms.parameters import every_layer
from titanlite.verify.compare import relative_difference
from titanlite.verify.decisions import Decisions
from titanlite.verify.facts import SEQ_LEN
from titanlite.verify.small_runs import NotRun, small_model, watch_for_nonfinite

# The largest difference of one token's result, relative to its norm. The families of models/ have 0 in the rows causal and
# documents, and at most 2e-6 in generation, where other kernels run.
ROUNDING = 2e-5
DOCUMENTS = (3, 20, 1, 8)  # lengths, together SEQ_LEN; one is longer than a window of 16
# The modules whose results these are; the input of a module, and the scores by which one decides.
HIDDEN, LOGITS, INPUT, SCORES = "", "head", "<input>", "<scores>"
# How many times the noise of rounding bfloat16 may differ from float32 (families of models/: at most 1.9 times), and which
# relative difference is accepted in any case.
BFLOAT16_NOISE, BFLOAT16_FLOOR = 4.0, 0.02
# The relative difference that is accepted of what distinguishes scores, such as those of experts, of which bfloat16 keeps few
# digits: in any case, and where rounding explains it. Beyond that, rounding decides instead of the router.
SCORES_FLOOR, SCORES_MOST = 0.25, 0.5
PROMPTS, NEW = (1, 9, 20), 6  # lengths of the prompts of a batch, and how many tokens follow each


def random_tokens(family: Family, *shape: int) -> Tensor:
    return torch.randint(family.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def _refusable(what: str) -> Iterator[None]:
    """Within it, a family may raise NotImplementedError: the row does not apply."""
    try:
        yield
    except NotImplementedError as error:
        raise NotRun(f"the model refuses {what}: {error}") from None


# --------------------------------------------------------------------------------------------------- results of all modules


class ForwardPass(NamedTuple):
    """One forward pass."""

    seq: SeqInfo
    results: dict[str, Tensor]  # those of shape (batch, seq, ...), by module, in the order of the forward pass; and INPUTs
    running: list[str]  # the modules that are running, the innermost last


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[list[ForwardPass]]:
    """Records the forward passes of a model. The hidden states are the result of the module HIDDEN."""
    calls: list[ForwardPass] = []

    def begin(_module: nn.Module, arguments: Any) -> None:
        calls.append(ForwardPass(arguments[1], {}, []))

    def keep(name: str, value: Any) -> None:
        # the head runs after the model, and is a part of the last call
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == calls[-1].seq.positions.shape:
            calls[-1].results[name] = value.detach().float()

    def enter(path: str, _module: nn.Module, arguments: Any) -> None:
        calls[-1].running.append(path)
        keep(f"{path}.{INPUT}", arguments[0] if arguments else None)

    def leave(path: str, _module: nn.Module, _arguments: Any, result: Any) -> None:
        calls[-1].running.pop()
        keep(path, result)

    handles = [model.register_forward_pre_hook(begin)]
    for path, module in model.named_modules():
        handles += [module.register_forward_pre_hook(partial(enter, path)), module.register_forward_hook(partial(leave, path))]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def run_model(model: Decoder, tokens: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
    """The results of all modules, and the logits, for tokens (batch, seq)."""
    model.eval()
    with torch.no_grad(), recording(model) as calls:
        assert model.head is not None
        model.head(model(tokens, sequence_of(tokens, documents)))
    return calls[0].results


# ------------------------------------------------------------------------------------------------------------- differences


class Wrong(NamedTuple):
    """A result that differs and must not."""

    module: str  # the first in the forward pass
    row: int
    position: int
    size: float  # relative to the norm of the token's result

    def __str__(self) -> str:
        where = {HIDDEN: "the result of the model", LOGITS: "the logits"}.get(self.module, f"the result of {self.module}")
        return f"{where} by {self.size:.1e} of the norm at position {self.position}"


def first_wrong(results: dict[str, Tensor], expected: dict[str, Tensor], where: Tensor) -> Wrong | None:
    """The first module whose results differ by more than rounding, if the hidden states or logits do.

    where: (batch, seq) bool, the tokens that are compared. A module alone may differ: a later one can undo it.
    """
    wrong = {
        name: Wrong(_owner(name), *divmod(int(sizes.argmax()), sizes.shape[1]), sizes.max().item())
        for name in expected
        if name in results and (sizes := _sizes(results[name], expected[name]).masked_fill(~where, 0.0)).max() > ROUNDING
    }
    return next(iter(wrong.values())) if HIDDEN in wrong or LOGITS in wrong else None


def _owner(name: str) -> str:
    """The module that a value is reported for. A wrong input, which no earlier result explains, is the outer module's."""
    return name.removesuffix(f".{INPUT}").rpartition(".")[0] if name.endswith(INPUT) else name


def _sizes(result: Tensor, expected: Tensor) -> Tensor:
    """Each token's difference relative to its norm, or to a thousandth of the mean norm where it is almost 0: (batch, seq)."""
    norms = expected.reshape(*expected.shape[:2], -1).norm(dim=-1)
    difference = (result - expected).reshape(*expected.shape[:2], -1).norm(dim=-1)
    size = difference / norms.clamp(min=1e-3 * norms.mean().item()).clamp(min=1e-30)
    return torch.where(size.isnan(), torch.inf, size)


# --------------------------------------------------------------------------------------------------- causality, documents


def causality_faults(family: Family) -> list[str]:
    """A token that is changed at position t must not change anything before t: hidden states, logits, loss."""
    model, tokens = small_model(family), random_tokens(family, 1, SEQ_LEN)
    changed = tokens.repeat(SEQ_LEN, 1)  # row t has another token at position t; row 0 is compared with itself
    positions = torch.arange(1, SEQ_LEN)
    changed[positions, positions] = (changed[positions, positions] + 1) % family.config.vocab_size
    before = torch.arange(SEQ_LEN) < torch.arange(SEQ_LEN)[:, None]
    for remark, documents in (("", None), ("in packed rows, ", _documents().expand_as(changed))):
        try:
            results = run_model(model, changed, documents)
        except NotImplementedError:
            if documents is None:
                raise
            break  # the row "documents" shows it
        unchanged = {name: result[:1].expand_as(result) for name, result in results.items()}
        if wrong := first_wrong(results, unchanged, before):
            return [f"{remark}another token at position {wrong.row} changes {wrong}"]
        if size := _loss_change(model, results[HIDDEN], tokens):
            return [f"{remark}another token at position {SEQ_LEN // 2} changes the loss before it by {size:.1e}"]
    return []


@torch.no_grad()
def _loss_change(model: Decoder, hidden: Tensor, tokens: Tensor) -> float:
    """How much the loss before the middle changes with the token there, relative to the loss; 0 within rounding."""
    assert model.head is not None
    labels = tokens.roll(-1, 1)
    labels[:, SEQ_LEN // 2 - 1 :] = IGNORE
    plain, changed = (model.head(hidden[row : row + 1], labels).item() for row in (0, SEQ_LEN // 2))
    size = abs(changed - plain) / abs(plain)
    return size if size > ROUNDING else 0.0


def _documents() -> Tensor:
    """Which document each token of a packed row belongs to: (1, seq) int32."""
    return torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None].int()


def document_faults(family: Family) -> list[str]:
    """In a packed row, each document must have the results that it has alone."""
    tokens = random_tokens(family, 1, SEQ_LEN)
    with _refusable("packed documents"):
        packed = run_model(small_model(family), tokens, _documents())
    # Alone, a document begins a row of the same length, if the model is causal: what follows has no effect on it.
    more = tokens if family.limits.causal else tokens[:, :0]
    model, parts = small_model(family), tokens.split(DOCUMENTS, dim=1)
    alone = [run_model(model, torch.cat([part, more], dim=1)[:, :SEQ_LEN]) for part in parts]
    expected = {
        name: torch.cat([results[name][:, :length] for results, length in zip(alone, DOCUMENTS, strict=True)], dim=1)
        for name in alone[0]
    }
    if wrong := first_wrong(packed, expected, torch.ones(1, SEQ_LEN, dtype=torch.bool)):
        number = int(_documents()[0, wrong.position])
        advice = "use seq.documents, or raise NotImplementedError where it is not None"
        return [f"document {number} of a packed row changes {wrong}, compared with the document alone; {advice}"]
    return []


# ------------------------------------------------------------------------------------------------------------- generation


def generation_faults(family: Family) -> list[str]:
    """Generation and scoring with a cache, in a padded batch, must agree with the whole text without a cache."""
    model, source = small_model(family), random_tokens(family, len(PROMPTS), SEQ_LEN).tolist()
    prompts = [tokens[:length] for tokens, length in zip(source, PROMPTS, strict=True)]
    with recording(model) as calls, _refusable("a cache"):
        new = generate(model, prompts, NEW, (), Sampling(temperature=0))
    texts = [prompt + tokens for prompt, tokens in zip(prompts, new, strict=True)]
    rows = torch.tensor([(text + tokens)[:SEQ_LEN] for text, tokens in zip(texts, source, strict=True)])
    by_row = [run_model(model, row[None]) for row in rows]
    expected = {name: torch.cat([results[name] for results in by_row]) for name in by_row[0]}
    logits = expected[LOGITS].double()
    advice = "; keep what later tokens need in seq.cache, or raise NotImplementedError where it is not None"
    if wrong := _wrong_of_calls(calls, expected, texts):
        return [f"generate changes {wrong} of a text of {PROMPTS[wrong.row]} tokens, compared with no cache{advice}"]
    with recording(model) as calls:
        scores = score(model, [(prompt, tokens) for prompt, tokens in zip(prompts, new, strict=True)])
    if wrong := _wrong_of_calls(calls, expected, texts):
        return [f"score changes {wrong} of a text of {PROMPTS[wrong.row]} tokens, compared with no cache{advice}"]
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        own, chosen = logits[row, len(prompt) - 1 : len(prompt) - 1 + NEW], torch.tensor(tokens)[:, None]
        missing = own.amax(-1) - own.gather(-1, chosen)[:, 0]
        if (missing > 1e-3 * own.std(-1)).any():
            return [f"generate chooses other tokens after {len(prompt)} tokens than the logits without a cache"]
        logprob = own.log_softmax(-1).gather(-1, chosen).sum().item()
        if abs(scores[row][0] - logprob) > 1e-4 * abs(logprob):
            return [f"score gives {scores[row][0]:.6g} after {len(prompt)} tokens, and {logprob:.6g} without a cache"]
    return []


def _wrong_of_calls(calls: Sequence[ForwardPass], expected: dict[str, Tensor], texts: Sequence[Sequence[int]]) -> Wrong | None:
    """The first wrong result of several forward passes with a cache, each for some positions of all texts."""
    lengths = torch.tensor([len(text) - 1 for text in texts])  # the last token is chosen, and not read
    where = torch.arange(SEQ_LEN) < lengths[:, None]
    row = torch.arange(len(texts))[:, None]
    # where a pass computed nothing, such as logits of a prompt, the expected value stays
    results = {name: result.clone() for name, result in expected.items()}
    for call in calls:
        for name, result in call.results.items():
            if name in results:
                results[name][row, call.seq.positions] = result
    return first_wrong(results, expected, where)


# --------------------------------------------------------------------------------------------------------------- bfloat16


class Precise(NamedTuple):
    """A forward and a backward pass in some precision."""

    results: dict[str, Tensor]  # by module, and the SCORES by which modules decide
    gradients: dict[str, Tensor]
    nonfinite: list[str]  # modules whose result is not finite
    decisions: list[Tensor]


def bfloat16_faults(family: Family) -> list[str]:
    """In bfloat16 everything must be finite, and differ from float32 by no more than rounding explains.

    A third pass measures how much rounding explains. It runs in float32, but rounds to bfloat16 the parameters, the input and
    result of each module, and what attention's kernels round. All passes make the discrete choices of the float32 pass, such as
    the experts of a token, since another choice changes results by any amount. A choice may differ only where its margin is
    within rounding, so the scores behind the choices are compared too.
    """
    exact = _pass(family, "float32", [])
    rounded, narrow = (_pass(family, how, exact.decisions) for how in ("rounded", "bfloat16"))
    if narrow.nonfinite:
        return [f"in bfloat16 the result of {narrow.nonfinite[0]} is not finite"]
    if bad := [name for name, gradient in narrow.gradients.items() if not gradient.isfinite().all()]:
        return [f"in bfloat16 the gradient of {name} is not finite" for name in dict.fromkeys(map(every_layer, bad))]
    for what in ("results", "gradients"):
        values: list[dict[str, Tensor]] = [getattr(each, what) for each in (exact, rounded, narrow)]
        for name in values[0]:
            reference, noisy, found = (each.get(name) for each in values)
            noise, size = (relative_difference(tensor, reference) for tensor in (noisy, found))
            explained, scores = BFLOAT16_NOISE * noise, name.endswith(SCORES)
            if scores:
                wrong = size > min(max(explained, SCORES_FLOOR), SCORES_MOST)
            else:
                wrong = noise < 1.0 and size > max(explained, BFLOAT16_FLOOR)  # from 1 on, it is nothing but rounding
            if wrong:
                text = f"the result of {_owner(name) or 'the model'}" if what == "results" else f"the gradient of {name}"
                if scores:
                    text = f"what distinguishes the scores by which {name.partition(' ')[0] or 'the model'} decides"
                advice = "; compute them in float32" if scores else ""
                return [f"in bfloat16 {text} differs by {size:.1e} of its norm; rounding explains {noise:.1e}{advice}"]
    return []


def _pass(family: Family, how: str, before: list[Tensor]) -> Precise:
    model, tokens = small_model(family), random_tokens(family, 4, SEQ_LEN + 1)
    nonfinite = watch_for_nonfinite(model)
    if how == "bfloat16":
        cast_where_used(model, torch.bfloat16, again=True)
    if how == "rounded":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        for module in model.modules():
            module.register_forward_pre_hook(lambda _module, arguments: tuple(map(_round, arguments)))
            module.register_forward_hook(lambda _module, _arguments, result: _round(result))
    of_kernels = _RoundedAttention() if how == "rounded" else contextlib.nullcontext()
    with recording(model) as calls, of_kernels:

        def note(scores: Tensor) -> None:
            path = calls[0].running[-1] if calls[0].running else ""
            calls[0].results[f"{path} {len(calls[0].results)}{SCORES}"] = scores

        with Decisions(before, note) as decisions:
            loss = summed_loss(model, Batch(tokens)) / tokens[:, 1:].numel()
        loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Precise(calls[0].results, gradients, nonfinite, decisions.made)


class _RoundedAttention(TorchFunctionMode):
    """Attention that rounds inside, as kernels in bfloat16 do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention; dropout is off wherever it is compared."""
    if enable_gqa:
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], dim=-3) for part in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _Weighted.apply(scores, v)


class _Weighted(torch.autograd.Function):
    """softmax(scores) @ v, with weights and gradients of scores rounded before each matmul.

    The softmax's backward pass reads the rounded result (arXiv:2205.14135, appendix B.2). The error of that is common to all
    keys of a query, and does not cancel where keys have much in common, as biases give them.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        result = _round(_round(weights) @ v)
        ctx.save_for_backward(weights, v, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weights, v, result = ctx.saved_tensors
        gradient = _round(gradient)
        of_weights = gradient @ v.transpose(-2, -1) - (gradient * result).sum(-1, keepdim=True)
        return _round(weights * of_weights), _round(weights).transpose(-2, -1) @ gradient


def _round(value: Any) -> Any:
    """A tensor of activations rounded to bfloat16, and in the backward pass its gradient."""
    activations = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
    return value.bfloat16().float() if activations else value
