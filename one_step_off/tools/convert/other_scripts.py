"""Reads the settings out of scripts of other trainers: verl's shell scripts and YAML, TRL's Python
scripts, commands and YAML. Nothing of a script is run.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.unknown_keys import leaves
from one_step_off.config.yaml_io import YAML_ERRORS, parse_yaml, yaml_error_text

VERL = "verl"
TRL = "TRL"
VERL_SECTIONS = ("actor_rollout_ref", "critic", "algorithm", "trainer", "data", "reward_model")
# Classes whose keyword arguments are settings, in scripts of TRL.
TRL_CONFIGS = re.compile(r"(GRPO|AsyncGRPO|RLOO)Config")
TRL_TRAINERS = re.compile(r"(GRPO|AsyncGRPO|RLOO)Trainer")
# The first arguments of those trainers, which scripts may give without names.
TRAINER_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
_SETTING = re.compile(r"[+~]*[A-Za-z_][\w.]*(\.[\w.]+)=", re.S)
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?=)", re.S)
_VARIABLE = re.compile(
    r"\$(?:\{([A-Za-z_]\w*)(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\}|([A-Za-z_]\w*))", re.S
)
_ARRAY = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
_END_OF_COMMAND = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>", "<")
_FLAG = re.compile(r"--([A-Za-z]\w*(?:[-_]\w+)*)(?:=(.*))?", re.S)


@dataclass(frozen=True)
class Setting:
    """One setting of another trainer, by its own key."""

    key: str
    value: Any


@dataclass
class OtherScript:
    """What a script says.

    Attributes:
        trainer: VERL or TRL.
        settings: in order; a later one of the same key counts.
        processes: of accelerate or torchrun; None: the script does not say.
        is_one_step_off: verl's recipe of that name.
        is_async: that recipe, or its fully asynchronous one.
        notes: what could not be read, a line each.
    """

    trainer: str
    settings: list[Setting] = field(default_factory=list)
    processes: int | None = None
    is_one_step_off: bool = False
    is_async: bool = False
    notes: list[str] = field(default_factory=list)


def read_script(path: str) -> OtherScript:
    """The settings of a script. Raises ConfigError: it cannot be read, or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {reason}; name a script of verl or TRL") from None
    if path.endswith((".yaml", ".yml")):
        script = _read_yaml(path, text)
    elif path.endswith(".py"):
        script = _read_python(path, text)
    else:
        script = _read_shell(path, text)
    if not script.settings:
        raise ConfigError(
            f"{path}: holds no settings of verl or TRL; name a shell script with key=value or "
            "--key value, a Python script with GRPOConfig(...), or a YAML file"
        )
    return script


# --- YAML -----------------------------------------------------------------------------------------


def _read_yaml(path: str, text: str) -> OtherScript:
    try:
        content, _ = parse_yaml(text)
    except YAML_ERRORS as error:
        raise ConfigError(f"{path}: {yaml_error_text(error)}; fix the file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping of keys; name a config of verl or TRL")
    is_verl = any(isinstance(content.get(name), dict) for name in VERL_SECTIONS)
    script = OtherScript(VERL if is_verl else TRL)
    for name, value in content.items():
        if is_verl:
            script.settings += [Setting(key, leaf) for key, leaf in leaves(str(name), value)]
        elif name == "num_processes":
            script.processes = value
        else:
            script.settings.append(Setting(str(name), value))
    return script


# --- shell ----------------------------------------------------------------------------------------


def _read_shell(path: str, text: str) -> OtherScript:
    """The settings of the commands of a script. Variables are replaced; those that the script does
    not set stay as environment variables."""
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    found: list[OtherScript] = []
    notes: list[str] = []
    for line in _logical_lines(text):
        if re.match(r"\s*(if|for|while|case|function)\b", line):
            notes.append(
                f"{line.strip().splitlines()[0][:60]!r}: not followed; the last value counts"
            )
        words = _words(line, variables, arrays)
        if words is None:
            notes.append(f"{line.strip()[:60]!r}: its quotes cannot be read")
            continue
        words = _without_assignments(words, line, variables, arrays)
        script = _command(path, words)
        if script is not None:
            found.append(script)
    if not found:
        return OtherScript(VERL)
    script = found[-1]
    if len(found) > 1:
        notes.append(f"the script has {len(found)} commands with settings; the last one is read")
    script.notes = notes + script.notes
    return script


