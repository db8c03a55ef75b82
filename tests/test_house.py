"""Does the house stand as designed: floors, names, words, and one short list of array functions?"""

from __future__ import annotations

import ast
import configparser
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import minikv
from minikv.backend import ARRAY_FUNCTIONS

ROOT = Path(minikv.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py"))
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding="utf-8")) for p in FILES}

# A module imports from lower floors only. `config.py` holds numbers and imports nothing, so it stands on the ground and
# every floor may read it. Modules inside a folder may use each other, but not in a circle.
FLOORS = {
    "backend.py": 0,
    "config.py": 0,
    "ops.py": 1,
    "rope.py": 1,
    "mask.py": 1,
    "caches/": 1,
    "attention.py": 2,
    "gqa.py": 3,
    "mla.py": 3,
    "feedforward.py": 4,
    "model.py": 5,
    # Beside the house: what prices, rewrites, quickens, measures and shows it. The core imports none of these.
    "cost.py": 5,
    "prefill.py": 6,
    "generate.py": 7,
    "weights/": 7,
    "convert.py": 7,
    "peers.py": 7,
    "presets/": 8,
    "arguments.py": 9,
    "report.py": 9,
    "drawing.py": 10,
    "bench.py": 10,
    "pictures.py": 11,
    "cli.py": 12,
    "__main__.py": 13,
    "__init__.py": 13,
}
LEAN = {"cost.py": {"config.py"}}  # from geometry alone

# Longer than 300 lines, and why.
LONG = {
    "cost.py": "every price of one configuration, with its formula and source: half of it is docstrings",
    "cli.py": "one short function per subcommand, side by side",
    "bench.py": "one short function per measurement, side by side",
    "weights/families.py": "a table with one block per family",
}

# Array libraries, and the files that may name one.
LIBRARIES = {"cupy", "torch", "jax", "array_api_compat", "array_api_strict", "tensorflow", "mlx"}
NAMED_IN = {"backend.py": {"cupy"}, "peers.py": {"torch"}}

DTYPES = {"bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"}


def home(file: str) -> str:
    """The key of FLOORS under which a file stands."""
    first, _, rest = file.partition("/")
    return first + "/" if rest else first


def imported_files(file: str) -> set[str]:
    """Files of the package that this one imports, at module level or inside a function."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = (ROOT / file).parents[node.level - 1]
            elif (node.module or "").split(".")[0] == "minikv":
                base = ROOT.parent
            else:
                continue
            target = base.joinpath(*(node.module or "").split("."))
            for name in node.names:
                for path in (target / f"{name.name}.py", target / name.name / "__init__.py", target.with_suffix(".py"),
                             target / "__init__.py"):  # fmt: skip
                    if path.exists():
                        found.add(str(path.relative_to(ROOT)))
                        break
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "minikv" for alias in node.names), f"{file}: import relatively"
    return found - {file}


@pytest.mark.parametrize("file", TREES)
def test_imports_come_from_lower_floors(file):
    assert home(file) in FLOORS, f"{file} has no floor yet"
    for other in imported_files(file):
        if home(other) != home(file):
            assert FLOORS[home(other)] < FLOORS[home(file)], f"{file} imports {other}, which is not below it"
            if file in LEAN:
                assert other in LEAN[file], f"{file} imports {other}"


def test_no_module_imports_itself_in_a_circle():
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join([*path, file])
        if file not in done:
            for other in imported_files(file):
                if not other.endswith("__init__.py"):
                    visit(other, (*path, file))
            done.add(file)

    for file in TREES:
        visit(file, ())


def test_every_floor_exists():
    assert {home(file) for file in TREES} == set(FLOORS)


def array_names(tree: ast.AST) -> set[str]:
    """Names looked up on an array library: xp.NAME, namespace(x).NAME, self.xp.NAME."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_xp = isinstance(owner, ast.Name) and owner.id == "xp"
            is_call = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "namespace"
            is_attribute = isinstance(owner, ast.Attribute) and owner.attr == "xp"
            if is_xp or is_call or is_attribute:
                found.add(node.attr)
    return found


# CuPy's own names, each used behind a check of the backend's name: to wait, to copy, to count the device's memory.
DEVICE_ONLY = {"backend.py": {"asnumpy", "cuda", "get_default_memory_pool"}, "presets/measure.py": {"cuda"}}


@pytest.mark.parametrize("file", TREES)
def test_only_listed_array_functions_are_used(file):
    assert not array_names(TREES[file]) - set(ARRAY_FUNCTIONS) - DTYPES - {"__name__"} - DEVICE_ONLY.get(file, set())


