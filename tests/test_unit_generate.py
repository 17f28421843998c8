"""Generation: the cache changes nothing, the choices are those asked for, texts outgrow the context."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cs336_systems.model import build  # noqa: E402
from cs336_systems.sizes import ModelConfig  # noqa: E402
from cs336_systems.training.generate import Cache, Sampling, generate  # noqa: E402

CONFIG = ModelConfig(d_model=32, d_ff=64, num_layers=3, num_heads=4, vocab_size=61, context_length=24)


@pytest.fixture
def model():
    return build(CONFIG, "reference").requires_grad_(False)


def test_the_cache_gives_the_logits_of_the_whole_text(model):
    ids = torch.randint(0, CONFIG.vocab_size, (CONFIG.context_length,))
    for prompt in (1, 7, len(ids)):
        cache = Cache(model)
        found = [cache.logits(ids[:prompt])] + [cache.logits(ids[i : i + 1]) for i in range(prompt, len(ids))]
        with torch.no_grad():
            whole = model(ids[None])[0, prompt - 1 :]
        torch.testing.assert_close(torch.stack(found), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(0.7, seed=3), Sampling(1.3, top_k=5), Sampling(top_p=0.6)]
)
def test_the_same_tokens_with_and_without_the_cache_beyond_the_context(model, sampling):
    prompt = torch.randint(0, CONFIG.vocab_size, (9,)).tolist()
    with_cache, without = (list(generate(model, prompt, sampling, 70, cached=c)) for c in (True, False))
    assert with_cache == without and len(with_cache) == 70


def test_a_prompt_longer_than_the_context_is_its_end(model):
    long = torch.randint(0, CONFIG.vocab_size, (50,)).tolist()
    assert list(generate(model, long, Sampling(0), 5)) == list(generate(model, long[-24:], Sampling(0), 5))


def test_stop_ends_the_text_and_seeds_repeat_it(model):
    tokens = list(generate(model, [1], Sampling(seed=5), 40))
    assert tokens == list(generate(model, [1], Sampling(seed=5), 40))
    assert tokens != list(generate(model, [1], Sampling(seed=6), 40))
    stop = tokens[7]
    assert list(generate(model, [1], Sampling(seed=5), 40, stop=stop)) == tokens[: tokens.index(stop)]


def test_choices_follow_their_probabilities():
    logits, random = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    for sampling, expected in (
        (Sampling(), [50, 30, 15, 5]), (Sampling(top_k=2), [5, 3, 0, 0]), (Sampling(top_p=0.79), [5, 3, 0, 0]),
        (Sampling(top_p=0.81), [50, 30, 15, 0]), (Sampling(0.5), [25, 9, 2.25, 0.25]), (Sampling(0), [1, 0, 0, 0]),
    ):  # fmt: skip
        drawn = (
            torch.tensor([sampling.choose(logits, random) for _ in range(3000)]).bincount(minlength=4) / 3000
        )
        torch.testing.assert_close(drawn, torch.tensor(expected) / sum(expected), atol=0.04, rtol=0)


def test_what_makes_no_sense_is_refused(model):
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="prompt"):
        list(generate(model, [], Sampling(), 3))
    cache = Cache(model)
    cache.logits(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="2 tokens at once"):
        cache.logits(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="context_length=24"):
        Cache(model).logits(torch.zeros(25, dtype=torch.long))
