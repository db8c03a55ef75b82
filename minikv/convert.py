"""Which other attention computes the same function, or nearly the same, from weights that are already there?

Every rewrite takes a configuration and its weights and returns new ones; weights that do not change are shared, not
copied, and nothing is changed in place. How to train the result further, which rewrites that lose something need, is
not known here. A rewrite happens once, so what the array standard lacks (singular values) is done on the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .backend import Array, Backend, namespace
from .config import ModelConfig
from .model import check_weights
from .rope import rope_frequencies

WAYS = ("mean", "first", "random")


def to_grouped(
    config: ModelConfig, weights: dict[str, Array], n_kv_heads: int, how: str = "mean", seed: int = 0
) -> tuple[ModelConfig, dict[str, Array]]:
    """Merge key/value heads until `n_kv_heads` are left: MHA to GQA, MHA to MQA, or GQA to fewer heads.

    head_j = mean of heads j G .. (j + 1) G - 1, with G = config.n_kv_heads / n_kv_heads; or the first of them; or one
    that is drawn from `seed` in each layer, its key and its value together.

    Neighbours merge, because query head n reads key/value head n // (n_heads / n_kv_heads) before and after. The
    result is the same function where the merged heads are equal, and another one everywhere else: the paper trains it
    for 5 % of the original steps. Norms of keys are shared by all heads and stay.

    Raises ValueError when `n_kv_heads` does not divide the number of heads, for an unknown way, and for latent
    attention, whose heads are not cached. arXiv 2305.13245, section 2.1. (The third way that the paper compares starts
    from new random heads, which makes nothing of the weights; "random" here chooses among the old ones.)

    >>> from minikv import ModelConfig, random_model
    >>> config = ModelConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=2, d_ff=8)
    >>> config, weights = to_grouped(config, random_model(config).weights, 1)
    >>> config.n_kv_heads, weights["layers.0.qkv"].shape  # 4 query heads, 1 key head, 1 value head
    (1, (12, 8))
    """
    _check_heads("to_grouped", config, weights)
    N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
    if isinstance(n_kv_heads, bool) or not isinstance(n_kv_heads, int) or n_kv_heads < 1 or K % n_kv_heads:
        raise ValueError(f"{K} key/value heads cannot be merged into n_kv_heads={n_kv_heads!r} equal groups")
    if how not in WAYS:
        raise ValueError(f"unknown how {how!r}: known are {', '.join(WAYS)}")
    xp, G, rng, grouped = namespace(weights["embed"]), K // n_kv_heads, np.random.default_rng(seed), dict(weights)
    for layer in range(config.n_layers):
        heads = np.arange(0, K, G) + (rng.integers(G, size=n_kv_heads) if how == "random" else 0)
        for name in (f"layers.{layer}.qkv", f"layers.{layer}.qkv_bias"):
            if name not in weights:
                continue
            rows, rest = weights[name], weights[name].shape[1:]  # [(N+2K)H, D], or [(N+2K)H] of a bias
            kv = rows[N * H :, ...]
            if how == "mean":
                kv = xp.mean(xp.reshape(kv, (2, n_kv_heads, G, H, *rest)), axis=2)
            else:
                kv = xp.take(xp.reshape(kv, (2, K, H, *rest)), xp.asarray(heads), axis=1)
            grouped[name] = xp.concat([rows[: N * H, ...], xp.reshape(kv, (2 * n_kv_heads * H, *rest))], axis=0)
    return dataclasses.replace(config, n_kv_heads=n_kv_heads), grouped


def to_mla(config: ModelConfig, weights: dict[str, Array]) -> tuple[ModelConfig, dict[str, Array]]:
    """Write grouped-query attention as latent attention: the same function, and the same 2 K H numbers per token.

    latent = [what does not rotate of the keys of all K heads | the values of all K heads], R = [what rotates of them]

    Of a key's H channels r rotate and P = H - r do not: r is H or `rotary_dim`, and 0 where positions are learned. So
    C = K (P + H) and R = K r, and the up-projection of query head n merely picks the channels of head n // G. The
    rotary key is one for all heads, as latent attention has it, but wide enough for the K keys side by side: a query
    head is zero outside its own. The frequencies start over at every key (`n_rope_heads`), and there is no norm on the
    latent (`latent_norm`), as a linear value has none: these two make it not DeepSeek's layer, but the same code.

    Windows, patterns, bases per layer, sinks, soft caps and YaRN keep their meaning. Queries become (K r + P) / H times
    as wide, and attention works at that width: this is no faster way to run a model. It shows that latent attention can
    do all that grouped-query attention can, at equal memory, and is where a smaller latent (`to_latent`) or training
    starts from.

    Raises ValueError for latent attention, and where queries, keys or values have biases or norms of their own, which
    latent attention lacks. arXiv 2502.07864.
    """
    _check_heads("to_mla", config, weights)
    if config.qkv_bias or config.qk_norm:
        raise ValueError(
            f"to_mla needs queries, keys and values without biases and norms, got qkv_bias={config.qkv_bias} and "
            f"qk_norm={config.qk_norm}"
        )
    N, K, H, D = config.n_heads, config.n_kv_heads, config.head_dim, config.d_model
    r = 0 if config.rope_theta is None else config.rotary_dim or H
    P, C, R = H - r, K * (H - r + H), K * r
    own = np.arange(N)[:, None] // (N // K) == np.arange(K)  # [N, K]: query head n reads key/value head k
    pick = np.zeros((N, P + H, C))  # keys before values, in each head's rows and in the latent's channels
    pick[:, :P, : K * P] = np.kron(own, np.eye(P)).reshape(N, P, K * P)
    pick[:, P:, K * P :] = np.kron(own, np.eye(H)).reshape(N, H, K * H)
    xp, dtype = namespace(weights["embed"]), weights["embed"].dtype
    mask, up = xp.asarray(own[:, :, None, None]), xp.asarray(pick.reshape(N * (P + H), C), dtype=dtype)

    latent = dict(weights)
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        qkv = xp.reshape(latent.pop(prefix + "qkv"), (N + 2 * K, H, D))
        q, k, v = qkv[:N, ...], qkv[N : N + K, ...], qkv[N + K :, ...]
        q_rope = xp.where(mask, q[:, None, :r, :], 0.0)  # [N, K, r, D]
        q_rope, k_rope = (_side_by_side(part, config.rope_interleaved) for part in (q_rope, k[None, :, :r, :]))
        q = xp.concat([q[:, r:, :], q_rope], axis=1)  # [N, P+R, D]
        down = [xp.reshape(k[:, r:, :], (K * P, D)), xp.reshape(v, (K * H, D)), k_rope[0, ...]]
        latent[prefix + "q"] = xp.reshape(q, (N * (P + R), D))
        latent[prefix + "kv_a"] = xp.concat(down, axis=0)
        latent[prefix + "kv_b"] = up
    config = dataclasses.replace(
        config,
        attn_scale=H**-0.5 if config.attn_scale is None else config.attn_scale,  # not of the wider key
        rope_scaling=_without_sharpening(config, r),
        rotary_dim=None,
        kv_lora_rank=C,
        qk_nope_head_dim=P,
        qk_rope_head_dim=R,
        v_head_dim=H,
        latent_norm=False,
        n_rope_heads=K,
    )
    return config, latent


def to_latent(
    config: ModelConfig, weights: dict[str, Array], rank: int
) -> tuple[ModelConfig, dict[str, Array], tuple[float, ...]]:
    """Shrink what a layer caches to a latent of `rank` numbers, and report what each layer loses.

    error = ‖U W - U' W'‖ / ‖U W‖ (Frobenius), with W = down-projection [C, D] and U = up-projection [N (P + V), C]

    U W makes keys and values of all heads from a token's input; U' W' of rank `rank` is the one nearest to it, its
    singular value decomposition cut off. A layer that is not latent attention yet is written so first (`to_mla`).
    Returns the new configuration and weights, and one error per layer.

    Compressed are the values and those channels of keys that do not rotate, together. **Rotating channels stay as they
    are**: rotations at all distances do not commute with a projection. A token then takes rank + R numbers, R = K r of
    `to_mla`; with all channels rotating that is more than half of before, with learned positions nothing but `rank`.
    At rank min(C, D) nothing is lost, and the error is 0. It is an error of weights, keys and values counting alike,
    not of logits: inputs that occur may lie well or badly in the directions that are kept.

    Raises ValueError for a rank out of range, a latent with a norm (which a change of its basis would change), and
    where `to_mla` does. arXiv 2502.07864 goes on to what rotates, and weighs by the inputs that occur.
    """
    if not config.is_mla:
        config, weights = to_mla(config, weights)
    check_weights(weights, config)
    if config.latent_norm:
        raise ValueError("to_latent needs a latent without a norm (latent_norm=False), got latent_norm=True")
    C, limit = config.kv_lora_rank or 0, min(*weights["layers.0.kv_b"].shape, config.d_model)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= limit:
        raise ValueError(f"rank must be within 1..{limit}, what the weights can have, got {rank!r}")
    xp = namespace(weights["embed"])
    backend, smaller, errors = Backend(xp.__name__, xp), dict(weights), []
    for layer in range(config.n_layers):
        a, b = f"layers.{layer}.kv_a", f"layers.{layer}.kv_b"
        down, up = (backend.to_numpy(weights[name]).astype(np.float64) for name in (a, b))
        basis, inner = np.linalg.qr(up)  # an orthonormal basis keeps every norm, and leaves a far smaller product
        left, sizes, right = np.linalg.svd(inner @ down[:C], full_matrices=False)
        errors.append(float(np.linalg.norm(sizes[rank:])) / (float(np.linalg.norm(sizes)) or 1.0))
        for name, new in (
            (a, np.concatenate([right[:rank], down[C:]])),
            (b, basis @ (left[:, :rank] * sizes[:rank])),
        ):
            smaller[name] = xp.astype(backend.asarray(new), weights[name].dtype)
    return dataclasses.replace(config, kv_lora_rank=rank), smaller, tuple(errors)


def _check_heads(function: str, config: ModelConfig, weights: dict[str, Array]) -> None:
    """Refuse weights that do not fit, and layers that make no keys and values of their own for each head."""
    if config.is_mla:
        raise ValueError(f"{function} needs keys and values per head, got a latent of rank {config.kv_lora_rank}")
    if "S" in config.pattern:
        raise ValueError(f"{function} needs keys and values in every layer, got layer_pattern {config.layer_pattern!r}")
    check_weights(weights, config)


def _side_by_side(x: Array, interleaved: bool) -> Array:
    """Lay the rotating rows of several heads into one head: [M, K, r, D] -> [M, K r, D].

    Interleaved pairs stay neighbours. Otherwise the first halves of all heads come before all second halves, so that
    a channel and the one half the width further on are still a pair.
    """
    xp = namespace(x)
    M, K, r, D = x.shape
    if not interleaved:
        x = xp.permute_dims(xp.reshape(x, (M, K, 2, r // 2, D)), (0, 2, 1, 3, 4))
    return xp.reshape(x, (M, K * r, D))


def _without_sharpening(config: ModelConfig, rotary_dim: int) -> dict[str, Any] | None:
    """Return the block `rope_scaling` such that latent attention reads it as grouped-query attention did.

    DeepSeek's `mscale_all_dim` means more there: it sharpens the channels that do not rotate, too. What it did to the
    tables is kept as their factor.
    """
    scaling = config.rope_scaling
    if config.rope_theta is None:
        return None
    if not scaling or "mscale_all_dim" not in scaling:
        return scaling
    _, factor = rope_frequencies(rotary_dim, config.rope_theta, scaling)
    return {key: value for key, value in scaling.items() if key != "mscale_all_dim"} | {"attention_factor": factor}
