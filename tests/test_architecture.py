"""Who may import whom, and which libraries: docs/architecture.md, "Rules for code"."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {  # package -> modules of ours; a package stands for all of its modules
    "blockstore": {"blockstore"},
    "preprocess": {"preprocess", "blockstore"},
    "loaderd": {"loaderd", "blockstore"},
    "clients": {
        "clients",
        "blockstore.kernels",
        "blockstore.format",
        "blockstore.errors",
        "blockstore.io",
        "blockstore.launch",
        "blockstore.store",
        "loaderd.api.contents",
        "loaderd.api.protocol",
        "loaderd.api.errors",
        "loaderd.api.endpoint",
        "loaderd.api.tcp",
        "loaderd.server.curve",
        "loaderd.api.placement",
        "loaderd.plans.base",
        "loaderd.plans.chunks",
        "loaderd.plans.home",
        "loaderd.plans.minibatch",
        "loaderd.plans.partitions",
    },
    "tools": {"tools", "blockstore", "preprocess", "loaderd", "clients"},
}
# folders that may import more: packs, and what is compiled ahead, the daemon's engine samples
MORE = {
    "preprocess/packs": {"loaderd"},
    "preprocess/cli/warm.py": {"loaderd.api.protocol", "loaderd.cli", "loaderd.sessions"},
    "preprocess/__main__.py": {"loaderd.api.errors"},
    # inference is a run of stages over a whole store, whose path the daemon tells
    "clients/inference": {"blockstore", "preprocess", "loaderd.server.transport"},
    "clients/infer.py": {"blockstore", "preprocess.errors"},
}
BELOW = {  # folder -> folders beside it, and modules, that it builds on
    "clients/connection": {},
    "clients/device": {"connection", "records"},
    "clients/inference": {"models"},
    "clients/hopwise": {"batch", "connection", "dataset", "records"},
    "clients/micrograph": {"batch", "connection", "cut", "ranks", "torch"},
    "clients/large": {
        "batch", "connection", "cut", "dataset", "hashing", "models", "ranks", "records", "torch"
    },
    "loaderd/api": {},
    "loaderd/plans": {"api"},
    "loaderd/memory": {"api", "plans"},
    "loaderd/monitoring": {"api", "memory"},
    "loaderd/sampling": {"api", "memory", "monitoring", "plans"},
    "loaderd/sessions": {"api", "memory", "monitoring", "plans", "sampling"},
    "loaderd/streams": {"api", "memory", "monitoring", "plans", "sampling", "sessions"},
    "loaderd/server": {"api", "memory", "monitoring", "sessions", "streams"},
    "loaderd/cli": {
        "api", "memory", "monitoring", "plans", "sampling", "server", "sessions", "streams"
    },
    "preprocess/kernels": {},
    "preprocess/files": {"errors", "pipeline.progress"},
    "preprocess/pipeline": {"errors", "files"},
    "preprocess/sources": {"errors", "files", "ingest", "kernels", "pipeline"},
    "preprocess/stages": {
        "errors", "files", "ingest.contents", "kernels", "partition", "pipeline", "sources"
    },
    "preprocess/partition": {
        "errors", "files", "ingest", "kernels", "pipeline", "sources", "stages"
    },
    "preprocess/ingest": {
        "errors", "files", "hops", "kernels", "partition", "pipeline", "sources", "stages"
    },
    "preprocess/hops": {"errors", "files", "ingest", "kernels", "pipeline", "stages"},
    "preprocess/derive": {
        "errors", "files", "ingest", "kernels", "partition.influence_plan", "pipeline", "stages"
    },
    "preprocess/export": {"files", "ingest", "kernels", "pipeline", "sources", "stages"},
    "preprocess/packs": {"cli.flags", "errors", "files", "hops.hops", "ingest.options", "pipeline"},
    "preprocess/cli": {
        "derive.plan", "errors", "files", "hops.hops", "ingest", "kernels", "partition",
        "pipeline", "sources",
    },
}  # fmt: skip
DOORS = {  # library -> the only files that import it, in the packages that are installed
    "pyarrow": {"preprocess/files/arrow.py", "preprocess/files/tables.py"},
    "zarr": {"blockstore/create.py"},
    "zmq": {
        "loaderd/server/transport.py",
        "loaderd/server/curve.py",
        "clients/connection/session.py",
        "clients/connection/remote.py",
    },
    "prometheus_client": {"loaderd/monitoring/metrics.py"},
    "rich": {"preprocess/pipeline/renderings.py", "loaderd/monitoring/top.py"},
    "typer": {
        "blockstore/flags.py",
        "preprocess/__main__.py",
        "preprocess/cli/flags.py",
        "loaderd/cli/commands.py",
        "loaderd/cli/flags.py",
    },
    "torch": {
        "clients/aggregate.py",
        "clients/batch.py",
        "clients/torch.py",
        "clients/hopwise/models.py",
        "clients/train_hops.py",
        "clients/dataset.py",
        "clients/records.py",
        "clients/prefetch.py",
        "clients/device/devices.py",
        "clients/device/driver.py",
        "clients/device/hotrows.py",
        "clients/device/kernels.py",
        "clients/device/stage.py",
        "clients/hopwise/batch.py",
        "clients/hopwise/dataset.py",
        "clients/hopwise/advice.py",
        "clients/mfg.py",
        "clients/dgl.py",
        "clients/link.py",
        "clients/bidirectional.py",
        "clients/pyg.py",
        "clients/pygdata.py",
        "clients/models.py",
        "clients/train.py",
        "clients/inference/layer.py",
        "clients/inference/layer_pull.py",
        "clients/inference/layer_push.py",
        "clients/inference/model.py",
        "clients/inference/run.py",
        "preprocess/files/torchfile.py",
        "clients/ranks.py",
        "clients/settings.py",
        "clients/shuffle.py",
        "clients/split.py",
        "clients/micrograph/dataset.py",
        "clients/micrograph/training.py",
        "clients/lightning.py",
        "clients/cut.py",
        "clients/hashing.py",
        "clients/large/batch.py",
        "clients/large/dataset.py",
        "clients/large/history.py",
        "clients/large/order.py",
        "clients/large/padding.py",
        "clients/large/reader.py",
    },
    "triton": {"clients/device/kernels.py"},
    "kvikio": {"blockstore/io/gds.py"},
    "ray": {"preprocess/pipeline/on_ray.py"},
    "lightning": {"clients/lightning.py"},
    "torch_geometric": {"clients/bidirectional.py", "clients/pyg.py"},
}
MAIN_PATH = 12  # modules that decide between `next(batch)` and the disk, at most
CLOCKED = {"threading", "queue", "concurrent", "time"}  # from blockstore/concurrency.py alone, in
SCHEDULED = [  # what runs under the schedules of tests/schedules.py
    "blockstore/io", "loaderd/memory", "loaderd/plans", "loaderd/sampling", "loaderd/sessions",
    "loaderd/streams", "loaderd/monitoring/devicecost.py", "loaderd/monitoring/meter.py",
    "loaderd/monitoring/trace.py",
]  # fmt: skip
# what the daemon loads must stay light
LIGHT = (
    "loaderd.sessions.engine",
    "loaderd.server.daemon",
    "clients.connection.session",
)
FILES = [p for name in MAY_IMPORT for p in sorted((ROOT / name).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once for all tests."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's, walked once for all tests."""
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything that a file imports, also inside functions."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                assert node.level == 0, f"{path}:{node.lineno}: relative import"
                for alias in names:
                    inner = f"{module}.{alias.name}"
                    is_module = (ROOT / Path(*inner.split("."))).with_suffix(".py").exists()
                    yield node.lineno, inner if is_module else module


