"""Are the settings and tensors of every family understood as transformers understands them?

The fixtures are tiny models with everything far from its initial value, made and run by transformers in float64
(`fixtures/make_families.py`). The settings that published models come with are listed here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minikv
from minikv import cost
from minikv.backend import Backend
from minikv.config import ModelConfig
from minikv.weights.families import FAMILIES, understand
from support import host

FIXTURES = Path(__file__).parent / "fixtures" / "families"
FOLDERS = [
    *("gpt2", "llama2", "llama3", "llama31", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "gpt_oss"),
]
# As a share of max|logit|. In float32 the models' own rounding dominates: transformers' is within 4e-6.
TOLERANCE = {"float32": 1e-4, "float64": 1e-6}


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str, backend: Backend, dtype: str) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    ids, expected = reference["ids"], reference["logits"]
    allowed = TOLERANCE[dtype] * np.abs(expected).max()
    model, _ = minikv.load(FIXTURES / name, backend=backend, dtype=dtype)
    whole = host(model.step(ids)).astype(np.float64)
    assert np.abs(whole - expected).max() <= allowed
    rng = np.random.default_rng(len(name))
    for _ in range(2):
        cuts = np.unique(rng.integers(1, ids.shape[1], rng.integers(1, 8)))
        caches = model.new_caches()
        steps = [host(model.step(part, caches)) for part in np.split(ids, cuts, axis=1)]
        assert np.abs(np.concatenate(steps, axis=1) - expected).max() <= allowed, f"cut at {cuts}"


@pytest.mark.parametrize("name", FOLDERS)
def test_cache_bytes_follow_from_the_geometry(name: str) -> None:
    """What real caches hold after 1, W-1, W, W+1 and 10W tokens is what `cost.cache_bytes` says of the model."""
    model, _ = minikv.load(FIXTURES / name)
    config = model.config
    window = config.window or 6
    caches, fed = model.new_caches(), 0
    rng = np.random.default_rng(0)
    for length in (1, window - 1, window, window + 1, 10 * window):
        if config.rope_theta is None and length > (config.max_positions or 0):
            continue  # learned positions end
        if length > fed:
            model.step(rng.integers(0, config.vocab_size, (3, length - fed)), caches)
            fed = length
        assert sum(cache.nbytes_used for cache in caches) == cost.cache_bytes(config, 3, fed, cost.FP32)


@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_continuation_is_that_of_transformers(name: str) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    model, _ = minikv.load(FIXTURES / name)
    for ids, expected in zip(reference["ids"], reference["greedy"], strict=True):
        assert minikv.generate(model, ids.tolist(), len(expected)).ids == expected.tolist()


# --- Settings

ROPE = {"rope_theta": 500000.0, "rope_scaling": None}
LLAMA3 = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
YARN |= {"original_max_position_embeddings": 4096}


def sizes(d_model: int, heads: int, kv: int, d_ff: int, layers: int, vocab: int) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "num_hidden_layers", "vocab_size")
    return dict(zip(names, (d_model, heads, kv, d_ff, layers, vocab), strict=True))


COMMON = {
    **{
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "initializer_range": 0.02,
    },
    **{"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "tie_word_embeddings": False},
}
# config.json as published, without the file's own spacing: the sizes and special settings of each model.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"},
        **{
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
        },
        **{"layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        **{"resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index"},
        **{"summary_proj_to_labels": True, "summary_use_proj": True, "vocab_size": 50257},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "Llama-2-7b": {
        **{"model_type": "llama", **sizes(4096, 32, 32, 11008, 32, 32000), **COMMON, "pretraining_tp": 1},
        **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None},
    },
    "Llama-3.1-8B": {
        **{"model_type": "llama", **sizes(4096, 32, 8, 14336, 32, 128256), **COMMON, "pretraining_tp": 1},
        **{"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05},
        **{"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
    },
    "Mistral-7B-v0.1": {
        **{"model_type": "mistral", **sizes(4096, 32, 8, 14336, 32, 32000), **COMMON, "sliding_window": 4096},
        **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
    },
    "Mixtral-8x7B-v0.1": {
        **{"model_type": "mixtral", **sizes(4096, 32, 8, 14336, 32, 32000), **COMMON, "sliding_window": None},
        **{"max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-05},
        **{"output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02},
    },
    "Qwen2.5-0.5B": {
        **{"model_type": "qwen2", **sizes(896, 14, 2, 4864, 24, 151936), **COMMON, "tie_word_embeddings": True},
        **{"max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
        **{"sliding_window": 32768, "use_sliding_window": False, "use_mrope": False},
    },
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", **sizes(1024, 16, 8, 3072, 28, 151936), **COMMON, "tie_word_embeddings": True},
        **{"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": 28},
        **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None},
        **{"use_sliding_window": False},
    },
    "gemma-2-2b": {
        **{
            "model_type": "gemma2",
            **sizes(2304, 8, 4, 9216, 26, 256000),
            **COMMON,
            "attention_bias": False,
            "head_dim": 256,
        },
        **{"attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0},
        **{
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
        },
        **{"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096},
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        **{"model_type": "gemma3_text", **sizes(1152, 4, 1, 6912, 26, 262144), **COMMON, "attention_bias": False},
        **{"attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None},
        **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768},
        **{"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None},
        **{"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "tie_word_embeddings": True},
    },
    "DeepSeek-V2-Lite": {
        **{"model_type": "deepseek_v2", **sizes(2048, 16, 16, 10944, 27, 102400), **COMMON, "attention_bias": False},
        **{"auto_map": {"AutoConfig": "c.C"}, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "kv_lora_rank": 512},
        **{"max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6},
        **{"pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"rms_norm_eps": 1e-06, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 10000, "seq_aux": True},
        **{"routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy"},
        "v_head_dim": 128,
    },
    "DeepSeek-V3": {
        **{"model_type": "deepseek_v3", **sizes(7168, 128, 128, 18432, 61, 129280), **COMMON, "attention_bias": False},
        **{"ep_size": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512, "max_position_embeddings": 163840},
        **{"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1},
        **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06},
        **{"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}, "rope_theta": 10000},
        **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc"},
        "v_head_dim": 128,
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", **sizes(2880, 64, 8, 2880, 24, 201088), **COMMON, "attention_bias": True},
        **{"experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096, "max_position_embeddings": 131072},
        **{
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
        },
        **{"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9},
        **{"sliding_window": 128, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"rope_type": "yarn", "truncate": False},
        },
    },
}


def config_of(values: dict[str, Any], drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (values | changes).items() if name not in drop}
    return understand(values, Path("config.json"), dict.fromkeys(map(str, range(100))))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_models_are_understood(name: str) -> None:
    values, config = PUBLISHED[name], config_of(PUBLISHED[name])
    assert config.d_model == values.get("hidden_size", values.get("n_embd"))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_what_the_special_settings_mean() -> None:
    config = {name: config_of(values) for name, values in PUBLISHED.items()}
    assert config["gpt2"].rope_theta is None and config["gpt2"].d_ff == 3072 and not config["gpt2"].gated
    assert config["gpt2"].activation == "gelu_tanh" and config["gpt2"].norm == "layer"
    assert config["Mistral-7B-v0.1"].pattern == "L" * 32 and config["Mistral-7B-v0.1"].window == 4096
    assert config["Mixtral-8x7B-v0.1"].pattern == "G" * 32 and config["Mixtral-8x7B-v0.1"].norm_top_k
    assert config["Qwen2.5-0.5B"].qkv_bias and not config["Qwen2.5-0.5B"].o_bias
    assert config["Qwen2.5-0.5B"].windows == (None,) * 24
    assert config["Qwen3-0.6B"].qk_norm and config["Qwen3-0.6B"].head_dim == 128
    assert config["gemma-2-2b"].pattern == "LG" * 13 and config["gemma-2-2b"].attn_scale == 1 / 16
    assert config["gemma-2-2b"].attn_softcap == 50 and config["gemma-2-2b"].final_softcap == 30
    assert config["gemma-2-2b"].embed_scale == 48 and config["gemma-2-2b"].activation == "gelu_tanh"
    assert config["gemma-3-1b"].pattern == ("LLLLLG" * 5)[:26] and config["gemma-3-1b"].rope_local_theta == 1e4
    assert config["gemma-3-1b"].rope_theta == 1e6 and config["gemma-3-1b"].qk_norm
    lite = config["DeepSeek-V2-Lite"]
    assert lite.q_lora_rank is None and lite.rope_interleaved and (lite.n_expert_groups, lite.n_top_groups) == (1, 1)
    v3 = config["DeepSeek-V3"]
    assert (v3.router, v3.group_score, v3.n_expert_groups, v3.n_top_groups) == ("sigmoid", "top2", 8, 4)
    assert v3.router_correction and v3.norm_top_k and v3.routed_scaling == 2.5 and v3.n_dense_layers == 3
    oss = config["gpt-oss-20b"]
    assert oss.pattern == "LG" * 12 and oss.attn_sinks and oss.swiglu_limit == 7 and oss.router_bias and oss.o_bias


def test_absent_is_not_null() -> None:
    mistral = PUBLISHED["Mistral-7B-v0.1"]
    assert config_of(mistral, drop=("sliding_window",)).window == 4096
    assert config_of(mistral, sliding_window=None).window is None
    assert config_of(PUBLISHED["gemma-2-2b"], drop=("attn_logit_softcapping",)).attn_softcap == 50
    assert config_of(PUBLISHED["gemma-2-2b"], attn_logit_softcapping=None).attn_softcap is None
    assert config_of(PUBLISHED["DeepSeek-V2-Lite"], drop=("q_lora_rank",)).q_lora_rank == 1536
    llama = PUBLISHED["Llama-3.1-8B"]
    for config in (config_of(llama, drop=("num_key_value_heads",)), config_of(llama, num_key_value_heads=None)):
        assert config.n_kv_heads == 32
    assert config_of(PUBLISHED["Qwen3-0.6B"], drop=("head_dim",)).head_dim == 128  # not 1024 / 16
    assert not config_of(PUBLISHED["Qwen2.5-0.5B"], attention_bias=True).o_bias  # a field of other families
    assert config_of(llama, head_dim=None).head_dim == 128 and config_of(llama, head_dim=96).head_dim == 96


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_parameters": {**LLAMA3, "type": "llama3"}, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {**LLAMA3, "type": "llama3", "rope_theta": 5e5}}},
    ],
)
def test_every_spelling_of_the_rotary_block(spelling: dict[str, Any]) -> None:
    config = config_of(PUBLISHED["Llama-3.1-8B"], drop=("rope_theta", "rope_scaling"))
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    config = config_of({k: v for k, v in PUBLISHED["Llama-3.1-8B"].items() if not k.startswith("rope")}, **spelling)
    assert config.rope_theta == 5e5 and config.rope_scaling == {**LLAMA3, "rope_type": "llama3"}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ],
)
def test_every_spelling_of_two_rotary_bases(spelling: dict[str, Any]) -> None:
    config = config_of({k: v for k, v in PUBLISHED["gemma-3-1b"].items() if not k.startswith("rope")}, **spelling)
    assert (config.rope_theta, config.rope_local_theta) == (2e6, 500.0)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}


def test_every_spelling_of_the_window_pattern() -> None:
    letters = {"L": "sliding_attention", "G": "full_attention"}
    qwen = PUBLISHED["Qwen2.5-0.5B"] | {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 5}
    assert config_of(qwen, max_window_layers=3).pattern == "GGGLL"
    assert config_of(qwen, max_window_layers=9).pattern == "GGGGG"
    assert config_of(qwen, max_window_layers=0).pattern == "LLLLL"
    listed = [letters[kind] for kind in "LGGLG"]
    assert config_of(qwen, layer_types=listed).windows == (64, None, None, 64, None)
    gemma = PUBLISHED["gemma-3-1b"] | {"num_hidden_layers": 5}
    assert config_of(gemma, sliding_window_pattern=2).pattern == "LGLGL"
    assert config_of(gemma, sliding_window_pattern=2, layer_types=listed).pattern == "LGGLG"
    assert config_of(gemma, drop=("sliding_window_pattern",), num_hidden_layers=7).pattern == "LLLLLGL"
    assert config_of(PUBLISHED["gpt-oss-20b"], drop=("layer_types",)).pattern == "LG" * 12
    with pytest.raises(ValueError, match="layer_types must list 5 times"):
        config_of(gemma, layer_types=listed[:4])
    with pytest.raises(ValueError, match=r"layer_types must list .*chunked_attention"):
        config_of(gemma, layer_types=["chunked_attention"] * 5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"^config.json \(\w+\): field 'logit_scale' = 0.5 is not supported$"):
        config_of(PUBLISHED[name], logit_scale=0.5)
    config_of(PUBLISHED[name], logit_scale=None)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Llama-3.1-8B", {"model_type": "mamba"}, "model_type 'mamba' is not supported; known are gpt2, llama"),
        ("Llama-3.1-8B", {"model_type": ["llama"]}, "model_type"),
        ("Llama-3.1-8B", {"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "rope type"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "base above 1, got 1.0"),
        (
            "Llama-3.1-8B",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": "1"}},
            "mscale_all_dim, got '1'",
        ),
        (
            "Llama-3.1-8B",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}},
            "low_freq_factor below high_freq_factor",
        ),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1]}}, "'short_factor'"),
        ("Llama-3.1-8B", {"rope_scaling": [1]}, "rotary block"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
        ("Llama-3.1-8B", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama-3.1-8B", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("Llama-3.1-8B", {"hidden_act": ["silu"]}, "hidden_act"),
        ("Llama-3.1-8B", {"num_hidden_layers": 10**6}, "1000000 layers cannot be made of 100 tensors"),
        ("Llama-3.1-8B", {"hidden_size": 4096.0}, "'hidden_size' must be a whole number"),
        ("Llama-3.1-8B", {"hidden_size": True}, "'hidden_size' must be a whole number"),
        ("Llama-3.1-8B", {"hidden_size": None}, "'hidden_size' is missing"),
        ("Llama-3.1-8B", {"num_key_value_heads": 5}, "32 query heads cannot share 5 key/value heads"),
        ("Llama-3.1-8B", {"rms_norm_eps": "1e-5"}, "'rms_norm_eps' must be a positive finite number"),
        ("Llama-3.1-8B", {"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' = True"),
        ("gpt2", {"add_cross_attention": True}, "'add_cross_attention' = True"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' = True"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "windowed layers",
        ),
        ("DeepSeek-V2-Lite", {"attention_bias": True}, "attention_bias"),
        ("DeepSeek-V2-Lite", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "'norm_topk_prob' = True"),
        ("DeepSeek-V2-Lite", {"moe_layer_freq": 2}, "'moe_layer_freq' = 2"),
        ("DeepSeek-V2-Lite", {"num_experts_per_tok": 65}, "n_experts_per_token"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.5}, "'swiglu_alpha' = 1.5"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_settings_that_cannot_be_followed_are_named(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        config_of(PUBLISHED[name], **change)
    message = str(refusal.value)
    assert message.startswith("config.json") and "\n" not in message and says in message, message


def test_every_family_has_a_fixture() -> None:
    fixtures = {understood(FIXTURES / name) for name in FOLDERS}
    assert fixtures == set(FAMILIES)


def understood(folder: Path) -> str:
    from minikv.weights.files import read_json

    return read_json(folder / "config.json")["model_type"]
