"""Would the tests notice? Plants one fault at a time into a copy of the package and runs the tests that should see it.

A fault that survives means that the tests prove less than they say. Run with `make mutants`; arguments, if any, are
parts of the names of the faults to plant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
THEOREM = "test_theorem.py"


@dataclass(frozen=True)
class Fault:
    """A mistake that somebody could make: each old text, which must stand in the file exactly once, becomes the new."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...] = (THEOREM,)


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, ((old, new),), tests or (THEOREM,))


FAULTS = [
    # The one rule.
    fault("window one too wide", "mask.py", "seen & (q - k < window)", "seen & (q - k <= window)"),
    fault("strict causal rule", "mask.py", "seen = (k >= 0) & (q >= k)", "seen = (k >= 0) & (q > k)"),
    fault("padding visible", "mask.py", "seen = (k >= 0) & (q >= k)", "seen = q >= k"),
    fault(
        "a tile seen whole is judged by its first query only",
        "mask.py",
        "q_pos.max() - oldest < window",
        "q_pos.min() - oldest < window",
        "test_attention.py",
    ),
    fault("blockwise skips a visible key", "mask.py", "(keys <= queries.max())", "(keys < queries.max())"),
    fault(
        "blockwise skips a key on the window's edge",
        "mask.py",
        "keys > int(queries.min()) - window",
        "keys > int(queries.min()) - window + 1",
    ),
    # Attention.
    fault(
        "heads tiled instead of repeated",
        "attention.py",
        "widen(q) * scale, widen(k), widen(v)",
        "widen(q) * scale, *(xp.concat([widen(x)] * (q.shape[1] // k.shape[1]), axis=1) for x in (k, v))",
    ),
    fault("scale missing", "attention.py", "widen(q) * scale,", "widen(q),"),
    Fault(
        "soft cap after the mask",
        "attention.py",
        (
            (
                "soft_cap(reshaped(rows_times(rows, k)[:, :, :R, :], (B, N, T, S)), softcap)",
                "reshaped(rows_times(rows, k)[:, :, :R, :], (B, N, T, S))",
            ),
            ("xp.where(seen, scores, -math.inf)", "soft_cap(xp.where(seen, scores, -math.inf), softcap)"),
        ),
    ),
    fault("sink left out of the running maximum", "attention.py", "for lse in lses[1:]:", "for lse in lses[1:1]:",
          "test_attention.py"),
    fault(
        "sink added per block",
        "attention.py",
        "parts.append((xp.zeros_like(out), xp.broadcast_to(sink, lse.shape)))",
        "parts.extend([(xp.zeros_like(out), xp.broadcast_to(sink, lse.shape))] * len(parts))",
        "test_attention.py",
    ),
    fault(
        "merging forgets the maximum",
        "attention.py",
        "return out, xp.where(empty, -math.inf, peak + xp.log(total))",
        "return out, xp.where(empty, -math.inf, xp.log(total))",
        "test_attention.py",
    ),
    fault(
        "merging pairs shares with the wrong parts",
        "attention.py",
        "for out, share in zip(outs, shares, strict=True)",
        "for out, share in zip(outs, shares[::-1], strict=True)",
    ),
    fault("hidden tiles computed", "mask.py", "np.flatnonzero(near.any(axis=0))", "np.arange(near.shape[1])",
          "test_attention.py"),
    fault("empty rows multiplied by zero", "attention.py", "if (k_pos < 0).any():", "if False:", "test_attention.py"),
    fault("a NumPy scalar widens", "attention.py", "scale = H**-0.5 if", "scale = np.float64(H) ** -0.5 if",
          "test_attention.py"),
    # Positions.
    fault(
        "angles in 32 bits",
        "rope.py",
        "pos[:, None, :, None] * frequencies",
        "pos[:, None, :, None].astype(np.float32) * frequencies.astype(np.float32)",
    ),
    fault(
        "angles in the type of the weights",
        "model.py",
        "return xp.asarray(cos, dtype=self.dtype), xp.asarray(sin, dtype=self.dtype)",
        "short = np.asarray(pos[:, None, :, None] * frequencies.astype(np.float16), dtype=np.float16)\n"
        "        return (xp.asarray(np.cos(short) * factor, dtype=self.dtype),\n"
        "                xp.asarray(np.sin(short) * factor, dtype=self.dtype))",
        "test_rope.py",
    ),
    fault(
        "token position read from a layer that has forgotten",
        "model.py",
        "seen[:, None] + np.arange(tokens.shape[1]) if",
        "np.minimum(seen, caches[0].window or 10**9)[:, None] + np.arange(tokens.shape[1]) if",
    ),
    fault(
        "shared rotary base",
        "model.py",
        "local = full if config.rope_local_theta is None else rope_frequencies(width, config.rope_local_theta)",
        "local = full",
    ),
    fault(
        "local layers scaled as the global ones",
        "model.py",
        "rope_frequencies(width, config.rope_local_theta)",
        "rope_frequencies(width, config.rope_local_theta, config.rope_scaling)",
    ),
    fault("window applied to global layers", "config.py", 'self.window if kind == "L" else None', "self.window"),
    fault("positions aliased", "caches/base.py", "if old.size else new.copy())", "if old.size else new)",
          "test_caches.py"),
    # Caches.
    fault("rolling cache forgets too early", "caches/rolling.py", "- self.window + 1  #", "- self.window + 2  #"),
    fault("a chunk gets back itself only", "caches/rolling.py", "            used = used_columns(self._pos)\n"
          "            seen = tuple(", "            used = 0\n            seen = tuple("),
    fault("a chunk overwrites rows its first queries need", "caches/rolling.py", "lone = time == 1",
          "lone = True"),
    fault("growth copies too little", "caches/growing.py", "buffer[:, :, :count, :] = old[:, :, :count, :]",
          "buffer[:, :, : count - 1, :] = old[:, :, : count - 1, :]"),
    fault("capacity one too many", "caches/growing.py", "end > self.capacity:", "end > self.capacity + 1:",
          "test_caches.py"),
    fault("truncate(0) keeps everything", "caches/base.py", "if length < self.length:", "if 0 < length < self.length:",
          "test_caches.py"),
    fault("truncation keeps one too many", "caches/base.py", "np.where(pos >= length, -1, pos)",
          "np.where(pos > length, -1, pos)", "test_caches.py"),
    fault("a rollback is granted that is not exact", "caches/rolling.py",
          "self._lost > np.maximum(lengths - self.window, -1)", "self._lost > lengths", "test_caches.py"),
    fault(
        "reordering misses a buffer",
        "caches/base.py",
        "tuple(_take_batch(row, index) for row in self._rows)",
        "tuple(row if i and len(index) == len(row) else _take_batch(row, index) for i, row in enumerate(self._rows))",
        "test_caches.py",
    ),
    fault("reordering misses the positions", "caches/base.py", "frozen(self._pos[index])",
          "frozen(self._pos[np.arange(len(index)) % len(self._pos)])", "test_caches.py"),
    fault("a copy shares its rows", "caches/base.py",
          "twin._rows = tuple(namespace(row).asarray(row, copy=True) for row in self._rows)", "twin._rows = self._rows",
          "test_caches.py"),
    fault("a slot that no token has reached holds anything", "caches/contiguous.py",
          "buffer[:, :, self._pos.shape[1] :, :] = 0.0", "pass", "test_caches.py"),
    fault("what was truncated stays in the buffer", "caches/contiguous.py",
          "super()._keep_below(length)\n        self._renew()", "super()._keep_below(length)", "test_caches.py"),
    fault("what a failed step wrote stays in the buffer", "caches/contiguous.py",
          "super().restore(mark)\n        self._renew()", "super().restore(mark)", "test_caches.py"),
    fault("latent attention mixes a slice where slices are copied", "mla.py",
          "v = row if copies_slices(row) else", "v =", "test_copies.py"),
    fault("positions may repeat", "caches/base.py", "(pos <= before)", "(pos < before)", "test_caches.py"),
    fault("a failed step is not undone in the ring", "caches/rolling.py",
          'reversed(mark["_overwritten"] or [])', "[]", "test_caches.py", "test_model.py"),
    fault("a step of several pieces is undone from its first piece on", "caches/rolling.py",
          'reversed(mark["_overwritten"] or [])', 'mark["_overwritten"] or []', "test_caches.py"),
    fault("only rows that still have a position are kept for undoing", "caches/rolling.py",
          "if self._overwritten is not None:", "if self._overwritten is not None and (self._pos[b, s] >= 0).any():",
          "test_caches.py"),
    fault("an interrupt leaves half a step behind", "caches/base.py", "except BaseException:", "except Exception:",
          "test_model.py"),
    # A prompt in pieces, and products of few rows.
    fault("a second interrupt leaves a piece at work", "prefill.py", "        to_the_end(finish)", "        finish()",
          "test_prefill.py"),
    fault("overlapping prefills set the threads of the matrix library", "prefill.py", "CORES = Lock()",
          "CORES = Semaphore(9)", "test_prefill.py"),
    fault("a piece begins before the one in front of it", "prefill.py", "ready[i].acquire()",
          "ready[0].acquire(timeout=1)", "test_prefill.py"),
    fault("threads forget the caller's context", "prefill.py", "copy_context().run, run, i", "run, i",
          "test_prefill.py"),
    fault("few rows come out turned around", "ops.py",
          "xp.matrix_transpose(xp.matmul(w, xp.matrix_transpose(x)))",
          "xp.reshape(xp.matmul(w, xp.matrix_transpose(x)), (*x.shape[:-1], w.shape[-2]))", "test_ops.py"),
    fault("the first of two or three rows is all of them", "ops.py", "(*x.shape[:-2], R, D, 1)))[..., 0]",
          "(*x.shape[:-2], R, D, 1))[..., :1, :, :])[..., 0] + 0.0 * x[..., :1]", "test_ops.py"),
    # The model.
    fault("only the first logits when the last are asked for", "model.py", "x[:, x.shape[1] - last :, :]",
          "x[:, :last, :]", "test_model.py"),
    fault("token ids of padding are checked", "model.py", "tokens = np.where(pos < 0, 0, tokens)", "tokens = +tokens"),
    fault("the token that reaches top_p is left out", "generate.py", "np.searchsorted(reached, top_p) + 1",
          "max(1, np.searchsorted(reached, top_p))", "test_generate.py"),
    # Latent attention and experts.
    fault("scale from the latent's width", "mla.py", "width = config.qk_nope_head_dim + config.qk_rope_head_dim",
          "width = (config.kv_lora_rank or 0) + config.qk_rope_head_dim"),
    fault("latent cached before its norm", "mla.py", 'latent = rms_norm(latent, w["kv_a_norm"], c.norm_eps)',
          'rms_norm(latent, w["kv_a_norm"], c.norm_eps)'),
    fault(
        "rotary key per head",
        "mla.py",
        "k_rope = xp.broadcast_to(k_rope, (*k_nope.shape[:3], c.qk_rope_head_dim))",
        "k_rope = xp.concat([k_rope * (1.0 + n) for n in range(c.n_heads)], axis=1)",
    ),
    fault("squared mscale factor missing", "rope.py", 'scaling["mscale_all_dim"]) ** 2',
          'scaling["mscale_all_dim"]) ** 0'),
    fault("mscale factor not squared", "rope.py", 'scaling["mscale_all_dim"]) ** 2', 'scaling["mscale_all_dim"])'),
    fault("experts not normalised", "feedforward.py", "if c.norm_top_k:", "if False:"),
    fault("the correction weighs too", "feedforward.py", "xp.where(best(worth, c.n_experts_per_token), scores, 0.0)",
          "xp.where(best(worth, c.n_experts_per_token), worth, 0.0)", "test_moe.py"),
    fault("experts chosen across all groups", "feedforward.py", "if c.n_top_groups < c.n_expert_groups:", "if False:",
          "test_moe.py"),
]  # fmt: skip


