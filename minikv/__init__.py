"""KV caching from scratch: plain caches, grouped heads, latent attention and windows, for NumPy and CuPy.

However the same tokens are split into steps, batched and cached, the logits are those of computing everything at once.
"""

from .attention import attention, merge_attention
from .backend import Backend, available_backends, get_backend, namespace
from .caches import Cache, ConcatCache, KVCache, RollingCache, truncate_all
from .config import ModelConfig, weight_shapes
from .generate import Generation, GenerationStats, generate
from .mask import visible
from .model import Model, random_model
from .prefill import prefill
from .weights import load

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Cache",
    "ConcatCache",
    "Generation",
    "GenerationStats",
    "KVCache",
    "Model",
    "ModelConfig",
    "RollingCache",
    "attention",
    "available_backends",
    "generate",
    "get_backend",
    "load",
    "merge_attention",
    "namespace",
    "prefill",
    "random_model",
    "truncate_all",
    "visible",
    "weight_shapes",
]
