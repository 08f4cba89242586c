"""From a YAML file and `key=value` arguments to a checked `Config`, and back to text.

Like the schema, this imports neither torch nor Ray nor vLLM. Every fault is a `ConfigError` of one line that names
the key (or file), the value, and the mend.
"""

import contextlib
import dataclasses
import inspect
import itertools
import operator
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf._yaml import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from one_step_off.config.hardware import plan_cores
from one_step_off.config.schema import Config, ConfigError, located_config_error, role_settings
from one_step_off.config.unknown_keys import hint
from one_step_off.config.validation import (
    MODEL_PARALLEL,
    format_value,
    mask_secrets,
    resolved_device,
)

# The types of the schema in words, as they complete "must be ...".
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
_KINDS |= {
    list[float]: "a list of numbers, as [0.9, 0.999]",
    list[int]: "a list of whole numbers, as [4, 4]",
}
_KINDS[dict[str, list[int]]] = "a mapping of lists of whole numbers, as {rollout: [1], actor: [1]}"
_KINDS[dict[str, str]] = "a mapping of names, as {rollout: rollout, actor: actor}"
_KINDS[dict[str, Any]] = "a mapping, as {name: value}"


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema. `dotted` is section.name, `type` the Python type without Optional, which has default None."""

    dotted: str
    section: str
    name: str
    type: Any
    default: Any
    meta: Any

    @property
    def kind(self) -> str:
        """The type in words, as it completes "must be ..."."""
        words = (
            f"one of {', '.join(self.meta['choices'])}"
            if self.meta["choices"]
            else _KINDS[self.type]
        )
        return words + (" or null" if self.default is None else "")


def _keys() -> Iterator[ConfigKey]:
    for section in dataclasses.fields(Config):
        for f in dataclasses.fields(section.type):
            default = getattr(section.type(), f.name)
            kind = get_args(f.type)[0] if default is None else f.type
            yield ConfigKey(
                f"{section.name}.{f.name}", section.name, f.name, kind, default, f.metadata
            )


KEYS: dict[str, ConfigKey] = {key.dotted: key for key in _keys()}
SECTIONS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Config))


def find_key(dotted: str, value: Any = None) -> ConfigKey:
    """The key of that name. Raises ConfigError: there is none; says what to write where that is known, for a key of another
    trainer perhaps by its `value`."""
    if dotted in KEYS:
        return KEYS[dotted]
    section, _, name = dotted.partition(".")
    if section in SECTIONS and not name:
        raise ConfigError(
            f"{format_value(dotted)}: a section, not a key; write {section}.KEY=VALUE (all keys: --help)"
        )
    shown, words = hint(dotted, value, KEYS, SECTIONS)
    raise ConfigError(f"{format_value(shown)}: unknown key; {words} (all keys: --help)")


_Loader = get_yaml_loader()  # YAML as people mean it: 1e-6 is a number, and a key stands once
sys.set_int_max_str_digits(0)  # or a number of 5,000 digits could not be shown as what is wrong
_YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError, TypeError)


def parse_yaml(text: str) -> tuple[Any, Any]:
    """What a YAML text holds, and its node. Raises one of _YAML_FAULTS."""
    return yaml.load(text, _Loader), yaml.compose(text, _Loader)


def _yaml_fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return (
        "not valid YAML: " + line + " ".join(str(getattr(error, "problem", None) or error).split())
    )


def _assign(tree: dict, dotted: str, value: Any) -> str:
    """Set one key, replacing what was there; `section.key.a.b` reaches into a mapping. Returns `section.key`."""
    *path, last = dotted.split(".")
    of_ours = ".".join([*path, last][:2])
    key = find_key(of_ours if of_ours in KEYS else dotted, value)
    if len(path) > 1 and get_origin(key.type) is not dict:
        find_key(dotted, value)  # only a mapping has parts
    for part in path:
        tree[part] = tree[part] if isinstance(tree.get(part), dict) else {}
        tree = tree[part]
    tree[last] = value
    return key.dotted


def _from_file(path: str) -> Iterator[tuple[str, Any, str]]:
    """The keys that a file sets: dotted name, value, and "file:line: " for messages."""
    try:
        with open(path, encoding="utf-8") as f:
            content, root = parse_yaml(f.read())
    except OSError as e:
        raise ConfigError(
            f"config={path}: {e.strerror} (working directory {os.getcwd()}); check the path"
        ) from None
    except _YAML_FAULTS as e:
        raise ConfigError(f"config={path}: {_yaml_fault(e)}; mend the file") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"config={path}: must hold a mapping of sections, as model: {{path: ...}}"
        )
    lines = {}
    for name, body in root.value:
        lines[str(name.value)] = name.start_mark.line + 1
        for inner, _ in body.value if isinstance(body, yaml.MappingNode) else ():
            lines[f"{name.value}.{inner.value}"] = inner.start_mark.line + 1
    for section, keys in content.items():
        with located_config_error(f"{path}:{lines.get(str(section), 1)}: "):
            if section not in SECTIONS:
                find_key(str(section), keys)
            if not isinstance(keys, dict | None):
                raise ConfigError(
                    f"{section}={format_value(keys)}: a section must be a mapping of keys, as {{key: value}}"
                )
        for name, value in (keys or {}).items():
            yield f"{section}.{name}", value, f"{path}:{lines.get(f'{section}.{name}', 1)}: "


def _from_argument(argument: str) -> tuple[str, Any, str]:
    dotted, _, value = argument.partition("=")
    # Text is taken as it stands: YAML would cut "... end with #### number" at its comment sign.
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if dotted not in KEYS or KEYS[dotted].type is not str or quoted or value in ("null", "~"):
        try:
            value, _ = parse_yaml(value)
        except _YAML_FAULTS as e:
            raise ConfigError(
                f"{format_value(dotted)}={format_value(value)}: {_yaml_fault(e)}; quote the value"
            ) from None
    return dotted, value, ""


def _fit(where: str, kind: Any, value: Any, words: str | None = None) -> Any:
    """The value as that type. Raises ConfigError if it is of another."""
    inner, given = get_args(kind), value
    if isinstance(value, str) and kind not in (str, Any):  # as environment variables are
        with contextlib.suppress(*_YAML_FAULTS):
            value, _ = parse_yaml(value)
    if kind is Any:
        return value
    if kind is str and type(value) in (str, int, float):
        return str(value)
    if kind is bool and value in (0, 1):
        return bool(value)
    if kind is float and type(value) in (int, float):
        return float(
            str(value)
        )  # a whole number beyond all floats becomes infinite, and its bound refuses it
    if kind is int and (type(value) is int or isinstance(value, float) and value.is_integer()):
        return int(value)
    if get_origin(kind) is list and isinstance(value, list):
        return [_fit(f"{where}[{i}]", inner[0], item) for i, item in enumerate(value)]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {
            str(name): _fit(f"{where}.{format_value(name)}", inner[1], item)
            for name, item in value.items()
        }
    raise ConfigError(f"{where}={format_value(given)}: must be {words or _KINDS[kind]}")


_LARGEST = (
    2**31 - 1
)  # no number of a config means anything beyond it, and the C code below wants 32 bits
_BOUNDS = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
}


def _checked(key: ConfigKey, value: Any) -> Any:
    """The value of a key, of its type and within its bounds. Raises ConfigError."""
    meta = key.meta
    if value is None and key.default in (None, ""):
        return key.default
    if isinstance(value, bool) and meta["choices"]:
        value = "on" if value else "off"  # YAML reads a bare on or off as a boolean
    value = _fit(key.dotted, key.type, value, key.kind)
    wrong = f"{key.dotted}={format_value(value)}: must be "
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{wrong}{key.kind}")
    if meta.get("path"):  # the libraries that open it do not know the ~
        return ",".join(os.path.expanduser(part.strip()) for part in value.split(","))
    if type(value) not in (int, float) or value == meta.get("also"):
        return value
    for name, (words, fits) in _BOUNDS.items():
        bound = meta.get(name, _LARGEST if name == "high" else None)
        if bound is not None and not fits(value, bound):
            also = f", or {meta['also']}" if "also" in meta else ""
            raise ConfigError(f"{wrong}{words} {bound:.10g}{also} ({meta['help']})")
    return value


def load_config(argv: list[str]) -> Config:
    """The config of `config=FILE section.key=value ...`: the file over the defaults, the arguments over the file. `config=`
    may be left out in front of a name that ends in .yaml or .yml.

    A mapping in the file or in an argument replaces the default; `section.key.name=value` changes one entry of it.
    Raises ConfigError: an argument or a key that cannot be understood, or a value of a wrong type or out of bounds.
    What must fit together is checked by `config_checks.validate`.
    """
    argv = [
        f"config={argument}" if re.fullmatch(r"[^=-][^=]*\.ya?ml", argument) else argument
        for argument in argv
    ]
    for argument in argv:
        if (
            not argument.partition("=")[1]
            or argument[0] == "="
            or any("\ud7ff" < c < "\ue000" for c in argument)
        ):
            forms = "config=FILE, section.key=value, --dry-run or --help, in valid Unicode"
            raise ConfigError(f"argument {format_value(argument)}: must be {forms}")
    files = [
        argument.removeprefix("config=") for argument in argv if argument.startswith("config=")
    ]
    if len(files) > 1:
        raise ConfigError(
            f"config={format_value(files[1])}: config is given {len(files)} times; give one file"
        )
    arguments = (argument for argument in argv if not argument.startswith("config="))
    tree, places = dataclasses.asdict(Config()), {}
    for dotted, value, where in itertools.chain(
        *map(_from_file, files), map(_from_argument, arguments)
    ):
        with located_config_error(where):
            places[_assign(tree, dotted, value)] = where
    try:
        tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError, RecursionError) as e:
        name = getattr(e, "full_key", None) or "config"
        reason = " ".join(str(e).split("full_key")[0].split())
        line = f"{format_value(name)}: cannot be resolved: {reason}; quote it, or write the value itself"
        raise ConfigError(places.get(".".join(name.split(".")[:2]), "") + line) from None
    cfg = Config()
    for key in KEYS.values():
        with located_config_error(places.get(key.dotted, "")):
            setattr(getattr(cfg, key.section), key.name, _checked(key, tree[key.section][key.name]))
    return cfg


def _escaped(value: Any) -> Any:  # keys are taken as they stand
    return (
        re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
        if isinstance(value, str)
        else value
    )


class _Dumper(yaml.SafeDumper):
    """Lists on one line, and texts that hold a literal ${ come back as they are, not as an interpolation."""


_Dumper.yaml_implicit_resolvers = (
    _Loader.yaml_implicit_resolvers
)  # to quote texts that would be read as numbers
_Dumper.add_representer(
    list, lambda to, x: to.represent_sequence("tag:yaml.org,2002:seq", map(_escaped, x), True)
)
_Dumper.add_representer(dict, lambda to, x: to.represent_dict({key: _escaped(x[key]) for key in x}))


def resolved_yaml(cfg: Config) -> str:
    """The whole config as YAML that `load` reads back to an equal one, but for secrets, which are masked."""
    # PyYAML leaves Unicode's own line breaks as they are, and reads them back as blanks.
    readable = not re.search(r"\\x85|\\u202[89]", repr(tree := dataclasses.asdict(cfg)))
    return mask_secrets(
        yaml.dump(tree, None, _Dumper, allow_unicode=readable, sort_keys=False, width=10**6)
    )


USAGE = """usage: python -m one_step_off.main_ppo config=FILE [section.key=value ...] [--dry-run] [--help] [--profile STEP] [--replay FOLDER]
  to look at a run:  python -m one_step_off.main_ppo config=config/gsm8k_tiny_cpu.yaml --dry-run
  all keys:          python -m one_step_off.main_ppo --help"""


def help_text() -> str:
    """How to call the program, and every key with its type, default and one line.

    Trains a language model with one-step-off-policy PPO.

      config=FILE          a YAML file, as config/gsm8k_tiny_cpu.yaml (trains on a CPU in minutes); FILE.yaml alone will do
      section.key=value    sets one key over the file; the value is YAML, as placement.pools.rollout=[2]
      --dry-run            check everything, print the resolved config and the placement, start nothing; what this machine
                           lacks for it, as GPUs, is a warning
      --profile STEP       torch's profile of the updates of that step, counted from 0, into OUTPUT_DIR/profile
      --replay FOLDER      the update of the batch in FOLDER, as OUTPUT_DIR/skipped/step_000012, once more and on the trainers
                           alone: why it was skipped. Nothing of the run is changed
      --help               this text

    Exit codes: 0 done, 2 bad input (one line says which), 130 interrupted, 1 anything else.

    Keys:"""
    lines = [USAGE.splitlines()[0] + "\n" + inspect.cleandoc(help_text.__doc__).partition("\n")[2]]
    for section, keys in itertools.groupby(KEYS.values(), lambda key: key.section):
        lines.append(f"\n{section}: {getattr(Config(), section).__doc__}")
        for key in keys:
            kind = f"{key.kind}, default {format_value(key.default) or repr('')}"
            lines.append(f"  {key.dotted}  ({kind})\n      {key.meta['help']}")
    return "\n".join(lines) + "\n"


def processes_per_node(cfg: Config, pool: str) -> list[int]:
    """Processes on each node of a pool: one per GPU, or one per tensor_parallel_size GPUs for rollout."""
    width = cfg.rollout.tensor_parallel_size if cfg.placement.roles["rollout"] == pool else 1
    return [gpus // width for gpus in cfg.placement.pools[pool]]


def process_cores(
    cfg: Config, device: str, cores: list[int] | None = None
) -> dict[str, list[list[int]]]:
    """Pool -> the cores of each of its processes (empty: not pinned, as on GPUs). `cores` None: those that this process
    may use. Rollout and trainers in pools of their own share no core where there are two, unless there are fewer cores
    than processes and the two work in turns anyway (staleness 0)."""
    counts = {pool: sum(processes_per_node(cfg, pool)) for pool in cfg.placement.pools}
    plan: dict[str, list[list[int]]] = {pool: [[]] * n for pool, n in counts.items()}
    # Seats on other machines are not pinned: only this one's cores are known here.
    one_node = not os.environ.get("RAY_ADDRESS") and all(
        len(shape) == 1 for shape in cfg.placement.pools.values()
    )
    if device == "cpu" and cfg.placement.pin_cores and one_node:
        rollout = counts.pop(cfg.placement.roles["rollout"])
        mine = sorted(os.sched_getaffinity(0)) if cores is None else cores
        in_turns = not counts or (
            cfg.pipeline.staleness == 0 and rollout + sum(counts.values()) > len(mine)
        )
        plan[cfg.placement.roles["rollout"]], trainers = plan_cores(
            rollout, sum(counts.values()), mine, in_turns
        )
        for pool, n in counts.items():
            plan[pool], trainers = trainers[:n], trainers[n:]
    return plan


def placement_text(cfg: Config, cores: list[int] | None = None) -> str:
    """What runs where, for a valid config: one line per pool, as "all [2] on cpu: rollout x 2, actor x 2; cores 0 1"."""
    device, lines = resolved_device(cfg), []
    for pool, seats in process_cores(cfg, device, cores).items():
        roles = []
        for role in (role for role, where in cfg.placement.roles.items() if where == pool):
            own = cfg.rollout if role == "rollout" else role_settings(cfg, role)
            sizes = {
                n[0].upper() + "P": getattr(own, f"{n}_parallel_size", 1) for n in MODEL_PARALLEL
            }
            divided = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            roles.append(f"{role} x {len(seats)}" + f" ({divided})" * bool(divided))
        pinned = "; cores " + " ".join(",".join(map(str, c)) for c in seats) if any(seats) else ""
        lines.append(f"{pool} {cfg.placement.pools[pool]} on {device}: {', '.join(roles)}{pinned}")
    return "\n".join(lines)
