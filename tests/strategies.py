"""Which structures should Hypothesis try: models, windows, ways to cut and to pad texts?

Only structure is drawn; numbers are filled from a drawn seed (`support.py`). What trips implementations is made
likely: a text shorter than, as long as and longer than the window, chunks around the window's size, one key/value head,
no groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from minikv.config import ModelConfig
from support import Feed

SEEDS = st.integers(0, 2**32 - 1)
WINDOWS = st.integers(1, 6)


def head_counts() -> st.SearchStrategy[tuple[int, int]]:
    """Query and key/value heads: one key/value head and groups of one are as likely as the rest."""
    kv_heads = st.one_of(st.just(1), st.integers(2, 3))
    group = st.one_of(st.just(1), st.integers(2, 4))
    return st.tuples(kv_heads, group).map(lambda kg: (kg[0] * kg[1], kg[0]))


def lengths(window: int | None) -> st.SearchStrategy[int]:
    """Lengths of a text: any small one, and those around a window."""
    if window is None:
        return st.integers(1, 12)
    near = [n for n in (window - 1, window, window + 1, 2 * window, 2 * window + 1) if n > 0]
    return st.one_of(st.sampled_from(near), st.integers(1, 3 * window + 2))


@st.composite
def chunkings(draw: st.DrawFn, length: int, window: int | None = None) -> list[int]:
    """Cut a length into steps: at once, one at a time, in two, around the window's size, at random."""
    window = window or 4
    near = [n for n in (window - 1, window, window + 1, 2 * window, 2 * window + 1) if n > 0]
    kind = draw(st.sampled_from(["whole", "single", "two", "near", "prefill", "random"]))
    if kind == "whole":
        return [length]
    if kind == "single":
        return [1] * length
    if kind == "two":
        first = draw(st.integers(1, length))
        return [first, length - first] if first < length else [length]
    if kind == "prefill":
        first = draw(st.integers(1, length))
        return [first] + [1] * (length - first)
    same, sizes = draw(st.sampled_from(near)), []
    while sum(sizes) < length:
        size = same if kind == "near" else draw(st.integers(1, length))
        sizes.append(min(size, length - sum(sizes)))
    return sizes