def run_tests(package: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Run tests against the package in a folder, on NumPy with few examples, to the first failure."""
    environment = os.environ | {
        "PYTHONPATH": str(package),
        "MINIKV_TEST_BACKENDS": "numpy",
        "HYPOTHESIS_PROFILE": "quick",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *tests]
    done = subprocess.run(command, cwd=package / "tests", env=environment, capture_output=True, text=True, timeout=600)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    first = failed[0].partition("::")[2].partition(" - ")[0] if failed else done.stdout.strip()[-200:]
    if done.returncode not in (0, 1):  # neither passed nor failed: the run itself broke, which proves nothing
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode == 0, first


def copy_of_the_package(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "fixtures", ".hypothesis")
    shutil.copytree(ROOT / "minikv", folder / "minikv", ignore=ignore)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


def faulty(fault: Fault) -> str:
    """Write the fault into its file's source. Raises ValueError when the package has moved on and the fault has not."""
    source = (ROOT / "minikv" / fault.file).read_text(encoding="utf-8")
    for old, new in fault.changes:
        if source.count(old) != 1:
            raise ValueError(f"{fault.name}: {old!r} stands {source.count(old)} times in {fault.file}, not once")
        source = source.replace(old, new)
    compile(source, fault.file, "exec")
    return source


def plant(fault: Fault) -> tuple[Fault, bool, str, float]:
    """Plant one fault and run its tests; returns whether they noticed and which test did."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        package = copy_of_the_package(Path(folder))
        (package / "minikv" / fault.file).write_text(faulty(fault), encoding="utf-8")
        passed, first = run_tests(package, fault.tests)
    return fault, not passed, first, time.perf_counter() - start


def main() -> int:
    """Plant every fault; returns 0 when each was noticed."""
    wanted = [f for f in FAULTS if not sys.argv[1:] or any(part in f.name for part in sys.argv[1:])]
    for fault in wanted:
        faulty(fault)
    with tempfile.TemporaryDirectory() as folder:  # tests that fail anyway would notice everything
        passed, first = run_tests(
            copy_of_the_package(Path(folder)), tuple(sorted({t for f in wanted for t in f.tests}))
        )
    if not passed:
        print(f"the tests fail without any fault: {first}")
        return 1
    survivors = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for number, (fault, noticed, first, seconds) in enumerate(pool.map(plant, wanted), 1):
            survivors += not noticed
            verdict = f"noticed by {first}" if noticed else "SURVIVED"
            print(f"{number:3}/{len(wanted)}  {seconds:5.1f} s  {fault.name:52}  {verdict}", flush=True)
    print(f"{len(wanted) - survivors} of {len(wanted)} faults noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
