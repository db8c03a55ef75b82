"""What does each family of Hugging Face checkpoints call its settings, and what do they mean here?

One entry a family, by `model_type`. A setting that is neither understood here nor known to be harmless stops the load.
What the families call their weights stands in `names.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..rope import rope_frequencies
from .assemble import Layout
from .fields import Fields
from .names import LAYOUTS
from .stored import Stored

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


def _activation(f: Fields, name: str, default: str) -> str:
    value = f.take(name, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"{f.where}: {name} {value!r:.80} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _rope_block(f: Fields, block: Any, max_positions: int | None) -> tuple[float | None, dict[str, Any] | None]:
    """Return base and scaling of one rotary block; either may be missing."""
    if not isinstance(block, dict):
        raise ValueError(f"{f.where}: a rotary block must be an object, got {block!r:.80}")
    block = {key: value for key, value in block.items() if value is not None}
    if block.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{f.where}: a partial_rotary_factor other than 1 is not supported")
    for key in block.keys() - _ROPE_KEYS:
        raise ValueError(f"{f.where}: field {key!r:.80} = {block[key]!r:.80} of a rotary block is not supported")
    theta = Fields(block, f.where).number("rope_theta", None)
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return theta, None
    scaling = {"rope_type": kind} | {key: block[key] for key in block if key not in ("rope_theta", "rope_type", "type")}
    if kind in ("llama3", "yarn") and max_positions is not None:
        scaling.setdefault("original_max_position_embeddings", max_positions)
    return theta, scaling


def _rope(f: Fields) -> dict[str, Any]:
    """Read bases and scaling in every spelling.

    Either `rope_theta`, `rope_local_base_freq` and the block `rope_scaling`; or all in the block `rope_parameters`; or
    in a block per kind of layer inside it. `rope_scaling` holds for full layers when the kinds differ.
    """
    max_positions = f.whole("max_position_embeddings", None)
    theta, local = f.number("rope_theta"), f.number("rope_local_base_freq", None)
    full: Any = f.take("rope_parameters", None) or {}
    windowed: Any = {}
    if isinstance(full, dict) and {"full_attention", "sliding_attention"} & full.keys():
        full, windowed = full.get("full_attention") or {}, full.get("sliding_attention") or {}
        local = local or theta
    local_theta, local_scaling = _rope_block(f, windowed, max_positions)
    if local_scaling is not None:
        raise ValueError(f"{f.where}: a rotary scaling of windowed layers is not supported, got {local_scaling!r:.80}")
    full_theta, scaling = _rope_block(f, full, max_positions)
    if older := f.take("rope_scaling", None):
        older_theta, scaling = _rope_block(f, older, max_positions)
        full_theta = older_theta or full_theta
    return {
        "rope_theta": full_theta or theta,
        "rope_local_theta": local_theta or local,
        "rope_scaling": scaling,
        "max_positions": max_positions,
    }


def _common(f: Fields) -> dict[str, Any]:
    """Read what every family but GPT-2 spells alike."""
    d_model, n_heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    bias = f.flag("attention_bias", False)
    return {
        "vocab_size": f.whole("vocab_size"),
        "d_model": d_model,
        "n_layers": f.whole("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": f.whole("num_key_value_heads", None) or n_heads,
        "head_dim": f.whole("head_dim", None) or d_model // max(n_heads, 1),
        "d_ff": f.whole("intermediate_size"),
        "norm_eps": f.number("rms_norm_eps"),
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "activation": _activation(f, "hidden_act", "silu"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": f.flag("mlp_bias", False),
        **_rope(f),
    }


def _windows(f: Fields, n_layers: int, window: int | None, usual: str) -> dict[str, Any]:
    """Read which layers see a window: from a list, or as is usual in the family, one letter a layer, tiled."""
    letters = {"sliding_attention": "L", "full_attention": "G"}
    kinds = f.take("layer_types", None)
    if kinds is None:
        pattern = usual
    elif isinstance(kinds, list) and len(kinds) == n_layers and all(kind in list(letters) for kind in kinds):
        pattern = "".join(letters[kind] for kind in kinds)
    else:
        raise ValueError(f"{f.where}: layer_types must list {n_layers} times {' or '.join(letters)}, got {kinds!r:.80}")
    return {"window": window, "layer_pattern": pattern} if window else {"window": None}


def _mistral(f: Fields) -> dict[str, Any]:
    return _common(f) | {"window": f.whole("sliding_window", None)}


def _mixtral(f: Fields) -> dict[str, Any]:
    settings = _mistral(f)
    return settings | {
        "n_experts": f.whole("num_local_experts"),
        "n_experts_per_token": f.whole("num_experts_per_tok"),
        "expert_d_ff": settings["d_ff"],
        "norm_top_k": True,
    }


def _qwen2(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    n_layers, window, full = settings["n_layers"], f.whole("sliding_window", None), f.whole("max_window_layers", 28)
    window = window if f.flag("use_sliding_window", False) else None
    usual = "G" * min(full, n_layers) + "L" * (n_layers - full)
    return settings | {"qkv_bias": True, "o_bias": False} | _windows(f, n_layers, window, usual)


def _qwen3(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias", False)
    return _qwen2(f) | {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma2(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    return settings | {
        **_windows(f, settings["n_layers"], f.whole("sliding_window"), "LG"),
        "activation": _activation(f, "hidden_activation", "gelu_pytorch_tanh"),
        "post_norms": True,
        "embed_scale": settings["d_model"] ** 0.5,
        "attn_scale": f.number("query_pre_attn_scalar") ** -0.5,
        "attn_softcap": f.number("attn_logit_softcapping", None),
        "final_softcap": f.number("final_logit_softcapping", None),
    }


def _gemma3(f: Fields) -> dict[str, Any]:
    settings = _gemma2(f)
    if settings.pop("attn_softcap") is not None:
        raise ValueError(f"{f.where}: attn_logit_softcapping is not supported: this family's attention does not use it")
    period = f.whole("sliding_window_pattern", 6)
    usual = "L" * min(period - 1, settings["n_layers"]) + "G"
    return settings | _windows(f, settings["n_layers"], settings["window"], usual) | {"qk_norm": True}


def _deepseek(f: Fields, scoring: str, methods: tuple[str, ...]) -> dict[str, Any]:
    settings = _common(f)
    for name, known in (("scoring_func", (scoring,)), ("topk_method", methods)):
        if (value := f.take(name, known[0])) not in known:
            raise ValueError(f"{f.where}: {name} {value!r:.80} is not supported; known: {', '.join(known)}")
    if settings["qkv_bias"] or settings["mlp_bias"]:
        raise ValueError(f"{f.where}: attention_bias and mlp_bias are not supported")
    if (
        eps := settings["norm_eps"]
    ) != 1e-6:  # the latents' norms have their own, of this value; published models agree
        raise ValueError(f"{f.where}: rms_norm_eps {eps} is not supported, only 1e-06 is")
    grouped = f.take("topk_method", methods[0]) != "greedy"
    return settings | {
        "head_dim": f.whole("qk_rope_head_dim"),
        "n_kv_heads": settings["n_heads"],
        "kv_lora_rank": f.whole("kv_lora_rank"),
        "q_lora_rank": f.whole("q_lora_rank", None),
        "qk_nope_head_dim": f.whole("qk_nope_head_dim"),
        "qk_rope_head_dim": f.whole("qk_rope_head_dim"),
        "v_head_dim": f.whole("v_head_dim"),
        "rope_interleaved": f.flag("rope_interleave", True),
        "n_experts": f.whole("n_routed_experts"),
        "n_experts_per_token": f.whole("num_experts_per_tok"),
        "expert_d_ff": f.whole("moe_intermediate_size"),
        "n_shared_experts": f.whole("n_shared_experts"),
        "n_dense_layers": f.whole("first_k_dense_replace"),
        "routed_scaling": f.number("routed_scaling_factor"),
        "router": scoring,
        "n_expert_groups": f.whole("n_group", 1) if grouped else 1,
        "n_top_groups": f.whole("topk_group", 1) if grouped else 1,
    }


def _deepseek_v2(f: Fields) -> dict[str, Any]:
    for name in ("n_group", "topk_group"):  # published files state them for the greedy method too, which has no groups
        f.take(name, None)
    return _deepseek(f, "softmax", ("greedy", "group_limited_greedy"))


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    settings = _deepseek(f, "sigmoid", ("noaux_tc",))
    return settings | {"router_correction": True, "group_score": "top2", "norm_top_k": f.flag("norm_topk_prob")}


def _gpt_oss(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    return settings | {
        **_windows(f, settings["n_layers"], f.whole("sliding_window"), "LG"),
        "attn_sinks": True,
        "mlp_bias": True,
        "swiglu_limit": f.number("swiglu_limit"),
        "n_experts": f.whole("num_local_experts"),
        "n_experts_per_token": f.whole("num_experts_per_tok"),
        "expert_d_ff": settings["d_ff"],
        "router_bias": True,
        "norm_top_k": True,
    }


def _gpt2(f: Fields) -> dict[str, Any]:
    d_model, n_heads = f.whole("n_embd"), f.whole("n_head")
    return {
        "vocab_size": f.whole("vocab_size"),
        "d_model": d_model,
        "n_layers": f.whole("n_layer"),
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": d_model // max(n_heads, 1),
        "d_ff": f.whole("n_inner", None) or 4 * d_model,
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "norm": "layer",
        "norm_eps": f.number("layer_norm_epsilon"),
        "attn_scale": None if f.flag("scale_attn_weights", True) else 1.0,
        "qkv_bias": True,
        "o_bias": True,
        "rope_theta": None,
        "max_positions": f.whole("n_positions"),
        "activation": _activation(f, "activation_function", "gelu_new"),
        "gated": False,
        "mlp_bias": True,
    }


_Settings = Callable[[Fields], dict[str, Any]]
_PLAIN = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LOCAL = _PLAIN | {"sliding_window": 4096}
_GEMMA = _LOCAL | {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
_LATENT = _PLAIN | {"q_lora_rank": 1536}
_GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
# How to read a family, and what a setting is when config.json does not have it: the defaults of transformers' classes.
# Absent is not null: Mistral without `sliding_window` has a window, with a null it has none.
FAMILIES: dict[str, tuple[_Settings, dict[str, Any]]] = {
    "gpt2": (_gpt2, {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024}),
    "llama": (_common, _PLAIN),
    "mistral": (_mistral, _LOCAL),
    "mixtral": (
        _mixtral,
        _PLAIN | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": (_qwen2, _LOCAL),
    "qwen3": (_qwen3, _LOCAL | {"head_dim": 128}),
    "gemma2": (_gemma2, _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": (_gemma3, _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}),
    "deepseek_v2": (
        _deepseek_v2,
        _LATENT | {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v3": (
        _deepseek_v3,
        _LATENT
        | {"first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    ),
    "gpt_oss": (
        _gpt_oss,
        _PLAIN
        | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE, "head_dim": 64}
        | {"attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
    ),
}

# Settings that do not touch the logits of a text: bookkeeping, training, generation.
_HARMLESS = {
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map"),
    *("use_cache", "cache_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
    *("sep_token_id", "decoder_start_token_id", "tokenizer_class", "task_specific_params", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef"),
    *("router_jitter_noise", "output_router_logits", "seq_aux", "aux_loss_alpha", "num_nextn_predict_layers"),
    *("ep_size", "pretraining_tp", "reorder_and_upcast_attn", "attn_implementation", "_attn_implementation"),
    *("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("n_ctx", "qk_head_dim", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
    *("remove_invalid_values", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder"),
    *("initial_context_length", "experts_per_token", "_sliding_window_pattern", "is_llama_config"),
}
# Settings that would touch them, at the values that change nothing.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "moe_layer_freq": (1,),
    "norm_topk_prob": (False,),
    "swiglu_alpha": (1.702,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
}


def understand(values: Mapping[str, Any], path: Path, tensors: Mapping[str, Stored]) -> tuple[ModelConfig, Layout]:
    """Translate the settings of `config.json` and say how the family stores its weights.

    Raises ValueError naming the file and the field: for an unknown family, a missing or impossible value, and for every
    setting that is neither understood nor known to leave the result as it is.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{path}: model_type {name!r:.80} is not supported; known are {', '.join(FAMILIES)}")
    read, defaults = FAMILIES[name]
    f = Fields({**defaults, **values}, f"{path} ({name})")
    n_layers = f.whole("n_layer" if name == "gpt2" else "num_hidden_layers")
    if n_layers > len(tensors):
        raise ValueError(f"{f.where}: {n_layers} layers cannot be made of {len(tensors)} tensors")
    settings = read(f)
    f.finish(_HARMLESS, _NO_EFFECT)
    try:
        config = ModelConfig(**settings)
        if config.rope_theta is not None:
            rope_frequencies(2, config.rope_theta, config.rope_scaling)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{f.where}: {error}") from None
    ignored = [LAYOUTS[name].ignored]
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    if values.get("num_nextn_predict_layers"):  # layers that guess further tokens, behind those that make logits
        ignored.append(rf"model\.layers\.{n_layers}\..*")
    return config, dataclasses.replace(LAYOUTS[name], ignored="|".join(ignored))
