"""Are both ways of computing latent attention one function, and is what it caches as small as promised?

That it is the paper's function, `test_theorem.py` shows over whole models; here are its two forms side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minikv import ModelConfig, weight_shapes
from minikv.mla import LatentAttention, cheaper_form
from strategies import SEEDS, configs, feeds
from support import assert_close, expected_logits, host, make_model, make_weights, normal, run
from test_model import LATENT, TEXT


def with_form(model: Any, form: str | None) -> Any:
    for layer in model.layers:
        layer.attention.form = form
    return model


@given(config=configs(latent=True), seed=SEEDS, data=st.data())
def test_absorbed_and_expanded_are_one_function(backend, config, seed, data):
    feed = data.draw(feeds(config.vocab_size, config.window))
    weights = make_weights(config, seed)
    expected = expected_logits(config, weights, feed.texts)
    assume(expected is not None)
    found = {}
    for form in ("absorbed", "expanded", None):
        model = with_form(make_model(config, weights, backend), form)
        found[form] = run(model, model.new_caches(data.draw(st.sampled_from([None, "kv", "concat"]))), feed)
    for row, want in enumerate(expected[0]):
        for form in found:
            assert_close(found[form][row], want, "float64", scale=expected[1])


@given(
    seed=SEEDS,
    sizes=st.tuples(*[st.sampled_from(s) for s in ([1, 3], [2, 5, 16], [1, 4], [2, 4], [1, 6])]),
    n_tokens=st.integers(1, 9),
)
def test_one_layer_in_both_forms_agrees_to_the_last_bits(backend, seed, sizes, n_tokens):
    """No norm and no other layer in between: 32 eps of the largest output, and nothing else."""
    n_heads, rank, nope, rope, value = sizes
    config = replace(
        LATENT, n_heads=n_heads, n_kv_heads=n_heads, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope,
        v_head_dim=value, rope_theta=None, max_positions=99,
    )  # fmt: skip
    weights = {n.removeprefix("layers.0."): backend.asarray(w) for n, w in make_weights(config, seed).items()}
    x, pos = backend.asarray(normal(seed, 2, n_tokens, 12)), np.tile(np.arange(n_tokens), (2, 1))
    outs = []
    for form in ("absorbed", "expanded"):
        layer = LatentAttention(config, weights)
        layer.form = form
        outs.append(host(layer(x, pos, None, make_model(config, make_weights(config, 0), backend).new_caches()[0])))
    # What cancels in the last product is measured by its parts, not by what is left.
    o = np.abs(host(weights["o"])).sum(axis=1).max()
    assert_close(outs[0], outs[1], "float64", scale=max(np.abs(outs[1]).max(), o))


def test_absorbed_is_multi_query_attention_over_latents(backend, monkeypatch):
    """Shape by shape: one key/value head as wide as the latent, and no key or value of a head is ever made."""
    import minikv.mla

    seen = {}
    attend = minikv.mla.attention

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen[form] = q.shape, k.shape, v.shape
        return attend(q, k, v, **options)

    monkeypatch.setattr(minikv.mla, "attention", watched)
    model = make_model(LATENT, make_weights(LATENT, 3), backend)
    for form in ("absorbed", "expanded"):
        with_form(model, form).step([TEXT])
    c, T = LATENT, len(TEXT)
    rank, rope, nope, value = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
    assert seen["absorbed"] == ((1, c.n_heads, T, rank + rope), (1, 1, T, rank + rope), (1, 1, T, rank))
    assert seen["expanded"] == (
        (1, c.n_heads, T, nope + rope),
        (1, c.n_heads, T, nope + rope),
        (1, c.n_heads, T, value),
    )


def test_the_cache_holds_the_latent_the_rotary_key_and_not_one_number_more(model_and_caches):
    model, caches = model_and_caches
    model.step([TEXT], caches)
    numbers = LATENT.kv_lora_rank + LATENT.qk_rope_head_dim
    assert [cache.nbytes_used for cache in caches] == [len(TEXT) * numbers * 8] * LATENT.n_layers


@pytest.fixture
def model_and_caches(backend):
    model = make_model(LATENT, make_weights(LATENT, 3), backend)
    return model, model.new_caches()


def test_what_is_cached_is_the_normed_latent_and_the_rotated_key(model_and_caches):
    """By hand, from the equations: c = norm(W_dkv h), k^R = rotate(W_kr h)."""
    model, caches = model_and_caches
    rows = {}
    extend = caches[0].extend
    caches[0].extend = lambda pos, *new: (
        rows.update(new=np.concatenate([host(x) for x in new], axis=-1)) or extend(pos, *new)
    )
    model.step([TEXT], caches)
    w = {name.removeprefix("layers.0."): x for name, x in make_weights(LATENT, 3).items()}
    for t, token in enumerate(TEXT):
        h = w["embed"][token]
        h = h / np.sqrt((h * h).mean() + 1e-5) * w["attn_norm"]
        down = w["kv_a"] @ h
        latent = down[:5] / np.sqrt((down[:5] ** 2).mean() + 1e-5) * w["kv_a_norm"]
        a, b = down[5:]
        key = [a * np.cos(t) - b * np.sin(t), a * np.sin(t) + b * np.cos(t)]
        assert np.allclose(rows["new"][0, 0, t], [*latent, *key], rtol=1e-13, atol=1e-13)


DEEPSEEK_V2 = ModelConfig(
    vocab_size=9, d_model=5120, n_layers=1, n_heads=128, n_kv_heads=128, head_dim=128, d_ff=12288,
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


@pytest.mark.parametrize(
    "queries, keys, form",
    [(1, 1, "expanded"), (1, 2, "absorbed"), (1, 4096, "absorbed"), (4096, 4096, "expanded"), (512, 4096, "expanded")],
)
def test_decode_absorbs_and_a_long_prefill_expands(queries, keys, form):
    """With one key the sums are C(P+V) + (P+R+V) against C(P+V) + (C+R+C): expanding is the smaller one."""
    assert cheaper_form(DEEPSEEK_V2, queries, keys) == form


def test_yarn_corrects_twice():
    """The ratio on the table, and the squared factor on the scale, whose mscale is another."""
    scaling = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    }
    weights = {"kv_b": np.zeros(weight_shapes(LATENT)["layers.0.kv_b"])}
    layer = LatentAttention(replace(LATENT, rope_scaling=scaling), weights)
    sharpening = 0.1 * 1.3 * np.log(40) + 1
    assert layer.scale == pytest.approx(sharpening**2 / np.sqrt(4 + 2), rel=1e-14)
    plain = LatentAttention(replace(LATENT, rope_scaling=scaling | {"mscale_all_dim": 0}), weights)
    assert plain.scale == pytest.approx(1 / np.sqrt(4 + 2), rel=1e-14)
