"""What is a model's geometry: which layers, which widths, which weights?

This module answers with numbers only. It holds no arrays and computes nothing with them: `model.py` runs a
configuration, `cost.py` prices it, `weights/` fills it from a checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORMS = ("rms", "layer")
ROUTERS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True)
class ModelConfig:
    """Describe a decoder-only transformer. Fields mean what Hugging Face's fields of the same idea mean.

    `layer_pattern` is tiled over the layers and cut at `n_layers`, layer 0 first: "L" sees the last `window` tokens,
    "G" everything. Without one, every layer is "L" when there is a window and "G" when there is none. `cost.py` also
    prices "C" (blocks of `window` tokens that see only themselves) and "S" (reads the cache of an earlier layer);
    `Model` does not run those two.

    `kv_lora_rank` makes every attention layer multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); the sizes
    keep DeepSeek's names and `n_kv_heads` and `head_dim` then describe nothing that is cached.

    `n_experts` makes the layers from `n_dense_layers` on mixtures of experts.

    Raises ValueError naming the field and its value when the sizes cannot belong together.
    """

    # The stack
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    tied_embeddings: bool = True
    norm: str = "rms"  # or "layer": LayerNorm with bias
    norm_eps: float = 1e-5
    post_norms: bool = False  # norm each branch's output too, before the residual sum (Gemma 2 and 3)
    embed_scale: float = 1.0  # embeddings are multiplied by it (Gemma: √d_model)
    final_softcap: float | None = None

    # Attention
    window: int | None = None
    layer_pattern: str | None = None
    attn_scale: float | None = None  # None: 1/√(width of a query head)
    attn_softcap: float | None = None
    attn_sinks: bool = False  # one learned logit per query head in the softmax's denominator (gpt-oss)
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head before rotation (Qwen 3, Gemma 3)

    # Positions
    rope_theta: float | None = 10000.0  # None: learned position embeddings instead of rotation
    rope_scaling: dict[str, Any] | None = None  # Hugging Face's block, with "rope_type"; see rope.py
    rope_local_theta: float | None = None  # base of the windowed layers, never scaled; None: as the full layers
    rotary_dim: int | None = None  # channels that rotate, the first ones of a head; None: all
    rope_interleaved: bool = False  # pairs are channels (2i, 2i+1); False: (i, i + rotary_dim/2)
    max_positions: int | None = None  # longest text; needed for learned positions, information otherwise

    # Multi-head latent attention
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None  # None: queries are not compressed
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    latent_norm: bool = True  # RMSNorm of the latent before it is cached; False in rewritten checkpoints (convert.py)
    n_rope_heads: int = 1  # keys that lie side by side in the rotary key and turn alike; 1 in DeepSeek's models

    # Feed-forward
    activation: str = "silu"
    gated: bool = True  # activation(gate) * up; False: activation(up)
    mlp_bias: bool = False
    swiglu_limit: float | None = None  # gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), both clamped at the limit

    # Mixture of experts
    n_experts: int = 0
    n_experts_per_token: int = 0
    expert_d_ff: int = 0
    n_shared_experts: int = 0  # one feed-forward as wide as this many experts, always on
    n_dense_layers: int = 0  # the first layers keep a dense feed-forward
    router: str = "softmax"  # what turns router logits into scores
    router_bias: bool = False  # the router is a linear map with bias (gpt-oss)
    router_correction: bool = False  # a bias per expert that decides who is chosen but not the weight (DeepSeek-V3)
    norm_top_k: bool = False  # weights of the chosen experts are divided by their sum
    routed_scaling: float = 1.0
    n_expert_groups: int = 1
    n_top_groups: int = 1  # experts are chosen from the best groups only
    group_score: str = "max"  # a group is worth its best score, or the sum of its two best ("top2")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type).removesuffix(" | None")
            if value is not None or kind == field.type:
                object.__setattr__(self, field.name, _read(value, kind, field.name))
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be a whole number of at least 1 or None, got {self.window!r}")
        if self.layer_pattern is not None and (not self.layer_pattern or set(self.layer_pattern) - set("LGCS")):
            raise ValueError(f"layer_pattern must be made of L, G, C and S, got {self.layer_pattern!r}")
        if self.window is None and set(self.pattern) & set("LC"):
            raise ValueError(f"layer_pattern {self.layer_pattern!r} has windowed layers, but window is None")
        for name, known in (
            ("activation", ACTIVATIONS),
            ("norm", NORMS),
            ("router", ROUTERS),
            ("group_score", GROUP_SCORES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known are {', '.join(known)}")
        if self.rope_theta is None and self.max_positions is None:
            raise ValueError("learned positions (rope_theta=None) need max_positions, got None")
        if self.n_rope_heads < 1 or self.qk_rope_head_dim % self.n_rope_heads:
            raise ValueError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} cannot hold {self.n_rope_heads} rotary keys of one width"
            )
        # A key may consist of one of its parts alone, but rotating positions need channels to rotate.
        least = 0 if self.rope_theta is None else 1
        if self.is_mla and (
            min(self.kv_lora_rank or 0, self.v_head_dim, self.qk_nope_head_dim + self.qk_rope_head_dim) < 1
            or self.qk_nope_head_dim < 0
            or self.qk_rope_head_dim < least
        ):
            raise ValueError(
                f"latent attention needs positive kv_lora_rank, v_head_dim and qk_nope_head_dim + qk_rope_head_dim, "
                f"with qk_rope_head_dim at least {least}, got {self.kv_lora_rank}, {self.v_head_dim} and "
                f"{self.qk_nope_head_dim} + {self.qk_rope_head_dim}"
            )
        rotary = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if self.is_mla:
            rotary = self.qk_rope_head_dim // self.n_rope_heads
        if self.rope_theta is not None and (rotary % 2 or not 1 <= rotary <= max(self.head_dim, self.qk_rope_head_dim)):
            raise ValueError(f"the rotary width must be even and within head_dim {self.head_dim}, got {rotary}")
        if self.n_experts and not 1 <= self.n_experts_per_token <= self.n_experts:
            raise ValueError(f"n_experts_per_token must be within 1..{self.n_experts}, got {self.n_experts_per_token}")
        if self.n_experts and (self.n_expert_groups < 1 or self.n_experts % self.n_expert_groups):
            raise ValueError(f"{self.n_experts} experts cannot form {self.n_expert_groups} equal groups")
        if self.n_experts and not 1 <= self.n_top_groups <= self.n_expert_groups:
            raise ValueError(f"n_top_groups must be within 1..{self.n_expert_groups}, got {self.n_top_groups}")

    @property
    def is_mla(self) -> bool:
        """Say whether attention caches a latent instead of keys and values."""
        return self.kv_lora_rank is not None

    @property
    def pattern(self) -> str:
        """Spell out the kind of every layer, one letter each, layer 0 first."""
        tile = self.layer_pattern or ("G" if self.window is None else "L")
        return (tile * self.n_layers)[: self.n_layers]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Give the window of every layer; None where a layer sees everything."""
        return tuple(self.window if kind == "L" else None for kind in self.pattern)

    @property
    def cache_rows(self) -> tuple[tuple[int, int], ...]:
        """Give (heads, width) of every array of rows that a layer's cache stores per token.

        Keys and values of the key/value heads; or, for latent attention, the latent and the shared rotary key side by
        side in one row, with one "head" (arXiv 2405.04434, section 2.1.3).
        """
        if self.is_mla:
            return ((1, (self.kv_lora_rank or 0) + self.qk_rope_head_dim),)
        return ((self.n_kv_heads, self.head_dim), (self.n_kv_heads, self.head_dim))

    def is_sparse(self, layer: int) -> bool:
        """Say whether the feed-forward of this layer is a mixture of experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Build a configuration from `to_dict`'s output. Raises ValueError for a field that does not exist."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ValueError(
                    f"unknown configuration field {name!r}" + (f": did you mean {near[0]!r}?" if near else "")
                )
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise ValueError(f"the configuration lacks the field {name!r}")
        return cls(**fields)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List every weight of a model by name with its shape, `[out, in]` for matrices.

    Projections that read the same input are stored as one matrix, so that a decode step makes one product of them:
    `qkv` is query heads, key heads, value heads; `gate_up` is gate, then up.
    """
    c = config
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["embed"] = (c.vocab_size, c.d_model)
    if c.rope_theta is None:
        shapes["positions"] = (c.max_positions or 0, c.d_model)

    def norm(name: str) -> None:
        shapes[name] = (c.d_model,)
        if c.norm == "layer":
            shapes[name + "_bias"] = (c.d_model,)

    def feed_forward(prefix: str, width: int, stack: tuple[int, ...] = (), bias: bool = False) -> None:
        up = ("gate_up", 2 * width) if c.gated else ("up", width)
        shapes[f"{prefix}{up[0]}"] = (*stack, up[1], c.d_model)
        shapes[f"{prefix}down"] = (*stack, c.d_model, width)
        if bias:
            shapes[f"{prefix}{up[0]}_bias"] = (*stack, up[1])
            shapes[f"{prefix}down_bias"] = (*stack, c.d_model)

    for layer in range(c.n_layers):
        p = f"layers.{layer}."
        shares = c.pattern[layer] == "S"  # reads the keys and values of an earlier layer and makes none
        norm(p + "attn_norm")
        if c.is_mla:
            width = c.qk_nope_head_dim + c.qk_rope_head_dim
            if c.q_lora_rank is None:
                shapes[p + "q"] = (c.n_heads * width, c.d_model)
            else:
                shapes[p + "q_a"] = (c.q_lora_rank, c.d_model)
                shapes[p + "q_a_norm"] = (c.q_lora_rank,)
                shapes[p + "q_b"] = (c.n_heads * width, c.q_lora_rank)
            if not shares:
                shapes[p + "kv_a"] = ((c.kv_lora_rank or 0) + c.qk_rope_head_dim, c.d_model)
                if c.latent_norm:
                    shapes[p + "kv_a_norm"] = (c.kv_lora_rank or 0,)
            shapes[p + "kv_b"] = (c.n_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank or 0)
            shapes[p + "o"] = (c.d_model, c.n_heads * c.v_head_dim)
        else:
            qkv = (c.n_heads + (0 if shares else 2 * c.n_kv_heads)) * c.head_dim
            shapes[p + "qkv"] = (qkv, c.d_model)
            if c.qkv_bias:
                shapes[p + "qkv_bias"] = (qkv,)
            if c.qk_norm:
                shapes[p + "q_norm"] = shapes[p + "k_norm"] = (c.head_dim,)
            shapes[p + "o"] = (c.d_model, c.n_heads * c.head_dim)
        if c.o_bias:
            shapes[p + "o_bias"] = (c.d_model,)
        if c.attn_sinks:
            shapes[p + "sinks"] = (c.n_heads,)
        if c.post_norms:
            norm(p + "attn_post_norm")
        norm(p + "ffn_norm")
        if c.is_sparse(layer):
            shapes[p + "router"] = (c.n_experts, c.d_model)
            if c.router_bias:
                shapes[p + "router_bias"] = (c.n_experts,)
            if c.router_correction:
                shapes[p + "router_correction"] = (c.n_experts,)
            feed_forward(p + "experts_", c.expert_d_ff, (c.n_experts,), c.mlp_bias)
            if c.n_shared_experts:
                feed_forward(p + "shared_", c.n_shared_experts * c.expert_d_ff)
        else:
            feed_forward(p, c.d_ff, bias=c.mlp_bias)
        if c.post_norms:
            norm(p + "ffn_post_norm")
    norm("final_norm")
    if not c.tied_embeddings:
        shapes["head"] = (c.vocab_size, c.d_model)
    return shapes


_KINDS: dict[str, Any] = {"int": Integral, "float": Real, "bool": bool, "str": str, "dict[str, Any]": dict}


def _read(value: Any, kind: str, name: str) -> Any:
    """Return a field's value as Python's own type, since a NumPy scalar would widen float32 to float64."""
    fits = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits or (kind == "float" and not 0 < value < math.inf):
        wanted = {"int": "a whole number", "float": "a positive finite number"}.get(kind, f"of type {kind}")
        raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")
    return {"int": int, "float": float}.get(kind, lambda same: same)(value)