def of_package(package: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(ROOT).parts[0] == package]


def within(name: str, allowed: set[str]) -> bool:
    """Whether a module is one of `allowed`, or inside one."""
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_arrows(package: str) -> None:
    for path in of_package(package):
        place = path.relative_to(ROOT)
        allowed = set(MAY_IMPORT[package])
        for where in (place, *place.parents):
            allowed |= MORE.get(str(where), set())
        for line, name in imports(path):
            if name.split(".")[0] in MAY_IMPORT:
                assert within(name, allowed), f"{place}:{line} imports {name}"


@pytest.mark.parametrize("folder", BELOW)
def test_folders_build_on_what_is_below(folder: str) -> None:
    package = folder.split("/")[0]
    allowed = {folder.replace("/", "."), *(f"{package}.{name}" for name in BELOW[folder])}
    for path in (ROOT / folder).rglob("*.py"):
        for line, name in imports(path):
            if name.split(".")[0] == package:
                assert within(name, allowed), f"{path}:{line} imports {name}"


def test_every_folder_has_its_place() -> None:
    for package in ("clients", "loaderd", "preprocess"):
        folders = {f"{package}/{p.parent.name}" for p in (ROOT / package).glob("*/__init__.py")}
        assert folders == {name for name in BELOW if name.startswith(f"{package}/")}


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(library: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.relative_to(ROOT).parts[0] != "tools"
        for _, name in imports(path)
        if name.split(".")[0] == library
    }
    assert found <= DOORS[library]


