"""How does text become token ids and back, and a conversation a prompt, exactly as a checkpoint's authors did it?

The `tokenizers` library does the splitting and merging. This module rebuilds its parts from what a GGUF file or a
Hugging Face folder says about them, and renders chat templates in a sandbox, because they are programs that come with
the file.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .extras import optional
from .fields import Fields
from .files import inside, read_json

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # kinds of tokens in GGUF files
_SPACE = "\u2581"  # how SentencePiece vocabularies spell a space
# What chat templates call the special tokens, and GGUF files their ids.
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# The pattern that cuts text into words before byte pairs are merged, by the names GGUF files give it; "" is GPT-2's,
# which the library has built in. `smollm` stands here as transformers reads it: the original also isolates every digit,
# which changes the spaces before a number only.
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_WORDS = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "llama-bpe": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
}


class Tokenizer:
    """Turn text into token ids and back as one checkpoint does; made by `load`, not by hand.

    `bos_id` is the id that begins a text, or None; `eos_ids` are the ids that end an answer.
    """

    def __init__(self, core: Any, specials: Mapping[str, str], eos_ids: Iterable[int], template: str | None) -> None:
        self._core = core
        self._specials = dict(specials)
        self._template = template
        self.bos_id: int | None = core.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens written out in it become their ids.

        `special` also puts around the text what the checkpoint wants there (Gemma: its first token); pass False for
        text from `chat`, whose template has done so. Raises ValueError for what is no text, such as undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            says = f"no character at position {error.start}, but {text[error.start]!r}"
            raise ValueError(f"the text is not UTF-8: {says}") from None
        return self._core.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Return the text of ids; `special` False leaves out special tokens."""
        return self._core.decode(list(ids), skip_special_tokens=not special)

    def stream(self, special: bool = True) -> Callable[[int], str]:
        """Return a function from the next id to the text that it completes.

        A character can be spread over several tokens: it comes with the last of them, and "" until then.
        """
        decoders = optional("tokenizers.decoders", "decoding")
        state = decoders.DecodeStream(skip_special_tokens=not special)
        return lambda token: state.step(self._core, token) or ""

    def chat(self, messages: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
        """Render messages, each with "role" and "content", by the checkpoint's template; `answer` opens the reply.

        Raises ValueError when there is no template, or when the template refuses the messages.
        """
        if self._template is None:
            raise ValueError("this checkpoint has no chat template: encode a plain text instead")
        jinja2 = optional("jinja2", "a chat template")
        sandbox = optional("jinja2.sandbox", "a chat template")

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=answer, **self._specials)
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template failed: {' '.join(str(error).split())}") from None


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file's metadata describes.

    "gpt2" is byte-level BPE with the file's merges. "llama" is SentencePiece's BPE: it lists no merges, so every way to
    split a token into two others is one, and the token that comes first in the vocabulary (Gemma) or has the higher
    score (Llama) is made first. Raises ValueError naming the file and the key for anything else.
    """
    optional("tokenizers", "a tokenizer")
    start = "tokenizer.ggml."
    own = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    f = Fields(own, f"{path} (tokenizer.ggml)")
    tokens, model = f.take("tokens"), f.text("model")
    if not _strings(tokens) or not tokens:
        raise ValueError(f"{f.where}: field 'tokens' must be a list of strings")
    kinds = f.take("token_type", [_NORMAL] * len(tokens))
    if not hasattr(kinds, "__len__") or len(kinds) != len(tokens) or isinstance(kinds[0], str):
        raise ValueError(f"{f.where}: field 'token_type' must list {len(tokens)} numbers, one a token")
    ids = {key: f.whole(key, None) for key in [*_SPECIAL_IDS.values(), "eot_token_id", "eom_token_id"]}
    for key, value in ids.items():
        if value is not None and value >= len(tokens):
            raise ValueError(f"{f.where}: {key} {value} is outside the vocabulary of {len(tokens)}")
    specials = {name: tokens[ids[key]] for name, key in _SPECIAL_IDS.items() if ids[key] is not None}
    if model == "gpt2":
        core = _byte_level(f, tokens, kinds)
    elif model == "llama":
        core = _sentence_piece(f, tokens, kinds, specials, metadata["general.architecture"].startswith("gemma"))
    else:
        raise ValueError(f"{f.where}: model {model!r:.80} is not supported; known are gpt2 and llama")
    # Files that do not say leave it to the reader: SentencePiece texts begin with a special token.
    _surround(core, specials, f.flag("add_bos_token", model == "llama"), f.flag("add_eos_token", False))
    eos_ids = [ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if ids[key] is not None]
    return Tokenizer(core, specials, eos_ids, Fields(metadata, str(path)).text("tokenizer.chat_template", None))


def _strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _byte_level(f: Fields, tokens: list[str], kinds: Sequence[int]) -> Any:
    import tokenizers as t

    name, merges = f.text("pre", "default"), f.take("merges", [])
    if name not in _WORDS:
        raise ValueError(f"{f.where}: pre {name!r:.80} is not supported; known are {', '.join(_WORDS)}")
    pairs = [tuple(merge.split(" ")) for merge in merges] if _strings(merges) else [()]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{f.where}: field 'merges' must list pairs of tokens")
    words = _WORDS[name]
    # Llama 3 looks a whole word up before it merges.
    core = _bpe(f, tokens, pairs, ignore_merges=words == _LLAMA3_WORDS)
    core.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    if words:
        split = t.pre_tokenizers.Split(t.Regex(words), behavior="isolated")
        core.pre_tokenizer = t.pre_tokenizers.Sequence([split, core.pre_tokenizer])
    core.decoder = t.decoders.ByteLevel()
    _add_whole(core, tokens, kinds)
    return core


def _sentence_piece(
    f: Fields, tokens: list[str], kinds: Sequence[int], specials: Mapping[str, str], gemma: bool
) -> Any:
    import tokenizers as t

    order: Iterable[int] = range(len(tokens))
    if gemma:  # its files spell runs of spaces as they are, and these merge like any other token
        runs = {index for index, token in enumerate(tokens) if set(token) == {" "}}
        tokens = [_SPACE * len(token) if index in runs else token for index, token in enumerate(tokens)]
        kinds = [_NORMAL if index in runs else kind for index, kind in enumerate(kinds)]
    else:
        scores = f.take("scores", [])
        if not hasattr(scores, "__len__") or len(scores) != len(tokens) or _strings(scores):
            raise ValueError(f"{f.where}: field 'scores' must list {len(tokens)} numbers, one a token")
        order = sorted(order, key=lambda index: -float(scores[index]))
    known = set(tokens)
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    core = _bpe(f, tokens, merges, unk_token=specials.get("unk_token"), fuse_unk=True, byte_fallback=True)
    decoders = [t.decoders.Replace(_SPACE, " "), t.decoders.ByteFallback(), t.decoders.Fuse()]
    if gemma or not f.flag("add_space_prefix", True):
        core.normalizer = t.normalizers.Replace(" ", _SPACE)
    else:
        core.pre_tokenizer = t.pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        decoders.append(t.decoders.Strip(" ", 1, 0))
    core.decoder = t.decoders.Sequence(decoders)
    _add_whole(core, tokens, kinds)
    return core


def _bpe(f: Fields, tokens: list[str], merges: Sequence[tuple[Any, ...]], **options: Any) -> Any:
    import tokenizers as t

    vocabulary: Any = {token: index for index, token in enumerate(tokens)}
    pairs: Any = merges
    try:
        return t.Tokenizer(t.models.BPE(vocabulary, pairs, **options))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{f.where}: the merges do not fit the tokens: {' '.join(str(error).split())}") from None


def _add_whole(core: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Have control tokens, and those that the authors added, found as a whole anywhere in a text."""
    import tokenizers as t

    for wanted, add in ((_CONTROL, core.add_special_tokens), (_USER_DEFINED, core.add_tokens)):
        found = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        add([t.AddedToken(token, normalized=False) for token in found])


