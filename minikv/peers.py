"""Whom does `minikv bench` compare with?

PyTorch and transformers where they are installed (None where not), and a NumPy Llama as textbooks write it. Nothing
but `bench.py` imports this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .model import Model


class Peer:
    """Offer a model's prefill and decode as functions of no arguments."""

    def __init__(self, prefill: Callable[[np.ndarray], Callable], decoder: Callable[[np.ndarray], Callable]) -> None:
        self.prefill, self.decoder = prefill, decoder


def torch_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Callable[[], Any] | None:
    """Wrap PyTorch's scaled_dot_product_attention over the same arrays; None when PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    tensors = [torch.from_numpy(array) for array in (q, k, v)]

    def run() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)

    return run


def transformers_llama(model: Model) -> Peer | None:
    """Build transformers' Llama with the weights of a plain model of ours; None when transformers is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    c, w = model.config, model.weights
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.d_ff,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=c.tied_embeddings,
    )
    peer = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["final_norm"]}
    state["lm_head.weight"] = w.get("head", w["embed"])
    for i in range(c.n_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        cuts = np.cumsum([c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim])
        for name, part in zip("qkv", np.split(w[ours + "qkv"], cuts), strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = part
        state[f"{theirs}self_attn.o_proj.weight"] = w[ours + "o"]
        for name, part in zip(("gate", "up"), np.split(w[ours + "gate_up"], 2), strict=True):
            state[f"{theirs}mlp.{name}_proj.weight"] = part
        state[f"{theirs}mlp.down_proj.weight"] = w[ours + "down"]
        state[f"{theirs}input_layernorm.weight"] = w[ours + "attn_norm"]
        state[f"{theirs}post_attention_layernorm.weight"] = w[ours + "ffn_norm"]
    peer.load_state_dict({name: torch.from_numpy(np.array(part)) for name, part in state.items()})

    def prefill(prompt: np.ndarray) -> Callable[[], Any]:
        ids = torch.from_numpy(prompt)

        def run() -> Any:
            with torch.inference_mode():
                return peer(ids, use_cache=True, logits_to_keep=1).logits

        return run

    # transformers has renamed it; the old name warns, and is to go.
    word = "cache" if "cache" in inspect.signature(peer.forward).parameters else "past_key_values"

    def decoder(prompt: np.ndarray) -> Callable[[], Any]:
        with torch.inference_mode():
            cache = peer(torch.from_numpy(prompt), use_cache=True, logits_to_keep=1)[word]
        token = torch.ones((1, 1), dtype=torch.long)

        def run() -> Any:
            with torch.inference_mode():
                return peer(token, **{word: cache}, use_cache=True, logits_to_keep=1).logits

        return run

    return Peer(prefill, decoder)


def textbook_llama(model: Model) -> Peer:
    """Write a plain Llama's decode step as NumPy textbooks do, over the same weights.

    Keys and values are repeated for every query head, caches are concatenated, q, k and v are separate products, and
    the scores are divided by np.sqrt(head width): a float64 scalar, which makes everything behind it float64 (NEP 50).
    """
    c, w = model.config, {name: np.asarray(weight) for name, weight in model.weights.items()}
    group = c.n_heads // c.n_kv_heads
    cuts = np.cumsum([c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim])
    frequencies = (c.rope_theta or 1e4) ** (-np.arange(0, c.head_dim, 2) / c.head_dim)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * weight

    def rotated(x: np.ndarray, start: int) -> np.ndarray:
        angles = np.outer(np.arange(start, start + x.shape[1]), frequencies)[:, None]
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def step(tokens: np.ndarray, caches: list) -> np.ndarray:
        x = w["embed"][tokens]
        length = x.shape[1]
        for i in range(c.n_layers):
            p = f"layers.{i}."
            h = norm(x, w[p + "attn_norm"])
            q, k, v = (h @ part.T for part in np.split(w[p + "qkv"], cuts))
            q, k, v = (part.reshape(*part.shape[:2], -1, c.head_dim) for part in (q, k, v))
            start = 0 if caches[i] is None else caches[i][0].shape[1]
            q, k = rotated(q, start), rotated(k, start)
            if start:
                k, v = (np.concatenate([old, new], axis=1) for old, new in zip(caches[i], (k, v), strict=True))
            caches[i] = k, v
            k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
            scores = q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / np.sqrt(c.head_dim)
            if length > 1:
                scores = scores + np.triu(np.full((length, k.shape[1]), -np.inf), k=1 + start)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = weights / weights.sum(-1, keepdims=True)
            x = x + (weights @ v.swapaxes(1, 2)).swapaxes(1, 2).reshape(*x.shape[:2], -1) @ w[p + "o"].T
            gate, up = (norm(x, w[p + "ffn_norm"]) @ part.T for part in np.split(w[p + "gate_up"], 2))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "down"].T
        return norm(x, w["final_norm"])[:, -1:] @ w.get("head", w["embed"]).T

    def decoder(prompt: np.ndarray) -> Callable[[], Any]:
        caches: list = [None] * c.n_layers
        step(prompt, caches)
        return lambda: step(np.array([[1]]), caches)

    return Peer(lambda prompt: lambda: step(prompt, [None] * c.n_layers), decoder)