@pytest.mark.parametrize("place", SCHEDULED)
def test_threads_and_clocks_of_the_engine_have_one_door(place: str) -> None:
    path = ROOT / place
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for line, name in imports(file):
            assert name.split(".")[0] not in CLOCKED, f"{file}:{line} imports {name}"
            assert not name.startswith("blockstore.concurrency."), f"{file}:{line}: by its module"
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "blockstore.concurrency", (
                    f"{file}:{node.lineno}: by its module"
                )


def test_nothing_of_ours_is_imported_in_a_function() -> None:
    installed = [p for p in FILES if p.relative_to(ROOT).parts[0] != "tools"]
    for path in installed:  # tools has peers to measure against that need not be there
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                assert not inner, f"{path}:{node.lineno}: {node.name} imports inside"


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}


def closure(module: str) -> set[str]:
    """Every module, of ours or not, that importing `module` loads."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = (ROOT / Path(*name.split("."))).with_suffix(".py")
        if path.exists():
            todo += [inner for _, inner in imports(path)]
    return seen


@pytest.mark.parametrize("module", LIGHT)
def test_the_daemon_and_the_session_stay_light(module: str) -> None:
    heavy = {"zarr", "torch", "rich", "typer"}
    assert not {name.split(".")[0] for name in closure(module)} & heavy


def test_there_is_no_cycle() -> None:
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in FILES}
    edges = {m: {n for _, n in imports(p) if n in modules} for m, p in modules.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for inner in edges[module]:
                visit(inner, (*path, module))
            done.add(module)

    for module in modules:
        visit(module, ())


def test_the_main_path_is_short() -> None:
    """README.md lists it in the order of a batch."""
    table = (ROOT / "README.md").read_text().partition("| module | decides |")[2]
    names = re.findall(r"^\| `(\S+\.py)` \|", table, re.MULTILINE)
    assert 0 < len(names) <= MAIN_PATH
    assert not [name for name in names if not (ROOT / name).exists()]


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Its parameters are groups of the command line's options."""
    return any("command" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_functions_take_few_parameters() -> None:
    found = []
    for path in FILES:
        maximum = 10 if "kernels" in {*path.parts, path.stem} else 8
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(node):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if sum(parameter.arg not in {"self", "cls"} for parameter in given) > maximum:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_module_fits_in_one_reading(package: str) -> None:
    for path in of_package(package):
        assert len(path.read_text().splitlines()) <= 500, path


PURE = {"isinstance", "len", "all", "any", "int", "filled", "sum", "getbuffer", "is_held"}


def test_assertions_do_nothing() -> None:
    """`python -O` leaves them out: what they call is missing then."""
    for path in [p for p in FILES if p.relative_to(ROOT).parts[0] != "tools"]:
        for node in nodes(path):
            if isinstance(node, ast.Assert):
                calls = [n.func for n in ast.walk(node.test) if isinstance(n, ast.Call)]
                names = {ast.unparse(call).rpartition(".")[2] for call in calls}
                assert names <= PURE, f"{path}:{node.lineno}: {sorted(names - PURE)}"
