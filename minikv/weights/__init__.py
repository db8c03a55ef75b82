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

    `path` is a `.gguf` file (architectures: see `gguf_models.py`), or a folder with `config.json` and `.safetensors`
    files as Hugging Face lays it out (families: see `families.py`), of which links that lead elsewhere are not
    followed. The tokenizer is None for a folder without `tokenizer.json`. Weights are read one by one: beside the model
    there is never more than a few megabytes in memory and, for another device than the CPU, one weight.

    Raises ValueError in one line, naming the file and the tensor or field, for a damaged or unsupported checkpoint, and
    ImportError when a library that the file needs is not installed.
    """
    source = Path(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    target = get_backend(backend)
    # The tokenizer first: the memory that building a large one takes is free again when the weights come.
    if source.is_dir():
        folder = read_folder(source)
        config, layout, tensors, tokenizer = folder.config, folder.layout, folder.tensors, folder_tokenizer(source)
    elif source.suffix == ".gguf":
        file = read_gguf(source)
        config, tensors = gguf_config(file), file.tensors
        layout = LAYOUTS[file.metadata["general.architecture"]]
        tokenizer = gguf_tokenizer(file.metadata, source)
        del file
    else:
        if not source.exists():
            raise ValueError(f"{source}: there is no such file or folder")
        raise ValueError(f"{source}: neither a .gguf file nor a folder with config.json")
    return Model(config, assemble(config, layout, tensors, target, dtype, source)), tokenizer
