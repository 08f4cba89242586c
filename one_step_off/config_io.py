"""From a YAML file and `key=value` arguments to a checked `Config`, and back to text.

Like the schema, this imports neither torch nor Ray nor vLLM. Every fault is a `ConfigError` of one line that names
the key (or file), the value, and the mend.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from one_step_off.config import Config, ConfigError
from one_step_off.config_checks import check_combinations, show
from one_step_off.cores import count_gpus, plan_cores


@dataclass(frozen=True)
class Key:
    """One key of the schema. `type` is the Python type without Optional."""

    section: str
    name: str
    type: Any
    optional: bool
    default: Any
    meta: Any

    @property
    def dotted(self) -> str:
        """section.name"""
        return f"{self.section}.{self.name}"

    @property
    def kind(self) -> str:
        """The type in words, as it completes "must be ..."."""
        if self.meta.get("choices"):
            words = "one of " + ", ".join(self.meta["choices"])
        else:
            words = _KINDS[get_origin(self.type) or self.type]
        if get_args(self.type) == (float,):
            words = "a list of numbers, as [0.9, 0.999]"
        elif self.type == dict[str, list[int]]:
            words = "a mapping of lists of whole numbers, as {rollout: [1], actor: [1]}"
        elif self.type == dict[str, str]:
            words = "a mapping of names, as {rollout: rollout, actor: actor}"
        return words + (" or null" if self.optional else "")


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping, as {name: value}",
    list: "a list, as [1, 2]",
}


def _keys() -> dict[str, Key]:
    found = {}
    for section, cls in get_type_hints(Config).items():
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            args = get_args(hints[f.name])
            optional = get_origin(hints[f.name]) is Union and type(None) in args
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            one = Key(section, f.name, args[0] if optional else hints[f.name], optional, default, f.metadata)
            found[one.dotted] = one
    return found


KEYS: dict[str, Key] = _keys()
SECTIONS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Config))


# --- YAML -------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number, dates are text, and a key stands once."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for name, _ in node.value:
            if name.value in seen and name.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {name.value!r} stands twice", problem_mark=name.start_mark
                )
            if isinstance(name.value, str):
                seen.add(name.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a sign in floats, so that PyYAML reads 1e-6 as text. The dumper must know it too, to quote
# a text that looks like that.
_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _parse(text: str) -> tuple[Any, dict[str, int]]:
    """The value of a YAML text, and the lines of its sections and keys (for messages)."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        for name, body in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[str(name.value)] = name.start_mark.line + 1
            for inner, _ in body.value if isinstance(body, yaml.MappingNode) else ():
                lines[f"{name.value}.{inner.value}"] = inner.start_mark.line + 1
        return (loader.construct_document(node) if node is not None else None), lines
    finally:
        loader.dispose()


def _yaml_fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return line + " ".join(str(problem).split())


_YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError, TypeError)


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    if not path:
        raise ConfigError("config=: names no file; use config=FILE, as config=config/gsm8k_tiny_cpu.yaml")
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
    except UnicodeDecodeError:
        raise ConfigError(f"config={path}: not a text file in UTF-8; give a YAML file") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise ConfigError(f"config={path}: {reason} (working directory {os.getcwd()}); check the path") from None
    try:
        value, lines = _parse(text)
    except _YAML_FAULTS as e:
        raise ConfigError(f"config={path}: not valid YAML: {_yaml_fault(e)}; mend the file") from None
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ConfigError(f"config={path}: {what}, not a mapping; write sections, as model: {{path: ...}}")
    return value, lines


# --- into the schema --------------------------------------------------------------------------------------------


def _nearest(word: str, names: list[str], what: str) -> str:
    close = names if len(names) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(names)}"


def find_key(dotted: str) -> Key:
    """The key of that name.

    Raises:
        ConfigError: there is none; names the nearest one.
    """
    if dotted in KEYS:
        return KEYS[dotted]
    section, _, name = dotted.partition(".")
    if section in SECTIONS and name:
        own = [k.dotted for k in KEYS.values() if k.section == section]
        elsewhere = [k.dotted for k in KEYS.values() if k.name == name]
        raise ConfigError(f"{show(dotted)}: unknown key; {_nearest(dotted, elsewhere or own, 'known are')}")
    if section in SECTIONS:
        raise ConfigError(f"{section}: a section, not a key; write {section}.KEY=VALUE (all keys: --help)")
    elsewhere = [k.dotted for k in KEYS.values() if k.name in (name or section).split(".")]
    hint = _nearest(dotted, elsewhere or list(KEYS) if name else elsewhere or list(SECTIONS), "the sections are")
    raise ConfigError(f"{show(dotted)}: unknown key; {hint}")