def test_every_listed_array_function_is_used():
    used = set().union(*(array_names(tree) for tree in TREES.values()))
    assert not set(ARRAY_FUNCTIONS) - used


def test_the_reader_of_array_names_reads_them():
    """The two tests above are worth what this finds."""
    source = "def f(x):\n    xp = namespace(x)\n    return xp.einsum(x) + namespace(x).cumsum(x) + self.xp.fft(x)"
    assert array_names(ast.parse(source)) == {"einsum", "cumsum", "fft"}


def array_calls(tree: ast.AST) -> list[tuple[str, int, list[str]]]:
    """Calls of array functions through the name xp: (function, number of plain arguments, names of the others)."""
    return [
        (node.func.attr, len(node.args), [keyword.arg or "" for keyword in node.keywords])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "xp" and node.func.attr in ARRAY_FUNCTIONS
        if not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "cupy"])
def test_every_library_takes_the_arguments_that_array_functions_are_given(library):
    """That a name exists is not enough: CuPy's argsort, for one, has no argument `stable`."""
    xp = pytest.importorskip(library)
    for file, tree in TREES.items():
        for name, count, keywords in array_calls(tree):
            try:
                signature = inspect.signature(getattr(xp, name))
            except (ValueError, TypeError):
                continue  # compiled, and silent about its arguments
            try:
                signature.bind(*[None] * count, **dict.fromkeys(keywords))
            except TypeError as error:
                raise AssertionError(f"{file}: {library}.{name} does not take {count} and {keywords}") from error


@pytest.mark.parametrize("file", TREES)
def test_only_the_backend_names_an_array_library(file):
    named = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            named |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            named |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert not (named & LIBRARIES) - NAMED_IN.get(file, set())


@pytest.mark.parametrize("file", [f for f in TREES if home(f) in FLOORS and 1 <= FLOORS[home(f)] <= 4])
def test_the_core_writes_into_no_array(file):
    """Caches alone write in place; everything else makes new arrays, which a library that records gradients needs.

    `a -= b` does both: where arrays cannot change it is a = a - b. What it may change is named here, each made in the
    line above and seen by nobody else. `mask.py` holds no data, only positions on the host.
    """
    if home(file) in ("caches/", "mask.py"):
        return
    changed = {"attention.py": {"scores"}, "ops.py": {"y"}}.get(file, set())
    for node in ast.walk(TREES[file]):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            assert not isinstance(target, ast.Subscript), f"{file}:{node.lineno} writes into an array"
        if isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant):
            assert ast.unparse(node.target) in changed, f"{file}:{node.lineno} changes {ast.unparse(node.target)}"


# Words.


@pytest.mark.parametrize("file", TREES)
def test_every_module_and_public_name_says_what_it_is_for(file):
    tree = TREES[file]
    if ast.unparse(tree).strip():
        assert ast.get_docstring(tree), f"{file} has no docstring"
    missing = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_") and child.name != "__call__":
                continue
            if not ast.get_docstring(child):
                missing.append(f"{prefix}{child.name}")
            if isinstance(child, ast.ClassDef):
                visit(child, child.name + ".")

    visit(tree, "")
    assert not missing


@pytest.mark.parametrize("file", [f for f in TREES if not f.endswith(("__init__.py", "__main__.py"))])
def test_a_module_opens_with_its_question(file):
    first = (ast.get_docstring(TREES[file]) or "").split("\n\n")[0]
    assert first.rstrip().endswith("?") or "?" in first, f"{file}: {first!r}"
    source = (ROOT / file).read_text(encoding="utf-8")
    assert "from __future__ import annotations" in source
    for mark in ("TODO", "FIXME", "XXX", "HACK"):
        assert mark not in source


@pytest.mark.parametrize("file", TREES)
def test_a_long_file_has_a_reason(file):
    lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    assert lines <= 300 or LONG.get(file), f"{file} has {lines} lines"
    assert lines <= 450, "no reason is good enough"


def test_reasons_are_for_files_that_are_long():
    for file in LONG:
        assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) > 300, f"{file} no longer needs its reason"


def test_the_core_can_be_read_in_an_afternoon():
    beside = {"config.py", "caches/contiguous.py"}  # a table of sizes; a variant for one library
    core = [
        f for f in TREES if home(f) in FLOORS and (FLOORS[home(f)] <= 3 or home(f) == "model.py") and f not in beside
    ]
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in core)
    assert 800 < lines <= 1650, f"the core has grown to {lines} lines: look for the idea that is missing"


def test_the_package_is_typed():
    assert (ROOT / "py.typed").exists()


