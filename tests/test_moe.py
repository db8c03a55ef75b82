"""Are experts chosen and weighed as each family's paper says?

Whole models with experts are in `test_theorem.py`; here are the routers alone, and the choices written out by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oracle
from minikv import ModelConfig
from minikv.feedforward import MixtureOfExperts, best
from strategies import SEEDS, experts
from support import assert_close, host, make_weights, normal

FAMILIES: dict[str, dict[str, Any]] = {
    "DeepSeek-V2 greedy": {"routed_scaling": 1.5},
    "DeepSeek-V2 group limited": {"n_expert_groups": 4, "n_top_groups": 2, "routed_scaling": 16.0},
    "DeepSeek-V3": {
        "router": "sigmoid",
        "router_correction": True,
        "n_expert_groups": 4,
        "n_top_groups": 2,
        "group_score": "top2",
        "norm_top_k": True,
        "routed_scaling": 2.5,
    },
    "Mixtral": {"norm_top_k": True},
    "gpt-oss": {"norm_top_k": True, "router_bias": True, "mlp_bias": True, "swiglu_limit": 0.7},
}


def sparse_config(**fields: Any) -> ModelConfig:
    sizes = {"vocab_size": 4, "d_model": 6, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "d_ff": 4}
    return ModelConfig(**sizes | {"n_experts": 8, "n_experts_per_token": 3, "expert_d_ff": 5} | fields)


def layer_of(config: ModelConfig, weights: dict[str, np.ndarray], backend: Any) -> MixtureOfExperts:
    here = {name.removeprefix("layers.0."): backend.asarray(w) for name, w in weights.items()}
    return MixtureOfExperts(config, here)


@given(fields=st.one_of(st.sampled_from(list(FAMILIES.values())), experts(1)), seed=SEEDS, n_tokens=st.integers(1, 5))
def test_experts_answer_as_in_the_papers(backend, dtype, fields, seed, n_tokens):
    """One token fetches its own experts, many go through all of them: both are the same sum."""
    config = sparse_config(**fields)
    weights = make_weights(config, seed, dtype)
    x = normal(seed + 1, 1, n_tokens, 6).astype(dtype)
    reference = oracle.Model(config.to_dict(), weights)
    want = np.array([[reference.feed_forward(0, v) for v in x[0].astype(np.float64)]])
    assume(min(reference.margins, default=1) > 1e-4)
    layer = layer_of(config, weights, backend)
    whole = layer(backend.asarray(x))
    # Products of three matrices, the answers weighed by up to routed_scaling and summed with either sign.
    scale = max(np.abs(want).max(), config.routed_scaling)
    assert_close(whole, want, dtype, scale=scale)
    for t in range(n_tokens):
        assert_close(layer(backend.asarray(x[:, t : t + 1])), want[:, t : t + 1], dtype, scale=scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_weights(backend, family):
    config = sparse_config(**FAMILIES[family])
    weights = make_weights(config, 5)
    x = normal(6, 40, 6)
    found = host(layer_of(config, weights, backend).route(backend.asarray(x)))
    for v, row in zip(x, found, strict=True):
        logits = weights["layers.0.router"] @ v + weights.get("layers.0.router_bias", 0)
        want = oracle.route(
            [float(a) for a in logits],
            3,
            config.router,
            weights.get("layers.0.router_correction"),
            config.n_expert_groups,
            config.n_top_groups,
            config.group_score,
            config.norm_top_k,
            config.routed_scaling,
        )
        assert {int(e) for e in np.flatnonzero(row)} == set(want)
        assert_close(row[list(want)], np.array(list(want.values())), "float64")
        if config.norm_top_k:
            assert row.sum() == pytest.approx(config.routed_scaling)


def route_by_hand(backend: Any, logits: list[float], **fields: Any) -> list[float]:
    """Weights of one token whose router logits are given."""
    correction = fields.pop("correction", None)
    config = sparse_config(n_experts=len(logits), d_model=len(logits), **fields)
    weights = make_weights(config, 0)
    weights["layers.0.router"] = np.eye(len(logits))
    if correction is not None:
        weights["layers.0.router_correction"] = np.array(correction)
    return host(layer_of(config, weights, backend).route(backend.asarray(np.array([logits]))))[0].tolist()


def test_softmax_over_all_or_over_the_chosen(backend):
    logits = np.log([1.0, 2.0, 3.0, 4.0]).tolist()
    over_all = route_by_hand(backend, logits, n_experts_per_token=2)
    over_chosen = route_by_hand(backend, logits, n_experts_per_token=2, norm_top_k=True)
    assert over_all == pytest.approx([0, 0, 0.3, 0.4]) and over_chosen == pytest.approx([0, 0, 3 / 7, 4 / 7])


def test_the_best_group_wins_over_the_second_best_expert(backend):
    """Groups (9, 1) and (8, 7): the best two experts are 9 and 8, but of the best group alone 9 and 1."""
    logits = np.log([9.0, 1.0, 8.0, 7.0]).tolist()
    fields = {"n_experts_per_token": 2, "n_expert_groups": 2}
    assert np.flatnonzero(route_by_hand(backend, logits, **fields, n_top_groups=2)).tolist() == [0, 2]
    assert np.flatnonzero(route_by_hand(backend, logits, **fields, n_top_groups=1)).tolist() == [0, 1]
    top2 = route_by_hand(backend, logits, **fields, n_top_groups=1, group_score="top2")
    assert np.flatnonzero(top2).tolist() == [2, 3], "8 + 7 is more than 9 + 1"


def test_the_correction_chooses_but_does_not_weigh(backend):
    fields = {"n_experts_per_token": 1, "router": "sigmoid", "router_correction": True}
    assert route_by_hand(backend, [1.0, 0.0], correction=[0.0, 0.0], **fields) == pytest.approx(
        [1 / (1 + np.exp(-1)), 0]
    )
    assert route_by_hand(backend, [1.0, 0.0], correction=[0.0, 5.0], **fields) == pytest.approx([0, 0.5])
    groups = {"n_expert_groups": 2, "n_top_groups": 1, "group_score": "top2"}
    low = route_by_hand(backend, [1.0, 0.9, 0.0, -1.0], correction=[-9.0, -9.0, -2.0, -2.0], **fields | groups)
    assert np.flatnonzero(low).tolist() == [2], "every merit is below zero, and still the best group is chosen from"


@given(seed=SEEDS, k=st.integers(1, 5), ties=st.booleans())
def test_exactly_k_are_chosen_whatever_is_equal(backend, seed, k, ties):
    x = np.random.default_rng(seed).integers(0, 2 if ties else 1000, (6, 5)).astype("float64")
    marked = host(best(backend.asarray(x), k))
    assert (marked.sum(-1) == k).all()
    for row, chosen in zip(x, marked, strict=True):
        assert sorted(row[chosen]) == sorted(row)[-k:]


def test_leading_layers_are_dense(backend):
    config = sparse_config(n_layers=3, n_dense_layers=2, d_ff=7)
    weights = make_weights(config, 0)
    assert [f"layers.{i}.router" in weights for i in range(3)] == [False, False, True]
    assert weights["layers.1.gate_up"].shape == (14, 6)


def test_an_expert_that_was_not_chosen_may_overflow(backend):
    """Many tokens go through every expert: 0 · inf in one that was not chosen must not reach them."""
    config = sparse_config(n_experts_per_token=2)
    weights, x = make_weights(config, 1), normal(3, 1, 9, 6)
    weights["layers.0.router"][5] = 0
    x[0, :, 0] += 100  # the routers' first column decides
    weights["layers.0.router"][:5, 0] = 1
    assert not host(layer_of(config, weights, backend).route(backend.asarray(x[0])))[:, 5].any()
    want = host(layer_of(config, weights, backend)(backend.asarray(x)))
    weights["layers.0.experts_down"][5] = np.inf
    with np.errstate(invalid="ignore"):
        assert np.array_equal(host(layer_of(config, weights, backend)(backend.asarray(x))), want)


def test_few_tokens_fetch_only_their_own_experts(backend):
    """Decode must not read what it does not use: NaN in every expert that was not chosen stays unseen."""
    config = sparse_config(n_experts_per_token=2)
    weights = make_weights(config, 1)
    x = normal(3, 1, 1, 6)
    chosen = np.flatnonzero(host(layer_of(config, weights, backend).route(backend.asarray(x[0])))[0])
    want = host(layer_of(config, weights, backend)(backend.asarray(x)))
    for name in ("experts_gate_up", "experts_down"):
        hidden = np.full_like(weights[f"layers.0.{name}"], np.nan)
        hidden[chosen] = weights[f"layers.0.{name}"][chosen]
        weights[f"layers.0.{name}"] = hidden
    assert np.array_equal(host(layer_of(config, weights, backend)(backend.asarray(x))), want)
