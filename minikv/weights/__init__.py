"""How does a checkpoint that somebody published become a model that runs here?

`load` reads a GGUF file (`gguf_file.py`) or a Hugging Face folder (`hf.py`); both end in one configuration and one dict
of weights. It downloads nothing, runs nothing that a file contains, and believes no number in a file before checking
it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..backend import Backend, get_backend
from ..model import Model
from .assemble import assemble
from .gguf_file import read_gguf
from .gguf_models import LAYOUTS, gguf_config
from .hf import read_folder
from .tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer

__all__ = ["Tokenizer", "load"]

DTYPES = ("float16", "float32", "float64")


def load(
    path: str | os.PathLike[str], backend: str | Backend = "numpy", dtype: str = "float32"
) -> tuple[Model, Tokenizer | None]:
    """Read a checkpoint and return the model, its weights on `backend` in `dtype`, and its tokenizer.

    `path` is a `.gguf` file (architectures llama and gemma3), or a folder with `config.json` and `.safetensors` files
    as Hugging Face lays it out (families: see `families.py`). The tokenizer is None for a folder without
    `tokenizer.json`. Weights are read one by one: the peak is the model itself plus its largest weight on another
    device than the CPU, and the model plus a few megabytes on the CPU.

    Raises ValueError in one line, naming the file and the tensor or field, for a damaged or unsupported checkpoint, and
    ImportError when a library that the file needs is not installed.
    """
    source = Path(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    target = get_backend(backend)
    if source.is_dir():
        folder = read_folder(source)
        weights = assemble(folder.config, folder.layout, folder.tensors, target, dtype, source)
        return Model(folder.config, weights), folder_tokenizer(source)
    if source.suffix != ".gguf":
        raise ValueError(f"{source}: neither a .gguf file nor a folder with config.json")
    file = read_gguf(source)
    config = gguf_config(file)
    layout = LAYOUTS[file.metadata["general.architecture"]]
    weights = assemble(config, layout, file.tensors, target, dtype, source)
    return Model(config, weights), gguf_tokenizer(file.metadata, source)
