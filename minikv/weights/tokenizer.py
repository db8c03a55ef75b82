"""How does text become token ids and back, and a conversation a prompt, exactly as a checkpoint's authors did it?

The `tokenizers` library does the splitting and merging. This module rebuilds its parts from what a GGUF file or a Hugging
Face folder says about them, and renders chat templates in a sandbox, because they are programs that come with the file.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .extras import optional
from .files import inside, read_json

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # kinds of tokens in GGUF files
_SPACE = "\u2581"  # how SentencePiece vocabularies spell a space
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

# The pattern that cuts text into words before byte pairs are merged, by the names GGUF files give it; "" is GPT-2's, which
# the library has built in. `smollm` stands here as transformers reads it: the original also isolates every digit, which
# changes the spaces before a number only.
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

        `special` also puts around the text what the checkpoint wants there (Gemma: its first token); pass False for text
        from `chat`, whose template has done so.
        """
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
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template failed: {' '.join(str(error).split())}") from None


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file's metadata describes.

    "gpt2" is byte-level BPE with the file's merges. "llama" is SentencePiece's BPE: it lists no merges, so every way to
    split a token into two others is one, and the token that comes first in the vocabulary (Gemma) or has the higher score
    (Llama) is made first. Raises ValueError naming the file and the key for anything else.
    """
    optional("tokenizers", "a tokenizer")
    settings = {
        key.removeprefix("tokenizer.ggml."): v for key, v in metadata.items() if key.startswith("tokenizer.ggml.")
    }
    tokens = settings.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{path}: metadata key 'tokenizer.ggml.tokens' is missing or no list of strings")
    kinds = settings.get("token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"{path}: {len(tokens)} tokens cannot have {len(kinds)} token types")
    model = settings.get("model")
    if model == "gpt2":
        core = _byte_level(settings, kinds, path)
    elif model == "llama":
        core = _sentence_piece(settings, kinds, str(metadata.get("general.architecture")).startswith("gemma"), path)
    else:
        raise ValueError(f"{path}: tokenizer.ggml.model {model!r:.80} is not supported; known are gpt2 and llama")

    def token_id(key: str) -> int | None:
        value = settings.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ValueError(f"{path}: tokenizer.ggml.{key} {value!r:.80} is outside the vocabulary of {len(tokens)}")
        return value

    specials = {}
    for name, key in zip(
        _SPECIAL_NAMES, ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"), strict=True
    ):
        if token_id(key) is not None:
            specials[name] = tokens[settings[key]]
    eos_ids = [i for key in ("eos_token_id", "eot_token_id", "eom_token_id") if (i := token_id(key)) is not None]
    # Files that do not say leave it to the reader: SentencePiece texts begin with a special token.
    _surround(core, specials, settings.get("add_bos_token", model == "llama"), settings.get("add_eos_token", False))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(core, specials, eos_ids, template if isinstance(template, str) else None)


def _byte_level(settings: Mapping[str, Any], kinds: Sequence[int], path: Path) -> Any:
    import tokenizers as t

    words = settings.get("pre", "default")
    if words not in _WORDS:
        raise ValueError(f"{path}: tokenizer.ggml.pre {words!r:.80} is not supported; known are {', '.join(_WORDS)}")
    merges = [tuple(merge.split(" ")) for merge in settings.get("merges", [])]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError(f"{path}: tokenizer.ggml.merges holds an entry that is not two tokens")
    vocabulary = {token: index for index, token in enumerate(settings["tokens"])}
    # Llama 3 looks a whole word up before it merges.
    core = _bpe(path, vocabulary, merges, ignore_merges=_WORDS[words] == _LLAMA3_WORDS)
    split = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not _WORDS[words])
    if _WORDS[words]:
        pattern = t.pre_tokenizers.Split(t.Regex(_WORDS[words]), behavior="isolated")
        split = t.pre_tokenizers.Sequence([pattern, split])
    core.pre_tokenizer = split
    core.decoder = t.decoders.ByteLevel()
    _add_whole(core, settings["tokens"], kinds)
    return core


def _sentence_piece(settings: Mapping[str, Any], kinds: Sequence[int], gemma: bool, path: Path) -> Any:
    import tokenizers as t

    tokens = settings["tokens"]
    if gemma:  # spells runs of spaces as they are, and means what all others spell with the replacement
        tokens = [_SPACE * len(token) if token.isspace() and set(token) == {" "} else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    order: Iterable[int] = range(len(tokens))
    if not gemma:
        scores = settings.get("scores", ())
        if len(scores) != len(tokens):
            raise ValueError(f"{path}: {len(tokens)} tokens cannot have {len(scores)} scores")
        order = sorted(order, key=lambda index: -scores[index])
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = settings.get("unknown_token_id")
    core = _bpe(
        path,
        vocabulary,
        merges,
        unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = [t.decoders.Replace(_SPACE, " "), t.decoders.ByteFallback(), t.decoders.Fuse()]
    if gemma or not settings.get("add_space_prefix", True):
        core.normalizer = t.normalizers.Replace(" ", _SPACE)
    else:
        core.pre_tokenizer = t.pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        steps.append(t.decoders.Strip(" ", 1, 0))
    core.decoder = t.decoders.Sequence(steps)
    _add_whole(core, tokens, [_NORMAL if token.strip(_SPACE) == "" else kind for token, kind in zip(tokens, kinds)])
    return core


def _bpe(path: Path, vocabulary: dict[str, int], merges: list[tuple[str, ...]], **options: Any) -> Any:
    import tokenizers as t

    try:
        return t.Tokenizer(t.models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}: the tokenizer's merges do not fit its tokens: {error}") from None


def _add_whole(core: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Have control tokens and those the authors added found as a whole, anywhere in a text."""
    import tokenizers as t

    control = [t.AddedToken(s, normalized=False, special=True) for s, kind in zip(tokens, kinds) if kind == _CONTROL]
    added = [
        t.AddedToken(s, normalized=False, special=False) for s, kind in zip(tokens, kinds) if kind == _USER_DEFINED
    ]
    core.add_special_tokens(control)
    core.add_tokens(added)


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
    for name in _SPECIAL_NAMES:
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
        template = inside(folder, "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(core, specials, eos_ids, template if isinstance(template, str) else None)
