"""How fast is it on this machine, beside the peers that are installed?

Everything is measured in one run, the parties taking turns, and told as medians with their spread and as ratios:
absolute times belong to the machine and the minute. What the numbers mean stands in docs/speed.md; what a step *should*
cost, in `cost.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from . import cost
from .arguments import Parser, as_output, one_of
from .attention import BLOCK_SIZE, attention
from .backend import Backend, get_backend
from .caches import Cache, ConcatCache, KVCache, RollingCache
from .config import ModelConfig
from .mla import LatentAttention
from .model import Model, random_model
from .peers import textbook_llama, torch_attention, transformers_llama
from .prefill import prefill
from .presets import models
from .presets.measure import measure_this
from .report import si

SETTLE = 0.25  # seconds: the threads of a matrix library wait for more work in a loop, in the way of the next party
CHECKPOINT = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL = ModelConfig(1000, 256, 4, 8, 2, 32, 512)
INSTALL = "pip install 'minikv[bench]'"
MISSING = f"missing ({INSTALL})"  # stands where a peer's times would
SECTIONS = {
    "model": "decode and prefill of SmolLM2-135M's shape, beside transformers",
    "load": "time and peak memory of reading a checkpoint, beside transformers",
    "attention": "decode attention of MHA, GQA and MQA, beside PyTorch's",
    "growth": "appends, windowed decode, prefill as the text grows, and no cache",
    "latent": "a token of latent attention, absorbed beside expanded",
    "share": "what share of this machine's own ceilings decode and prefill reach",
}


@dataclass
class Table:
    """Collect rows of timings of parties that took turns; the first party is what the others are divided by."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: str, **values: Any) -> None:
        """Put down one case and print it: a line per party with its ratio, all other values on the first line."""
        if not self.rows:
            print(f"\n{self.title}")
        self.rows.append({"case": case, **values})
        parties = [name for name, value in values.items() if isinstance(value, dict) or value == MISSING]
        plain = [name for name in values if name not in parties and "/" not in name]
        lines = [f"{name:15}{_times(values[name]):26}" for name in parties] or [""]
        lines[0] += "  ".join(f"{name} {_short(values[name])}" for name in plain)
        for i, name in enumerate(parties):
            if ratio := values.get(f"{name}/{parties[0]}"):
                lines[i] += f"{parties[0]} runs at {_short(ratio)} x this speed"
        for label, line in zip_longest([case], lines, fillvalue=""):
            print(f"  {label:33}{line}".rstrip(), flush=True)


def _times(told: Any) -> str:
    if told == MISSING:
        return MISSING
    median, low, high = (_short(told[key] * 1e3) for key in ("median", "low", "high"))
    return f"{median:>6} ms  ({low}-{high})"


def _short(value: Any) -> str:
    """Write a number with three digits or a little more: 1.10, 0.0228, 1,186, 1.05 M."""
    if isinstance(value, float):
        return f"{value:,.{min(max(2 - math.floor(math.log10(value)), 0), 4)}f}" if value else "0"
    if isinstance(value, int):
        return f"{value:,}" if value < 10_000 else si(value, "").strip()
    return str(value)


def alternate(parties: Mapping[str, Callable[[], Any] | None], backend: Backend, repeats: int) -> dict[str, Any]:
    """Time each party `repeats` times, taking turns after one untimed round, and divide the others by the first.

    Returns {name: {median, low, high}} in seconds (low, high: the quartiles) and {"name/first": ratio of medians}. A
    party that is None is not installed: it gets a word instead of times, and no ratio.
    """
    present = {name: run for name, run in parties.items() if run}
    times: dict[str, list[float]] = {name: [] for name in present}
    for turn in range(repeats + 1):
        for name, run in present.items():
            time.sleep(SETTLE)
            run()  # what the other party left in the processor's cache should not decide
            backend.synchronize()
            start = time.perf_counter()
            run()
            backend.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    told: dict[str, Any] = dict.fromkeys(parties, MISSING)
    for name, seconds in times.items():
        low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        told[name] = {"median": float(median), "low": float(low), "high": float(high)}
    first, *others = present
    told |= {f"{name}/{first}": told[name]["median"] / told[first]["median"] for name in others}
    return told


