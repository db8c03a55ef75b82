"""Do texts become the ids that transformers gives, come back, and can a chat template do no harm?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from checkpoints import GEMMA3, SMOLLM2, model_file
from minikv.weights.gguf_file import read_gguf
from minikv.weights.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
PATH = Path("model.gguf")


def reference(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name).read_text())


@pytest.fixture(scope="module", params=[("smollm2.json", SMOLLM2), ("gemma3.json", GEMMA3)], ids=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    """A real tokenizer, and what transformers made of the same file."""
    fixture, file = request.param
    path = model_file(file)
    return gguf_tokenizer(read_gguf(path).metadata, path), reference(fixture)


def test_ids_are_those_of_transformers(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = real
    assert len(expected["sentences"]) >= 50
    for row in expected["sentences"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
        assert tokenizer.encode(row["text"], special=False) == row["ids_without_bos"], row["text"]
        assert tokenizer.decode(row["ids_without_bos"]) == row["decoded"], row["text"]


def test_texts_come_back(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = real
    texts = [row["text"] for row in expected["sentences"]]
    back = [tokenizer.decode(tokenizer.encode(text, special=False)) for text in texts]
    # Gemma spells a space as the character that then cannot come back as itself.
    assert back == [text.replace("\u2581", " ") for text in texts] or back == texts


def test_bytes_that_are_no_text_are_refused(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    """Python hands undecodable bytes of a command line on as lone surrogates."""
    with pytest.raises(ValueError, match=r"^the text is not UTF-8: no character at position 1, but '\\udcff'$"):
        real[0].encode(b"a\xff".decode(errors="surrogateescape"))


def test_a_stream_of_tokens_makes_the_same_text(real: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = real
    for row in expected["sentences"]:
        take = tokenizer.stream()
        pieces = [take(token) for token in row["ids_without_bos"]]
        assert "".join(pieces) == row["decoded"], row["text"]
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in row["text"]


def test_conversations_are_those_of_transformers() -> None:
    path = model_file(SMOLLM2)
    tokenizer = gguf_tokenizer(read_gguf(path).metadata, path)
    for chat in reference("smollm2.json")["chats"]:
        text = tokenizer.chat(chat["messages"], answer=chat["add_generation_prompt"])
        assert text == chat["text"]
        assert tokenizer.encode(text, special=False) == chat["ids"]
    assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1
    assert tokenizer.decode([1, 504, 2], special=False) == tokenizer.decode([504])


# --- Vocabularies made by hand


def byte_level(**changes: Any) -> Tokenizer:
    settings: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "merges": ["1 2", "12 3", "123 4"]}
    settings |= {"tokens": ["1", "2", "3", "4", "12", "123", "1234", "<s>", "</s>", "<note>", "\u0120"]}
    settings |= {"token_type": [1] * 7 + [3, 3, 4, 1], "bos_token_id": 7, "eos_token_id": 8}
    return gguf_tokenizer({f"tokenizer.ggml.{key}": v for key, v in (settings | changes).items()}, PATH)


def test_words_are_cut_as_the_file_says() -> None:
    assert byte_level().encode("1234 1") == [6, 10, 0]
    assert byte_level(pre="llama-bpe").encode("12341") == [5, 3, 0]  # at most three digits a word
    assert byte_level(pre="qwen2").encode("1234") == [0, 1, 2, 3]  # each digit is a word
    with pytest.raises(ValueError, match="pre 'klingon' is not supported; known are default, gpt-2"):
        byte_level(pre="klingon")


def test_whole_words_need_no_merges_for_llama3() -> None:
    assert byte_level(pre="llama-bpe", merges=["1 2"]).encode("123") == [5]
    assert byte_level(pre="gpt-2", merges=["1 2"]).encode("123") == [4, 2]


def test_tokens_around_a_text_are_those_the_file_wants() -> None:
    assert byte_level().encode("12") == [4]
    assert byte_level(add_bos_token=True, add_eos_token=True).encode("12") == [7, 4, 8]
    assert byte_level(add_bos_token=True).encode("12", special=False) == [4]
    assert byte_level().encode("1<s>2<note>3") == [0, 7, 1, 9, 2]
    assert byte_level().decode([0, 7, 1, 9], special=False) == "12<note>"  # the authors' own tokens are text
    assert byte_level(eot_token_id=9).eos_ids == (8, 9)


def sentence_piece(architecture: str, **changes: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {"\u2581": -9.0, "a": -8.0, "b": -7.0, "c": -6.0, "ab": -3.0, "bc": -1.0, "\u2581a": -2.0, "  ": -5.0}
    settings: dict[str, Any] = {"model": "llama", "tokens": tokens + list(words)}
    settings |= {"scores": np.array([0.0] * len(tokens) + list(words.values()), np.float32)}
    settings |= {"token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) - 1) + [4]}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    named = {f"tokenizer.ggml.{key}": value for key, value in (settings | changes).items()}
    return gguf_tokenizer(named | {"general.architecture": architecture}, PATH)


SP = {"\u2581": 259, "a": 260, "b": 261, "c": 262, "ab": 263, "bc": 264, "\u2581a": 265, "  ": 266}


def test_merges_follow_scores_in_llama_and_the_order_of_tokens_in_gemma() -> None:
    assert sentence_piece("llama").encode("abc") == [1, SP["\u2581a"], SP["bc"]]  # with the space put in front
    assert sentence_piece("llama", add_space_prefix=False).encode("abc") == [1, SP["a"], SP["bc"]]
    assert sentence_piece("gemma3").encode("abc") == [1, SP["ab"], SP["c"]]
    assert sentence_piece("llama").decode([SP["\u2581a"], SP["bc"]]) == "abc"
    assert sentence_piece("gemma3").decode([SP["\u2581a"], SP["bc"]]) == " abc"


def test_what_the_vocabulary_lacks_is_spelled_in_bytes() -> None:
    text = "a\u00e9"
    ids = sentence_piece("gemma3").encode(text)
    assert ids == [1, SP["a"], 3 + 0xC3, 3 + 0xA9]
    assert sentence_piece("gemma3").decode(ids[1:]) == text


def test_runs_of_spaces_in_gemma_files_are_merged() -> None:
    assert sentence_piece("gemma3").encode("a  b") == [1, SP["a"], SP["  "], SP["b"]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "bert"}, "model 'bert' is not supported; known are gpt2 and llama"),
        ({"tokens": 3}, "'tokens' must be a list of strings"),
        ({"token_type": [1]}, "'token_type' must list 11 numbers"),
        ({"eos_token_id": 11}, "eos_token_id 11 is outside the vocabulary of 11"),
        ({"merges": ["1 2 3"]}, "'merges' must list pairs"),
        ({"merges": ["1 9"]}, "the merges do not fit the tokens"),
        ({"merges": 3}, "'merges' must list pairs"),
        ({"merges": [3, 4]}, "'merges' must list pairs"),
        ({"tokens": list(range(40))}, "'tokens' must be a list of strings"),
        ({"token_type": ["1"] * 11}, "'token_type' must list 11 numbers"),
        ({"model": np.arange(40)}, "'model' must be a string"),
        ({"add_bos_token": 1}, "'add_bos_token' must be true or false"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_damaged_vocabularies_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        byte_level(**changes)
    assert str(refusal.value).startswith("model.gguf") and says in str(refusal.value) and "\n" not in str(refusal.value)


# --- Chat templates


def with_template(template: str | None) -> Tokenizer:
    core = Core(models.BPE({"a": 0, "<s>": 1}, []))
    return Tokenizer(core, {"bos_token": "<s>"}, [1], template)


def test_a_template_sees_messages_and_special_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}\n  {{ m.role | upper }}: {{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}{{ messages[0] | tojson }}"
    message = {"role": "user", "content": "<h\u00e9>"}
    text = '<s>  USER: <h\u00e9>;>{"role": "user", "content": "<h\u00e9>"}'  # a line break after a block is dropped
    assert with_template(template).chat([message]) == text
    assert with_template("{{ eos_token }}|{{ strftime_now('%Y') | length }}").chat([message]) == "|4"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must\n alternate') }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.missing.deeper }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_misbehaves_is_an_error(template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError) as refusal:
        with_template(template).chat(messages)
    assert str(refusal.value).startswith("the chat template failed") and "\n" not in str(refusal.value)
    assert messages == [{"role": "user", "content": "a"}]


def test_no_template_is_an_error() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        with_template(None).chat([])


# --- Hugging Face folders


def folder(path: Path, settings: dict[str, Any], **more: dict[str, Any]) -> Path:
    core = Core(models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    core.enable_truncation(2)
    core.enable_padding(length=9)
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_folder_says_what_its_tokens_are(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "{{ eos_token }}"}
    tokenizer = folder_tokenizer(folder(tmp_path, config))
    assert tokenizer is not None
    assert tokenizer.encode("abab<s>") == [2, 2, 3]  # neither cut nor padded
    assert tokenizer.decode([2, 0, 3]) == "aba<s>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat([])) == (3, (4,), "</s>")


def test_generation_settings_know_best_where_an_answer_ends(tmp_path: Path) -> None:
    settings = {"eos_token": "</s>"}
    tokenizer = folder_tokenizer(folder(tmp_path, settings, config={"eos_token_id": 1}))
    assert tokenizer is not None and tokenizer.eos_ids == (1,)
    tokenizer = folder_tokenizer(folder(tmp_path, settings, generation_config={"eos_token_id": [4, 0]}))
    assert tokenizer is not None and tokenizer.eos_ids == (4, 0)


def test_several_templates_and_a_template_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "usual"}]
    tokenizer = folder_tokenizer(folder(tmp_path, {"chat_template": named}))
    assert tokenizer is not None and tokenizer.chat([]) == "usual" and tokenizer.bos_id is None
    (tmp_path / "chat_template.jinja").write_text("own file")
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.chat([]) == "own file"


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model.gguf[^\n]*'scores' must list \d+ numbers"):
        sentence_piece("llama", scores=["-1"] * (259 + len(SP)))


def test_damaged_folders_are_refused_by_file(tmp_path: Path) -> None:
    assert folder_tokenizer(tmp_path) is None
    folder(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja: not UTF-8"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: damaged JSON"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"^[^\n]*tokenizer.json: not a tokenizer[^\n]*$"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    outside = tmp_path.parent / "outside.json"
    outside.write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to(outside)
    with pytest.raises(ValueError, match="not in the folder"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("library", "call"), [("tokenizers", byte_level), ("jinja2", lambda: with_template("").chat([]))]
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str, call: Any) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"needs the library '{library}': pip install 'minikv\[models\]'"):
        call()
