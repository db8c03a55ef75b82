"""Does `minikv bench` run fairly and say what it means? Times are made up or tiny here; only the telling is checked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minikv import ModelConfig, bench, cli, get_backend

NUMPY = get_backend("numpy")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETTLE", 0)


def seconds(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.95 * median, "high": 1.1 * median}


def test_parties_take_turns_and_are_divided_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order, speed = [0.0], [], {"ours": 2.0, "theirs": 5.0}
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def party(name: str) -> Any:
        def run() -> None:
            order.append(name)
            clock[0] += speed[name]

        return run

    told = bench.alternate({"ours": party("ours"), "absent": None, "theirs": party("theirs")}, NUMPY, repeats=3)
    assert order == ["ours", "ours", "theirs", "theirs"] * 4  # each once to warm up, once timed; one round untimed
    assert told == {
        "ours": {"median": 2.0, "low": 2.0, "high": 2.0},
        "absent": "missing (pip install 'minikv[bench]')",
        "theirs": {"median": 5.0, "low": 5.0, "high": 5.0},
        "theirs/ours": 2.5,
    }


def test_a_table_is_narrow_and_says_what_a_ratio_means(capsys: pytest.CaptureFixture[str]) -> None:
    table = bench.Table("Time of a step")
    times = {"minikv": seconds(4.802), "transformers": seconds(2.603), "transformers/minikv": 1.1}
    table.add("batch 8, heads 32/32, 16384 keys", **times, GB_per_s=1717.123)
    peaks = {"in blocks peak_MB": 14.52, "whole peak_MB": 1640.1}
    table.add("attention over 4096 tokens", **{"in blocks": seconds(4.8), "whole": seconds(9.6)}, **peaks)
    table.add("decode, context 128", minikv=seconds(0.0381), transformers=bench.MISSING)
    table.add("ceilings", GFLOP_per_s=310.2, share=0.02284)
    table.add("transformers", seconds=16.83, peak_MB=1186, bytes_each=1048576)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "Time of a step"] and max(map(len, lines)) <= 120
    text = "\n".join(" ".join(line.split()) for line in lines)
    for told in (
        "batch 8, heads 32/32, 16384 keys minikv 4,802 ms (4,562-5,282) GB_per_s 1,717",
        "transformers 2,603 ms (2,473-2,863) minikv runs at 1.10 x this speed",
        "attention over 4096 tokens in blocks 4,800 ms (4,560-5,280) in blocks peak_MB 14.5 whole peak_MB 1,640",
        "decode, context 128 minikv 38.1 ms (36.2-41.9)\ntransformers missing (pip install 'minikv[bench]')",
        "ceilings GFLOP_per_s 310 share 0.0228",
        "transformers seconds 16.8 peak_MB 1,186 bytes_each 1.05 M",
    ):
        assert told in text
    assert table.rows[0] == {"case": "batch 8, heads 32/32, 16384 keys", **times, "GB_per_s": 1717.123}


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ModelConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
    monkeypatch.setattr(bench, "models", lambda: {"smollm2-135m": SimpleNamespace(config=small)})
    monkeypatch.setattr(bench, "transformers_llama", lambda model: None)
    file = tmp_path / "results.json"
    assert cli.main(["bench", "model", "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("transformers   missing (pip install 'minikv[bench]')") == 4
    assert "textbook NumPy" in printed and "x this speed" in printed
    told = json.loads(file.read_text())
    assert set(told["about"]) == {"backend", "machine", "system", "cores", "threads", "versions"}
    rows = {row["case"]: row for row in told["tables"][0]["rows"]}
    assert set(rows) == {"decode, context 128", "decode, context 2048", "prefill, 512 tokens", "prefill, 2048 tokens"}
    assert rows["prefill, 2048 tokens"]["transformers"] == bench.MISSING
    assert rows["prefill, 2048 tokens"]["minikv"]["median"] > 0


def test_a_prefill_is_timed_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ModelConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
    monkeypatch.setattr(bench, "models", lambda: {"smollm2-135m": SimpleNamespace(config=small)})
    counts = []

    def counted(parties: Any, backend: Any, repeats: int) -> dict[str, Any]:
        counts.append(repeats)
        return {name: seconds(1.0) for name in parties}

    monkeypatch.setattr(bench, "alternate", counted)
    bench.bench_model(NUMPY, quick=True)
    assert min(counts) >= 2 and counts[-2] >= 3


def test_a_checkpoint_that_is_not_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    table = bench.bench_load("nowhere/model.gguf")
    assert table.rows == [{"case": "minikv", "missing": "no file nowhere/model.gguf: make demo fetches it"}]
    assert "make demo" in capsys.readouterr().out


def test_a_cached_token_is_beside_a_recomputed_one() -> None:
    ((length, told),) = bench.next_token(NUMPY, [64])
    assert length == 64 and told["recomputed/cached"] == told["recomputed"]["median"] / told["cached"]["median"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lod"], "unknown section 'lod': did you mean load?"),
        (["--json", "nowhere/a.json"], "cannot write nowhere/a.json: No such file or directory"),
        (["--json", "."], "cannot write .: Is a directory"),
        (["load", "--model", "nowhere.gguf"], "there is no file nowhere.gguf"),
        (["--backend", "nump"], "nump"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    output = capsys.readouterr()
    assert end.value.code == 2 and output.out == ""
    assert output.err.count("\n") == 1 and told in output.err
    assert not list(tmp_path.iterdir())


def test_help_fits_a_screen_and_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"  {section} " in "\n".join(lines) for section in bench.SECTIONS)
