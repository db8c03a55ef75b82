"""What does each family of Hugging Face checkpoints call its settings and its weights?

One entry a family: how its settings become a `ModelConfig`, and the `Layout` of its tensors. A setting that is neither
understood here nor known to be harmless stops the load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..rope import rope_frequencies
from .assemble import Layout, transposed
from .fields import Fields
from .stored import Stored

# --- Names -----------------------------------------------------------------------------------------------------------

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
_PLAIN = Layout(_LLAMA, prefix="model.", ignored=_TABLES)
_GEMMA_LAYOUT = Layout(_GEMMA, prefix="model.", ignored=_TABLES, norm_offset=1.0)  # computes with 1 + weight
_DEEPSEEK_LAYOUT = Layout(_DEEPSEEK, prefix="model.", ignored=_TABLES)

# --- Settings --------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *(
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


def _activation(f: Fields, name: str, default: str) -> str:
    value = f.take(name, default)
    if value not in _ACTIVATIONS:
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
    try:
        rope_frequencies(2, theta or 10000.0, scaling)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{f.where}: {error}") from None
    return theta, scaling


def _rope(f: Fields) -> dict[str, Any]:
    """Read bases and scaling in every spelling.

    Either `rope_theta`, `rope_local_base_freq` and the block `rope_scaling`; or all in the block `rope_parameters`; or in a
    block per kind of layer inside it. `rope_scaling` holds for full layers when the kinds differ.
    """
    max_positions = f.whole("max_position_embeddings", None)
    theta, local = f.number("rope_theta"), f.number("rope_local_base_freq", None)
    nested = f.take("rope_parameters", None) or {}
    block = f.take("rope_scaling", None) or nested
    if isinstance(nested, dict) and {"full_attention", "sliding_attention"} & nested.keys():
        block = {**(nested.get("full_attention") or {}), **(f.take("rope_scaling", None) or {})}
        local_theta, local_scaling = _rope_block(f, nested.get("sliding_attention") or {}, max_positions)
        if local_scaling is not None:
            raise ValueError(
                f"{f.where}: scaled rotary angles of windowed layers are not supported: {local_scaling!r:.80}"
            )
        local = local_theta or local or theta
    own_theta, scaling = _rope_block(f, block, max_positions)
    return dict(
        rope_theta=own_theta or theta, rope_local_theta=local, rope_scaling=scaling, max_positions=max_positions
    )


def _common(f: Fields) -> dict[str, Any]:
    """Read what every family but GPT-2 spells alike."""
    d_model, n_heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    bias = f.flag("attention_bias", False)
    return dict(
        vocab_size=f.whole("vocab_size"),
        d_model=d_model,
        n_layers=f.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=f.whole("num_key_value_heads", None) or n_heads,
        head_dim=f.whole("head_dim", None) or d_model // max(n_heads, 1),
        d_ff=f.whole("intermediate_size"),
        norm_eps=f.number("rms_norm_eps"),
        tied_embeddings=f.flag("tie_word_embeddings"),
        activation=_activation(f, "hidden_act", "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
        **_rope(f),
    )


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
    return dict(window=window, layer_pattern=pattern) if window else dict(window=None)


def _mistral(f: Fields) -> dict[str, Any]:
    return _common(f) | dict(window=f.whole("sliding_window", None))


def _mixtral(f: Fields) -> dict[str, Any]:
    settings = _mistral(f)
    return settings | dict(
        n_experts=f.whole("num_local_experts"),
        n_experts_per_token=f.whole("num_experts_per_tok"),
        expert_d_ff=settings["d_ff"],
        norm_top_k=True,
    )


def _qwen2(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    n_layers, window, full = settings["n_layers"], f.whole("sliding_window", None), f.whole("max_window_layers", 28)
    window = window if f.flag("use_sliding_window", False) else None
    usual = "G" * min(full, n_layers) + "L" * (n_layers - full)
    return settings | dict(qkv_bias=True, o_bias=False) | _windows(f, n_layers, window, usual)


def _qwen3(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias", False)
    return _qwen2(f) | dict(qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma2(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    return settings | dict(
        **_windows(f, settings["n_layers"], f.whole("sliding_window"), "LG"),
        activation=_activation(f, "hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        embed_scale=settings["d_model"] ** 0.5,
        attn_scale=f.number("query_pre_attn_scalar") ** -0.5,
        attn_softcap=f.number("attn_logit_softcapping", None),
        final_softcap=f.number("final_logit_softcapping", None),
    )


def _gemma3(f: Fields) -> dict[str, Any]:
    settings = _gemma2(f)
    period = f.whole("sliding_window_pattern", None) or f.whole("_sliding_window_pattern", None) or 6
    usual = "L" * min(period - 1, settings["n_layers"]) + "G"
    return settings | _windows(f, settings["n_layers"], settings["window"], usual) | dict(qk_norm=True)


def _deepseek(f: Fields, scoring: str, methods: tuple[str, ...]) -> dict[str, Any]:
    settings = _common(f)
    for name, supported in (("scoring_func", (scoring,)), ("topk_method", methods)):
        if f.take(name, supported[0]) not in supported:
            raise ValueError(
                f"{f.where}: {name} {f.take(name)!r:.80} is not supported; known are {', '.join(supported)}"
            )
    if settings["qkv_bias"] or settings["mlp_bias"]:
        raise ValueError(f"{f.where}: attention_bias and mlp_bias are not supported")
    if settings["norm_eps"] != 1e-6:
        raise ValueError(
            f"{f.where}: rms_norm_eps {settings['norm_eps']} is not supported: the latents' norms use 1e-06"
        )
    grouped = f.take("topk_method", methods[0]) != "greedy"
    return settings | dict(
        head_dim=f.whole("qk_rope_head_dim"),
        n_kv_heads=settings["n_heads"],
        kv_lora_rank=f.whole("kv_lora_rank"),
        q_lora_rank=f.whole("q_lora_rank", None),
        qk_nope_head_dim=f.whole("qk_nope_head_dim"),
        qk_rope_head_dim=f.whole("qk_rope_head_dim"),
        v_head_dim=f.whole("v_head_dim"),
        rope_interleaved=f.flag("rope_interleave", True),
        n_experts=f.whole("n_routed_experts"),
        n_experts_per_token=f.whole("num_experts_per_tok"),
        expert_d_ff=f.whole("moe_intermediate_size"),
        n_shared_experts=f.whole("n_shared_experts"),
        n_dense_layers=f.whole("first_k_dense_replace"),
        routed_scaling=f.number("routed_scaling_factor"),
        router=scoring,
        n_expert_groups=f.whole("n_group", 1) if grouped else 1,
        n_top_groups=f.whole("topk_group", 1) if grouped else 1,
    )


def _deepseek_v2(f: Fields) -> dict[str, Any]:
    f.take("n_group", None), f.take("topk_group", None)  # without a meaning for the greedy method
    return _deepseek(f, "softmax", ("greedy", "group_limited_greedy"))


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    settings = _deepseek(f, "sigmoid", ("noaux_tc",))
    return settings | dict(router_correction=True, group_score="top2", norm_top_k=f.flag("norm_topk_prob"))


def _gpt_oss(f: Fields) -> dict[str, Any]:
    settings = _common(f)
    return settings | dict(
        **_windows(f, settings["n_layers"], f.whole("sliding_window"), "LG"),
        attn_sinks=True,
        mlp_bias=True,
        swiglu_limit=f.number("swiglu_limit"),
        n_experts=f.whole("num_local_experts"),
        n_experts_per_token=f.whole("num_experts_per_tok"),
        expert_d_ff=settings["d_ff"],
        router_bias=True,
        norm_top_k=True,
    )


def _gpt2(f: Fields) -> dict[str, Any]:
    d_model, n_heads = f.whole("n_embd"), f.whole("n_head")
    return dict(
        vocab_size=f.whole("vocab_size"),
        d_model=d_model,
        n_layers=f.whole("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // max(n_heads, 1),
        d_ff=f.whole("n_inner", None) or 4 * d_model,
        tied_embeddings=f.flag("tie_word_embeddings"),
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon"),
        attn_scale=None if f.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        rope_theta=None,
        max_positions=f.whole("n_positions"),
        activation=_activation(f, "activation_function", "gelu_new"),
        gated=False,
        mlp_bias=True,
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """Tell how to read one family: its settings, its tensors, and what a setting is when config.json does not have it.

    An absent setting is not a null one: Mistral without `sliding_window` has a window, with a null it has none.
    """

    settings: Callable[[Fields], dict[str, Any]]
    layout: Layout
    defaults: Mapping[str, Any]


_UNTIED = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_GEMMA2 = _UNTIED | {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT = {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
# Values: the defaults of the configuration classes of transformers 5.
FAMILIES = {
    "gpt2": Family(
        _gpt2,
        Layout(
            _GPT2,
            views={name: transposed for part in ("qkv", "o", "up", "down") for name in _GPT2[part]},
            prefix="transformer.",
            ignored=_TABLES,
        ),
        {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024},
    ),
    "llama": Family(_common, _PLAIN, _UNTIED),
    "mistral": Family(_mistral, _PLAIN, _UNTIED | {"sliding_window": 4096}),
    "mixtral": Family(
        _mixtral,
        Layout(_MIXTRAL, prefix="model.", ignored=_TABLES),
        _UNTIED | _MIXTURE | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen2": Family(_qwen2, _PLAIN, _UNTIED | {"sliding_window": 4096}),
    "qwen3": Family(_qwen3, _PLAIN, _UNTIED | {"sliding_window": 4096, "head_dim": 128}),
    "gemma2": Family(
        _gemma2, _GEMMA_LAYOUT, _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3_text": Family(_gemma3, _GEMMA_LAYOUT, _GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}),
    "deepseek_v2": Family(_deepseek_v2, _DEEPSEEK_LAYOUT, _UNTIED | _LATENT | {"q_lora_rank": 1536}),
    "deepseek_v3": Family(
        _deepseek_v3,
        _DEEPSEEK_LAYOUT,
        _UNTIED
        | _LATENT
        | {"q_lora_rank": 1536, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    ),
    "gpt_oss": Family(
        _gpt_oss,
        Layout(
            _GPT_OSS,
            views={
                **{
                    name: _alternating
                    for part in ("experts_gate_up", "experts_gate_up_bias")
                    for name in _GPT_OSS[part]
                },
                **{name: transposed for name in _GPT_OSS["experts_down"]},
            },
            prefix="model.",
            ignored=_TABLES,
        ),
        _UNTIED
        | {
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
        }
        | {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
}

# Settings that do not touch the logits of a text: bookkeeping, training, generation.
_HARMLESS = frozenset(
    """
    model_type architectures torch_dtype dtype transformers_version _name_or_path auto_map use_cache cache_implementation
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class task_specific_params
    initializer_range attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop router_aux_loss_coef
    router_jitter_noise output_router_logits seq_aux aux_loss_alpha num_nextn_predict_layers ep_size pretraining_tp
    reorder_and_upcast_attn attn_implementation _attn_implementation id2label label2id problem_type chunk_size_feed_forward
    is_encoder_decoder is_decoder output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj n_ctx qk_head_dim
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    remove_invalid_values torchscript use_bfloat16 tf_legacy_loss tie_encoder_decoder initial_context_length
    experts_per_token
    """.split()
)
# Settings that would touch them, at the values that change nothing.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "moe_layer_freq": (1,),
    "norm_topk_prob": (False,),
    "swiglu_alpha": (1.702,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def understand(values: Mapping[str, Any], path: Path, tensors: Mapping[str, Stored]) -> tuple[ModelConfig, Layout]:
    """Translate the settings of `config.json` and say how the family stores its weights.

    Raises ValueError naming the file and the field: for an unknown family, a missing or impossible value, and for every
    setting that is neither understood nor known to leave the result as it is.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{path}: model_type {name!r:.80} is not supported; known are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    f = Fields({**family.defaults, **values}, f"{path} ({name})")
    n_layers = f.whole("n_layer" if name == "gpt2" else "num_hidden_layers")
    if n_layers > len(tensors):
        raise ValueError(f"{f.where}: {n_layers} layers cannot be made of {len(tensors)} tensors")
    settings = family.settings(f)
    f.finish(_HARMLESS, _NO_EFFECT)
    try:
        config = ModelConfig(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{f.where}: {error}") from None
    ignored = [family.layout.ignored]
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    if values.get("num_nextn_predict_layers"):  # layers that guess further tokens, behind those that make logits
        ignored.append(rf"model\.layers\.{n_layers}\..*")
    return config, dataclasses.replace(family.layout, ignored="|".join(ignored))
