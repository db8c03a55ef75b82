"""How do layers become a model, and one step of it?

There is one kind of step: some new tokens, caches that remember the old ones, logits out. A full forward pass is a step
from empty caches, prefill a step of many tokens, decode a step of one. Choosing tokens from logits is `generate.py`'s
matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .backend import Array, Backend, as_integers, as_positions, copies_slices, get_backend, namespace, whole
from .caches import Cache, ConcatCache, ContiguousCache, KVCache, RollingCache, all_or_none
from .caches.base import check_rising
from .config import ModelConfig, weight_shapes
from .feedforward import FeedForward, MixtureOfExperts
from .gqa import GroupedQueryAttention
from .mla import LatentAttention
from .ops import layer_norm, linear, rms_norm, soft_cap
from .rope import rope_frequencies, rope_tables


class Layer:
    """Add to the residual stream what attention and then the feed-forward make of it."""

    def __init__(self, config: ModelConfig, weights: dict[str, Array], index: int) -> None:
        prefix = f"layers.{index}."
        self.weights = {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}
        self.config, self.window = config, config.windows[index]
        attention = LatentAttention if config.is_mla else GroupedQueryAttention
        self.attention = attention(config, self.weights, self.window)
        sparse = config.is_sparse(index)
        self.feed_forward = MixtureOfExperts(config, self.weights) if sparse else FeedForward(config, self.weights)

    def __call__(self, x: Array, pos: np.ndarray, rotary: tuple[Array, Array] | None, cache: Cache) -> Array:
        """Compute one step, x [B, T, D] -> [B, T, D], and let the cache take in the layer's new rows."""
        x = x + self._post(
            "attn_post_norm", self.attention(norm(x, self.weights, "attn_norm", self.config), pos, rotary, cache)
        )
        return x + self._post("ffn_post_norm", self.feed_forward(norm(x, self.weights, "ffn_norm", self.config)))

    def _post(self, name: str, branch: Array) -> Array:
        return norm(branch, self.weights, name, self.config) if self.config.post_norms else branch


def norm(x: Array, weights: dict[str, Array], name: str, config: ModelConfig) -> Array:
    """Apply the configuration's kind of norm with the weights called `name`."""
    if config.norm == "layer":
        return layer_norm(x, weights[name], weights[name + "_bias"], config.norm_eps)
    return rms_norm(x, weights[name], config.norm_eps)