def test_an_extra_installs_what_the_package_imports():
    settings = configparser.ConfigParser()
    settings.read(ROOT.parent / "setup.cfg")
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in TREES)
    for extra in ("models", "plot", "threads", "bench"):
        for requirement in settings["options.extras_require"][extra].split():
            name = requirement.partition(">=")[0]
            if name.startswith("minikv["):
                continue
            assert re.search(rf"import {name}\b|\"{name}[.\"]", code), f"{extra}: nothing imports {name}"


def test_worked_examples_exist_where_indices_are_hard():
    """That they run, pytest sees to: it collects every module's doctests."""
    finder = doctest.DocTestFinder()
    for name in ("minikv.mask", "minikv.caches.rolling", "minikv.caches.growing"):
        module = importlib.import_module(name)
        assert any(test.examples for test in finder.find(module) if module.__name__ in test.name), name


# The public face. Callers outside rely on these names and on these parameters in this order; more may follow.

FACE = {
    "namespace": "*arrays",
    "get_backend": "name",
    "available_backends": "",
    "visible": "q_pos, k_pos, window",
    "attention": "q, k, v, *, q_pos, k_pos, window, scale, softcap, sinks, block_size, return_lse",
    "merge_attention": "outs, lses",
    "ConcatCache": "",
    "KVCache": "capacity",
    "RollingCache": "window",
    "KVCache.extend": "self, pos, *rows",
    "KVCache.truncate": "self, length",
    "KVCache.reset": "self",
    "KVCache.copy": "self",
    "KVCache.reorder": "self, rows",
    "ModelConfig": "vocab_size, d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff",
    "ModelConfig.to_dict": "self",
    "ModelConfig.from_dict": "fields",
    "Model": "config, weights",
    "random_model": "config, seed, backend, dtype",
    "Model.new_caches": "self, kind",
    "Model.step": "self, tokens, caches, pos",
    "Model.to": "self, backend, dtype",
    "prefill": "model, tokens, caches, pos, *, last",
    "generate": "model, prompt_ids, max_new_tokens, *, temperature, top_k, top_p, seed, stop_ids, prefill_chunk, "
    "use_cache, on_token",
    "load": "path, backend, dtype",
}
DEFAULTS = {
    "attention": {"q_pos": None, "window": None, "scale": None, "block_size": None, "return_lse": False},
    "KVCache": {"capacity": None},
    "random_model": {"seed": 0, "backend": "numpy", "dtype": "float32"},
    "Model.step": {"caches": None, "pos": None},
    "Model.new_caches": {"kind": None},
    "generate": {"temperature": 0.0, "top_k": None, "top_p": None, "stop_ids": (), "use_cache": True, "on_token": None},
    "load": {"backend": "numpy", "dtype": "float32"},
    "visible": {"window": None},
    "ModelConfig": {"window": None, "layer_pattern": None},
}


@pytest.mark.parametrize("name", FACE)
def test_the_public_face(name):
    thing = minikv
    for part in name.split("."):
        thing = getattr(thing, part)
    assert name.split(".")[0] in minikv.__all__
    parameters = inspect.signature(thing).parameters
    wanted = [p.strip() for p in FACE[name].split(",") if p.strip()]
    keyword_only = wanted.index("*") if "*" in wanted else len(wanted)
    names = [p.lstrip("*") for p in wanted if p != "*"]
    assert list(parameters)[: len(names)] == names
    for i, parameter in enumerate(names):
        assert (parameters[parameter].kind is inspect.Parameter.KEYWORD_ONLY) == (i >= keyword_only), parameter
    for parameter, default in DEFAULTS.get(name, {}).items():
        assert parameters[parameter].default == default
    for parameter in list(parameters.values())[len(names) :]:
        optional = parameter.default is not inspect.Parameter.empty
        assert optional or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


@pytest.mark.parametrize("kind", ["ConcatCache", "KVCache", "RollingCache"])
def test_every_cache_has_the_protocol(kind):
    for name in ("extend", "length", "nbytes", "nbytes_used", "truncate", "reset", "copy", "reorder"):
        assert hasattr(getattr(minikv, kind), name)


def test_a_backend_has_its_names():
    backend = minikv.get_backend("numpy")
    for name in ("name", "xp", "asarray", "to_numpy", "synchronize", "memory_used"):
        assert hasattr(backend, name)
    assert list(inspect.signature(backend.asarray).parameters) == ["x", "dtype"]


def test_all_that_is_exported_exists_and_nothing_twice():
    assert len(minikv.__all__) == len(set(minikv.__all__)) and all(hasattr(minikv, name) for name in minikv.__all__)
