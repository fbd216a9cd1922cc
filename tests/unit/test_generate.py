"""Generation: which tokens are sampled, with which probability, and that a prompt's text is independent of others."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from models.attention import Cache, SeqInfo
from models.decoder import Decoder
from titanlite.inference.generate import Sampling, draw, generate, score
from titanlite.registry.family import load_module

FORKS = [
    "latent_attention",
    "value_residual",
    "linear_attention",
    "looped",  # an attention module runs several times in a pass
]
PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8]]
GREEDY = Sampling(temperature=0)


def tiny(name: str = "tests.tiny") -> Decoder:
    module = load_module(name)
    model = module.Model(module.FLAVORS["plain"])
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        of_branch = key.endswith("post_norm.weight")  # larger than the embedding, or the last token would repeat itself
        torch.nn.init.normal_(parameter, mean=10.0 if of_branch else 0.0, std=0.3)
    return model


def longhand(model: Decoder, prompt: list[int], tokens: int) -> list[int]:
    """The greedy continuation, with a forward pass over the whole text for every token."""
    text = list(prompt)
    for _ in range(tokens):
        positions = torch.arange(len(text))[None]
        text.append(int(model.head(model(torch.tensor([text]), SeqInfo(positions)))[0, -1].argmax()))
    return text[len(prompt) :]


def logprob(model: Decoder, context: list[int], new: list[int]) -> float:
    """The log-probability of the tokens after a context, with one forward pass over the whole text."""
    ids = torch.tensor([[*context, *new]])
    logits = model.head(model(ids[:, :-1], SeqInfo(torch.arange(ids.shape[1] - 1)[None])))[0].log_softmax(-1)
    return logits[len(context) - 1 :].gather(1, ids[0, len(context) :, None]).sum().item()


@pytest.mark.parametrize("module", ["tests.tiny", "tests.tiny_gemma3", *(f"tests.forks.right.{fork}" for fork in FORKS)])
def test_texts_and_their_scores_are_those_without_a_cache_and_long_prompts_are_read_in_parts(monkeypatch, module):
    """Prompts of different lengths, a different one of which each prefill pass pads, and a cache that grows."""
    monkeypatch.setattr(Cache, "_STEP", 8)
    monkeypatch.setattr("titanlite.inference.generate._PREFILL", 4)
    model, widths = tiny(module), []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    texts = generate(model, PROMPTS, 12, (), GREEDY)
    assert widths == [4, 4, 4, 2] + 12 * [1]
    assert texts == [longhand(model, prompt, 12) for prompt in PROMPTS]
    assert len({new for text in texts for new in text}) > 5
    others = [[*new[:-1], (new[-1] + 1) % 512] for new in texts]
    pairs = [*zip(PROMPTS, texts, strict=True), *zip(PROMPTS, others, strict=True), (PROMPTS[1], [7])]
    found = score(model, pairs)
    assert [of_text for of_text, _ in found] == pytest.approx([logprob(model, *pair) for pair in pairs], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [True] * 3 + [False] * 4


def test_a_text_ends_before_the_first_of_its_end_tokens_and_the_others_continue():
    model = tiny()
    whole = generate(model, PROMPTS, 12, (), GREEDY)
    ends = whole[0][3], whole[2][4]  # the other text repeats one token
    cut = [ids[: min((ids.index(end) for end in ends if end in ids), default=12)] for ids in whole]
    assert generate(model, PROMPTS, 12, ends, GREEDY) == cut
    assert len(cut[0]) <= 3 and len(cut[2]) <= 4 and max(map(len, cut)) == 12


def test_a_finished_text_does_not_grow_and_generation_ends_when_all_are_finished(monkeypatch):
    model, steps = tiny(), []
    whole = generate(model, PROMPTS, 12, (), GREEDY)
    model.head.register_forward_hook(lambda *_: steps.append(1))
    cut = generate(model, PROMPTS, 12, (), GREEDY, is_done=lambda new: len(new) == 3 or new[:2] == whole[0][:2])
    assert [len(new) for new in cut] == [2, 3, 3] and all(a == b[: len(a)] for a, b in zip(cut, whole, strict=True))
    assert len(steps) == 3


def test_a_prompts_text_depends_on_seed_and_number_but_not_on_other_prompts():
    model, sampling = tiny(), Sampling(seed=3)
    first = generate(model, PROMPTS, 20, (), sampling)
    assert generate(model, PROMPTS, 20, (), sampling) == first
    assert generate(model, [PROMPTS[0], [9, 9]], 20, (), sampling)[0] == first[0]
    assert generate(model, PROMPTS, 20, (), Sampling(seed=4)) != first
    same = generate(model, [[5], [5]], 20, (), sampling)
    assert same[0] != same[1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=100),
        Sampling(temperature=1.5, top_k=8, top_p=0.8),
        Sampling(top_p=0.0),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_of_transformers_warpers(sampling):
    torch.manual_seed(0)
    logits = torch.randn(1, 20) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    expected = warpers(None, logits).softmax(-1)[0]
    rows = 20_000
    random = torch.Generator().manual_seed(1)
    drawn = draw(logits.expand(rows, -1), sampling, [random] * rows)
    found = torch.bincount(torch.tensor(drawn), minlength=20) / rows
    assert ((found > 0) <= (expected > 0)).all()
    assert (found - expected).abs().max() < 5 * (0.25 / rows) ** 0.5  # five standard deviations