class Model:
    """Run a decoder-only transformer over weights of the names and shapes that `weight_shapes(config)` lists.

    The weights stay where they are, in whichever array library, and are not copied. Raises ValueError naming the weight
    that is missing, unknown or misshapen (with both shapes), or the layer of a kind that the stack does not run.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Array]) -> None:
        check_weights(weights, config)
        for kind in sorted(set(config.pattern) & set("CS")):
            raise ValueError(
                f"layer {config.pattern.index(kind)} is of kind {kind!r}: the stack runs the kinds L and G"
            )
        self.config, self.weights = config, weights
        self.layers = [Layer(config, weights, index) for index in range(config.n_layers)]
        self._rope = rope_of_windows(config)

    @property
    def backend(self) -> Backend:
        """Return the backend of the weights."""
        xp = namespace(self.weights["embed"])
        return Backend(xp.__name__, xp)

    @property
    def dtype(self) -> Any:
        """Return the type of the weights, and so of the logits."""
        return self.weights["embed"].dtype

    def new_caches(self, kind: str | Callable[[], Cache] | None = None) -> list[Cache]:
        """Make one empty cache per layer.

        kind None: a RollingCache for layers with a window, for the others a KVCache or, where the library wants it, a
        ContiguousCache. "concat" or "kv": that kind for all layers (a windowed layer then remembers more than it looks
        at). A function of no arguments makes each, for example `lambda: KVCache(capacity=512)`.
        """
        kinds: dict[str, Callable[[], Cache]] = {"concat": ConcatCache, "kv": KVCache}
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(f"unknown cache kind {kind!r}: known are None, {', '.join(kinds)}")
        if kind is not None:
            make = kinds[kind] if isinstance(kind, str) else kind
            return [make() for _ in self.layers]
        full = ContiguousCache if copies_slices(self.weights["embed"]) else KVCache
        return [full() if window is None else RollingCache(window) for window in self.config.windows]

    def step(
        self, tokens: Any, caches: Sequence[Cache] | None = None, pos: Any = None, *, last: int | None = None
    ) -> Array:
        """Compute the logits of new tokens, given all that the caches remember, and let the caches remember these too.

        tokens: host integers [B, T] -> logits [B, T, vocab_size]; with `last`, of the last so many tokens only. No
        caches means from empty ones. pos: host integers [B, T], -1 for padding (whose token may be anything and whose
        logits mean nothing); by default each row goes on from its own length.

        However the same tokens are split into steps, padded and batched, the logits are the same.

        Raises ValueError or TypeError for tokens outside the vocabulary, positions that do not rise, or caches that do
        not fit. Whatever fails, in whichever layer: every cache keeps what it had.
        """
        caches = self.new_caches() if caches is None else caches
        tokens, pos = self.checked(tokens, caches, pos, last)
        with all_or_none(caches):
            *_, x = self.layer_by_layer(tokens, pos, caches)
            return self.logits(x, last)

    def layer_by_layer(self, tokens: np.ndarray, pos: np.ndarray, caches: Sequence[Cache]) -> Iterator[Array]:
        """Compute what the residual stream holds behind each layer, [B, T, D], a layer each time the next is asked for.

        tokens and pos are those that `checked` returned.
        """
        xp, w = namespace(self.weights["embed"]), self.weights
        flat = xp.asarray(tokens.reshape(-1))
        x = xp.reshape(xp.take(w["embed"], flat, axis=0), (*tokens.shape, self.config.d_model))
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.config.rope_theta is None:
            flat = xp.asarray(np.maximum(pos, 0).reshape(-1))
            x = x + xp.reshape(xp.take(w["positions"], flat, axis=0), x.shape)
        rotary = {window: self._tables(pos, *rope) for window, rope in self._rope.items()}
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, pos, rotary.get(layer.window), cache)
            yield x

    def logits(self, x: Array, last: int | None = None) -> Array:
        """Map what comes out of the last layer to logits: [B, T, D] -> [B, T or `last`, vocab_size]."""
        x = x if last is None else x[:, x.shape[1] - last :, :]
        x = norm(x, self.weights, "final_norm", self.config)
        return soft_cap(linear(x, self.weights.get("head", self.weights["embed"])), self.config.final_softcap)

    def to(self, backend: str | Backend, dtype: str | None = None) -> Model:
        """Return the model with its weights in another array library, or as another type."""
        source, target = self.backend, get_backend(backend)
        moved = {name: target.asarray(source.to_numpy(w), dtype=dtype) for name, w in self.weights.items()}
        return Model(self.config, moved)

    def _tables(self, pos: np.ndarray, frequencies: np.ndarray, factor: float) -> tuple[Array, Array]:
        xp = namespace(self.weights["embed"])
        cos, sin = rope_tables(np.maximum(pos, 0), frequencies, factor)
        return xp.asarray(cos, dtype=self.dtype), xp.asarray(sin, dtype=self.dtype)

    def checked(
        self, tokens: Any, caches: Sequence[Cache], pos: Any, last: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and positions of a step as NumPy arrays [B, T], or raise what `step` promises to."""
        tokens = as_integers(tokens, "tokens")
        if tokens.ndim != 2 or not tokens.size:
            raise ValueError(f"tokens must have axes [B, T] and at least one token, got shape {tokens.shape}")
        if len(caches) != len(self.layers):
            raise ValueError(f"{len(self.layers)} layers need as many caches, got {len(caches)}")
        if last is not None and not 1 <= whole(last, "last", least=None) <= tokens.shape[1]:
            raise ValueError(f"last must be within 1..{tokens.shape[1]}, the tokens of this step, got {last}")
        lengths = [cache.lengths.tolist() or [0] * len(tokens) for cache in caches]
        seen = np.array(lengths[0])
        for index, (cache, layer) in enumerate(zip(caches, self.layers, strict=True)):
            if lengths[index] != lengths[0]:
                raise ValueError(
                    f"caches disagree: layer 0 has seen {caches[0].length} tokens, layer {index} {cache.length}"
                )
            if cache.window is not None and (layer.window is None or cache.window < layer.window):
                sight = "everything" if layer.window is None else f"{layer.window} tokens"
                raise ValueError(f"layer {index} sees {sight}, its cache remembers {cache.window} tokens")
        if len(seen) != len(tokens):
            raise ValueError(f"the caches hold a batch of {len(seen)}, got tokens of {len(tokens)}")
        pos = seen[:, None] + np.arange(tokens.shape[1]) if pos is None else as_positions(pos, "pos")
        if pos.shape != tokens.shape:
            raise ValueError(f"pos must have the shape of tokens, {tokens.shape}, got {pos.shape}")
        limit = self.config.max_positions if self.config.rope_theta is None else None
        if limit is not None and pos.max() >= limit:
            raise ValueError(f"position {pos.max()} is beyond the model's {limit} learned positions")
        tokens = np.where(pos < 0, 0, tokens)
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}")
        check_rising(pos, seen)  # as the caches do, which may get them in pieces
        return tokens, pos