def _convert(key: Key, value: Any) -> Any:
    """Mend what YAML reads otherwise than meant, and refuse what OmegaConf would quietly turn into something else."""
    wrong = ConfigError(f"{key.dotted}={show(value)}: must be {key.kind}")
    if value is None:
        if key.optional:
            return None
        mend = f"; for none write {key.dotted}= with nothing after it" if key.default == "" else ""
        raise ConfigError(f"{wrong}{mend}")
    if isinstance(value, str) and "${" in value:
        return value  # an interpolation of OmegaConf; its result is checked when it is known
    if key.type is str:
        # YAML reads a bare on, off, yes or no as a boolean.
        if isinstance(value, bool) and {"on", "off"} <= set(key.meta["choices"] or ()):
            return "on" if value else "off"
        if isinstance(value, (dict, list, bool)):
            raise wrong
    if key.type in (int, float) and isinstance(value, (bool, dict, list)):
        raise wrong
    if key.type is bool:
        word = str(value).lower()
        if word not in ("true", "false", "1", "0"):
            raise wrong
        return word in ("true", "1")
    if key.type is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if key.type in (float, str):
        return key.type(value)
    if (get_origin(key.type) is dict) != isinstance(value, dict) or (get_origin(key.type) is list) != isinstance(
        value, list
    ):
        raise wrong
    if key.type == list[float]:
        return [float(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in value]
    return value


def _require_text(key: Key, *values: Any) -> None:
    """OmegaConf turns a number in a mapping of names into text, with a warning of its own on stderr."""
    if key.type == dict[str, str] and not all(isinstance(v, str) for v in values):
        raise TypeError(key.dotted)


def _assign(tree: Any, dotted: str, value: Any) -> None:
    """Set one key, replacing what was there; `section.key.a.b` reaches into a mapping."""
    section, name, *inner = dotted.split(".")
    key = KEYS.get(f"{section}.{name}") if inner else None
    if inner and key and get_origin(key.type) is not dict:
        raise ConfigError(f"{show(dotted)}: {key.dotted} is {key.kind}, and has no parts; write {key.dotted}=VALUE")
    try:
        if not inner:
            key = find_key(dotted)
            if isinstance(value, dict):
                _require_text(key, *value.values())
            tree[section][name] = _convert(key, value)
            return
        key = find_key(f"{section}.{name}")
        if not all(inner):
            raise ConfigError(f"{show(dotted)}: a name between the dots is empty; write {key.dotted}.NAME=VALUE")
        _require_text(key, value)
        node = tree[section][name]
        for part in inner[:-1]:
            if not OmegaConf.is_dict(node.get(part)):
                node[part] = {}
            node = node[part]
        node[inner[-1]] = value
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError, AssertionError) as e:
        kind = key.kind if key else "a value"
        if "Interpolation" in type(e).__name__ or "Grammar" in type(e).__name__:
            kind = "free of a faulty ${...}"
        raise ConfigError(f"{show(dotted)}={show(value)}: must be {kind}") from None


def _apply_file(tree: Any, path: str) -> None:
    content, lines = _read_file(path)
    for section, body in content.items():
        where = f"{path}:{lines.get(str(section), 1)}: "
        if section not in SECTIONS:
            hint = _nearest(str(section), list(SECTIONS), "the sections are")
            raise ConfigError(f"{where}{show(section)}: unknown section; {hint}")
        if body is None:
            continue
        if not isinstance(body, dict):
            raise ConfigError(f"{where}{section}={show(body)}: a section must be a mapping of keys, as {{key: value}}")
        for name, value in body.items():
            where = f"{path}:{lines.get(f'{section}.{name}', 1)}: "
            if not isinstance(name, str) or "." in name:
                raise ConfigError(f"{where}{section}.{show(name)}: unknown key; a key is one word (all keys: --help)")
            try:
                _assign(tree, f"{section}.{name}", value)
            except ConfigError as e:
                raise ConfigError(f"{where}{e}") from None


def _apply_argument(tree: Any, argument: str) -> None:
    dotted, _, text = argument.partition("=")
    value: Any = text
    key = KEYS.get(dotted)
    # Text is taken as it stands: YAML would cut "... end with #### number" at its comment sign.
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if not (key and key.type is str) or quoted or text in ("null", "~"):
        try:
            value, _ = _parse(text)
        except _YAML_FAULTS as e:
            raise ConfigError(
                f"{show(dotted)}={show(text)}: not valid YAML: {_yaml_fault(e)}; quote the value"
            ) from None
    if "." not in dotted:
        find_key(dotted)
    _assign(tree, dotted, value)