def bench_model(backend: Backend, quick: bool) -> Table:
    """Decode and prefill of SmolLM2-135M's shape beside transformers and a NumPy Llama as textbooks write it."""
    table = Table("A model of SmolLM2-135M's shape, float32, batch 1: time of a step")
    config = models()["smollm2-135m"].config
    model = random_model(config, backend=backend)
    peers = {"transformers": transformers_llama(model)} if backend.name == "numpy" else {}
    textbook = textbook_llama(model) if backend.name == "numpy" else None
    rng = np.random.default_rng(0)
    for party in (*peers.values(), textbook):
        if party:  # a race counts only when all run the same course
            prompt = rng.integers(0, config.vocab_size, (1, 9))
            ours, theirs = np.asarray(model.step(prompt, last=1)), np.asarray(party.prefill(prompt)())
            assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max(), "a peer computes something else"
    for context in (128, 2048):
        prompt = rng.integers(0, config.vocab_size, (1, context))
        parties: dict[str, Callable[[], Any] | None] = {"minikv": _decoder(model, prompt)}
        parties |= {name: peer.decoder(prompt) if peer else None for name, peer in peers.items()}
        table.add(f"decode, context {context}", **alternate(parties, backend, 5 if quick else 25))
    if textbook:
        prompt = rng.integers(0, config.vocab_size, (1, 128))
        parties = {"minikv": _decoder(model, prompt), "textbook NumPy": textbook.decoder(prompt)}
        table.add("decode, context 128", **alternate(parties, backend, 2 if quick else 5))
    for length, quick_repeats in ((512, 3), (2048, 2)):
        prompt = rng.integers(0, config.vocab_size, (1, length))
        parties = {"minikv": partial(prefill, model, prompt, last=1)}
        parties |= {name: peer.prefill(prompt) if peer else None for name, peer in peers.items()}
        table.add(f"prefill, {length} tokens", **alternate(parties, backend, quick_repeats if quick else 5))
    return table


def _decoder(model: Model, prompt: np.ndarray) -> Callable[[], Any]:
    caches = model.new_caches()
    prefill(model, prompt, caches, last=1)
    return lambda: model.step([[1]], caches, last=1)


def bench_load(path: str) -> Table:
    """Seconds and peak memory of reading a checkpoint, each party in a process of its own."""
    table = Table(f"Reading {os.path.basename(path)}: seconds and peak memory of the process")
    if not os.path.exists(path):
        table.add("minikv", missing=f"no file {path}: make demo fetches it")
        return table
    peers = {
        "minikv": "import minikv; model, tokenizer = minikv.load(path)",
        "transformers": "import transformers, os; folder, name = os.path.split(path); "
        "model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype='float32')",
    }
    for name, code in peers.items():
        script = (
            "import sys, time; path = sys.argv[1]; start = time.perf_counter()\n"
            f"{code}\n"
            "seconds, status = time.perf_counter() - start, open('/proc/self/status').read()\n"
            "print(seconds, int(status.split('VmHWM:')[1].split()[0]) * 1024)"  # of this process alone
        )
        done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
        if done.returncode:
            *_, reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            table.add(name, missing=INSTALL if reason.startswith("ModuleNotFoundError") else reason[:80])
        else:
            seconds, peak = done.stdout.split()[-2:]
            table.add(name, seconds=float(seconds), peak_MB=round(float(peak) / 1e6))
    return table


def bench_attention(backend: Backend, quick: bool) -> Table:
    """One query against many keys, beside PyTorch's scaled_dot_product_attention."""
    table = Table("Decode attention, head width 128, float32: time of one call")
    rng = np.random.default_rng(0)
    for batch in (1, 8):
        for keys in (4096,) if quick else (4096, 16384):
            for heads, kv_heads in ((32, 32), (32, 8), (32, 1)):
                shapes = ((batch, heads, 1, 128), (batch, kv_heads, keys, 128), (batch, kv_heads, keys, 128))
                host = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
                q, k, v = (backend.asarray(array) for array in host)
                parties: dict[str, Callable[[], Any] | None] = {"minikv": partial(attention, q, k, v)}
                if backend.name == "numpy":
                    parties["torch"] = torch_attention(*host)
                case = f"batch {batch}, heads {heads}/{kv_heads}, {keys} keys"
                told = alternate(parties, backend, 3 if quick or batch > 1 else 9)
                table.add(case, **told, GB_per_s=(k.size + v.size) * 4 / told["minikv"]["median"] / 1e9)
    return table


