"""How can a layer with many heads remember one small vector per token?

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) caches a latent of C numbers, from which keys
and values of all heads can be made, and one rotary key of R numbers that all heads share. It can be computed in two
ways:

- *expanded*: make the keys and values of all tokens in sight from their latents, then attend as usual;
- *absorbed*: q · (W_uk latent) = (W_ukᵀ q) · latent, so carry the query into the latent's space instead of the latents
  out of it, attend there, and bring the mixed latent out at the end. There is one key/value head then, whose key is
  [latent, rotary key] and whose value is its first C numbers: **absorbed MLA is multi-query attention over latents.**

Both are the same function; they differ in operations. Which cache holds the rows and who sees whom is not known here.
"""

from __future__ import annotations

import numpy as np

from .attention import BLOCK_SIZE, attention, merge_heads
from .backend import Array, copies_slices, namespace
from .caches import Cache
from .config import ModelConfig
from .ops import linear, rms_norm, rows_times
from .rope import rotate, yarn_score_factor


class LatentAttention:
    """Attend with N heads whose keys and values are made from one cached row of C + R numbers per token.

    weights: `q` [N (P + R), D], or `q_a` [Q, D], `q_a_norm` [Q] and `q_b` [N (P + R), Q] when queries are compressed
    too; `kv_a` [C + R, D]; `kv_a_norm` [C], absent without `latent_norm`; `kv_b` [N (P + V), C], each head's key rows
    W_uk before its value rows W_uv; `o` [D, N V]. P is qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim,
    C kv_lora_rank, Q q_lora_rank.

    `form` is "absorbed", "expanded" or None for whichever takes fewer operations in the step at hand.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Array], window: int | None = None) -> None:
        self.config, self.weights, self.window = config, weights, window
        self.form: str | None = None
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        scale = width**-0.5 if config.attn_scale is None else config.attn_scale
        self.scale = scale * yarn_score_factor(config.rope_scaling)
        self.up_k, self.up_v = up_projections(config, weights["kv_b"])

    def __call__(self, x: Array, pos: np.ndarray, rotary: tuple[Array, Array] | None, cache: Cache) -> Array:
        """Compute one step, x [B, T, D] -> [B, T, D], and let the cache take in one row [B, 1, T, C + R] per token.

        pos: host positions [B, T]; rotary: (cos, sin) of them from `rope_tables`.
        """
        xp, c, w = namespace(x), self.config, self.weights
        q_nope, q_rope = self._queries(x, rotary)
        down = linear(x, w["kv_a"])[:, None, ...]  # [B, 1, T, C+R]: equations 41 and 43
        latent = down[..., : c.kv_lora_rank]
        if c.latent_norm:
            latent = rms_norm(latent, w["kv_a_norm"], c.norm_eps)
        row = xp.concat([latent, self._rotated(down[..., c.kv_lora_rank :], rotary)], axis=-1)
        k_pos, row = cache.extend(pos, row)
        form = self.form or cheaper_form(c, x.shape[1], row.shape[2])
        attend = self._absorbed if form == "absorbed" else self._expanded
        return linear(merge_heads(attend(q_nope, q_rope, row, pos, k_pos)), w["o"], w.get("o_bias"))

    def _queries(self, x: Array, rotary: tuple[Array, Array] | None) -> tuple[Array, Array]:
        """Make queries without position [B, N, T, P] and with [B, N, T, R] (equations 37 to 40)."""
        xp, c, w = namespace(x), self.config, self.weights
        if c.q_lora_rank is None:
            q = linear(x, w["q"])
        else:
            q = linear(rms_norm(linear(x, w["q_a"]), w["q_a_norm"], c.norm_eps), w["q_b"])
        q = xp.permute_dims(xp.reshape(q, (*x.shape[:2], c.n_heads, -1)), (0, 2, 1, 3))
        return q[..., : c.qk_nope_head_dim], self._rotated(q[..., c.qk_nope_head_dim :], rotary)

    def _rotated(self, x: Array, rotary: tuple[Array, Array] | None) -> Array:
        return x if rotary is None else rotate(x, *rotary, interleaved=self.config.rope_interleaved)

    def _expanded(self, q_nope: Array, q_rope: Array, row: Array, pos: np.ndarray, k_pos: np.ndarray) -> Array:
        """Make keys and values of every token in sight, then attend with K = N (equations 42, 44 to 46)."""
        xp, c = namespace(row), self.config
        latent, k_rope = row[..., : c.kv_lora_rank], row[..., c.kv_lora_rank :]
        k_nope = rows_times(latent, self.up_k)  # [B, 1, S, C] and [N, P, C] -> [B, N, S, P]
        v = rows_times(latent, self.up_v)
        k_rope = xp.broadcast_to(k_rope, (*k_nope.shape[:3], c.qk_rope_head_dim))
        q, k = xp.concat([q_nope, q_rope], axis=-1), xp.concat([k_nope, k_rope], axis=-1)
        return self._attention(q, k, v, pos, k_pos)

    def _absorbed(self, q_nope: Array, q_rope: Array, row: Array, pos: np.ndarray, k_pos: np.ndarray) -> Array:
        """Carry the queries into the latent's space, attend with K = 1, and expand what comes out (section 2.1.2,
        end)."""
        xp, c = namespace(row), self.config
        q = xp.concat([xp.matmul(q_nope, self.up_k), q_rope], axis=-1)  # [B, N, T, P] and [N, P, C] -> [B, N, T, C+R]
        # The values are the latents, a slice of the rows. Mixing whole rows and dropping the rest spares a copy of it.
        v = row if copies_slices(row) else row[..., : c.kv_lora_rank]
        mixed = self._attention(q, row, v, pos, k_pos)[..., : c.kv_lora_rank]  # [B, N, T, C]
        return rows_times(mixed, self.up_v)

    def _attention(self, q: Array, k: Array, v: Array, pos: np.ndarray, k_pos: np.ndarray) -> Array:
        return attention(
            q,
            k,
            v,
            q_pos=pos,
            k_pos=k_pos,
            window=self.window,
            scale=self.scale,
            softcap=self.config.attn_softcap,
            sinks=self.weights.get("sinks"),
            block_size=BLOCK_SIZE,
        )


def up_projections(config: ModelConfig, kv_b: Array) -> tuple[Array, Array]:
    """Return the up-projections of keys [N, P, C] and values [N, V, C]: views of `kv_b`, or copies made once for a
    library that would copy the views in every product."""
    xp, (_, C), P = namespace(kv_b), kv_b.shape, config.qk_nope_head_dim
    up = xp.reshape(kv_b, (config.n_heads, P + config.v_head_dim, C))
    copy = True if copies_slices(kv_b) else None
    return xp.asarray(up[:, :P, :], copy=copy), xp.asarray(up[:, P:, :], copy=copy)


def cheaper_form(config: ModelConfig, queries: int, keys: int) -> str:
    """Choose between "absorbed" and "expanded" for a step of T queries and S keys, by multiply-adds per head.

    expanded: S C (P + V) to make keys and values, then T S (P + R + V) to attend;
    absorbed: T C (P + V) to carry queries in and results out, then T S (C + R + C) to attend.

    One query (decode) never pays for expanding S latents; a long prefill does not want to attend at width C, several
    times P or V. At DeepSeek-V2's sizes the two meet near T = 170 when S is large.
    """
    T, S, C, P = queries, keys, config.kv_lora_rank or 0, config.qk_nope_head_dim
    R, V = config.qk_rope_head_dim, config.v_head_dim
    expanded = S * C * (P + V) + T * S * (P + R + V)
    absorbed = T * C * (P + V) + T * S * (C + R + C)
    return "absorbed" if absorbed < expanded else "expanded"
