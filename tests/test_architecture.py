"""The shape of the code, read from its syntax trees: who imports whom, who may touch torch or the environment, how long
things are. A rule is one function over modules; a failure lists every offender.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from triblade import registry

SOURCE = Path(__file__).parents[1] / "src"
# A module imports from its left and from its own package; serve and bench stand side by side.
LINE = (
    "base",
    "ops",
    "models",
    "quant",
    "kv",
    "spec",
    "structured",
    "engine",
    "disagg",
    "serve|bench",
    "tune|doctor",
    "deploy",
    "llm",
    "writing",
    "cli",
)
BASE = {"", "page", "files", "errors", "registry", "config", "sampling_params", "host", "console"}
COMMAND_LINE = {"cli", "commands", "conversation", "__main__"}
PURE = ("base", "models.config", "kv.layout", "spec.policy", "disagg.wire", "tune.cost", "tune.rules", "tune.planner")
PURE += ("tune.points", "tune.measured", "tune.ablation", "tune.trial_plan")
PURE += ("tune.serving", "tune.gates", "tune.make_plan", "tune.plan_report", "tune.bill")
PURE += ("engine.request", "engine.block_pool", "engine.scheduler", "engine.outputs", "engine.client")
PURE += ("bench.workload", "bench.metrics", "doctor.symptoms")
HEAVY = {"torch", "numpy"}
MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_PARAMETERS = 60, 420, 6
RANK = {name: rank for rank, names in enumerate(LINE) for name in names.split("|")}


@cache
def modules() -> Mapping[str, ast.Module]:
    """Dotted name below triblade ("" is the package itself) -> syntax tree."""
    trees = {}
    for path in sorted((SOURCE / "triblade").rglob("*.py")):
        parts = path.relative_to(SOURCE / "triblade").with_suffix("").parts
        trees[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def layer(module: str) -> str:
    """`engine.scheduler` -> `engine`; modules of the base and of the command line have no package of their own."""
    head = module.partition(".")[0]
    return "base" if head in BASE else "cli" if head in COMMAND_LINE else head


def imports(module: str, *, at_load: bool = False) -> Iterator[str]:
    """Absolute names of imported modules; `at_load` leaves out imports in functions and under TYPE_CHECKING."""
    for node in statements(modules()[module]) if at_load else ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if own(name) in modules() else str(node.module) for name in inside)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def own(name: str) -> str:
    """`triblade.engine.outputs` -> `engine.outputs`; other packages' names as they are, marked."""
    return name.removeprefix("triblade").removeprefix(".") if name.partition(".")[0] == "triblade" else f"!{name}"


def loaded_with(module: str, seen: set[str]) -> set[str]:
    """Everything outside the package that importing `module` loads."""
    parents = [module.rsplit(".", n)[0] for n in range(module.count(".") + 1)]
    outside: set[str] = set()
    for part in {module, *parents} - seen:
        seen.add(part)
        for name in imports(part, at_load=True):
            inside = own(name)
            outside |= loaded_with(inside, seen) if inside in modules() else {name.split(".")[0]}
    return outside


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        for name in imports(module)
        if (target := own(name)) in modules()
        and layer(target) != layer(module)
        and RANK[layer(target)] >= RANK[layer(module)]
    ]
    assert not wrong


def test_every_package_has_a_place_in_the_line() -> None:
    assert {layer(module) for module in modules()} <= set(RANK)


def test_the_control_plane_loads_no_torch_and_no_numpy() -> None:
    listed = [name for name in modules() if name in PURE or layer(name) == "base"]
    assert not {name: found for name in listed if (found := loaded_with(name, set()) & HEAVY)}


def test_the_command_line_loads_no_torch() -> None:
    assert not loaded_with("cli", set()) & HEAVY


@pytest.mark.parametrize(
    ("table", "name"), [(t, n) for t in vars(registry).values() if isinstance(t, registry.Registry) for n in t]
)
def test_every_registry_entry_imports(table: registry.Registry, name: str) -> None:
    assert callable(table[name])


def test_only_config_reads_the_environment() -> None:
    reads = {"environ", "getenv", "environb", "putenv", "unsetenv"}
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if module != "config.environment"
        and (
            (isinstance(node, ast.Attribute) and node.attr in reads and ast.unparse(node.value) == "os")
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and reads & {a.name for a in node.names})
        )
    ]
    assert not wrong


def test_no_user_name_lookups() -> None:  # H07
    wrong = [m for m in modules() if {"pwd", "getpass"} & {name.split(".")[0] for name in imports(m)}]
    assert not wrong


def test_no_mutable_state_at_module_level() -> None:
    """Lists, dicts and sets of a module or class are allowed as CONSTANTS that no code changes; `global` never is."""
    wrong = []
    for module, tree in modules().items():
        changed = set(mutated_names(tree))
        for node in (part for body in bodies(tree) for part in body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = {target.id for target in targets if isinstance(target, ast.Name)} - {"__all__"}
            unstable = {name for name in names if name != name.upper() or name in changed}
            wrong += [f"{module}: {name}" for name in unstable if is_mutable(getattr(node, "value", None))]
        wrong += [f"{module}:{node.lineno} global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not wrong


def bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    """The module's own statements and those of its classes."""
    return [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]


def is_mutable(value: Any) -> bool:
    literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    makers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray", "count"}
    return literal or (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in makers)


def mutated_names(tree: ast.AST) -> Iterator[str]:
    """Names that are stored into by index, deleted from, added to in place, or changed by a method."""
    changers = {
        "append",
        "add",
        "update",
        "pop",
        "popitem",
        "clear",
        "extend",
        "insert",
        "remove",
        "discard",
        "setdefault",
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield node.value.id
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changers:
            yield ast.unparse(node.func.value)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if layer(module) != "cli" and isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not wrong


def test_functions_are_short() -> None:
    assert not [name for name, node in functions() if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES]


def test_functions_have_few_parameters() -> None:
    """Commands are exempt, their parameters are flags; so are kernels, which take no structures. `self` and `cls` do not count."""
    counts = {
        name: len([a for a in (*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs) if a.arg not in ("self", "cls")])
        for name, n in functions()
        if not name.startswith(("commands.", "ops.triton."))
    }
    assert not {name: count for name, count in counts.items() if count > MAX_PARAMETERS}


def test_files_are_short_and_say_what_they_are() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES}
    assert not [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)]


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")
    assert not [p.name for p in SOURCE.rglob("*.py") if any(mark in p.read_text(encoding="utf-8") for mark in marks)]
