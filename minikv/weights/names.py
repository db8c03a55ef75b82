"""What does each family of Hugging Face checkpoints call its weights, and how does it store them?

One `Layout` a family, by `model_type`. What its settings mean stands in `families.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ModelConfig
from .assemble import Layout, transposed

_BLOCK = "model.layers.{layer}."
_ATTENTION = _BLOCK + "self_attn."


def _per_projection(kind: str) -> dict[str, tuple[str, ...]]:
    """Name the weights or the biases of attention and of a gated feed-forward, as nearly all families do."""
    suffix = "" if kind == "weight" else "_bias"
    return {
        "qkv" + suffix: tuple(f"{_ATTENTION}{part}_proj.{kind}" for part in "qkv"),
        "o" + suffix: (f"{_ATTENTION}o_proj.{kind}",),
        "gate_up" + suffix: (f"{_BLOCK}mlp.gate_proj.{kind}", f"{_BLOCK}mlp.up_proj.{kind}"),
        "down" + suffix: (f"{_BLOCK}mlp.down_proj.{kind}",),
    }


_LLAMA = {
    "embed": ("model.embed_tokens.weight",),
    "attn_norm": (_BLOCK + "input_layernorm.weight",),
    "ffn_norm": (_BLOCK + "post_attention_layernorm.weight",),
    **_per_projection("weight"),
    **_per_projection("bias"),
    "q_norm": (_ATTENTION + "q_norm.weight",),
    "k_norm": (_ATTENTION + "k_norm.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
_GEMMA = {
    **_LLAMA,
    "attn_post_norm": (_BLOCK + "post_attention_layernorm.weight",),
    "ffn_norm": (_BLOCK + "pre_feedforward_layernorm.weight",),
    "ffn_post_norm": (_BLOCK + "post_feedforward_layernorm.weight",),
}
_MIXTRAL = {
    **_LLAMA,
    "router": (_BLOCK + "block_sparse_moe.gate.weight",),
    "experts_gate_up": tuple(_BLOCK + f"block_sparse_moe.experts.{{expert}}.{part}.weight" for part in ("w1", "w3")),
    "experts_down": (_BLOCK + "block_sparse_moe.experts.{expert}.w2.weight",),
}
_DEEPSEEK = {
    **_LLAMA,
    "q": (_ATTENTION + "q_proj.weight",),
    "q_a": (_ATTENTION + "q_a_proj.weight",),
    "q_a_norm": (_ATTENTION + "q_a_layernorm.weight",),
    "q_b": (_ATTENTION + "q_b_proj.weight",),
    "kv_a": (_ATTENTION + "kv_a_proj_with_mqa.weight",),
    "kv_a_norm": (_ATTENTION + "kv_a_layernorm.weight",),
    "kv_b": (_ATTENTION + "kv_b_proj.weight",),
    "router": (_BLOCK + "mlp.gate.weight",),
    "router_correction": (_BLOCK + "mlp.gate.e_score_correction_bias",),
    "experts_gate_up": tuple(_BLOCK + f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")),
    "experts_down": (_BLOCK + "mlp.experts.{expert}.down_proj.weight",),
    "shared_gate_up": tuple(_BLOCK + f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")),
    "shared_down": (_BLOCK + "mlp.shared_experts.down_proj.weight",),
}
_GPT_OSS = {
    **_LLAMA,
    "sinks": (_ATTENTION + "sinks",),
    "router": (_BLOCK + "mlp.router.weight",),
    "router_bias": (_BLOCK + "mlp.router.bias",),
    "experts_gate_up": (_BLOCK + "mlp.experts.gate_up_proj",),
    "experts_gate_up_bias": (_BLOCK + "mlp.experts.gate_up_proj_bias",),
    "experts_down": (_BLOCK + "mlp.experts.down_proj",),
    "experts_down_bias": (_BLOCK + "mlp.experts.down_proj_bias",),
}
_GPT2_BLOCK = "transformer.h.{layer}."
_GPT2 = {
    "embed": ("transformer.wte.weight",),
    "positions": ("transformer.wpe.weight",),
    "attn_norm": (_GPT2_BLOCK + "ln_1.weight",),
    "attn_norm_bias": (_GPT2_BLOCK + "ln_1.bias",),
    "qkv": (_GPT2_BLOCK + "attn.c_attn.weight",),
    "qkv_bias": (_GPT2_BLOCK + "attn.c_attn.bias",),
    "o": (_GPT2_BLOCK + "attn.c_proj.weight",),
    "o_bias": (_GPT2_BLOCK + "attn.c_proj.bias",),
    "ffn_norm": (_GPT2_BLOCK + "ln_2.weight",),
    "ffn_norm_bias": (_GPT2_BLOCK + "ln_2.bias",),
    "up": (_GPT2_BLOCK + "mlp.c_fc.weight",),
    "up_bias": (_GPT2_BLOCK + "mlp.c_fc.bias",),
    "down": (_GPT2_BLOCK + "mlp.c_proj.weight",),
    "down_bias": (_GPT2_BLOCK + "mlp.c_proj.bias",),
    "final_norm": ("transformer.ln_f.weight",),
    "final_norm_bias": ("transformer.ln_f.bias",),
    "head": ("lm_head.weight",),
}


def _alternating(config: ModelConfig, weight: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Look at experts' [E, 2F, D] or [E, 2F], gates first, as gpt-oss stores them: [E, D, 2F], gate and up in turns."""
    halves = weight.reshape(weight.shape[0], 2, -1, *weight.shape[2:]).swapaxes(1, -1)  # [E, D, F, 2] or [E, F, 2]
    return halves, weight.swapaxes(1, -1).shape


# Angles, masks and the like that older versions stored; they follow from the configuration.
_TABLES = r".*\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)"


def _layout(names: dict[str, tuple[str, ...]], **how: Any) -> Layout:
    return Layout(names, prefix="model.", ignored=_TABLES, **how)


LAYOUTS = {
    "gpt2": Layout(
        _GPT2,
        views={name: transposed for part in ("qkv", "o", "up", "down") for name in _GPT2[part]},
        prefix="transformer.",
        ignored=_TABLES,
    ),
    "llama": _layout(_LLAMA),
    "mistral": _layout(_LLAMA),
    "mixtral": _layout(_MIXTRAL),
    "qwen2": _layout(_LLAMA),
    "qwen3": _layout(_LLAMA),
    "gemma2": _layout(_GEMMA, norm_offset=1.0),
    "gemma3_text": _layout(_GEMMA, norm_offset=1.0),
    "deepseek_v2": _layout(_DEEPSEEK),
    "deepseek_v3": _layout(_DEEPSEEK),
    "gpt_oss": _layout(
        _GPT_OSS,
        views={
            _GPT_OSS["experts_gate_up"][0]: _alternating,
            _GPT_OSS["experts_gate_up_bias"][0]: _alternating,
            _GPT_OSS["experts_down"][0]: transposed,
        },
    ),
}
