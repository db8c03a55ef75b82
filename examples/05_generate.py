"""A real language model answers, and the screen shows what its cache bought.

The file comes by `make demo` (SmolLM2 135M) or `make demo MODEL=gemma3` (Gemma 3 270M, most of whose layers look at the
last 512 tokens only).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common import parser, progress, run
from minikv import Generation, Model, generate, load
from minikv.arguments import as_count
from minikv.cost import KIND_NAMES
from minikv.report import both_units, print_table, si
from minikv.weights import Tokenizer

FILE = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
QUESTION = "What is the capital of France, and what is it known for?"
BEGINNING = "The capital of France is"
LENGTHS = (128, 256, 512, 768, 1024)


def main(argv: Sequence[str] | None = None) -> None:
    """Answer a prompt on the screen, compute the same tokens without a cache, compare; then look at windowed layers."""
    arguments = parser(__doc__)
    arguments.add_argument("model", nargs="?", type=Path, default=FILE, metavar="FILE", help=f"default {FILE}")
    arguments.add_argument("--prompt", help="a question, or a beginning where the model is not made for chat")
    arguments.add_argument("--max-new-tokens", type=as_count, default=48, metavar="N", help="default 48")
    options = arguments.parse_args(argv)
    if not options.model.exists():
        raise ValueError(
            f"{options.model} is not there: `make {FILE}` fetches SmolLM2, `make demo MODEL=gemma3` Gemma 3"
        )
    print(f"reading {options.model} ...", file=sys.stderr)
    model, tokenizer = load(options.model, options.backend)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer, so there is nothing to read a prompt with")
    ids = prompt_ids(tokenizer, options.prompt)

    cached = answer(model, tokenizer, ids, options.max_new_tokens)
    count = len(cached.ids)
    print(f"\nThe same {count} tokens without a cache ...", file=sys.stderr)
    # Nothing but the end of the answer may stop it: a difference is to be seen.
    said = iter(progress(range(count), "tokens"))
    uncached = generate(model, ids, count, use_cache=False, on_token=lambda _: next(said, None))
    compare(cached, uncached)
    if model.config.window is not None:
        show_windows(model, [*ids, *cached.ids])


def prompt_ids(tokenizer: Tokenizer, prompt: str | None) -> list[int]:
    """Make token ids of the prompt, as a question to a chat model or as a text to go on from, and show it."""
    try:
        text = tokenizer.chat([{"role": "user", "content": prompt or QUESTION}])
    except ValueError:  # no chat template: this is a base model
        print(f"> {prompt or BEGINNING}", end="", flush=True)
        return tokenizer.encode(prompt or BEGINNING)
    print(f"> {prompt or QUESTION}", flush=True)
    return tokenizer.encode(text, special=False)


def answer(model: Model, tokenizer: Tokenizer, ids: Sequence[int], count: int) -> Generation:
    """Generate up to `count` tokens and show them as they come."""
    text_of = tokenizer.stream()

    def show(token: int) -> None:
        if token not in tokenizer.eos_ids:
            print(text_of(token), end="", flush=True)

    result = generate(model, ids, count, stop_ids=tokenizer.eos_ids, on_token=show)
    print("" if result.ids[-1] in tokenizer.eos_ids else " [...]")
    return result


def compare(cached: Generation, uncached: Generation) -> None:
    """Print what both took, and say whether they are the same."""
    table = [["", "prompt", "other tokens", "tokens/s", "cache"]]
    for name, result in (("with cache", cached), ("without", uncached)):
        s = result.stats
        seconds = si(s.prefill_seconds, "s"), si(s.decode_seconds, "s")
        table.append([name, *seconds, f"{s.decode_rate:,.1f}", both_units(s.cache_bytes) if s.cache_bytes else "none"])
    print_table(table)
    s = cached.stats
    same = "The same tokens" if cached.ids == uncached.ids else "OTHER TOKENS, which must not be,"
    ratio = uncached.stats.decode_seconds / s.decode_seconds if s.decode_seconds else 1.0
    held = s.prompt_tokens + s.new_tokens - 1  # the last token was never read
    print(f"\n{same}, {ratio:,.1f} times as fast.")
    print(f"The cache holds {s.cache_bytes // held:,} bytes for each of {held} tokens.")


def show_windows(model: Model, ids: Sequence[int]) -> None:
    """Feed a longer text and print what the layers of each kind own, as it grows."""
    window, pattern, caches = model.config.window, model.config.pattern, model.new_caches()
    print(f"\nA longer text: the windowed layers stop growing at {window} tokens.")
    text = (list(ids) * (LENGTHS[-1] // len(ids) + 1))[: LENGTHS[-1]]
    kinds = sorted(set(pattern), reverse=True)
    table = [["text", *(f"{pattern.count(kind)} {KIND_NAMES[kind]} layers" for kind in kinds), "if all were full"]]
    for start in progress(range(0, LENGTHS[-1], 128), "chunks of 128 tokens"):
        model.step([text[start : start + 128]], caches, last=1)
        length = start + 128
        if length in LENGTHS:
            held = dict.fromkeys(kinds, 0)
            for kind, cache in zip(pattern, caches, strict=True):
                held[kind] += cache.nbytes_used
            full = held["G"] // pattern.count("G") * len(pattern) if "G" in held else 0
            table.append([f"{length:,}", *(si(size, "B") for size in held.values()), si(full, "B") if full else ""])
    print_table(table)


if __name__ == "__main__":
    run(main)
