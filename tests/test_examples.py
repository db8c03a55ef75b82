"""Do the examples run, and is what they print right? Each runs with small arguments, and its tables are read back."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from checkpoints import SMOLLM2, model_file
from minikv import Backend, ModelConfig, attention, random_model
from minikv.cost import Device
from support import TOLERANCE

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"

Run = Callable[..., "Output"]


class Output:
    """What an example printed: the lines, and the rows of its tables by their first cell."""

    def __init__(self, module: ModuleType, text: str) -> None:
        self.module, self.text = module, text

    def rows(self, header: str) -> dict[str, list[str]]:
        """Return the cells of the table whose header line begins so, by the first cell of each row."""
        lines = self.text.splitlines()
        start = next(i for i, line in enumerate(lines) if " ".join(line.split()).startswith(header))
        rows = {}
        for line in lines[start + 1 :]:
            if not line.strip():
                break
            first, *cells = re.split(r" {2,}", line.strip())
            rows[first] = cells
        return rows


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run_real(load_example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example, with some of its names changed, as a reader would."""

    def run_example(name: str, *arguments: str, **changed: object) -> Output:
        module = load_example(name)
        for attribute, value in changed.items():
            setattr(module, attribute, value)
        module.main(arguments)
        return Output(module, capsys.readouterr().out)

    return run_example


@pytest.fixture
def run(run_real: Run, backend: Backend) -> Run:
    """Run an example on one array library after the other, those included that no reader can ask for."""
    return lambda name, *arguments, **changed: run_real(name, *arguments, get_backend=lambda _: backend, **changed)


def eps_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) eps", text)]


def test_kv_cache(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    picture = tmp_path / "a.svg"
    output = run("01_kv_cache", "--longest", "128", "--plot", str(picture))
    assert eps_in(output.text) and max(eps_in(output.text)) < TOLERANCE
    cells = output.rows("text FLOP again")["128"]
    assert cells[6] == "1.05 MB"  # 128 tokens · 4 layers · 2 · 8 heads · 32 numbers · 4 bytes
    # n tokens one at a time write n(n+1)/2 rows when concatenated, and 2n - 1 when n is reached by doubling.
    for n in (64, 128):
        assert output.rows("tokens")[str(n)][1:3] == [f"{(n + 1) / 2:,.1f}x", "2.0x"]
    assert output.rows("text 1 user")["4,096"] == ["2.15 GB", "17.2 GB", "68.7 GB"]
    assert "Time of one more token" in picture.read_text(encoding="utf-8")


def test_prefill_decode(run: Run) -> None:
    device = Device("this", 80e9, 10e9, 0, "made up: 8 FLOP per byte")
    config = ModelConfig(vocab_size=64, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=256)
    output = run(
        *("02_prefill_decode", "--context", "64", "--batches", "1", "4"),
        measure_this=lambda backend: device,
        CONFIG=config,
    )
    assert "Below 8 FLOP per byte" in output.text
    phases = output.rows("FLOP")
    assert phases["prefill"][3] == "compute" and phases["decode, batch 1"][3] == "memory"
    parts = output.rows("prefill decode")
    # A float32 weight serves 2 operations for each sequence and takes 4 bytes, less what activations add to the bytes.
    assert parts["feed-forward"][1:] == ["0.5", "1.9"]
    assert parts["scores"][1] == parts["scores"][2]  # a batch does not share its caches


def test_grouped_query(run: Run) -> None:
    output = run("03_grouped_query", "--keys", "64")
    assert len(eps_in(output.text)) == 3 and max(eps_in(output.text)) < TOLERANCE
    rows = output.rows("K")
    assert [rows[kind][2] for kind in ("MHA", "GQA", "MQA")] == ["1,048,576", "262,144", "32,768"]


def test_repeating_heads_is_the_same_function(load_example: Callable[[str], ModuleType]) -> None:
    module = load_example("03_grouped_query")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 5, 8)) for heads in (6, 2, 2))
    assert module.in_eps(module.repeating(q, k, v), module.attention(q, k, v)) < TOLERANCE


def test_sliding_window(run: Run) -> None:
    config = ModelConfig(vocab_size=16, d_model=32, n_layers=6, n_heads=2, n_kv_heads=2, head_dim=16, d_ff=32)
    output = run("04_sliding_window", "--window", "4", FULL=config)
    held = {length: cells[0::2] for length, cells in output.rows("text").items()}
    row = 6 * 2 * 2 * 16 * 4  # bytes of a token: layers · (key, value) · heads · width · 4
    assert held["2"] == [f"{2 * row:,}"] * 3
    assert held["400"] == [f"{400 * row:,}", f"{4 * row:,}", f"{(4 * 4 + 2 * 400) * row // 6:,}"]
    assert held["400"][1] == held["4"][1]
    felt = output.rows("d full")
    assert [felt[d][1] for d in ("7", "8", "42", "43", "84")] == ["yes", "yes", "yes", "no", "no"]
    assert all(felt[d][column] == "yes" for d in felt for column in (0, 2))
    assert "slots hold 3 4 2" in output.text


def test_generate_with_the_real_model(run_real: Run) -> None:
    output = run_real(
        "05_generate", str(model_file(SMOLLM2)), "--max-new-tokens", "8", "--prompt", "What is the capital of France?"
    )
    assert "The capital of France is Paris." in output.text
    assert "The same tokens" in output.text
    assert "46,080 bytes" in output.text  # 30 layers · 2 · 3 heads · 64 numbers · 4 bytes


