"""What should the numbers be, straight from the papers?

The tests hold minikv against this file, so it shares nothing with it: no import, no batch, no cache, no mask, no
fused trick. One sequence at a time, one token, one head, one key after the other; a window is a slice of a list. NumPy
holds float64 vectors and multiplies matrices with them, and that is all it does here. Slow is fine.

A model is two plain dictionaries: the configuration's fields by name, and the weights by name, `[out, in]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vector = np.ndarray
Matrix = np.ndarray


# Attention: softmax(q · k / √H) v over the keys that a query sees (arXiv 1706.03762, equation 1).


def attend(
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    scale: float,
    softcap: float | None = None,
    sink: float | None = None,
) -> tuple[Vector | None, float]:
    """Mix the values of the keys given, all of them seen; returns the mixture (None without keys) and the log-sum-exp.

    The sink is one more logit in the denominator and has no value; the log-sum-exp is that of the keys alone.
    """
    if len(keys) == 0:
        return None, -math.inf
    scores = []
    for key in keys:
        score = float(np.dot(query, key)) * scale
        scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
    top = max(scores) if sink is None else max([*scores, sink])
    total = math.fsum(math.exp(score - top) for score in scores)
    below = total if sink is None else total + math.exp(sink - top)
    mixed = np.zeros(len(values[0]))
    for score, value in zip(scores, values, strict=True):
        mixed = mixed + math.exp(score - top) / below * value
    highest = max(scores)
    return mixed, highest + math.log(math.fsum(math.exp(score - highest) for score in scores))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sequence[float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Let the last T tokens of a text look at it: q [N, T, H], k [K, S, H], v [K, S, V] -> out [N, T, V], lse [N, T].

    Query head n reads key/value head n // (N / K) (arXiv 2305.13245, section 2.2). A query sees itself and what came
    before it, `window` tokens in all.
    """
    heads, n_queries, width = q.shape
    group, length = heads // k.shape[0], k.shape[1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    out, lse = np.zeros((heads, n_queries, v.shape[2])), np.full((heads, n_queries), -math.inf)
    for n in range(heads):
        for t in range(n_queries):
            here = length - n_queries + t
            first = 0 if window is None else max(0, here - window + 1)
            keys, values = k[n // group][first : max(here + 1, 0)], v[n // group][first : max(here + 1, 0)]
            mixed, lse[n, t] = attend(q[n, t], keys, values, scale, softcap, None if sinks is None else float(sinks[n]))
            if mixed is not None:
                out[n, t] = mixed
    return out, lse


# Rotary positions: pair i of the first `width` channels turns by position · base^(-2i / width) (arXiv 2104.09864).


def frequencies(width: int, base: float, scaling: dict[str, Any] | None = None) -> tuple[list[float], float]:
    """Angle per token of every pair, and the factor by which the rotated channels are stretched."""
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if scaling is None:
        return plain, 1.0
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "default":
        return plain, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    length = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        bent = []
        for f in plain:
            turns = length * f / (2 * math.pi)  # whole turns that this pair makes over the trained length
            keep = min(max((turns - low) / (high - low), 0.0), 1.0)
            bent.append(keep * f + (1 - keep) * f / factor)
        return bent, 1.0
    if kind == "yarn":
        return yarn_frequencies(plain, width, base, scaling), yarn_stretch(scaling)
    raise ValueError(kind)


def yarn_frequencies(plain: list[float], width: int, base: float, scaling: dict[str, Any]) -> list[float]:
    """Divide slow pairs by the factor and leave fast ones, with a ramp between (arXiv 2309.00071, section 3.2)."""
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    start, end = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, width - 1)
    if start == end:
        end += 0.001
    bent = []
    for i, f in enumerate(plain):
        slow = min(max((i - start) / (end - start), 0.0), 1.0)
        bent.append(slow * f / factor + (1 - slow) * f)
    return bent


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_stretch(scaling: dict[str, Any]) -> float:
    """First correction of YaRN: what the table of cosines and sines is multiplied by."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["factor"], scaling["mscale"]) / mscale(scaling["factor"], scaling["mscale_all_dim"])
    return mscale(scaling["factor"], 1.0)


def rotate(x: Vector, position: int, freqs: Sequence[float], stretch: float = 1.0, interleaved: bool = False) -> Vector:
    """Turn the pairs of one head's vector: channels (i, i + half), or (2i, 2i + 1); the rest stays as it is."""
    half, turned = len(freqs), x.astype(np.float64).copy()
    for i, f in enumerate(freqs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = math.cos(position * f) * stretch, math.sin(position * f) * stretch
        turned[a], turned[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return turned


# Norms and activations.


def rms_norm(x: Vector, weight: Vector, eps: float) -> Vector:
    """x / √(mean x² + eps) · weight (arXiv 1910.07467)."""
    return x / math.sqrt(math.fsum(a * a for a in x) / len(x) + eps) * weight


def layer_norm(x: Vector, weight: Vector, bias: Vector, eps: float) -> Vector:
    """(x - mean) / √(variance + eps) · weight + bias (arXiv 1607.06450)."""
    mean = math.fsum(x) / len(x)
    variance = math.fsum((a - mean) ** 2 for a in x) / len(x)
    return (x - mean) / math.sqrt(variance + eps) * weight + bias


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x: max(x, 0.0),
}


# Feed-forward.


def feed_forward(
    x: Vector,
    first: Matrix,
    down: Matrix,
    first_bias: Vector | None = None,
    down_bias: Vector | None = None,
    activation: str = "silu",
    gated: bool = True,
    limit: float | None = None,
) -> Vector:
    """down · (act(gate · x) * (up · x)), the rows of gate above those of up (arXiv 2002.05202); plain without a gate.

    With `limit`, gpt-oss's form: gate is cut off above, up on both sides, then (up + 1) · gate · sigmoid(1.702 gate).
    """
    hidden = first @ x if first_bias is None else first @ x + first_bias
    act = ACTIVATIONS[activation]
    if not gated:
        inner = [act(h) for h in hidden]
    else:
        gates, ups = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
        if limit is None:
            inner = [act(g) * u for g, u in zip(gates, ups, strict=True)]
        else:
            inner = []
            for g, u in zip(gates, ups, strict=True):
                g, u = min(g, limit), max(-limit, min(u, limit))
                inner.append((u + 1) * g * sigmoid(1.702 * g))
    out = down @ np.array(inner)
    return out if down_bias is None else out + down_bias


def route(
    logits: Sequence[float],
    chosen: int,
    router: str = "softmax",
    correction: Sequence[float] | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    normalise: bool = False,
    scaling: float = 1.0,
    margins: list[float] | None = None,
) -> dict[int, float]:
    """Choose the experts of one token: number -> weight.

    softmax scores, best of the best groups: DeepSeek-V2 (arXiv 2405.04434, sections 2.2.1 and 2.2.2). sigmoid scores,
    a correction added for the choice alone, groups worth the sum of their two best: DeepSeek-V3 (arXiv 2412.19437,
    equations 12 to 16). softmax normalised over the chosen: Mixtral (arXiv 2401.04088, section 2.1) and gpt-oss.

    `margins` collects how clear each choice was: the gap between the last one taken and the first one left.
    """
    if router == "sigmoid":
        scores = [sigmoid(x) for x in logits]
    else:
        top = max(logits)
        scores = [math.exp(x - top) for x in logits]
        total = math.fsum(scores)
        scores = [s / total for s in scores]
    merit = list(scores) if correction is None else [s + float(c) for s, c in zip(scores, correction, strict=True)]

    def best(items: list[int], worth: Sequence[float], count: int) -> list[int]:
        order = sorted(items, key=lambda i: -worth[i])
        if margins is not None and 0 < count < len(order):
            margins.append(worth[order[count - 1]] - worth[order[count]])
        return order[:count]

    size = len(scores) // groups
    group_worth = []
    for g in range(groups):
        members = sorted(merit[g * size : (g + 1) * size], reverse=True)
        group_worth.append(members[0] if group_score == "max" else math.fsum(members[:2]))
    open_experts = [
        g * size + i for g in sorted(best(list(range(groups)), group_worth, top_groups)) for i in range(size)
    ]
    taken = best(open_experts, merit, chosen)
    below = math.fsum(scores[e] for e in taken) if normalise else 1.0
    return {e: scores[e] / below * scaling for e in taken}


# The whole model.


class Model:
    """Computes a text's logits from a configuration and weights, each a plain dictionary."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = {name: np.asarray(w, dtype=np.float64) for name, w in weights.items()}
        self.margins: list[float] = []

    def logits(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> np.ndarray:
        """Logits [T, vocab] after each token of the text, which may stand at other positions than 0, 1, 2, ..."""
        c, w = self.config, self.weights
        self.positions, stream = list(range(len(tokens)) if positions is None else positions), []
        for position, token in zip(self.positions, tokens, strict=True):
            x = w["embed"][token] * c["embed_scale"]
            stream.append(x if c["rope_theta"] is not None else x + w["positions"][position])
        for layer in range(c["n_layers"]):
            p = f"layers.{layer}."
            normed = [self.norm(x, p + "attn_norm") for x in stream]
            mixed = self.latent_attention(layer, normed) if c["kv_lora_rank"] else self.head_attention(layer, normed)
            for t, y in enumerate(mixed):
                stream[t] = stream[t] + (self.norm(y, p + "attn_post_norm") if c["post_norms"] else y)
                y = self.feed_forward(layer, self.norm(stream[t], p + "ffn_norm"))
                stream[t] = stream[t] + (self.norm(y, p + "ffn_post_norm") if c["post_norms"] else y)
        head = w["embed"] if c["tied_embeddings"] else w["head"]
        out = [head @ self.norm(x, "final_norm") for x in stream]
        cap = c["final_softcap"]
        return np.array(out if cap is None else [[cap * math.tanh(a / cap) for a in x] for x in out])

    def norm(self, x: Vector, name: str) -> Vector:
        if self.config["norm"] == "layer":
            return layer_norm(x, self.weights[name], self.weights[name + "_bias"], self.config["norm_eps"])
        return rms_norm(x, self.weights[name], self.config["norm_eps"])

    def is_windowed(self, layer: int) -> bool:
        pattern = self.config["layer_pattern"] or ("G" if self.config["window"] is None else "L")
        return pattern[layer % len(pattern)] == "L"

    def layer_frequencies(self, layer: int, width: int) -> tuple[list[float], float]:
        c = self.config
        if c["rope_theta"] is None:
            return [], 1.0
        if self.is_windowed(layer) and c["rope_local_theta"] is not None:
            return frequencies(width, c["rope_local_theta"])
        return frequencies(width, c["rope_theta"], c["rope_scaling"])

    def attend_text(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> list[Vector]:
        """Mix values [N or K, T, ...] for every token, and project what all heads found."""
        c, w, p = self.config, self.weights, f"layers.{layer}."
        window = c["window"] if self.is_windowed(layer) else None
        if window is not None and self.positions != list(range(len(self.positions))):
            assert self.positions[-1] - self.positions[0] < window, (
                "a slice is the window only where no position is left out"
            )
        sinks = w[p + "sinks"] if c["attn_sinks"] else None
        mixed, _ = attention(q, k, v, window, scale, c["attn_softcap"], sinks)
        out = []
        for t in range(q.shape[1]):
            y = w[p + "o"] @ np.concatenate([mixed[n, t] for n in range(q.shape[0])])
            out.append(y + w[p + "o_bias"] if c["o_bias"] else y)
        return out

    def head_attention(self, layer: int, stream: list[Vector]) -> list[Vector]:
        """Multi-head, grouped-query and multi-query attention (arXiv 2305.13245)."""
        c, w, p = self.config, self.weights, f"layers.{layer}."
        n_q, n_kv, width = c["n_heads"], c["n_kv_heads"], c["head_dim"]
        freqs, stretch = self.layer_frequencies(layer, width if c["rotary_dim"] is None else c["rotary_dim"])
        q, k, v = (np.zeros((n, len(stream), width)) for n in (n_q, n_kv, n_kv))
        for t, x in enumerate(stream):
            rows = w[p + "qkv"] @ x
            if c["qkv_bias"]:
                rows = rows + w[p + "qkv_bias"]
            heads = [rows[i * width : (i + 1) * width] for i in range(n_q + 2 * n_kv)]
            for n, head in enumerate(heads[: n_q + n_kv]):
                if c["qk_norm"]:
                    head = rms_norm(head, w[p + ("q_norm" if n < n_q else "k_norm")], c["norm_eps"])
                head = rotate(head, self.positions[t], freqs, stretch, c["rope_interleaved"])
                if n < n_q:
                    q[n, t] = head
                else:
                    k[n - n_q, t] = head
            for n, head in enumerate(heads[n_q + n_kv :]):
                v[n, t] = head
        return self.attend_text(layer, q, k, v, 1 / math.sqrt(width) if c["attn_scale"] is None else c["attn_scale"])

    def latent_attention(self, layer: int, stream: list[Vector]) -> list[Vector]:
        """Multi-head latent attention, expanded for every token (arXiv 2405.04434, equations 37 to 47).

        The scale's squared factor is YaRN's second correction, as DeepSeek's published model applies it.
        """
        c, w, p = self.config, self.weights, f"layers.{layer}."
        heads, nope, rope, value = c["n_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        rank, eps = c["kv_lora_rank"], c["norm_eps"]
        freqs, stretch = self.layer_frequencies(layer, rope // c["n_rope_heads"])
        freqs = freqs * c["n_rope_heads"]  # a rotary key made of several repeats the angles of one
        q, k = (np.zeros((heads, len(stream), nope + rope)) for _ in range(2))
        v = np.zeros((heads, len(stream), value))

        def turned(x: Vector, position: int) -> Vector:
            return rotate(x, position, freqs, stretch, c["rope_interleaved"])

        for t, x in enumerate(stream):
            if c["q_lora_rank"] is None:
                queries = w[p + "q"] @ x
            else:
                queries = w[p + "q_b"] @ rms_norm(w[p + "q_a"] @ x, w[p + "q_a_norm"], eps)  # 37, 38
            down = w[p + "kv_a"] @ x
            latent = down[:rank]  # 41
            if c["latent_norm"]:
                latent = rms_norm(latent, w[p + "kv_a_norm"], eps)
            shared_key = turned(down[rank:], self.positions[t])  # 43
            up = w[p + "kv_b"] @ latent
            for n in range(heads):
                query = queries[n * (nope + rope) : (n + 1) * (nope + rope)]
                q[n, t, :nope] = query[:nope]
                q[n, t, nope:] = turned(query[nope:], self.positions[t])  # 39, 40
                rows = up[n * (nope + value) : (n + 1) * (nope + value)]
                k[n, t, :nope], k[n, t, nope:] = rows[:nope], shared_key  # 42, 44
                v[n, t] = rows[nope:]  # 45
        scale = 1 / math.sqrt(nope + rope) if c["attn_scale"] is None else c["attn_scale"]
        scaling = c["rope_scaling"] or {}
        if (scaling.get("rope_type") or scaling.get("type")) == "yarn" and scaling.get("mscale_all_dim"):
            scale *= mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        return self.attend_text(layer, q, k, v, scale)  # 46, 47

    def feed_forward(self, layer: int, x: Vector) -> Vector:
        c, w, p = self.config, self.weights, f"layers.{layer}."
        first = "gate_up" if c["gated"] else "up"
        style = {"activation": c["activation"], "gated": c["gated"], "limit": c["swiglu_limit"]}
        if not c["n_experts"] or layer < c["n_dense_layers"]:
            return feed_forward(
                x, w[p + first], w[p + "down"], w.get(f"{p}{first}_bias"), w.get(p + "down_bias"), **style
            )
        logits = w[p + "router"] @ x
        if c["router_bias"]:
            logits = logits + w[p + "router_bias"]
        weights = route(
            [float(a) for a in logits],
            c["n_experts_per_token"],
            c["router"],
            w[p + "router_correction"] if c["router_correction"] else None,
            c["n_expert_groups"],
            c["n_top_groups"],
            c["group_score"],
            c["norm_top_k"],
            c["routed_scaling"],
            self.margins,
        )
        out = np.zeros(len(x))
        for e, weight in weights.items():
            biases = [w[f"{p}experts_{b}_bias"][e] if c["mlp_bias"] else None for b in (first, "down")]
            out = out + weight * feed_forward(
                x, w[f"{p}experts_{first}"][e], w[p + "experts_down"][e], *biases, **style
            )
        if c["n_shared_experts"]:
            out = out + feed_forward(x, w[f"{p}shared_{first}"], w[p + "shared_down"], **style)
        return out
