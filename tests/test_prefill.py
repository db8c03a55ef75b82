"""Does a prompt in pieces, one on each core, give what one step gives, and is nothing lost when a piece fails?"""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minikv.cost import step_cost, total
from minikv.prefill import cut, in_step, prefill
from minikv.presets import models
from strategies import SEEDS, configs, feeds
from support import assert_close, assert_same, expected_logits, host, make_model, make_weights, run
from test_model import MIXED, TEXT, Failure, assert_unchanged, snapshot
from test_theorem import CACHES, new_caches

module = importlib.import_module("minikv.prefill")  # whose name in the package is the function's
threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed: a prefill is a step")


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even the shortest prompt into three pieces."""
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "matrix_threads", lambda: 3)


@given(config=configs(), kind=st.sampled_from(sorted(CACHES)), seed=SEEDS, data=st.data())
def test_the_theorem_holds_for_pieces(backend, dtype, config, kind, seed, data):
    feed = data.draw(feeds(config.vocab_size, config.window))
    weights = make_weights(config, seed, dtype)
    expected = expected_logits(config, weights, feed.texts)
    assume(expected is not None)
    model = make_model(config, weights, backend)
    found = run(model, new_caches(model, kind, feed), feed, prefill)
    for got, want in zip(found, expected[0], strict=True):
        assert_close(got, want, dtype, scale=expected[1])


@pytest.fixture
def model() -> Any:
    import minikv

    return make_model(MIXED, make_weights(MIXED, 1), minikv.get_backend())


def test_a_prompt_really_runs_in_pieces(model, monkeypatch):
    seen: list[tuple[int, int]] = []
    for index, layer in enumerate(model.layers):
        inner = layer.feed_forward
        monkeypatch.setattr(
            layer, "feed_forward", lambda x, i=index, f=inner: (seen.append((i, threading.get_ident())), f(x))[1]
        )
    want = host(model.step([TEXT], last=1))
    seen.clear()
    assert_close(prefill(model, [TEXT], last=1), want, "float64")
    assert sorted(layer for layer, _ in seen) == sorted(3 * list(range(len(model.layers))))
    assert threading.get_ident() not in {thread for _, thread in seen}


@pytest.mark.parametrize("exception", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_piece_that_fails_advances_no_cache(model, exception, layer, piece, monkeypatch):
    caches = model.new_caches()
    model.step([TEXT], caches)
    before, libraries = snapshot(caches, model), threadpoolctl.threadpool_info()
    calls, inner = [0], model.layers[layer].attention

    def fail(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == piece + 1:
            raise exception
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[layer], "attention", fail)
        with pytest.raises(exception):
            prefill(model, [TEXT * 2], caches)
    assert_unchanged(before, snapshot(caches, model))
    assert threadpoolctl.threadpool_info() == libraries, "the matrix library has its threads back"
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-27b", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (2, 5), (7, 0), (512, 0), (2048, 0), (512, 100_000)])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_pieces_cover_the_prompt_and_take_equal_work(name, new, past, count):
    config = models()[name].config
    pieces = cut(config, new, past, count)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(new))
    if new >= 512:
        work = [total(step_cost(config, 1, p.stop - p.start, past + p.start, absorbed=True)).operations for p in pieces]
        assert len(pieces) == count and max(work) < 1.05 * min(work)  # a token of 60 is 1.7 %


def test_no_walk_overtakes_the_one_before_it():
    events: list[tuple[int, int]] = []

    def walk(i: int) -> Any:
        for item in range(20):
            events.append((i, item))  # what an item needs is there: the same item of the walk before
            yield item

    assert in_step([walk(i) for i in range(4)], 20) == [19] * 4
    for i in range(1, 4):
        for item in range(20):
            assert events.index((i - 1, item)) < events.index((i, item))


def test_without_the_extra_it_is_a_step(model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(module, "matrix_libraries", lambda: None)
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "in_step", None)
    assert_same(prefill(model, [TEXT]), host(model.step([TEXT])))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="a signal cannot be sent to one thread here")
def test_an_interrupt_while_another_is_seen_to_leaves_nobody_at_work():
    """Who is impatient presses the keys twice; a walk still at work would go on in caches that are restored."""
    events = []

    def walk() -> Any:
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
        events.append("done")
        yield

    with pytest.raises(KeyboardInterrupt):
        in_step([walk()], 1)
    assert events == ["done"]


def test_prefills_at_the_same_time_leave_the_threads_as_they_were(model, monkeypatch):
    """Where each puts back the number of threads that it found, the last one puts back what the first had set."""
    first_is_done, second_is_at_work, inner = threading.Event(), threading.Event(), in_step
    found, threads = [], [2]

    class Libraries:
        @contextlib.contextmanager
        def limit(self, limits: int) -> Iterator[None]:
            before, threads[0] = threads[0], limits
            yield
            threads[0] = before

    def another() -> None:
        found.append(prefill(model, [TEXT]))
        second_is_at_work.set()  # or was

    second = threading.Thread(target=another)

    def overlapping(*args: Any) -> Any:
        if threading.current_thread() is second:
            second_is_at_work.set()
            first_is_done.wait(10)
        else:
            second.start()
            second_is_at_work.wait(10)
        return inner(*args)

    monkeypatch.setattr(module, "in_step", overlapping)
    monkeypatch.setattr(module, "matrix_libraries", Libraries)
    found.append(prefill(model, [TEXT]))
    first_is_done.set()
    second.join()
    assert threads == [2]
    for logits in found:
        assert_close(logits, host(model.step([TEXT])), "float64")


def test_threads_handle_floating_point_errors_as_the_caller_does(model):
    model.layers[1].feed_forward.up[...] = np.finfo("float64").max
    for run_it in (model.step, functools.partial(prefill, model)):
        with np.errstate(all="ignore"):
            run_it([TEXT])  # a warning is an error here
        with np.errstate(over="raise", invalid="ignore"), pytest.raises(FloatingPointError):
            run_it([TEXT])


def test_an_error_names_the_place_in_the_whole_prompt(model):
    pos = np.arange(len(TEXT))[None]
    pos[0, -1] = 0
    messages = []
    for run_it in (model.step, functools.partial(prefill, model)):
        with pytest.raises(ValueError, match="rise") as caught:
            run_it([TEXT], None, pos)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