def test_generate_shows_where_windowed_layers_stop(
    load_example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_example("05_generate")
    config = ModelConfig(
        vocab_size=16,
        d_model=16,
        n_layers=3,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        d_ff=16,
        window=512,
        layer_pattern="LLG",
    )
    module.show_windows(random_model(config), [1, 2, 3])
    rows = Output(module, capsys.readouterr().out).rows("text")
    token = 2 * 8 * 4  # bytes of a token in one layer
    assert rows["512"][:2] == [module.si(2 * 512 * token, "B"), module.si(512 * token, "B")]
    assert rows["1,024"][:2] == [module.si(2 * 512 * token, "B"), module.si(1024 * token, "B")]


def test_latent_attention(run: Run) -> None:
    output = run("06_latent_attention", "--longest", "64")
    (difference,) = eps_in(output.text)
    assert difference < TOLERANCE
    assert output.rows("numbers")["latent"] == ["576", "1/56.9", "1,152", "115 MB"]
    assert output.rows("text")["64"][-1] == "absorbed"
    assert output.rows("expanded")["keys"] == ["[B, 128, S, 128+64]", "[B, 1, S, 512+64]", "[B, 1, S, H]"]


def test_mixed_stack(run: Run) -> None:
    output = run("07_mixed_stack", "--window", "8")
    (difference,) = eps_in(output.text)
    assert difference < TOLERANCE
    row = 2 * 2 * 16 * 4
    assert output.rows("text")["256"][:3] == [f"{tokens * row:,}" for tokens in (6 * 256, 256 + 5 * 8, 6 * 8)]
    assert output.rows("text if all")["131,072"] == ["66.6 GB", "11.2 GB", "520 MB", "16.8%"]


def test_convert(run: Run) -> None:
    output = run("08_convert")
    merged = {own: [float(cell.rstrip("%")) for cell in cells[:3]] for own, cells in output.rows("own share").items()}
    assert merged["0.0%"] == [0, 0, 0]  # equal heads lose nothing
    assert all(mean < min(rest) for own, (mean, *rest) in merged.items() if own in ("0.1%", "1.0%", "10.0%"))
    assert "1,536 and 1,536 bytes per token" in output.text
    assert max(eps_in(output.text)) < TOLERANCE
    ranks = output.rows("rank")
    assert ranks["224"][:2] == ["0.0%", "0.0%"] and ranks["56"][-1] == "34%"
    lost = [float(cells[0].rstrip("%")) for cells in ranks.values()]
    assert lost == sorted(lost)


def test_quality_measures_perplexity(load_example: Callable[[str], ModuleType]) -> None:
    module = load_example("09_quality")
    model = random_model(ModelConfig(32, 16, 2, 4, 2, 8, 32), dtype="float64")
    ids = np.random.default_rng(0).integers(0, 32, 41).tolist()
    logits = model.step([ids])[0]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    said = [p[t, ids[t + 1]] for t in range(20, 40)]
    found = module.perplexity(model, model.new_caches(), ids, chunk=7)
    assert found == pytest.approx(np.prod(said) ** (-1 / 20), rel=1e-12)
    variants = module.merged_heads(model) | module.other_windows(model)
    assert variants["merged into one (mean)"][0].config.n_kv_heads == 1
    assert variants["window 128"][0].config.windows == (128, 128)
    windowed = random_model(replace(model.config, window=8, layer_pattern="LG"))
    assert "window 32" in module.other_windows(windowed)


def test_quality_keeps_the_first_tokens(load_example: Callable[[str], ModuleType]) -> None:
    module = load_example("09_quality")
    cache, window = module.FirstAndLast(6), 6
    for chunk in ([0, 1, 2, 3, 4], [5, 6], [7], list(range(8, 14)), [14]):
        one_hot = np.eye(15)[chunk].reshape(1, 1, -1, 15)
        zeros = np.zeros((1, 1, len(chunk), 2))
        pos, k, v = cache.extend([chunk], zeros, one_hot)
        out = attention(zeros, k, v, q_pos=chunk, k_pos=pos, window=window)[0, 0]
        for p, row in zip(chunk, out, strict=True):
            seen = sorted({*range(4), *range(p - 5, p + 1)} & set(range(p + 1)))
            assert np.flatnonzero(row).tolist() == seen
            assert row[seen] == pytest.approx(1 / len(seen))  # none twice
    assert cache.nbytes_used == (4 + 6) * 17 * 8


def test_quality_of_the_real_model(run_real: Run) -> None:
    output = run_real("09_quality", str(model_file(SMOLLM2)), "--tokens", "288", WAYS=("mean",))
    found = {name: float(cells[0].replace(",", "")) for name, cells in output.rows("perplexity").items()}
    assert found["9 query, 3 key/value heads"] < 40  # it was trained so
    assert min(value for name, value in found.items() if "merged" in name) > 1000  # and never so
    assert found["window 128 and the first 4"] < found["window 128"]


def test_an_interrupt_ends_politely(
    load_example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        load_example("common").run(interrupted)
    assert end.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("01_kv_cache.py", "--backend", "nump"),
        ("01_kv_cache.py", "--longest", "3"),
        ("04_sliding_window.py", "--plot", "picture.pdf"),
        ("07_mixed_stack.py", "--plot", "nowhere/picture.svg"),
        ("02_prefill_decode.py", "--context", "1"),
        ("05_generate.py", "nowhere.gguf"),
        ("07_mixed_stack.py", "--window", "0"),
        ("09_quality.py", "nowhere.gguf"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    name, *rest = arguments
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *rest], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and name in done.stderr and rest[-1] in done.stderr