@st.composite
def feeds(draw: st.DrawFn, vocab: int, window: int | None = None, max_batch: int = 3) -> Feed:
    """Draw texts and the steps that feed them: an even batch, or rows of different lengths with padding anywhere."""
    rng = np.random.default_rng(draw(SEEDS))
    batch = draw(st.integers(1, max_batch))
    if draw(st.booleans()):
        length = draw(lengths(window))
        texts = [[int(t) for t in rng.integers(vocab, size=length)] for _ in range(batch)]
        ends = np.cumsum(draw(chunkings(length, window)))
        steps = [np.tile(np.arange(start, end), (batch, 1)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return Feed(texts, steps, explicit=draw(st.booleans()))
    rows = [draw(chunkings(draw(lengths(window)), window)) for _ in range(batch)]
    texts = [[int(t) for t in rng.integers(vocab, size=sum(row))] for row in rows]
    n_steps = max(len(row) for row in rows) + draw(st.integers(0, 1))
    side = draw(st.sampled_from(["left", "right", "anywhere"]))
    plan = np.zeros((batch, n_steps), dtype=int)  # tokens of each row in each step
    for b, row in enumerate(rows):
        plan[b, np.sort(rng.permutation(n_steps)[: len(row)])] = row
    steps, seen = [], [0] * batch
    for counts in plan.T:
        width = counts.max() + (rng.integers(2) if side == "anywhere" else 0)
        if not width:
            continue
        pos = np.full((batch, width), -1)
        for b, count in enumerate(counts):
            first = {"left": width - count, "right": 0}.get(side)
            places = np.sort(rng.permutation(width)[:count]) if first is None else np.arange(first, first + count)
            pos[b, places] = np.arange(seen[b], seen[b] + count)
            seen[b] += count
        steps.append(pos)
    return Feed(texts, steps, pad_token=int(rng.choice([0, vocab - 1, -1, 10**6])))


ROPE_SCALINGS: st.SearchStrategy[dict[str, Any] | None] = st.sampled_from(
    [
        None,
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    ]
)


def sometimes(value: Any, otherwise: Any = None) -> st.SearchStrategy[Any]:
    """The plain choice first, so that Hypothesis shrinks towards it."""
    return st.sampled_from([otherwise, value])


@st.composite
def configs(draw: st.DrawFn, max_layers: int = 3, latent: bool | None = None) -> ModelConfig:
    """Draw the geometry of a small model with any mixture of what the families have."""
    n_heads, n_kv_heads = draw(head_counts())
    window = draw(st.one_of(st.none(), WINDOWS))
    is_latent = draw(st.booleans()) if latent is None else latent
    head_dim = draw(st.sampled_from([4, 6, 8]))
    fields: dict[str, Any] = {
        "vocab_size": 11,
        "d_model": draw(st.sampled_from([8, 12])),
        "n_layers": draw(st.integers(1, max_layers)),
        "n_heads": n_heads,
        "n_kv_heads": n_heads if is_latent else n_kv_heads,
        "head_dim": head_dim,
        "d_ff": draw(st.sampled_from([4, 10])),
        "tied_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "post_norms": draw(st.booleans()),
        "embed_scale": draw(sometimes(3.0, 1.0)),
        "final_softcap": draw(sometimes(5.0)),
        "window": window,
        "layer_pattern": draw(st.sampled_from([None, "LG", "GL", "LLG", "G"])) if window else None,
        "attn_scale": draw(sometimes(0.3)),
        "attn_softcap": draw(sometimes(2.0)),
        "attn_sinks": draw(st.booleans()),
        "o_bias": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([10000.0, 100.0, None])),
        "rope_scaling": draw(ROPE_SCALINGS),
        "rope_local_theta": draw(sometimes(50.0)),
        "rope_interleaved": draw(st.booleans()),
        "max_positions": 64,
        "activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"])),
        "gated": draw(sometimes(False, True)),
        "mlp_bias": draw(st.booleans()),
    }
    if fields["gated"]:
        fields["swiglu_limit"] = draw(sometimes(1.5))
    if is_latent:
        fields |= {
            "kv_lora_rank": draw(st.sampled_from([3, 6])),
            "q_lora_rank": draw(sometimes(5)),
            "qk_nope_head_dim": draw(st.sampled_from([3, 4])),
            "qk_rope_head_dim": draw(st.sampled_from([2, 4])),
            "latent_norm": draw(sometimes(False, True)),
            "v_head_dim": draw(st.sampled_from([2, 5])),
        }
        if fields["qk_rope_head_dim"] == 4:
            fields["n_rope_heads"] = draw(sometimes(2, 1))
    else:
        fields |= {
            "qkv_bias": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
            "rotary_dim": draw(sometimes(2)),
        }
    if draw(st.booleans()):
        fields |= draw(experts(fields["n_layers"]))
    return ModelConfig(**fields)


@st.composite
def experts(draw: st.DrawFn, n_layers: int) -> dict[str, Any]:
    """Draw a mixture of experts: the routers of DeepSeek-V2 and V3, Mixtral and gpt-oss, and what lies between."""
    groups, size = draw(st.sampled_from([(1, 4), (2, 3), (3, 2)]))
    top_groups = draw(st.integers(1, groups))
    return {
        "n_experts": groups * size,
        "n_expert_groups": groups,
        "n_top_groups": top_groups,
        "n_experts_per_token": draw(st.integers(1, min(3, top_groups * size))),
        "expert_d_ff": draw(st.sampled_from([3, 4])),
        "n_shared_experts": draw(st.integers(0, 2)),
        "n_dense_layers": draw(st.integers(0, n_layers - 1)),
        "router": draw(st.sampled_from(["softmax", "sigmoid"])),
        "router_bias": draw(st.booleans()),
        "router_correction": draw(st.booleans()),
        "group_score": draw(st.sampled_from(["max", "top2"])),
        "norm_top_k": draw(st.booleans()),
        "routed_scaling": draw(sometimes(2.5, 1.0)),
    }
