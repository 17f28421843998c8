"""Generation: the cache changes nothing, the choices are those asked for, texts outgrow the context."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from cs336_systems.model import build  # noqa: E402
from cs336_systems.sizes import ModelConfig  # noqa: E402
from cs336_systems.training.config import Generation  # noqa: E402
from cs336_systems.training.generate import Cache, choose, generate  # noqa: E402

CONFIG = ModelConfig(d_model=32, d_ff=64, num_layers=3, num_heads=4, vocab_size=61, context_length=24)


PLAIN = Generation(temperature=1.0, top_p=1.0, tokens=60)


def how(**changes):
    return dataclasses.replace(PLAIN, **changes)


@pytest.fixture(params=[None, 2], ids=["", "grouped"])
def model(request):
    return build(dataclasses.replace(CONFIG, num_kv_heads=request.param), "reference").requires_grad_(False)


def some(*lengths):
    return [torch.randint(0, CONFIG.vocab_size, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", [(1,), (7,), (24,), (3, 9, 1, 9), (24, 2)], ids=str)
def test_the_cache_gives_the_logits_of_the_whole_text(model, lengths):
    """Of each text, whatever fills it up in front."""
    texts, longest = some(*lengths), max(lengths)
    before = torch.tensor([longest - length for length in lengths])
    cache = Cache(model, before)
    ids = torch.tensor([[5] * (longest - len(text)) + text for text in texts])
    for _ in range(CONFIG.context_length - longest + 1):
        with torch.no_grad():
            whole = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
        torch.testing.assert_close(cache.logits(ids), whole, rtol=1e-4, atol=1e-5)
        ids = torch.tensor(some(*[1] * len(texts)))
        for text, new in zip(texts, ids.tolist(), strict=True):
            text += new
    assert all(k.shape[1] == v.shape[1] == model.config.kv_heads for k, v in cache._kept)


def one_by_one(model, prompt, sampling, count, stop=None):
    """The same without a cache, and alone."""
    window, random, found = prompt[-24:], torch.Generator().manual_seed(sampling.seed), []
    while len(found) < count:
        with torch.no_grad():
            token = choose(sampling, model(torch.tensor([window]))[0, -1], random)
        if token == stop:
            break
        found.append(token)
        window = [*window, token] if len(window) < 24 else [*window, token][-12:]
    return found


def of_each(model, prompts, *args, **kwargs):
    steps = list(generate(model, prompts, *args, **kwargs))
    assert all(len(step) == len(prompts) and any(token is not None for token in step) for step in steps)
    found = [[token for token in text if token is not None] for text in zip(*steps, strict=True)]
    assert all(
        None not in text[: len(one)] for one, text in zip(found, zip(*steps, strict=True), strict=True)
    )
    return found or [[] for _ in prompts]


SAMPLINGS = [how(temperature=0), how(temperature=0.7, seed=3), how(temperature=1.3, top_k=5), how(top_p=0.6)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("lengths", [(9,), (1, 50, 13), (24, 24)], ids=str)
def test_the_same_tokens_alone_and_together_beyond_the_context(model, sampling, lengths):
    """In fp64, so that no rounding decides between two tokens."""
    model, prompts = model.double(), some(*lengths)
    expected = [
        one_by_one(model, prompt, dataclasses.replace(sampling, seed=sampling.seed + n), 70)
        for n, prompt in enumerate(prompts)
    ]
    assert of_each(model, prompts, dataclasses.replace(sampling, tokens=70)) == expected


def test_stop_ends_a_text_the_others_go_on_and_seeds_repeat_them(model):
    model, prompts, sampling = model.double(), some(4, 11, 7), how(seed=5)
    whole = of_each(model, prompts, sampling)
    assert whole == of_each(model, prompts, sampling) != of_each(model, prompts, how(seed=6))
    for stop in whole[1][:12]:
        expected = [text[: text.index(stop)] if stop in text else text for text in whole]
        assert of_each(model, prompts, sampling, stop=stop) == expected
    assert list(generate(model, [], sampling)) == list(generate(model, prompts, how(tokens=0))) == []


def test_choices_follow_their_probabilities():
    logits, random = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    for sampling, expected in (
        (how(), [50, 30, 15, 5]), (how(top_k=2), [5, 3, 0, 0]), (how(top_p=0.79), [5, 3, 0, 0]),
        (how(top_p=0.81), [50, 30, 15, 0]), (how(temperature=0.5), [25, 9, 2.25, 0.25]),
        (how(temperature=0), [1, 0, 0, 0]), (how(top_p=1e-300), [1, 0, 0, 0]),
    ):  # fmt: skip
        drawn = (
            torch.tensor([choose(sampling, logits, random) for _ in range(3000)]).bincount(minlength=4) / 3000
        )
        torch.testing.assert_close(drawn, torch.tensor(expected) / sum(expected), atol=0.04, rtol=0)


def test_no_more_than_k_are_chosen_from_of_equals_either():
    logits, random = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    for k in (1, 2, 3, 4):
        assert len({choose(how(top_k=k), logits, random) for _ in range(200)}) == k


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="prompt"):
        list(generate(model, [[1], []], how()))