def bench_growth(backend: Backend, quick: bool) -> Table:
    """What grows with the text and what does not: appending, windowed decode, prefill memory, recomputing."""
    table = Table("Growth with the text")
    rng = np.random.default_rng(0)
    row = backend.asarray(rng.standard_normal((1, 8, 1, 64), dtype=np.float32))

    def appends(make: Callable[[], Cache], count: int) -> Callable[[], None]:
        def run() -> None:
            cache = make()
            for position in range(count):
                cache.extend([[position]], row, row)

        return run

    for count in (512, 1024) if quick else (512, 1024, 2048, 4096):
        parties: dict[str, Callable[[], Any]] = {
            "doubling": appends(KVCache, count),
            "concatenating": appends(ConcatCache, count),
        }
        table.add(f"{count} appends", **alternate(parties, backend, 3))

    window, caches = 256, {}
    for seen in (2, 10, 100):
        cache = RollingCache(window)
        long = backend.asarray(rng.standard_normal((1, 8, seen * window, 64), dtype=np.float32))
        cache.extend([list(range(seen * window))], long, long)
        caches[f"{seen}W"] = cache
    q = backend.asarray(rng.standard_normal((1, 32, 1, 64), dtype=np.float32))

    def windowed(cache: Cache) -> Callable[[], Any]:
        def run() -> None:
            pos = [[cache.length]]
            k_pos, k, v = cache.extend(pos, row, row)
            attention(q, k, v, q_pos=pos, k_pos=k_pos, window=window)

        return run

    parties = {name: windowed(cache) for name, cache in caches.items()}
    told = alternate(parties, backend, 50)
    table.add(
        f"a windowed token, W = {window}, after",
        **told,
        bytes_each=caches["2W"].nbytes,
        bytes_at_100W=caches["100W"].nbytes,
    )

    for length in (512, 1024, 2048) if quick else (512, 1024, 2048, 4096):
        q, k, v = (backend.asarray(rng.standard_normal((1, n, length, 64), dtype=np.float32)) for n in (8, 2, 2))
        parties = {
            "in blocks": partial(attention, q, k, v, block_size=BLOCK_SIZE),
            "whole": partial(attention, q, k, v),
        }
        told = alternate(parties, backend, 3)
        peaks = {f"{name} peak_MB": round(_peak(run) / 1e6, 1) for name, run in parties.items()}
        table.add(f"attention over {length} tokens", **told, **(peaks if backend.name == "numpy" else {}))

    for length, told in next_token(backend, (64, 256, 1024)):
        table.add(f"next token after {length}", **told)
    return table


