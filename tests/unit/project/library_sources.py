"""What other libraries' sources define, read without importing them: an import of vLLM takes ten
seconds, and Transformer Engine's half of Megatron needs a GPU.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
OWN_PACKAGES = ("one_step_off", "agent_loop")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_there(package: str) -> bool:
    """Whether a top-level package is installed."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The parsed source of a module. Fails if there is no such file."""
    return ast.parse(path_of(module).read_text())


def path_of(module: str) -> Path:
    """The file of a module, or of a package's __init__."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec and spec.submodule_search_locations, f"{top} is not installed"
    for location in spec.submodule_search_locations:
        stem = Path(location, *rest)
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if rest and path.is_file():
                return path
        if not rest:
            return Path(location, "__init__.py")
    raise AssertionError(f"there is no module {module}")


def definition(module: str, name: str) -> ast.AST:
    """A function, class or method ("Class.method") of a module, also inside an `if`."""
    node: ast.AST = tree_of(module)
    for part in name.split("."):
        found = [child for child in _inside(node) if getattr(child, "name", None) == part]
        assert found, f"{module} has no {name}"
        node = found[0]
    return node


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """The definitions of a module or a class, also those under `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _inside(child)


def source_digest(module: str, name: str) -> str:
    """The first digits of a hash of a definition's text, without its docstring and comments."""
    node = definition(module, name)
    assert isinstance(node, FUNCTIONS)
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    lines = path_of(module).read_text().splitlines()
    kept = [line.strip() for line in lines[statements[0].lineno - 1 : node.end_lineno]]
    text = "\n".join(line for line in kept if line and not line.startswith("#"))
    arguments = ast.unparse(node.args)
    return hashlib.sha256(f"{arguments}\n{text}".encode()).hexdigest()[:12]


def parameters(module: str, name: str) -> list[str]:
    """The names of a function's parameters, without self; a class stands for its __init__."""
    node = definition(module, name)
    if isinstance(node, ast.ClassDef):
        node = definition(module, f"{name}.__init__")
    assert isinstance(node, FUNCTIONS)
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [argument.arg for argument in every]
    return [name for name in names if name not in ("self", "cls")]


def fields(module: str, name: str) -> set[str]:
    """The annotated fields of a class, as a dataclass has them."""
    node = definition(module, name)
    annotated = [child for child in ast.walk(node) if isinstance(child, ast.AnnAssign)]
    return {child.target.id for child in annotated if isinstance(child.target, ast.Name)}


def literal_values(module: str, name: str) -> set[object]:
    """The values of `NAME = Literal[...]`, or of a set of constants."""
    for node in ast.walk(tree_of(module)):
        targets = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
        if isinstance(node, ast.Assign) and name in targets:
            constants = [child for child in ast.walk(node.value) if isinstance(child, ast.Constant)]
            return {constant.value for constant in constants}
    raise AssertionError(f"{module} has no {name}")


def constants(module: str, name: str = "") -> set[object]:
    """All constants in the source of a module, or of one of its definitions."""
    node = definition(module, name) if name else tree_of(module)
    return {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)}


def assigned_attributes(module: str, name: str) -> set[str]:
    """The attributes of self that a class sets."""
    names = set()
    for node in ast.walk(definition(module, name)):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and getattr(node.value, "id", "") == "self":
            names.add(node.attr)
    return names


# ---- what this project uses ----------------------------------------------------------------------


@functools.cache
def own_trees() -> dict[str, ast.Module]:
    """Path -> parsed source, of every module of the product."""
    trees = {}
    for package in OWN_PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            trees[str(path.relative_to(ROOT))] = ast.parse(path.read_text())
    return trees


@functools.cache
def own_imports() -> dict[str, set[str]]:
    """Module -> names, of every `from module import name` in the product."""
    found: dict[str, set[str]] = {}
    for tree in own_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def imported_names(library: str) -> set[tuple[str, str]]:
    """(module, name) of every `from library... import name` in the product."""
    found = set()
    for module, names in own_imports().items():
        if module == library or module.startswith(f"{library}."):
            found |= {(module, name) for name in names}
    return found


def used_attributes(prefix: str) -> set[str]:
    """X of every `prefix.X` in the product, such as "torch.cuda" or "self.engine"."""
    found = set()
    for tree in own_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == prefix:
                found.add(node.attr)
    return found


def is_defined(module: str, name: str) -> bool:
    """Whether `from module import name` finds something: a definition, an assignment, a name that
    the module imports, one that a package lists for lazy import, or a submodule."""
    if name in _names_of(tree_of(module).body):
        return True
    is_package = path_of(module).name == "__init__.py"
    if is_package and name in constants(module):
        return True
    try:
        path_of(f"{module}.{name}")
    except AssertionError:
        return False
    return True


def _names_of(statements: list[ast.stmt]) -> set[str]:
    """The names that statements of a module define, also under `if`, `try` and `with`."""
    names = set()
    for statement in statements:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(statement, block, []):
                    names |= _names_of(inner.body if hasattr(inner, "type") else [inner])
        else:
            stored = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            names |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    return names