def _logical_lines(text: str) -> Iterator[str]:
    """The statements of a script: continued lines and open quotes or brackets joined, comments left
    out."""
    pending = ""
    for line in text.splitlines():
        is_comment = line.lstrip().startswith("#")
        if is_comment and not _has_open_quote(pending):
            continue  # also between continued lines, where people disable an argument
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        pending += line + "\n"
        if _is_open(pending):
            continue
        yield pending
        pending = ""
    if pending.strip():
        yield pending


def _has_open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _is_open(text: str) -> bool:
    """Whether a statement has an open quote, or an open array."""
    if _has_open_quote(text):
        return True
    words = shlex.split(text, comments=True)
    match = re.match(r"\s*\w+\+?=\(", text)
    return match is not None and not any(word.endswith(")") for word in words)


def _words(line: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str] | None:
    """The words of a statement with its variables replaced; None: its quotes cannot be read."""

    def array(match: re.Match) -> str:
        return shlex.join(arrays.get(match[1], []))

    expanded = _expand(_ARRAY.sub(array, line), variables)
    try:
        return shlex.split(expanded, comments=True)
    except ValueError:
        return None


def _expand(text: str, variables: dict[str, str]) -> str:
    """Replace $NAME, ${NAME}, ${NAME:-DEFAULT} and $((...)) outside of single quotes."""
    parts = re.split(r"('[^']*')", text) if text.count('"') == 0 else [text]
    expanded = [part if part[:1] == "'" else _expanded(part, variables) for part in parts]
    return "".join(expanded)


def _expanded(text: str, variables: dict[str, str]) -> str:
    def variable(match: re.Match) -> str:
        name = match[1] or match[4]
        if name in variables and (variables[name] or not match[2]):
            return variables[name]
        if match[2]:
            return _expanded(match[3].strip("\"'"), variables)
        return f"${{oc.env:{name}}}"

    def arithmetic(expression: str) -> str:
        inner = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), expression)
        inner = _VARIABLE.sub(variable, inner)
        value = _whole_number(inner)
        return f"$(({inner}))" if value is None else str(value)

    # Positional arguments are none of the script's settings.
    text = re.sub(r"\"?\$[@*]\"?", "", text)
    text = _with_arithmetic(text, arithmetic)
    return re.sub(_VARIABLE, lambda m: m[0] if m[0].startswith("${oc.env") else variable(m), text)


def _with_arithmetic(text: str, work_out: Callable[[str], str]) -> str:
    """The text with each $((EXPRESSION)) worked out; brackets may be nested."""
    before, begin, rest = text.partition("$((")
    if not begin:
        return text
    depth = 2
    for end, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return before + work_out(rest[: end - 1]) + _with_arithmetic(rest[end + 1 :], work_out)
    return text


def _whole_number(expression: str) -> int | None:
    """The value of whole numbers with + - * / % and brackets; None: it is something else."""
    try:
        tree = ast.parse(expression.strip().replace("/", "//"), mode="eval").body
        value = _folded(tree, {})
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return value if isinstance(value, int) else None


def _without_assignments(
    words: list[str], line: str, variables: dict[str, str], arrays: dict[str, list[str]]
) -> list[str]:
    """Take note of the assignments at the beginning of a statement; returns the words behind
    them."""
    words = [word for word in words if word not in ("export", "local", "readonly", "declare")]
    while words:
        match = _ASSIGNMENT.match(words[0])
        if match is None or "." in words[0].partition("=")[0]:
            return words
        name, operator = match[1], match[2]
        value = words[0][match.end() :]
        if value.startswith("(") and "((" not in line.partition(words[0])[0]:
            inner = [value[1:], *words[1:]]
            items = [word.removesuffix(")") for word in inner]
            items = [item for item in items if item]
            before = arrays.get(name, []) if operator == "+=" else []
            arrays[name] = before + items
            return []
        before_text = variables.get(name, "") if operator == "+=" else ""
        variables[name] = before_text + value
        words = words[1:]
    return []