def rope_of_windows(config: ModelConfig) -> dict[int | None, tuple[np.ndarray, float]]:
    """Give each kind of layer, by its window, its rotary frequencies and table factor; nothing when positions are
    learned.

    Windowed layers with a base of their own are not scaled: what they see is never far away (Gemma 3, arXiv
    2503.19786). A rotary key made of `n_rope_heads` keys repeats the frequencies of one.
    """
    if config.rope_theta is None:
        return {}
    width, repeats = config.rotary_dim or config.head_dim, 1
    if config.is_mla:
        width, repeats = config.qk_rope_head_dim // config.n_rope_heads, config.n_rope_heads
    full = rope_frequencies(width, config.rope_theta, config.rope_scaling)
    local = full if config.rope_local_theta is None else rope_frequencies(width, config.rope_local_theta)
    tables = {window: full if window is None else local for window in config.windows}
    return {window: (np.tile(frequencies, repeats), factor) for window, (frequencies, factor) in tables.items()}


def check_weights(weights: dict[str, Array], config: ModelConfig) -> None:
    """Raise ValueError for the first weight that is missing, unknown or misshapen, TypeError for mixed types or
    libraries."""
    shapes = weight_shapes(config)
    for name in [*shapes, *weights]:
        if name not in weights:
            raise ValueError(f"weight {name!r} is missing: expected shape {shapes[name]}")
        if name not in shapes:
            raise ValueError(f"weight {name!r} does not belong to this configuration")
        if tuple(weights[name].shape) != shapes[name]:
            raise ValueError(f"weight {name!r} must have shape {shapes[name]}, got {tuple(weights[name].shape)}")
        namespace(weights["embed"], weights[name])  # types of two libraries cannot be compared
        if not namespace(weights[name]).isdtype(weights[name].dtype, "real floating"):
            raise TypeError(f"weight {name!r} must be floating-point, got {weights[name].dtype}")
        if weights[name].dtype != weights["embed"].dtype:
            raise TypeError(
                f"weight {name!r} must have the type of 'embed', {weights['embed'].dtype}, got {weights[name].dtype}"
            )


def random_model(config: ModelConfig, seed: int = 0, backend: str | Backend = "numpy", dtype: str = "float32") -> Model:
    """Make a model with random weights, equal numbers on every backend: NumPy draws them from the seed, then they are
    moved.

    Matrices are scaled by 1/√(inputs), so that activations keep their size. Norms scatter around 1, and biases, sinks
    and corrections around 0, far enough that leaving one out changes the logits.
    """
    rng, target = np.random.default_rng(seed), get_backend(backend)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = rng.standard_normal(shape)
        leaf = name.rpartition(".")[2]
        if leaf.endswith("norm"):
            noise = 1 + 0.2 * noise
        elif leaf.endswith("bias") or leaf in ("sinks", "router_correction"):
            noise = 0.5 * noise
        else:
            noise = noise / math.sqrt(shape[-1])
        weights[name] = target.asarray(noise, dtype=dtype)
    return Model(config, weights)