def _surround(core: Any, specials: Mapping[str, str], begin: bool, end: bool) -> None:
    """Have `encode` put the first and the last token around a text, where they are wanted and known."""
    import tokenizers as t

    first = [specials["bos_token"]] if begin and "bos_token" in specials else []
    last = [specials["eos_token"]] if end and "eos_token" in specials else []
    if first or last:
        ids = [(token, core.token_to_id(token)) for token in dict.fromkeys(first + last)]
        core.post_processor = t.processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids)


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a Hugging Face folder; None when it has no `tokenizer.json`.

    Special tokens come from `tokenizer_config.json`, the ids that end an answer from `generation_config.json`, then
    `config.json`, then the eos token; the chat template from `chat_template.jinja` or `tokenizer_config.json`. Raises
    ValueError naming the file that is damaged.
    """
    if not (folder / "tokenizer.json").exists():
        return None
    path = inside(folder, "tokenizer.json")
    tokenizers = optional("tokenizers", "a tokenizer")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from None
    core.no_truncation()
    core.no_padding()

    def optional_json(name: str) -> dict[str, Any]:
        return read_json(inside(folder, name)) if (folder / name).exists() else {}

    settings = optional_json("tokenizer_config.json")
    specials = {}
    for name in _SPECIAL_IDS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            specials[name] = token

    eos: Any = core.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    for name in ("config.json", "generation_config.json"):
        eos = optional_json(name).get("eos_token_id", eos)
    eos_ids = [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]

    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if (folder / "chat_template.jinja").exists():
        path = inside(folder, "chat_template.jinja")
        try:
            template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8") from None
    return Tokenizer(core, specials, eos_ids, template if isinstance(template, str) else None)
