"""What does a layer do to each token by itself: a gated unit, a plain one, or a mixture of experts?

Tokens do not meet here, so nothing depends on positions, batches or caches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np

from .backend import Array, namespace
from .config import ModelConfig
from .ops import ACTIVATIONS, linear, sigmoid, softmax, widen


class FeedForward:
    """Widen, apply a non-linearity, narrow: down · (activation(gate · x) * (up · x)), or down · activation(up · x)
    ungated.

    weights, behind `prefix`: `gate_up` [2F, D], gate rows first, or `up` [F, D]; `down` [D, F]; `gate_up_bias`,
    `up_bias` and `down_bias` where there are any. With silu this is SwiGLU, with gelu GeGLU (arXiv 2002.05202,
    equations 5 and 6).
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Array], prefix: str = "") -> None:
        self.config = config
        up = prefix + ("gate_up" if config.gated else "up")
        self.up, self.up_bias = weights[up], weights.get(up + "_bias")
        self.down, self.down_bias = weights[prefix + "down"], weights.get(prefix + "down_bias")

    def __call__(self, x: Array) -> Array:
        """Map x [B, T, D] -> [B, T, D]."""
        return linear(non_linearity(linear(x, self.up, self.up_bias), self.config), self.down, self.down_bias)


def non_linearity(h: Array, config: ModelConfig) -> Array:
    """Map what the first matrix gives, [..., 2F] when gated and [..., F] when not, to what the second takes, [...,
    F]."""
    if not config.gated:
        return ACTIVATIONS[config.activation](h)
    half = h.shape[-1] // 2
    gate, up = h[..., :half], h[..., half:]
    if config.swiglu_limit is None:
        return ACTIVATIONS[config.activation](gate) * up
    # gpt-oss: clamped (the gate from above only), a steeper sigmoid, and one added to the linear half.
    xp, limit = namespace(h), config.swiglu_limit
    gate, up = xp.clip(gate, -math.inf, limit), xp.clip(up, -limit, limit)
    return gate * sigmoid(1.702 * gate) * (up + 1.0)


class MixtureOfExperts:
    """Send every token to the few experts that its router likes best, and add up what they say.

    y = Σ_e w_e expert_e(x) + shared(x),  w_e = 0 for all but the n_experts_per_token chosen

    weights: `router` [E, D]; `experts_gate_up` [E, 2F, D] and `experts_down` [E, D, F], with `_bias` where the
    configuration says so; `shared_gate_up`, `shared_down` of one feed-forward that is always on; `router_bias` [E];
    `router_correction` [E].

    Scores are a softmax (DeepSeek-V2, arXiv 2405.04434, section 2.2; Mixtral, arXiv 2401.04088) or a sigmoid of the
    router's logits (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). With `norm_top_k` the chosen weights are divided by
    their sum, which for a softmax is the softmax over the chosen logits alone, as Mixtral and gpt-oss define it.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Array]) -> None:
        self.config, self.weights = config, weights
        self.shared = FeedForward(config, weights, "shared_") if config.n_shared_experts else None

    def __call__(self, x: Array) -> Array:
        """Map x [B, T, D] -> [B, T, D]."""
        xp, c = namespace(x), self.config
        tokens = xp.reshape(x, (-1, x.shape[-1]))  # [n, D]
        weights = xp.astype(self.route(tokens), x.dtype, copy=False)
        # Which experts were chosen only the device knows, and asking it would mean to wait. So few tokens (decode)
        # fetch the weights of their own experts, and of many (prefill) every expert sees every one.
        few = tokens.shape[0] * c.n_experts_per_token < c.n_experts
        y = xp.reshape(self._fetch(tokens, weights) if few else self._all(tokens, weights), x.shape)
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Array) -> Array:
        """Weigh the experts for every token: x [n, D] -> [n, E], 0 for those not chosen; float32 or wider."""
        xp, c, w = namespace(x), self.config, self.weights
        bias = w.get("router_bias")
        logits = linear(widen(x), widen(w["router"]), None if bias is None else widen(bias))
        scores = softmax(logits) if c.router == "softmax" else sigmoid(logits)
        worth = scores + widen(w["router_correction"]) if c.router_correction else scores
        if c.n_top_groups < c.n_expert_groups:
            worth = xp.where(self._in_best_groups(worth), worth, -math.inf)
        weights = xp.where(best(worth, c.n_experts_per_token), scores, 0.0)
        if c.norm_top_k:
            weights = weights / (xp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * c.routed_scaling

    def _in_best_groups(self, worth: Array) -> Array:
        """Say which experts belong to the n_top_groups groups of highest worth: bool [n, E]."""
        xp, c = namespace(worth), self.config
        groups = xp.reshape(worth, (worth.shape[0], c.n_expert_groups, -1))
        if c.group_score == "top2":
            groups = xp.where(best(groups, 2), groups, 0.0)
            score = xp.sum(groups, axis=-1)
        else:
            score = xp.max(groups, axis=-1)
        return xp.reshape(xp.broadcast_to(best(score, c.n_top_groups)[..., None], groups.shape), worth.shape)

    def _all(self, x: Array, weights: Array) -> Array:
        """Add up every expert's answer to every token: [n, D]."""
        y = namespace(x).zeros_like(x)
        for e in range(self.config.n_experts):
            y = y + weighted(weights[:, e : e + 1], self._expert(x, operator.itemgetter((e, ...))))
        return y

    def _fetch(self, x: Array, weights: Array) -> Array:
        """Add up the answers of each token's own k experts: [n, D]."""
        xp, (n, experts), k = namespace(x), weights.shape, self.config.n_experts_per_token
        chosen = xp.argsort(-weights, axis=-1)[:, :k]
        flat = xp.reshape(chosen + xp.asarray(np.arange(n)[:, None] * experts), (-1,))
        weights = xp.reshape(xp.take(xp.reshape(weights, (-1,)), flat), (n, k, 1, 1))
        chosen = xp.reshape(chosen, (-1,))

        def pick(w: Array) -> Array:  # [E, ...] -> [n, k, ...]
            return xp.reshape(xp.take(w, chosen, axis=0), (n, k, *w.shape[1:]))

        return xp.sum(weighted(weights, self._expert(x[:, None, None, :], pick)), axis=(1, 2))

    def _expert(self, x: Array, pick: Callable[[Array], Array]) -> Array:
        """Run the feed-forward whose weights `pick` takes out of the stacks: x [..., m, D] -> [..., m, D]."""
        c, up, down = self.config, "experts_gate_up" if self.config.gated else "experts_up", "experts_down"
        bias = {name: pick(self.weights[name + "_bias"])[..., None, :] if c.mlp_bias else None for name in (up, down)}
        h = non_linearity(linear(x, pick(self.weights[up]), bias[up]), c)
        return linear(h, pick(self.weights[down]), bias[down])


def weighted(weights: Array, y: Array) -> Array:
    """Multiply, and give 0 where the weight is 0: an expert that was not chosen may overflow, and 0 · inf is NaN."""
    return namespace(y).where(weights == 0, 0.0, weights * y)


def best(x: Array, k: int) -> Array:
    """Mark the k largest values along the last axis: bool, of x's shape, exactly k true whatever is equal."""
    xp = namespace(x)
    order = xp.argsort(-x, axis=-1)
    return xp.argsort(order, axis=-1) < k