def load(argv: list[str]) -> Config:
    """The config of `config=FILE section.key=value ...`: the file over the defaults, the arguments over the file.

    A mapping in the file or in an argument replaces the default; `section.key.name=value` changes one entry of it.

    Raises:
        ConfigError: an argument or a key that cannot be understood. Meaning is checked by `validate`.
    """
    files, overrides = [], []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals or not name:
            raise ConfigError(f"argument {show(argument)}: must be config=FILE or section.key=value; add the '='")
        if name == "config":
            files.append(value)
        else:
            overrides.append(argument)
    if len(files) > 1:
        raise ConfigError(f"config={show(files[1])}: config is given {len(files)} times; give one file")
    tree = OmegaConf.structured(Config)
    for file in files:
        _apply_file(tree, file)
    for argument in overrides:
        _apply_argument(tree, argument)
    for key in KEYS.values():
        try:
            value = tree[key.section][key.name]
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, ValueError, RecursionError) as e:
            reason = " ".join(str(e).split("full_key")[0].split())
            raise ConfigError(f"{key.dotted}: cannot be resolved: {reason}; write the value itself") from None
    try:
        return _at_home(OmegaConf.to_object(tree))  # type: ignore[arg-type]
    except (OmegaConfBaseException, ValueError, RecursionError) as e:
        raise ConfigError(f"config: {' '.join(str(e).split())}; write the values themselves") from None


def _at_home(cfg: Config) -> Config:
    """A leading ~ becomes the home directory: the libraries that open these paths do not know it."""
    cfg.model.path = os.path.expanduser(cfg.model.path)
    cfg.trainer.output_dir = os.path.expanduser(cfg.trainer.output_dir)
    cfg.trainer.resume = os.path.expanduser(cfg.trainer.resume)
    for name in ("train_files", "val_files"):
        parts = [os.path.expanduser(part.strip()) for part in getattr(cfg.data, name).split(",")]
        setattr(cfg.data, name, ",".join(parts))
    return cfg


# --- checks -----------------------------------------------------------------------------------------------------


_LARGEST = 2**31 - 1
"""No number of a config means anything beyond it, and the C code below wants 32 bits."""


def _check_range(key: Key, value: Any) -> None:
    meta = key.meta
    if value is None:
        return
    wrong = f"{key.dotted}={show(value)}: must be "
    if meta["choices"] and value not in meta["choices"]:
        close = difflib.get_close_matches(str(value), meta["choices"], n=1)
        raise ConfigError(f"{wrong}{key.kind}" + (f"; did you mean {close[0]}?" if close else ""))
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{wrong}a finite number")
    if abs(value) > _LARGEST:
        raise ConfigError(f"{wrong}at most {_LARGEST}")
    low, high, above = meta["low"], meta["high"], meta["above"]
    if low is not None and low == high and value != low:
        raise ConfigError(
            f"{wrong}{low:g}: the engine would then sample from another distribution than the trainer scores; remove it"
        )
    if low is not None and value < low:
        raise ConfigError(f"{wrong}at least {low:g}")
    if above is not None and value <= above:
        raise ConfigError(f"{wrong}above {above:g}")
    if high is not None and value > high:
        raise ConfigError(f"{wrong}at most {high:g}")


def resolved_device(cfg: Config, num_gpus: int | None = None) -> str:
    """ "cuda" or "cpu". `num_gpus` None: counted here, and only where `placement.device` is auto."""
    if cfg.placement.device != "auto":
        return cfg.placement.device
    return "cuda" if (count_gpus() if num_gpus is None else num_gpus) > 0 else "cpu"


def validate(cfg: Config, num_gpus: int | None = None) -> None:
    """Check ranges first, then what belongs together, then what the machine must have.

    Args:
        num_gpus: GPUs of this machine; None: counted here, where it matters.

    Raises:
        ConfigError: the first fault found.
    """
    for key in KEYS.values():
        _check_range(key, getattr(getattr(cfg, key.section), key.name))
    if num_gpus is None and cfg.placement.device != "cpu":
        num_gpus = count_gpus()
    check_combinations(cfg, resolved_device(cfg, num_gpus), num_gpus or 0)


