"""What do the architectures of GGUF files call their settings and weights, and what do they mean here?

Two stand here: `llama`, and `gemma3`. How the file is read stands in `gguf_file.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ModelConfig
from ..rope import rope_frequencies
from .assemble import Layout
from .fields import Fields
from .gguf_file import GGUF


def paired_rows(config: ModelConfig, weight: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Look at query or key rows as a `llama` file orders them: the two channels of a rotary pair beside each other.

    A head of the weight has the rows (a0 a1 .. b0 b1 ..), a head in the file (a0 b0 a1 b1 ..).
    """
    heads = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[-1])
    return heads.swapaxes(1, 2), weight.shape


_LLAMA = {
    "embed": ("token_embd.weight",),
    "final_norm": ("output_norm.weight",),
    "head": ("output.weight",),
    "attn_norm": ("blk.{layer}.attn_norm.weight",),
    "qkv": ("blk.{layer}.attn_q.weight", "blk.{layer}.attn_k.weight", "blk.{layer}.attn_v.weight"),
    "o": ("blk.{layer}.attn_output.weight",),
    "ffn_norm": ("blk.{layer}.ffn_norm.weight",),
    "gate_up": ("blk.{layer}.ffn_gate.weight", "blk.{layer}.ffn_up.weight"),
    "down": ("blk.{layer}.ffn_down.weight",),
}
_GEMMA3 = {
    **_LLAMA,
    "q_norm": ("blk.{layer}.attn_q_norm.weight",),
    "k_norm": ("blk.{layer}.attn_k_norm.weight",),
    "attn_post_norm": ("blk.{layer}.post_attention_norm.weight",),
    "ffn_post_norm": ("blk.{layer}.post_ffw_norm.weight",),
}
LAYOUTS = {
    "llama": Layout(
        _LLAMA,
        views={"blk.{layer}.attn_q.weight": paired_rows, "blk.{layer}.attn_k.weight": paired_rows},
        ignored=r"rope_freqs\.weight",  # read into the configuration
    ),
    "gemma3": Layout(_GEMMA3),  # its norms are stored with the 1 of (1 + weight) already added
}


def gguf_config(file: GGUF) -> ModelConfig:
    """Translate a file's metadata into a configuration.

    Raises ValueError naming the file and the key: for an unknown architecture, a missing or impossible value, and for
    any setting of the architecture that is not understood, since it would change the result.
    """
    general = Fields(file.metadata, str(file.path))
    architecture = general.text("general.architecture")
    if architecture not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ValueError(f"{file.path}: architecture {architecture!r:.80} is not supported; known are {known}")
    if (parts := general.whole("split.count", 1)) > 1:
        raise ValueError(f"{file.path}: this is one of {parts} parts; join them first")
    start = f"{architecture}."
    own = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    f = Fields(own, f"{file.path} ({architecture})")
    n_layers, d_model, n_heads = f.whole("block_count"), f.whole("embedding_length"), f.whole("attention.head_count")
    if n_layers > len(file.tensors):
        raise ValueError(f"{file.path}: {n_layers} layers cannot be made of {len(file.tensors)} tensors")
    head_dim = f.whole("attention.key_length", d_model // max(n_heads, 1))
    if (width := f.whole("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"{f.where}: key_length {head_dim} and value_length {width} must be equal")
    common: dict[str, Any] = {
        "vocab_size": f.whole("vocab_size", None) or len(general.take("tokenizer.ggml.tokens", ())),
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": f.whole("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": f.whole("feed_forward_length"),
        "tied_embeddings": "output.weight" not in file.tensors,
        "norm_eps": f.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": f.number("rope.freq_base", 10000.0),
        "rotary_dim": f.whole("rope.dimension_count", head_dim),
        "rope_scaling": _rope_scaling(f),
        "max_positions": f.whole("context_length", None),
    }
    special = _gemma3(f, common) if architecture == "gemma3" else _llama(f, common, file)
    no_effect = {"expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,)}
    f.finish(harmless=("tensor_data_layout",), no_effect=no_effect)
    try:
        config = ModelConfig(**common | special)
        rope_frequencies(head_dim, config.rope_theta or 0.0, config.rope_scaling)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{f.where}: {error}") from None
    return config


def _rope_scaling(f: Fields) -> dict[str, Any] | None:
    kind = f.text("rope.scaling.type", "none")
    f.flag("rope.scaling.finetuned", False)
    factor = f.number("rope.scaling.factor", None)
    original = f.whole("rope.scaling.original_context_length", None)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(f"{f.where}: rope.scaling.type {kind!r:.80} is not supported; known are none, linear and yarn")


def _llama(f: Fields, common: dict[str, Any], file: GGUF) -> dict[str, Any]:
    head_dim, theta = common["head_dim"], common["rope_theta"]
    if common["rotary_dim"] != head_dim:
        raise ValueError(f"{f.where}: rope.dimension_count {common['rotary_dim']} must be the head width {head_dim}")
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return {}
    # Llama 3.1 and later: the file lists the divisor of every frequency but not the recipe, whose other numbers are the
    # same for all published models; the factor is the largest divisor.
    if stored.shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: tensor {stored.name!r} has shape {stored.shape}, expected {(head_dim // 2,)}")
    divisors = np.empty(stored.shape)
    stored.copy_to(divisors)
    factor = float(divisors.max())
    recipe = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    recipe["original_max_position_embeddings"] = 8192
    if factor > 0:
        plain, scaled = rope_frequencies(head_dim, theta)[0], rope_frequencies(head_dim, theta, recipe)[0]
        if np.allclose(plain / scaled, divisors, rtol=1e-5, atol=0):
            return {"rope_scaling": recipe}
    raise ValueError(f"{file.path}: tensor {stored.name!r} does not hold the frequencies of Llama 3")


def _gemma3(f: Fields, common: dict[str, Any]) -> dict[str, Any]:
    d_model, n_layers = common["d_model"], common["n_layers"]
    pattern = f.take("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray) and len(pattern) == n_layers:  # a truth value a layer
        letters = "".join("L" if windowed else "G" for windowed in pattern)
    else:  # or every how many layers one is full; older files leave out that it is the sixth
        letters = "L" * min(f.whole("attention.sliding_window_pattern", 6) - 1, n_layers) + "G"
    # The 27B model alone scales by the width of the model over the heads; the file does not say so.
    scale_width = d_model / max(common["n_heads"], 1) if n_layers == 62 else common["head_dim"]
    return {
        "window": f.whole("attention.sliding_window"),
        "layer_pattern": letters,
        "attn_scale": max(scale_width, 1) ** -0.5,
        "final_softcap": f.number("final_logit_softcapping", None),
        "rope_local_theta": f.number("rope.freq_base_swa", 10000.0),
        "post_norms": True,
        "qk_norm": True,
        "embed_scale": d_model**0.5,
        "activation": "gelu_tanh",
    }