def _command(path: str, words: list[str]) -> OtherScript | None:
    """The settings in one command; None: it has none."""
    for position, word in enumerate(words):
        if word in _END_OF_COMMAND or re.match(r"\d?>", word):
            words = words[:position]
            break
    settings = [word for word in words if _SETTING.match(word)]
    if settings and any(re.search(r"\bverl\b.*sft", word) for word in words):
        raise ConfigError(
            f"{path}: is supervised fine-tuning, which is not converted; see "
            "docs/tutorials/supervised_warm_up.md, or give a script of RL"
        )
    if any("verl" in word or "main_" in word for word in words[:4]) or len(settings) > 3:
        return _read_verl_words(path, words)
    flags = [word for word in words if word.startswith("--")]
    is_trl = any(word.endswith(".py") or word in ("trl", "grpo") for word in words)
    if is_trl and flags:
        return _read_flags(path, words)
    return None


_PROGRAM = re.compile(r"verl[\w.]*\.main\w*|(.*/)?main_\w+\.py")
_HYDRA = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
# The configs of verl itself; what they set is known.
_OWN_CONFIG = re.compile(r"\w*ppo(_megatron)?_trainer")


def _read_verl_words(path: str, words: list[str]) -> OtherScript | None:
    """The settings of a command of verl. Each word behind its program is one: what is no key=value,
    as an option of Hydra, by its own name."""
    script = OtherScript(VERL)
    script.is_one_step_off = any("one_step_off" in word for word in words)
    script.is_async = script.is_one_step_off or any("fully_async" in word for word in words)
    programs = [i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)]
    first = next((i for i, word in enumerate(words) if _SETTING.match(word)), len(words))
    rest = words[programs[0] + 1 if programs else first :]
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        key = _HYDRA.get(key, key).lstrip("+")
        if key.startswith("--config-") and not equals and rest:
            value = rest.pop(0)
        elif not equals:
            value = "true"
        script.settings.append(Setting(key, _value(value)))
    _read_base_config(path, script)
    return script if script.settings else None


def _read_base_config(path: str, script: OtherScript) -> None:
    """The settings of the YAML file that --config-name means, before those of the command."""
    options = {setting.key: str(setting.value) for setting in script.settings}
    name = options.get("--config-name", "")
    name = name.removesuffix(".yaml")
    script.settings = [
        Setting(setting.key, name) if setting.key == "--config-name" else setting
        for setting in script.settings
    ]
    if not name or _OWN_CONFIG.fullmatch(name):
        return
    folder = options.get("--config-path", options.get("--config-dir", "."))
    candidates = [base / folder / f"{name}.yaml" for base in (Path(), Path(path).parent)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        return
    base = _read_yaml(str(found), found.read_text(encoding="utf-8"))
    hydra = ("--config-name", "--config-path", "--config-dir")
    rest = [setting for setting in script.settings if setting.key not in hydra]
    script.settings = base.settings + rest
    script.notes.append(f"--config-name={name}: the settings of {found} are read, "
                        "those of the command count before them")  # fmt: skip


def _value(text: str) -> Any:
    """A value of a command line, as YAML reads it; the text itself where it is none."""
    if "${" in text or "$((" in text:
        return text
    try:
        return parse_yaml(text)[0]
    except YAML_ERRORS:
        return text


def _read_flags(path: str, words: list[str]) -> OtherScript:
    """The settings `--key value`, `--key=value` and `--key` of a command of TRL, accelerate or
    torchrun."""
    script = OtherScript(TRL)
    program = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "trl"), 0)
    position = 0
    while position < len(words):
        match = _FLAG.fullmatch(words[position])
        is_launcher = position < program
        position += 1
        if match is None:
            is_subcommand = position - 2 == program and words[program] == "trl"
            if position - 1 > program and not is_subcommand:
                script.settings.append(Setting(words[position - 1], True))
            continue
        key = match[1].replace("-", "_")
        values = [] if match[2] is None else [match[2]]
        while match[2] is None and position < len(words) and not words[position].startswith("--"):
            if position == program:
                break
            values.append(words[position])
            position += 1
        value: Any = True if not values else _value(values[0])
        if len(values) > 1:
            value = [_value(text) for text in values]
        if is_launcher:
            if key in ("num_processes", "nproc_per_node"):
                script.processes = value
            else:
                script.notes.append(f"--{key} of the launcher is not read; see placement.pools")
            continue
        if key in ("config", "config_file") and isinstance(value, str):
            _read_named_config(path, value, script)
            continue
        script.settings.append(Setting(key, value))
    return script


