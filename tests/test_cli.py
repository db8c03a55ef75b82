"""Does the command answer what was asked, and with one line when it was asked badly?"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minikv import ModelConfig, cli, cost, random_model
from minikv.presets import devices, models

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that a wrong call gets."""
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n")
    return err.strip()


def test_json_holds_what_programs_need(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["llama-3-8b", "deepseek-v3", "mistral-7b-v0.1"]
    told = json.loads(
        answer(
            capsys, "cost", *names, "--context", "128k", "--batch", "4", "--device", "h200", "--devices", "8", "--json"
        )
    )
    assert [price["model"] for price in told] == names
    for name, price in zip(names, told, strict=True):
        config, memory = models()[name].config, 8 * 141 * 10**9
        assert (price["context"], price["batch"], price["format"]) == (131072, 4, "bf16")
        assert price["cache_bytes"] == cost.cache_bytes(config, 4, 131072)
        assert price["cache_bytes_per_token"] == cost.cache_bytes_per_token(config)
        assert price["weight_bytes"] == cost.weight_bytes(config)
        assert price["active_parameters"] == cost.active_parameters(config)
        assert price["max_batch"] == cost.max_batch(config, memory, 131072)
        assert price["max_context"] == cost.max_context(config, memory, 4)
        for phase, new, past in (("prefill", 131072, 0), ("decode", 1, 131071)):
            work = cost.total(cost.step_cost(config, 4, new, past))
            seconds, bound = cost.best_time(work, devices()["h200"], 8)
            step = price[phase]
            assert (step["operations"], step["bytes"]) == (work.operations, work.bytes)
            assert (step["seconds"], step["bound"]) == (seconds, bound)
            assert sum(part["bytes"] for part in step["parts"].values()) == work.bytes
    assert told[0]["prefill"]["bound"] == "compute" and told[0]["decode"]["bound"] == "memory"
    assert told[2]["max_context"] is None


def test_formats_capacity_pages_and_memory_reach_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--format", "int4", "--weight-format", "fp8", "--capacity", "8k", "--page-size", "3000"]
    (told,) = json.loads(answer(capsys, "cost", "llama-3-8b", *arguments, "--memory", "24GiB", "--json"))
    row = 32 * 2 * 8 * (128 // 2 + 128 // 32 * 2)
    assert told["cache_bytes_per_token"] == row
    assert (told["cache_bytes"], told["cache_bytes_reserved"]) == (4096 * row, 9000 * row)
    assert told["weight_bytes"] == told["parameters"]
    room = 24 * 2**30 - told["weight_bytes"]
    assert (told["max_batch"], told["max_context"]) == (room // (9000 * row), room // (3000 * row) * 3000)


def test_without_a_device_there_is_no_time_and_nothing_to_fit_in(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = json.loads(answer(capsys, "cost", "gpt2-small", "--json"))
    assert told["max_batch"] is None and told["max_context"] is None
    assert "seconds" not in told["decode"] and told["decode"]["operations"] > 0


def test_the_table_shows_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, "cost", "llama-3-8b", "gemma-3-27b", "--context", "128k", "--device", "h200")
    lines = {line[:28].strip(): line[28:].split("  ") for line in out.splitlines() if line[28:]}
    cells = {label: [cell.strip() for cell in line if cell.strip()] for label, line in lines.items()}
    assert cells[""] == ["llama-3-8b", "gemma-3-27b"]
    assert cells["cache per token, all layers"] == ["131.072 KB", "507.904 KB"]
    assert cells["cache needed"] == ["17.2 GB (16 GiB)", "11.2 GB (10.41 GiB)"]
    assert cells["layers"] == ["32 full", "52 windowed + 10 full"]
    assert "llama-3-8b was made for 8,192 positions, not for 131,072." in out


def test_what_does_not_fit_is_said_and_how_many_devices_would_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = shlex.split("cost llama-3.1-405b smollm2-135m --context 128k --batch 8 --format fp8 --device h100")
    out = answer(capsys, *told)
    # 405.853 GB and 8 · 131,072 · 126 · 2 · 8 · 128 B = 270.582 GB want 9 times 80 GB.
    assert re.search(r"devices that hold it +9 +1$", out, re.MULTILINE)
    assert "llama-3.1-405b does not fit: 406 GB of weights and 271 GB of cache want more than 80.0 GB." in out
    assert "smollm2-135m does not fit" not in out
    assert [price["devices_needed"] for price in json.loads(answer(capsys, *told, "--json"))] == [9, 1]
    assert "does not fit" not in answer(capsys, *told, "--devices", "9")
    assert "does not fit" in answer(capsys, *told, "--devices", "8")
    assert "does not fit" not in answer(capsys, "cost", "llama-3.1-405b")  # nothing to fit in


def test_what_a_planner_could_take_amiss_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = "cost deepseek-v3 llama-3-70b --device h200 --devices 8 --batch 4 --context 2k"
    out = answer(capsys, *shlex.split(command))
    assert re.search(r"largest batch at 2,048 ", out) and re.search(r"longest context at batch 4 ", out)
    split = "split by heads over 8 devices, its cache takes 8 times what is counted here."
    assert f"deepseek-v3 caches 1 head: {split}" in out
    assert "llama-3-70b caches" not in out  # 8 heads on 8 devices
    assert "fp8" not in out
    out = answer(capsys, "cost", "llama-3-8b", "--device", "h100", "--weight-format", "fp8")
    assert "Products are taken to be bf16: a device that multiplies fp8 faster can beat times bound by compute." in out


def test_sizes_and_times_are_in_words_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny = {**LLAMA, "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**tiny, "num_key_value_heads": 2, "intermediate_size": 24}))
    out = answer(capsys, "cost", str(tmp_path), "smollm2-135m", "llama-3-8b", "--device", "h100", "--batch", "100000")
    assert re.search(r"^parameters +5,520 +134.515 million +8.030 billion$", out, re.MULTILINE), out
    assert not re.search(r"[0-9] [KM]s", out) and re.search(r"[0-9],[0-9]{3} s \(compute\)", out)


def test_one_model_is_told_part_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, "cost", "llama-3-8b")
    assert all(any(line.startswith(part) for line in out.splitlines()) for part in cost.PARTS)


def test_a_model_is_read_from_config_json_or_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    told = json.loads(answer(capsys, "cost", str(folder), str(folder / "config.json"), "llama-3-8b", "--json"))
    assert [price.pop("model") for price in told] == ["my-llama", "my-llama", "llama-3-8b"]
    assert told[0] == told[1] == told[2]


def test_models_are_listed_with_what_a_token_costs(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, "models")
    assert all(name in out for name in (*models(), *devices()))
    assert "70.272" in next(line for line in out.splitlines() if line.startswith("deepseek-v3 "))
    some = answer(capsys, "models", "qwen2.5", "--sources")
    assert "qwen2.5-72b" in some and models()["qwen2.5-7b"].source in some and "llama" not in some.splitlines()[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("cost llama-3-8", "unknown model 'llama-3-8': did you mean llama-3-8b?"),
        ("cost qqq", "unknown model 'qqq'; `minikv models` lists the known ones"),
        ("cost llama-3-8b --device h10", "unknown device 'h10': did you mean h100?"),
        ("cost llama-3-8b --device abacus", "known are h100, h200"),
        ("cost llama-3-8b --format bf15", "unknown format 'bf15': did you mean bf16?"),
        ("cost llama-3-8b --context 128q", "'128q' is not a number of tokens: did you mean 128k?"),
        ("cost llama-3-8b --context many", "'many' is not a number of tokens: write it like 128k"),
        ("cost llama-3-8b --context 0", "must be at least 1, got 0"),
        ("cost llama-3-8b --context -4096", "must be at least 1, got -4096"),
        ("cost llama-3-8b --batch 0", "must be at least 1, got 0"),
        ("cost llama-3-8b --batch -3", "must be at least 1, got -3"),
        ("cost llama-3-8b --batch 1.5", "'1.5' is not a whole number"),
        ("cost llama-3-8b --batch " + "9" * 400, "must be at most 1e+15"),
        ("cost llama-3-8b --devices 0", "must be at least 1, got 0"),
        ("cost llama-3-8b --devices 8", "--devices needs a --device"),
        ("cost llama-3-8b --picture fits --device h100", "--picture needs a --plot"),
        ("cost llama-3-8b --context 1.5", "'1.5' is no whole number of tokens"),
        ("cost llama-3-8b --capacity 0.3k", "'0.3k' is no whole number of tokens"),
        ("cost llama-3-8b --context 1e400", "'1e400' is not a number of tokens: write it like 128k"),
        ("cost llama-3-8b --page-size 0", "must be at least 1, got 0"),
        ("cost llama-3-8b --capacity 2k", "capacity 2048 cannot hold a context of 4096 tokens"),
        ("cost llama-3-8b --memory 24gg", "'24gg' is not a size in bytes: did you mean 24GB?"),
        ("cost llama-3-8b --memory 0GB", "must be at least 1, got 0GB"),
        ("cost llama-3-8b --contxt 3", "unknown argument '--contxt': did you mean --context?"),
        ("cost llama-3-8b --plot picture.jpg", "must end in .svg or .png, got picture.jpg"),
        ("cost llama-3-8b --plot no/such/x.svg", "cannot write no/such/x.svg: No such file or directory"),
        ("cost llama-3-8b --plot " + "a" * 5000 + ".svg", "File name too long"),
        ("cost llama-3-8b --plot p.svg --picture roofline", "--picture roofline needs a --device"),
        ("cost llama-3-8b --plot p.svg --picture pie", "unknown picture 'pie'"),
        ("cost no/such/config.json", "no/such/config.json"),
        ("cost no-such.gguf", "no-such.gguf: there is no such file"),
        ("cost ./no-such", "no-such: there is no such file"),
        ("cost " + "a" * 5000, "unknown model 'aaa"),
        ("cost " + "a" * 5000 + ".json", "aaa.json: "),
        ("cost /dev/null", "/dev/null: neither a config.json nor a folder with one nor a .gguf file"),
        ("cost", "MODEL"),
        ("models zzz", "no model has 'zzz' in its name"),
        ("generate smollm2 hello", "no weights known for 'smollm2': did you mean smollm2-135m?"),
        ("generate no/such.gguf hello", "no/such.gguf: there is no such file"),
        ("generate ./no-such hello", "no-such: there is no such file"),
        ("generate " + "a" * 5000 + " hello", "no weights known for 'aaa"),
        ("generate /dev/null hello", "/dev/null: neither a .gguf file nor a folder with config.json"),
        ("generate smollm2-135m hello --seed -1", "seed must be at least 0, got -1"),
        ("generate smollm2-135m hello --top-p 2", "top_p must be within (0, 1] or None, got 2"),
        ("generate smollm2-135m hello --temperature -1", "temperature must be at least 0 and finite, got -1"),
        ("generate smollm2-135m hello --max-new-tokens -1", "must be at least 1, got -1"),
        ("generate smollm2-135m hello --backend nump", "unknown backend 'nump': did you mean numpy?"),
        ("generate smollm2-135m hello --dtype float8", "unknown dtype 'float8'"),
        ("generate smollm2-135m", "PROMPT"),
        ("cst", "unknown command 'cst': did you mean cost?"),
        ("", "COMMAND"),
    ],
)
def test_a_wrong_call_gets_one_line(
    argv: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *argv.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\x00", b'{"model_type": "abacus"}', b""])
def test_a_damaged_file_gets_one_line_that_names_it(
    content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert str(file) in refusal(capsys, "cost", str(file))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(content)
    assert str(gguf) in refusal(capsys, "cost", str(gguf))
    assert str(gguf) in refusal(capsys, "generate", str(gguf), "hello")


def test_what_is_no_model_is_not_called_damaged_or_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A page")
    assert "neither a config.json nor a folder with one nor a .gguf file" in refusal(capsys, "cost", str(page))
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert "folder.gguf: not a file" in refusal(capsys, "cost", str(folder))
    for argv in (["cost", ""], ["generate", "", "hello"]):
        assert "''" in refusal(capsys, *argv)


@pytest.mark.parametrize("read", ["read_bytes", "open"])
def test_a_file_that_may_not_be_read_gets_one_line_without_an_errno(
    read: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path, *arguments: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(Path, read, forbidden)
    assert refusal(capsys, "cost", str(file)).endswith(f" {file}: Permission denied")


def test_a_folder_without_a_configuration_and_impossible_layers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "config.json" in refusal(capsys, "cost", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**9}))
    assert "1000000000 layers" in refusal(capsys, "cost", str(tmp_path))


@pytest.mark.parametrize("command", ["", "cost", "models", "generate", "bench"])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command.split(), "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80  # of a terminal's 24, one has the prompt


HEAVY = ("matplotlib", "torch", "transformers", "tokenizers", "gguf", "safetensors", "jinja2", "cupy", "scipy")


def test_cost_answers_in_under_half_a_second_and_imports_nothing_heavy() -> None:
    """CPU time, the best of three: what the command itself takes, however busy the machine is."""
    program = (
        "import resource, sys; from minikv.cli import main; main(sys.argv[1:]); "
        "usage = resource.getrusage(resource.RUSAGE_SELF); "
        f"print([name for name in {HEAVY} if name in sys.modules], usage.ru_utime + usage.ru_stime, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "cost", "llama-3.1-405b", "deepseek-v3", "--context", "128k"]
    runs = [
        subprocess.run([*command, "--device", "h200"], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    assert all(run.stderr.startswith("[] ") for run in runs), runs[0].stderr
    assert min(float(run.stderr.split()[-1]) for run in runs) < 0.5


@pytest.mark.parametrize("argv", ["cost llama-3-8b", "cost --help", "models --sources", "bench --help"])
def test_output_that_nobody_takes_is_no_traceback(argv: str) -> None:
    """Output to a pipe waits in a buffer: Python must not be left to find out at its end that the pipe is closed."""
    command, buffered = [sys.executable, "-m", "minikv", *argv.split()], {**os.environ, "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    for output, code, said in ((writer, 0, ""), (os.open("/dev/full", os.O_WRONLY), 2, ": No space left on device")):
        run = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=buffered)
        os.close(output)
        assert (run.returncode, run.stderr.count("\n")) == (code, bool(said)) and said in run.stderr, run.stderr


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "minikv", "cost", "llama-3-8b", "--batch", "0"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "minikv cost: argument --batch: must be at least 1, got 0\n"


@pytest.mark.parametrize("ending", ["svg", "png"])
@pytest.mark.parametrize("picture", ["context", "fits", "roofline"])
def test_pictures_are_drawn_and_say_what_they_show(
    picture: str, ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [tmp_path / f"{n}.{ending}" for n in (1, 2)]
    for file in files:
        command = ["cost", "llama-3-8b", "falcon-7b", "--device", "h100", "--plot", str(file)]
        answer(capsys, *command, *([] if picture == "context" else ["--picture", picture]))
    assert files[0].read_bytes() == files[1].read_bytes()  # equal pictures are equal files
    if ending == "png":
        assert files[0].read_bytes().startswith(b"\x89PNG")
        return
    text = files[0].read_text()
    told = {
        "context": ["llama-3-8b", "falcon-7b", "tokens per sequence", "GB", "128k"],
        "fits": ["llama-3-8b", "falcon-7b", "tokens per sequence", "largest batch", "h100"],
        "roofline": ["llama-3-8b on 1 x h100", "FLOP per byte", "TFLOP/s", "prefill", "decode", "batch 1"],
    }
    assert all(word in text for word in told[picture])


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_ids = (0,)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) % 50 for letter in ("^" if special else "") + text]

    def stream(self) -> Any:
        return lambda token: chr(65 + token)

    def chat(self, messages: list[dict[str, str]]) -> str:
        return f"<{messages[0]['content']}>"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `generate` load a small model whatever it is asked for; the list tells what it was asked for."""
    asked: list[Any] = []
    model = random_model(ModelConfig(50, 16, 2, 4, 2, 4, 24, window=8, layer_pattern="LG"))

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        return model, Letters()

    monkeypatch.setattr(cli, "load", load)
    return [model, asked]


def test_generate_streams_the_answer_of_generate(small: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    from minikv import generate

    model, asked = small
    arguments = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    options = [word for name, value in arguments.items() for word in ("--" + name.replace("_", "-"), str(value))]
    expected = generate(model, Letters().encode("hello"), 12, stop_ids=(0,), **arguments).ids
    cached = [*options, "--max-new-tokens", "12", "--dtype", "float16"]
    for extra in ([], ["--no-cache"]):
        assert cli.main(["generate", "x.gguf", "hello", *cached, *extra]) == 0
        out, err = capsys.readouterr()
        assert out == "".join(chr(65 + token) for token in expected if token) + "\n"
        assert "prompt: 6 tokens in" in err and f"answer: {len(expected)} tokens" in err
    assert asked[0] == (Path("x.gguf"), "numpy", "float16")


@pytest.mark.parametrize("cores", [1, 2])
def test_generate_tells_how_far_a_long_prompt_has_been_read(
    cores: int, small: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cores > 1:
        pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed: a prefill is a step")
    monkeypatch.setattr(sys.modules["minikv.prefill"], "LEAST", 10)
    monkeypatch.setattr(sys.modules["minikv.prefill"], "matrix_threads", lambda: cores)
    monkeypatch.setattr(cli, "PREFILL_CHUNK", 100)
    assert cli.main(["generate", "x.gguf", "a" * 250, "--max-new-tokens", "3"]) == 0
    told = [f"reading the prompt: {n} of 251 tokens" for n in (100, 200, 251)]
    assert capsys.readouterr().err.startswith("\n".join(told) + "\nprompt:")  # a file gets lines
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 2)
    assert cli.main(["generate", "x.gguf", "a" * 250, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().err.startswith("\r".join(told) + "\nprompt:")  # a terminal one that changes


def test_generate_refuses_a_prompt_of_nothing(
    small: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Letters, "encode", lambda self, text, special: list(map(ord, text)))
    assert refusal(capsys, "generate", "x.gguf", "") == "minikv generate: PROMPT is empty, there is nothing to continue"


def test_generate_uses_the_chat_template_and_standard_input(
    small: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert cli.main(["generate", "x.gguf", "-", "--chat", "--max-new-tokens", "1"]) == 0
    assert "prompt: 4 tokens" in capsys.readouterr().err  # <hi>, and no token put before it


def test_too_little_memory_gets_one_line(
    small: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr(cli, "generate", full)
    assert "72.8 TiB" in refusal(capsys, "generate", "x.gguf", "hi")


def test_known_names_are_looked_up_in_the_models_folder(
    small: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINIKV_MODELS", str(tmp_path))
    assert "`make demo` fetches it" in refusal(capsys, "generate", "smollm2-135m", "hello")
    file = tmp_path / "deep" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    assert cli.main(["generate", "SmolLM2-135M", "hello", "--max-new-tokens", "1"]) == 0
    assert small[1][-1][0] == file


def test_this_machine_is_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = json.loads(answer(capsys, "cost", "smollm2-135m", "--device", "this", "--json"))
    assert told["device"] == "this"
    assert told["memory_bytes"] > 2**28 and np.isfinite(told["decode"]["seconds"])


PAGE = Path(__file__).parent.parent / "docs" / "cost.md"


def test_the_page_on_costs_shows_what_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed, checked = "", 0
    for kind, body in re.findall(r"```(python|console|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if kind == "python":
            exec(compile(body, str(PAGE), "exec"), names)
            printed = capsys.readouterr().out or printed
        elif kind == "text":
            assert body == printed
        else:
            command, _, shown = body.partition("\n")
            assert shown == answer(capsys, *shlex.split(command.removeprefix("$ minikv ")))
        checked += kind != "python"
    assert checked >= 5
