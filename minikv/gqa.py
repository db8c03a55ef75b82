"""How does a layer make queries, keys and values from its input, and one output of all heads?

Multi-head, grouped-query and multi-query attention are one layer: they differ in the number of key/value heads, K = N,
1 < K < N, K = 1 (arXiv 2305.13245). The mixing itself is `attention.py`'s matter, remembering is the cache's.
"""

from __future__ import annotations

import numpy as np

from .attention import BLOCK_SIZE, attention, merge_heads
from .backend import Array, namespace
from .caches import Cache
from .config import ModelConfig
from .ops import linear, rms_norm
from .rope import rotate


class GroupedQueryAttention:
    """Attend with N query heads over K key/value heads.

    weights: `qkv` [(N + 2K) H, D], `o` [D, N H] and, where the configuration says so, `qkv_bias`, `o_bias`, `q_norm`
    and `k_norm` [H], `sinks` [N]. `window` is this layer's, None when it sees everything.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Array], window: int | None = None) -> None:
        self.config, self.weights, self.window = config, weights, window

    def __call__(self, x: Array, pos: np.ndarray, rotary: tuple[Array, Array] | None, cache: Cache) -> Array:
        """Compute one step, x [B, T, D] -> [B, T, D], and let the cache take in the new keys and values.

        pos: host positions [B, T]; rotary: (cos, sin) of them from `rope_tables`, None when positions are learned.
        """
        xp, c, w = namespace(x), self.config, self.weights
        N, K, H = c.n_heads, c.n_kv_heads, c.head_dim
        B, T, _ = x.shape
        heads = linear(x, w["qkv"], w.get("qkv_bias"))  # [B, T, (N+2K)H]
        heads = xp.permute_dims(xp.reshape(heads, (B, T, N + 2 * K, H)), (0, 2, 1, 3))  # [B, N+2K, T, H]
        qk, v = heads[:, : N + K, ...], heads[:, N + K :, ...]
        if c.qk_norm:
            q, k = rms_norm(qk[:, :N, ...], w["q_norm"], c.norm_eps), rms_norm(qk[:, N:, ...], w["k_norm"], c.norm_eps)
            qk = xp.concat([q, k], axis=1)
        if rotary is not None:
            qk = rotate(qk, *rotary, interleaved=c.rope_interleaved)  # queries and keys in one go
        k_pos, k, v = cache.extend(pos, qk[:, N:, ...], v)
        out = attention(
            qk[:, :N, ...],
            k,
            v,
            q_pos=pos,
            k_pos=k_pos,
            window=self.window,
            scale=c.attn_scale,
            softcap=c.attn_softcap,
            sinks=w.get("sinks"),
            block_size=BLOCK_SIZE,
        )
        return linear(merge_heads(out), w["o"], w.get("o_bias"))