def _read_named_config(path: str, name: str, script: OtherScript) -> None:
    """The settings of the YAML file that a command names, before those of the command."""
    candidates = [Path(name), Path(path).parent / name]
    found = [candidate for candidate in candidates if candidate.is_file()]
    if not found:
        script.notes.append(f"--config {name}: no such file here; convert it by itself")
        return
    named = _read_yaml(str(found[0]), found[0].read_text(encoding="utf-8"))
    script.settings = named.settings + script.settings
    script.processes = script.processes or named.processes


# --- Python ---------------------------------------------------------------------------------------


def _read_python(path: str, text: str) -> OtherScript:
    """The keyword arguments of GRPOConfig, LoraConfig and GRPOTrainer in a script."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: not valid Python: {error}; fix the file") from None
    script = OtherScript(TRL)
    values = _assigned_values(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name_of(node.func)
            if TRL_CONFIGS.fullmatch(name):
                _read_call(node, values, script, first=("output_dir",))
            elif TRL_TRAINERS.fullmatch(name):
                _read_call(node, values, script, TRAINER_ARGUMENTS, skipped=("args", "peft_config"))
            elif name == "LoraConfig":
                _read_call(node, values, script, prefix="lora.")
    return script


def _assigned_values(tree: ast.AST) -> dict[str, ast.expr]:
    """Name -> the expression that the script assigns to it last."""
    assigned: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                assigned[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            assigned[node.target.id] = node.value
    return assigned


def _read_call(
    node: ast.Call,
    values: dict[str, ast.expr],
    script: OtherScript,
    first: tuple[str, ...] = (),
    prefix: str = "",
    skipped: tuple[str, ...] = (),
) -> None:
    """The keyword arguments of a call as settings. `first`: the names of the
    first arguments."""
    arguments: list[tuple[str, ast.expr]] = []
    arguments += zip(first, node.args, strict=False)
    for argument in node.args[len(first) :]:
        written = ast.unparse(argument)[:80]
        script.notes.append(f"line {node.lineno}: {written} is given without a name: not read")
    for keyword in node.keywords:
        if keyword.arg is None:
            written = ast.unparse(keyword.value)
            script.notes.append(f"line {node.lineno}: **{written} is not followed")
        else:
            arguments.append((keyword.arg, keyword.value))
    for key, expression in arguments:
        if key in skipped:
            continue
        try:
            value = _folded(expression, values)
        except ValueError:
            written = ast.unparse(expression)[:80]
            script.notes.append(f"{prefix}{key}={written}: the value is not in the script")
            continue
        script.settings.append(Setting(prefix + key, value))


def _folded(node: ast.expr, values: dict[str, ast.expr], depth: int = 0) -> Any:
    """The value of an expression of constants, names, arithmetic, and load_dataset(...). Raises
    ValueError: it is another one."""
    if depth > 20:
        raise ValueError("names that refer to themselves")
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_folded(item, values, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            _folded(key, values, depth + 1): _folded(value, values, depth + 1)
            for key, value in pairs
            if key is not None
        }
    if isinstance(node, ast.Name) and node.id in values:
        return _folded(values[node.id], values, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_folded(node.operand, values, depth + 1)
    if isinstance(node, ast.BinOp):
        return _calculated(node, values, depth)
    return _folded_call(node, values, depth)


_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _calculated(node: ast.BinOp, values: dict[str, ast.expr], depth: int) -> Any:
    left = _folded(node.left, values, depth + 1)
    right = _folded(node.right, values, depth + 1)
    operator = _OPERATORS.get(type(node.op))
    if operator is None or not all(isinstance(side, int | float) for side in (left, right)):
        raise ValueError(ast.unparse(node))
    return operator(left, right)


def _folded_call(node: ast.expr, values: dict[str, ast.expr], depth: int) -> Any:
    """`load_dataset("a/b", "c")`, with or without methods behind it, as "a/b:c"; and a name of a
    function, such as a reward, as itself."""
    if isinstance(node, ast.Name):
        return Named(node.id)
    if isinstance(node, ast.Subscript):
        return _folded(node.value, values, depth + 1)
    if isinstance(node, ast.Call):
        if _name_of(node.func) == "load_dataset" and node.args:
            parts = [_folded(argument, values, depth + 1) for argument in node.args[:2]]
            return ":".join(str(part) for part in parts)
        if isinstance(node.func, ast.Attribute):  # dataset.map(...)
            return _folded(node.func.value, values, depth + 1)
    raise ValueError(ast.unparse(node))


class Named(str):
    """The name of something that a Python script defines or imports."""


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