# --- text -------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Lists on one line, and no anchors where two keys hold the same list."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def _escape(value: Any) -> Any:
    """Texts that hold a literal ${ or ??? come back as they are, not as an interpolation or as missing."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    return [_escape(v) for v in value] if isinstance(value, list) else value


def resolved_yaml(cfg: Config) -> str:
    """The whole config as YAML that `load` reads back to an equal one."""
    tree = _escape(dataclasses.asdict(cfg))
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, sort_keys=False, allow_unicode=True, width=10**6)


def _type_name(key: Key) -> str:
    name = key.type.__name__ if isinstance(key.type, type) and not get_args(key.type) else str(key.type)
    name = "|".join(key.meta["choices"]) if key.meta["choices"] else name.replace("typing.", "")
    return name + ("|null" if key.optional else "")


def _keys_table() -> Iterator[str]:
    for section, cls in get_type_hints(Config).items():
        yield ""
        yield f"{section}: {cls.__doc__}"
        for key in KEYS.values():
            if key.section == section:
                default = show(key.default) if key.default != "" else '""'
                yield f"  {key.dotted}  ({_type_name(key)}, default {default})"
                yield f"      {key.meta['help']}"


def help_text() -> str:
    """How to call the program, and every key with its type, default and one line."""
    usage = """usage: python -m one_step_off.main_ppo config=FILE [section.key=value ...] [--dry-run] [--help]

Trains a language model with one-step-off-policy PPO.

  config=FILE          a YAML file, as config/gsm8k_tiny_cpu.yaml (trains on a CPU in minutes)
  section.key=value    sets one key over the file; the value is YAML, as placement.pools.rollout=[2]
  --dry-run            check everything, print the resolved config and the placement, start nothing
  --help               this text

Exit codes: 0 done, 2 bad input (one line says which), 130 interrupted, 1 anything else.

Keys:"""
    return usage + "\n".join(_keys_table()) + "\n"


@dataclass(frozen=True)
class PoolPlan:
    """One pool: its roles, its processes (replicas or ranks), and the cores that each is pinned to (empty: none)."""

    name: str
    shape: list[int]
    roles: list[str]
    device: str
    processes: int
    width: int
    cores: list[list[int]]

    def line(self) -> str:
        """For people."""
        unit = "GPU" if self.device == "cuda" else "CPU process"
        many = "" if sum(self.shape) == 1 else "s" if unit == "GPU" else "es"
        nodes = "" if len(self.shape) == 1 else f" on {len(self.shape)} nodes {self.shape}"
        unit_of_work = "replica" if "rollout" in self.roles else "rank"
        what = f"{self.processes} {unit_of_work}" + ("" if self.processes == 1 else "s")
        what += f" x TP {self.width}" if "rollout" in self.roles else ""
        text = f"{self.name}: {sum(self.shape)} {unit}{many}{nodes}; {', '.join(self.roles)}: {what}"
        if any(self.cores):
            text += "; cores " + " ".join(",".join(map(str, c)) for c in self.cores)
        return text


def placement_plan(cfg: Config, cores: list[int] | None = None, num_gpus: int | None = None) -> list[PoolPlan]:
    """What runs where, for a valid config. `cores` None: those that this process may use."""
    device = resolved_device(cfg, num_gpus)
    place = cfg.placement
    rollout_pool = place.roles["rollout"]
    width = cfg.rollout.tensor_parallel_size
    counts = {p: sum(n // width if p == rollout_pool else n for n in shape) for p, shape in place.pools.items()}
    pinned: dict[str, list[list[int]]] = {p: [] for p in counts}
    # Cores of other machines are not known here.
    if device == "cpu" and place.pin_cores and all(len(shape) == 1 for shape in place.pools.values()):
        others = [p for p in counts if p != rollout_pool]
        mine = sorted(os.sched_getaffinity(0)) if cores is None else cores
        pinned[rollout_pool], trainers = plan_cores(counts[rollout_pool], sum(counts[p] for p in others), mine)
        for pool in others:
            pinned[pool], trainers = trainers[: counts[pool]], trainers[counts[pool] :]
    return [
        PoolPlan(
            name=pool,
            shape=list(shape),
            roles=[role for role, where in place.roles.items() if where == pool],
            device=device,
            processes=counts[pool],
            width=width if pool == rollout_pool else 1,
            cores=pinned[pool],
        )
        for pool, shape in place.pools.items()
    ]


def placement_text(cfg: Config, cores: list[int] | None = None, num_gpus: int | None = None) -> str:
    """`placement_plan` for people: one line per pool."""
    return "\n".join(p.line() for p in placement_plan(cfg, cores, num_gpus))
