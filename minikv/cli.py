"""What can be asked from a shell? `minikv cost`, `models`, `generate` and `bench`.

This file says which arguments there are and hands them on; `arguments.py` reads them, `cost.py`, `report.py`,
`presets/`, `generate.py` and `bench.py` have the answers. Nothing heavy is imported before a command needs it, so that
`minikv cost` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cost
from .arguments import (
    Parser,
    add_backend,
    add_command,
    as_bytes,
    as_count,
    as_model,
    as_output,
    as_tokens,
    flush,
    in_a_line,
    is_path,
    one_of,
    suggestion,
)
from .config import ModelConfig
from .generate import check_sampling, generate
from .model import Model
from .presets import devices, models
from .report import Plan, both_units, in_words, price, print_prices, print_table, si
from .weights import load

COMMANDS = ("cost", "models", "generate", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 after one line on what is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
        prog="minikv",
        description="KV caching, written to be read: what a model's cache costs, and models that run.",
        epilog="`minikv COMMAND --help` says more about each.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_cost, _add_models, _add_generate, _add_bench):
        add(commands)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command {argv[0]!r}{suggestion(argv[0], COMMANDS)}")
    command = parser
    try:
        try:
            if argv and argv[0] == "bench":  # has arguments of its own
                from .bench import main as bench

                return bench(argv[1:])
            arguments, unknown = parser.parse_known_args(argv)
            command = arguments.parser
            if unknown:
                options = [option for action in command._actions for option in action.option_strings]
                command.error(f"unknown argument {unknown[0]!r}{suggestion(unknown[0], options)}")
            return arguments.run(arguments)
        finally:
            flush()
    except BrokenPipeError:  # `minikv models | head` has read enough
        return 0
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        command.error(in_a_line(error))
    except KeyboardInterrupt:
        return 130


# minikv cost


def _add_cost(commands: Any) -> None:
    add = add_command(
        commands,
        "cost",
        "MODEL...",
        run_cost,
        "memory, operations and best times of models",
        "Say what caches and weights take, what fits, and what steps cost at best.",
        "example:\n  minikv cost llama-3-8b qwen3-8b --context 8k --batch 32 --device h100",
    )
    known_devices, known_formats, pictures = [*devices(), "this"], list(cost.FORMATS), ("context", "fits", "roofline")
    add("model", nargs="+", type=as_model, metavar="MODEL", help="a preset, a config.json or its folder, a GGUF file")
    add("--context", type=as_tokens, default=4096, metavar="TOKENS", help="per sequence; 128k is 131072 (default 4k)")
    add("--batch", type=as_count, default=1, metavar="N", help="sequences (default 1)")
    as_format, formats = one_of("format", known_formats), f"{', '.join(known_formats)} (default bf16)"
    add("--format", type=as_format, default="bf16", metavar="NAME", help=formats)
    add("--weight-format", type=as_format, metavar="NAME", help="of weights, if they are not in --format")
    add("--capacity", type=as_tokens, metavar="TOKENS", help="reserve for longer sequences than --context")
    add("--page-size", type=as_count, default=1, metavar="TOKENS", help="reserve whole pages (default 1)")
    add("--device", type=one_of("device", known_devices), metavar="NAME", help=", ".join(known_devices))
    add("--devices", type=as_count, default=1, metavar="N", help="that share the work evenly (default 1)")
    add("--memory", type=as_bytes, metavar="SIZE", help="80GB or 24GiB in all, if not the devices' own")
    add("--json", action="store_true", help="print a list with an object per model, for programs")
    add("--plot", type=as_output(".svg", ".png"), metavar="FILE", help="draw a picture too, .svg or .png")
    which = f"{', '.join(pictures)} (default context)"
    add("--picture", type=one_of("picture", pictures), metavar="NAME", help=which)
    add_backend(add, "measures --device this")


def run_cost(arguments: argparse.Namespace) -> int:
    """Price every model asked for; print a table or JSON, and draw a picture when one is wanted."""
    if arguments.devices > 1 and not arguments.device:
        raise ValueError("--devices needs a --device")
    if arguments.picture and not arguments.plot:
        raise ValueError("--picture needs a --plot")
    device = None
    if arguments.device == "this":
        from .presets.measure import measure_this

        device = measure_this(arguments.backend, arguments.dtype)
    elif arguments.device:
        device = devices()[arguments.device]
    plan = Plan(
        arguments.context,
        arguments.batch,
        cost.FORMATS[arguments.format],
        cost.FORMATS[arguments.weight_format or arguments.format],
        arguments.capacity,
        arguments.page_size,
        device,
        arguments.devices,
        arguments.memory,
    )
    prices = [price(name, config, plan) for name, config in arguments.model]
    if arguments.plot:
        _draw(arguments.picture or "context", dict(arguments.model), plan, arguments.plot)
    if arguments.json:
        print(json.dumps(prices, indent=1))
    else:
        print_prices(prices, plan)
    return 0


def _draw(picture: str, configs: dict[str, ModelConfig], plan: Plan, path: Path) -> None:
    from . import pictures

    formats = plan.format, plan.weight_format
    if picture == "context":
        pictures.draw_context(configs, path, plan.format, plan.batch)
    elif plan.device is None:
        raise ValueError(f"--picture {picture} needs a --device")
    elif picture == "fits":
        pictures.draw_fits(configs, plan.device, path, plan.devices, *formats)
    else:
        name, config = next(iter(configs.items()))
        pictures.draw_roofline(name, config, plan.device, path, plan.context, plan.devices, *formats)


# minikv models


def _add_models(commands: Any) -> None:
    add = add_command(
        commands,
        "models",
        "[TEXT]",
        run_models,
        "the models and devices known by name",
        "List the models that `minikv cost` knows by name, with what a token adds to the\n"
        "cache in bf16 as long as every layer keeps it, and the devices.",
    )
    add("text", nargs="?", default="", metavar="TEXT", help="only models with this in their name")
    add("--sources", action="store_true", help="where each row was read, and what is not verified")


def run_models(arguments: argparse.Namespace) -> int:
    """Print the presets."""
    chosen = {name: preset for name, preset in models().items() if arguments.text.lower() in name}
    if not chosen:
        raise ValueError(f"no model has {arguments.text!r} in its name{suggestion(arguments.text, models())}")
    if arguments.sources:
        for name, preset in chosen.items():
            notes = f"\n  notes: {preset.notes}" if preset.notes else ""
            print(f"{name}\n  source: {preset.source}\n  verified: {preset.verified}{notes}")
        return 0
    table = [["model", "parameters", "attention", "layers", "KB/token", "positions"]]
    for name, preset in chosen.items():
        c = preset.config
        table.append(
            [
                name,
                in_words(cost.parameters(c)),
                f"MLA {c.kv_lora_rank}+{c.qk_rope_head_dim}"
                if c.is_mla
                else f"{c.n_heads}/{c.n_kv_heads} x {c.head_dim}",
                " + ".join(f"{kind.layers} {cost.KIND_NAMES[kind.kind]}" for kind in cost.cache_cost(c)),
                f"{cost.cache_bytes_per_token(c) / 1000:,.3f}",
                f"{c.max_positions:,}",
            ]
        )
    print_table(table)
    if not arguments.text:
        table = [["device", "FLOP/s", "memory", "bandwidth"]]
        for device in devices().values():
            rates = si(device.operations_per_second, ""), si(device.memory, "B"), si(device.bytes_per_second, "B/s")
            table.append([device.name, *rates])
        print_table(table)
    return 0


# minikv generate

# Checkpoints that `generate` finds by name below $MINIKV_MODELS or ./models: the file, and what brings it there.
CHECKPOINTS = {
    "smollm2-135m": ("SmolLM2-135M-Instruct.Q4_1.gguf", "make demo"),
    "gemma-3-270m": ("gemma-3-270m*.gguf", "make demo MODEL=gemma3"),
}
PREFILL_CHUNK = 512  # tokens between two signs of progress


def _add_generate(commands: Any) -> None:
    add = add_command(
        commands,
        "generate",
        "MODEL PROMPT",
        run_generate,
        "continue a text with a model",
        "Continue a prompt with a model; the answer streams, the statistics follow.",
        'example:\n  minikv generate smollm2-135m "The capital of France is" --max-new-tokens 20',
    )
    add("model", metavar="MODEL", help=f"a GGUF file, a folder, or one of {', '.join(CHECKPOINTS)}")
    add("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    add("--max-new-tokens", type=as_count, default=100, metavar="N", help="stop after so many (default 100)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default 0)")
    add("--top-k", type=as_count, metavar="N", help="draw from the N likeliest tokens only")
    add("--top-p", type=float, metavar="P", help="draw from the fewest that reach probability P")
    add("--seed", type=int, metavar="N", help="equal seeds draw equal tokens")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--no-cache", action="store_true", help="recompute the whole text for each token, to compare")
    add_backend(add, "what computes")


def run_generate(arguments: argparse.Namespace) -> int:
    """Load a model, continue the prompt, and print the answer as it comes and the statistics on standard error."""
    check_sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    model, tokenizer = load(_checkpoint(arguments.model), arguments.backend, arguments.dtype)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer.json, so there is nothing to read a prompt with")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.chat:
        prompt = tokenizer.chat([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(prompt, special=not arguments.chat)
    if not ids:
        raise ValueError("PROMPT is empty, there is nothing to continue")
    text_of = tokenizer.stream()

    def show(token: int) -> None:
        if token not in tokenizer.eos_ids:
            print(text_of(token), end="", flush=True)

    result = generate(
        WatchedModel(model, len(ids)) if len(ids) > PREFILL_CHUNK and not arguments.no_cache else model,
        ids,
        arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop_ids=tokenizer.eos_ids,
        prefill_chunk=PREFILL_CHUNK,
        use_cache=not arguments.no_cache,
        on_token=show,
    )
    stats = result.stats
    print()
    print(
        f"prompt: {stats.prompt_tokens:,} tokens in {si(stats.prefill_seconds, 's')}, "
        f"{stats.prefill_rate:,.1f} a second\n"
        f"answer: {stats.new_tokens:,} tokens, after the first {stats.decode_rate:,.1f} a second\n"
        f"cache: {both_units(stats.cache_bytes) if stats.cache_bytes else 'none'}",
        file=sys.stderr,
    )
    return 0


class WatchedModel(Model):
    """Say on standard error, as long as a prompt is being read, how much of it has been.

    A terminal gets one line that changes, a file a line each time.
    """

    def __init__(self, model: Model, prompt_tokens: int) -> None:
        super().__init__(model.config, model.weights)
        self.read, self.prompt_tokens = 0, prompt_tokens

    def logits(self, x: Any, last: int | None = None) -> Any:
        """Compute what `Model.logits` does: the end of every step, however it was computed."""
        logits = super().logits(x, last)
        if self.read < self.prompt_tokens:
            self.read += x.shape[1]
            end = "\r" if self.read < self.prompt_tokens and os.isatty(2) else "\n"
            print(
                f"reading the prompt: {self.read:,} of {self.prompt_tokens:,} tokens",
                end=end,
                file=sys.stderr,
                flush=True,
            )
        return logits


def _checkpoint(word: str) -> Path:
    name = word.lower()
    if is_path(word, ".gguf"):
        return Path(word)
    if name not in CHECKPOINTS:
        hint = suggestion(word, CHECKPOINTS) or f": give a path, or one of {', '.join(CHECKPOINTS)}"
        raise ValueError(f"no weights known for {word!r:.80}{hint}")
    pattern, command = CHECKPOINTS[name]
    folder = Path(os.environ.get("MINIKV_MODELS", "models"))
    found = sorted(folder.rglob(pattern))
    if not found:
        raise ValueError(f"{name} is not in {folder}: `{command}` fetches it, or give a path")
    return found[0]


# minikv bench


def _add_bench(commands: Any) -> None:
    commands.add_parser("bench", help="measure the library on this machine, beside its peers", add_help=False)
