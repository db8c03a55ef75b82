"""How do prompts become tokens?

Prefill (the prompt, in steps of many tokens), then decode (one token a step): choose, append, repeat, stop. What a step
computes is `model.py`'s matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Array, Backend, as_integers, namespace, whole
from .model import Model
from .prefill import prefill


@dataclass(frozen=True)
class GenerationStats:
    """Say what a generation took: tokens, seconds of both phases, bytes of the caches at its end."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float  # until the first new token was chosen
    decode_seconds: float  # for the others
    cache_bytes: int  # rows that hold a token, over all layers; 0 without a cache

    @property
    def prefill_rate(self) -> float:
        """Give the prompt's tokens per second of prefill."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Give the new tokens per second of decode. The first comes out of prefill and does not count."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Generation:
    """Hold the new tokens (without the prompt) and what they took."""

    ids: list[int]
    stats: GenerationStats


def generate(
    model: Model,
    prompt_ids: Sequence[int] | np.ndarray,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_ids: Collection[int] = (),
    prefill_chunk: int | None = None,
    use_cache: bool = True,
    on_token: Callable[[int], Any] | None = None,
) -> Generation:
    """Continue a prompt by up to `max_new_tokens` tokens, ending early behind a token of `stop_ids` (which is
    included).

    temperature 0 takes the likeliest token; above, one is drawn from softmax(logits / temperature), among the `top_k`
    likeliest and among the fewest that together reach probability `top_p`, where these are given. The same seed draws
    the same tokens.

    prefill_chunk: tokens per prefill step (None: all at once); the result does not depend on it. use_cache=False
    recomputes the whole text for every token, which is what a cache saves. on_token is called with each new token as it
    comes.

    Raises ValueError for an empty prompt, a negative count or temperature, top_k < 1, top_p outside (0, 1],
    prefill_chunk < 1, or a token outside the vocabulary.
    """
    prompt = as_integers(prompt_ids, "prompt_ids")
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"prompt_ids must be a list of at least one token id, got shape {prompt.shape}")
    whole(max_new_tokens, "max_new_tokens", least=0)
    if prefill_chunk is not None:
        whole(prefill_chunk, "prefill_chunk")
    if not isinstance(stop_ids, Collection):
        raise TypeError(f"stop_ids must be a collection of token ids, got {stop_ids!r:.80}")
    check_sampling(temperature, top_k, top_p, seed)
    rng = np.random.default_rng(seed)
    backend, caches = model.backend, model.new_caches()
    text = [int(token) for token in prompt]
    ids: list[int] = []
    seconds = [0.0, 0.0]  # prefill, decode

    def next_logits() -> Array:
        if not use_cache:
            return model.step([text], last=1)[0, 0, :]
        new = text[caches[0].length :]
        size = prefill_chunk or len(new)
        for start in range(0, len(new), size):
            logits = prefill(model, [new[start : start + size]], caches, last=1)
        return logits[0, 0, :]

    while len(ids) < max_new_tokens and not (ids and ids[-1] in stop_ids):
        backend.synchronize()
        start = time.perf_counter()
        token = sample(next_logits(), backend, rng, temperature, top_k, top_p)  # the one copy from the device in a step
        seconds[bool(ids)] += time.perf_counter() - start
        ids.append(token)
        text.append(token)
        if on_token is not None:
            on_token(token)
    cache_bytes = sum(cache.nbytes_used for cache in caches)
    return Generation(ids, GenerationStats(len(prompt), len(ids), seconds[0], seconds[1], cache_bytes))


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> None:
    """Raise ValueError for a sampling setting outside its range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None:
        whole(top_k, "top_k")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be within (0, 1] or None, got {top_p}")
    if seed is not None:
        whole(seed, "seed", least=0)


def sample(
    logits: Array,
    backend: Backend,
    rng: np.random.Generator,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> int:
    """Choose a token from logits [vocab_size] as `generate` describes. Equal logits: the lower id counts as
    likelier. Raises ValueError when the largest logit is not finite and there are no probabilities to draw by."""
    if temperature == 0:
        return int(backend.to_numpy(namespace(logits).argmax(logits)))
    scores = backend.to_numpy(logits).astype(np.float64)
    largest = scores.max()
    if not np.isfinite(largest):
        raise ValueError(f"the largest logit must be finite, got {largest}")
    free = top_k is None and top_p is None  # every token may come, so none has to be found
    ids = np.arange(scores.size) if free else likeliest(scores, top_k)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, and so weight 0, for all but the likeliest
        weights = np.exp((scores[ids] - largest) / temperature)
    reached = np.cumsum(weights / weights.sum())
    if top_p is not None:  # the token that reaches top_p is the last one in
        reached = reached[: np.searchsorted(reached, top_p) + 1]
    return int(ids[np.searchsorted(reached, rng.random() * reached[-1], side="right")])


def likeliest(scores: np.ndarray, count: int | None = None) -> np.ndarray:
    """Return the ids of the `count` highest scores [vocab_size] (None: all), the highest first, equal ones by id.

    Only those that are not below the last one in are sorted, however large the vocabulary: all ties with it are among
    them, so that the lower ids stay.
    """
    ids = np.arange(scores.size)
    if count is not None and count < scores.size:
        ids = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return ids[np.argsort(-scores[ids], kind="stable")][:count]