def next_token(backend: Backend, lengths: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Time one more token of `SMALL` behind texts of some lengths, on a cache and with everything computed again."""
    model, rng = random_model(SMALL, backend=backend), np.random.default_rng(0)
    for length in lengths:
        text = rng.integers(0, SMALL.vocab_size, (1, length))
        again = partial(model.step, text, last=1)
        yield length, alternate({"cached": _decoder(model, text), "recomputed": again}, backend, 5)


def _peak(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def bench_latent(backend: Backend, quick: bool) -> Table:
    """A token of latent attention in both forms, at DeepSeek-V2-Lite's sizes."""
    table = Table("Latent attention (16 heads, latent 512 + 64): one token of one layer")
    config = ModelConfig(
        *(100, 2048, 1, 16, 16, 128, 64), kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    layer = random_model(config, backend=backend).layers[0].attention
    assert isinstance(layer, LatentAttention)
    rng = np.random.default_rng(0)
    x = backend.asarray(rng.standard_normal((1, 1, 2048), dtype=np.float32))
    for context in (256, 1024) if quick else (256, 1024, 4096):
        rows = backend.asarray(rng.standard_normal((1, 1, context, 576), dtype=np.float32))
        cache = KVCache()
        cache.extend([list(range(context))], rows)

        def run(form: str, cache: Cache = cache) -> None:
            layer.form = form
            layer(x, np.array([[cache.length]]), None, cache)

        parties = {form: partial(run, form) for form in ("absorbed", "expanded")}
        table.add(f"after {context} tokens", **alternate(parties, backend, 5))
    return table


def bench_share(backend: Backend, quick: bool) -> Table:
    """What share of the machine's own ceilings decode and prefill reach."""
    table = Table("Share of this machine's measured ceilings (SmolLM2-135M's shape, float32)")
    ceiling = measure_this(backend)
    table.add("ceilings", GFLOP_per_s=ceiling.operations_per_second / 1e9, GB_per_s=ceiling.bytes_per_second / 1e9)
    config = models()["smollm2-135m"].config
    model = random_model(config, backend=backend)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, (1, 512))
    parties: dict[str, Callable[[], Any]] = {
        "decode": _decoder(model, prompt),
        "prefill": partial(prefill, model, prompt, last=1),
    }
    told = alternate(parties, backend, 3 if quick else 9)
    for name, (new, past) in {"decode": (1, 512), "prefill": (512, 0)}.items():
        work = cost.total(cost.step_cost(config, 1, new, past, cost.FORMATS["fp32"], head_positions=1))
        seconds = told[name]["median"]
        table.add(
            f"{name}, context 512",
            operations=work.operations / seconds / ceiling.operations_per_second,
            bandwidth=work.bytes / seconds / ceiling.bytes_per_second,
        )
    return table


def about_this_machine(backend: Backend) -> dict[str, Any]:
    """Name the machine, the versions and the thread counts that a result belongs to."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for package in ("threadpoolctl", "torch", "transformers", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    threads = {name: os.environ.get(name, "default") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {
        "backend": backend.name,
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": threads,
        "versions": versions,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run `minikv bench` and return its exit code."""
    sections = "\n".join(f"  {name:9}  {what}" for name, what in SECTIONS.items())
    parser = Parser(
        prog="minikv bench",
        usage="minikv bench [SECTION...] [options]",
        description="Measure the library on this machine: medians, and in brackets the middle half,\n"
        "of parties that take turns. Peers that are not installed are named as missing.\n\n"
        f"sections (all, when none is named):\n{sections}",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=22, width=80),
    )
    add = parser.add_argument
    add("sections", nargs="*", type=one_of("section", tuple(SECTIONS)), metavar="SECTION", help=argparse.SUPPRESS)
    add("--backend", default="numpy", help="numpy, cupy or auto (default numpy)")
    add("--model", metavar="FILE", default=CHECKPOINT, help=f"what `load` reads (default {CHECKPOINT})")
    add("--quick", action="store_true", help="fewer sizes and repetitions")
    add("--json", type=as_output(), metavar="FILE", help="also write everything, with versions and threads, to a file")
    arguments = parser.parse_args(argv)
    if arguments.model != CHECKPOINT and not os.path.isfile(arguments.model):
        parser.error(f"--model: there is no file {arguments.model}")
    try:
        backend = get_backend(arguments.backend)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    about = about_this_machine(backend)
    for name, value in about.items():
        told = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        print(f"{name}: {told}")
    run: dict[str, Callable[[], Table]] = {
        "model": lambda: bench_model(backend, arguments.quick),
        "load": lambda: bench_load(arguments.model),
        "attention": lambda: bench_attention(backend, arguments.quick),
        "growth": lambda: bench_growth(backend, arguments.quick),
        "latent": lambda: bench_latent(backend, arguments.quick),
        "share": lambda: bench_share(backend, arguments.quick),
    }
    tables = [run[section]() for section in arguments.sections or SECTIONS]
    if arguments.json:
        results = {"about": about, "tables": [vars(table) for table in tables]}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0
