"""Does generation give the tokens that the logits say, however it computes them?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from minikv import ModelConfig, generate
from minikv.generate import likeliest, sample
from strategies import SEEDS
from support import make_model, make_weights
from test_model import LATENT, MIXED, TEXT


@pytest.fixture(params=[MIXED, LATENT], ids=["mixed", "latent"], scope="module")
def model(request, backend):
    return make_model(request.param, make_weights(request.param, 3), backend)


def greedy(config: ModelConfig, prompt: list[int], count: int, seed: int = 3) -> list[int]:
    """The oracle's continuation, the whole text computed again for every token."""
    reference, text = oracle.Model(config.to_dict(), make_weights(config, seed)), list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(reference.logits(text)[-1])))
    return text[len(prompt) :]


def test_greedy_is_the_likeliest_token_every_time(model):
    want = greedy(model.config, TEXT, 12)
    assert generate(model, TEXT, 12).ids == want
    assert generate(model, np.array(TEXT), 12, use_cache=False).ids == want
    assert len(set(want)) > 2, "a text of one token would show nothing"


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 8, 9])
def test_prefill_chunks_change_nothing(model, chunk):
    assert generate(model, TEXT, 6, prefill_chunk=chunk).ids == generate(model, TEXT, 6).ids


def test_stop_ids_end_the_text_and_belong_to_it(model):
    ids = generate(model, TEXT, 12).ids
    stop = ids[4]
    assert generate(model, TEXT, 12, stop_ids=[stop]).ids == ids[: ids.index(stop) + 1]
    assert generate(model, TEXT, 12, stop_ids=(99, stop)).ids == ids[: ids.index(stop) + 1]
    assert generate(model, TEXT, 12, stop_ids=()).ids == ids


def test_no_token_is_a_result_too(model):
    result = generate(model, TEXT, 0)
    assert result.ids == [] and result.stats.new_tokens == 0


def test_each_token_is_reported_once_and_in_order(model):
    seen: list[int] = []
    result = generate(model, TEXT, 7, on_token=seen.append)
    assert seen == result.ids and all(type(token) is int for token in seen)


def test_statistics_count_what_happened(model):
    config = model.config
    stats = generate(model, TEXT, 5, prefill_chunk=3).stats
    assert (stats.prompt_tokens, stats.new_tokens) == (8, 5)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.decode_rate == pytest.approx(4 / stats.decode_seconds)
    assert stats.prefill_rate == pytest.approx(8 / stats.prefill_seconds)
    per_token = sum(heads * width * 8 for heads, width in config.cache_rows)
    kept = sum(min(8 + 4, window or 99) for window in config.windows)  # the last token is never fed
    assert stats.cache_bytes == kept * per_token
    assert generate(model, TEXT, 5, use_cache=False).stats.cache_bytes == 0


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.6}])
def test_the_same_seed_draws_the_same_tokens_with_and_without_a_cache(model, options):
    def text(seed: int, **more: object) -> list[int]:
        return generate(model, TEXT, 6, temperature=1.5, seed=seed, **options, **more).ids

    assert text(4) == text(4) == text(4, use_cache=False) == text(4, prefill_chunk=3)
    assert len({tuple(text(seed)) for seed in range(4)}) > 1


def test_taking_the_likeliest_of_one_is_greedy(model):
    want = generate(model, TEXT, 6).ids
    assert generate(model, TEXT, 6, temperature=3.0, top_k=1, seed=0).ids == want
    assert generate(model, TEXT, 6, temperature=3.0, top_p=1e-9, seed=0).ids == want
    assert generate(model, TEXT, 6, temperature=1e-6, seed=0).ids == want
    assert generate(model, TEXT, 6, temperature=5e-324, seed=0).ids == want  # and no warning


def allowed(probabilities: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Probabilities after top-k, then top-p: the fewest likeliest tokens that together reach it."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:top_k]
    kept, reached, whole = [], 0.0, sum(probabilities[i] for i in order)
    for i in order:
        kept.append(i)
        reached += probabilities[i] / whole
        if top_p is not None and reached >= top_p:
            break
    out = np.zeros(len(probabilities))
    out[kept] = probabilities[kept] / probabilities[kept].sum()
    return out


@settings(max_examples=12)
@given(
    seed=SEEDS,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 3, 20]),
    top_p=st.sampled_from([None, 0.3, 0.77, 1.0]),
)
def test_tokens_are_drawn_as_often_as_they_should(backend, seed, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).standard_normal(8) * 2
    weights = np.exp((logits - logits.max()) / temperature)
    want = allowed(weights / weights.sum(), top_k, top_p)
    rng, draws = np.random.default_rng(seed + 1), 1500
    x = backend.asarray(logits)
    counts = np.bincount([sample(x, backend, rng, temperature, top_k, top_p) for _ in range(draws)], minlength=8)
    assert not counts[want == 0].any(), "a token was drawn that is not among the allowed"
    # Five standard deviations of a count: a correct sampler fails one check in two million.
    assert (np.abs(counts - draws * want) <= 5 * np.sqrt(draws * want * (1 - want)) + 1).all()


@given(seed=SEEDS, size=st.integers(1, 40), ties=st.sampled_from([1, 3, 1000]), count=st.integers(1, 50))
def test_the_likeliest_are_those_of_a_plain_sort(seed, size, ties, count):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.standard_normal(size) * ties) + 0.0  # few different values, or hardly two that are equal
    scores[rng.random(size) < 0.2] = -np.inf
    plain = sorted(range(size), key=lambda i: (-scores[i], i))
    assert likeliest(scores, count).tolist() == plain[:count] and likeliest(scores).tolist() == plain


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_without_probabilities_are_refused(backend, bad):
    x, rng = backend.asarray(np.array([bad, -np.inf])), np.random.default_rng(0)
    for top_k, top_p in ((None, None), (1, None), (None, 0.5)):
        with pytest.raises(ValueError, match=f"the largest logit must be finite, got {bad}"):
            sample(x, backend, rng, 1.0, top_k, top_p)


def test_equal_logits_favour_the_lower_id(backend):
    x, rng = backend.asarray(np.array([1.0, 5.0, 5.0, 5.0])), np.random.default_rng(0)
    assert sample(x, backend, rng) == 1
    assert {sample(x, backend, rng, 1.0, top_k=2) for _ in range(50)} == {1, 2}
