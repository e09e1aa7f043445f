"""Rules about the tree: budgets, one-way imports, purity, edges. Reads source, imports nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120

PACKAGES = ("common", "drafter_svc", "verifier_svc")
FILES = sorted(
    path
    for top in (*PACKAGES, "tests", "proto", "deploy")
    for path in (ROOT / top).rglob("*.py")
    if "common/pb" not in path.as_posix()
)
SOURCES = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]

# Plain Python, so that it runs in microseconds and takes property tests.
PURE = {
    "verifier_svc/admission.py",
    "verifier_svc/breaker.py",
    "verifier_svc/draft_payload.py",
    "verifier_svc/draft_sync.py",
    "verifier_svc/events.py",
    "verifier_svc/kv_blocks.py",
    "verifier_svc/request.py",
    "verifier_svc/rhythm.py",
    "verifier_svc/scheduler.py",
    "verifier_svc/verify_len.py",
    "drafter_svc/batcher.py",
    "drafter_svc/sessions.py",
    "common/contract.py",
    "common/errors.py",
}
# The only files that see the wire types.
EDGES = {
    "common/client.py",
    "drafter_svc/service.py",
    "drafter_svc/wire.py",
    "verifier_svc/draft_link.py",
    "verifier_svc/drafter_client.py",
    "verifier_svc/service.py",
}
# inside common: a module may import only from groups to its right in this order, or its own.
LAYERS = ("cli", "testing", "models", "nn", "kernels")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path) -> Iterator[str]:
    """Every module name that `path` imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _starts(module: str, *prefixes: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_file_keeps_its_budget_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "every module opens with a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES), node.name
    assert "TODO" not in text.replace('"TODO"', "")


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_imports_run_one_way(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    foreign = {"common": ("drafter_svc", "verifier_svc"), "drafter_svc": ("verifier_svc",)}
    banned = foreign.get(top, ("drafter_svc",))
    for module in _imports(path):
        assert not _starts(module, *banned), f"{_name(path)} imports {module}"
        assert module != "common", "import a submodule, never `common` itself"
        if _starts(module, "triton"):
            assert _name(path).startswith("common/kernels/"), "triton only in common/kernels"


@pytest.mark.parametrize("path", [p for p in SOURCES if _name(p).startswith("common/")], ids=_name)
def test_common_is_layered(path: Path) -> None:
    group = path.relative_to(ROOT).parts[1]
    if group not in LAYERS:
        allowed: tuple[str, ...] = ()  # leaves and side packages import none of the layers
    else:
        allowed = LAYERS[LAYERS.index(group) :]
    for module in _imports(path):
        parts = module.split(".")
        if parts[0] == "common" and len(parts) > 1 and parts[1] in LAYERS:
            assert parts[1] in allowed, f"{_name(path)} imports {module}"


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_stay_pure(name: str) -> None:
    for module in _imports(ROOT / name):
        assert not _starts(module, "torch", "grpc", "common.pb", "common.nn", "common.models")


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_wire_types_stop_at_the_edge(path: Path) -> None:
    if _name(path) in EDGES:
        return
    for module in _imports(path):
        assert not _starts(module, "common.pb"), f"{_name(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_environment_is_read_in_one_place(path: Path) -> None:
    if _name(path) != "common/config.py":
        text = path.read_text()
        assert "os.environ" not in text and "getenv" not in text


def test_folders_that_are_no_packages() -> None:
    for top in ("proto", "deploy", "tests"):
        assert not list((ROOT / top).rglob("__init__.py")), top
    assert not [p for p in FILES if p.stem == "common" or "common" in p.relative_to(ROOT).parts[1:]]
    names = [p.name for p in FILES if p.name.startswith("test_")]
    assert len(names) == len(set(names)), "test file names are unique across the tree"
