"""The reward functions that a config names: built in, or the user's own as `module:function`."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.schema import RewardConfig
from one_step_off.config.text import format_value
from one_step_off.rewards.reward import RewardItem
from one_step_off.rewards.verifiers import REWARD_FUNCTIONS

# The arguments that every function receives, by keyword; each is a field of `RewardItem`.
ARGUMENTS = ("prompt", "response", "ground_truth", "data_source")
# One more, for functions that take it.
EXTRA_ARGUMENT = "extra_info"


@dataclass(frozen=True)
class RewardFunction:
    """One function that a config names.

    Attributes:
        name: the key and its value, for messages: `reward.function='my_rewards:score'`.
        kwargs: `reward.kwargs`.
        built_in: it is one of ours. If it takes too long, that is the response's doing.
        takes_extra_info: it takes the row's other columns.
    """

    name: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    built_in: bool
    takes_extra_info: bool

    @property
    def file(self) -> str:
        """Its source file; empty where it has none."""
        with contextlib.suppress(TypeError, OSError):
            return inspect.getsourcefile(inspect.unwrap(self.function)) or ""
        return ""

    def __call__(self, item: RewardItem) -> Any:
        """What the function returns for this response, whatever that is."""
        arguments = {name: getattr(item, name) for name in ARGUMENTS}
        if self.takes_extra_info:
            arguments[EXTRA_ARGUMENT] = item.extra_info
        return self.function(**arguments, **self.kwargs)


class RewardFunctions:
    """The functions of a config: those of the sources in `data.train_files` that name one; for all
    other rows one for each `data_source` of `reward.functions`, or `reward.function`.
    """

    def __init__(self, cfg: RewardConfig, of_sources: Mapping[str, str] | None = None) -> None:
        """Import the functions.

        Args:
            of_sources: see `config.sections.data.source_rewards`.

        Raises:
            ConfigError: there is no such module or attribute, it is not callable, it is
                asynchronous, or `reward.kwargs` does not fit.
        """
        of_sources = of_sources or {}
        default = list(cfg.functions.values()) or [cfg.function]
        self.names = default + list(of_sources.values())
        self.of_sources: dict[str, RewardFunction] = {}
        for source, spec in of_sources.items():
            key = f"data.train_files, {source}: reward"
            self.of_sources[source] = self._find_function(key, spec, cfg)
        self.by_source: dict[str, RewardFunction] = {}
        for source, spec in cfg.functions.items():
            key = f"reward.functions.{format_value(source)}"
            self.by_source[source] = self._find_function(key, spec, cfg)
        self.for_all: RewardFunction | None = None
        if not cfg.functions:
            self.for_all = self._find_function("reward.function", cfg.function, cfg)

    def find(self, data_source: str, source: str = "") -> RewardFunction:
        """The function of a row.

        Args:
            data_source: the row's.
            source: the name of its source in `data.train_files`; "": none.

        Raises:
            ConfigError: `reward.functions` has none for its data_source.
        """
        function = self.of_sources.get(source) or self.for_all or self.by_source.get(data_source)
        if function is None:
            known = ", ".join(map(format_value, self.by_source))
            raise ConfigError(
                f"reward.functions: no function for the data_source "
                f"{format_value(data_source)!r}; add one (defined: {known})"
            )
        return function

    def _find_function(self, key: str, spec: str, cfg: RewardConfig) -> RewardFunction:
        """The function `spec`, checked to be callable as the trainer will call it. Raises
        ConfigError.
        """
        name = f"{key}={spec!r}"
        built_in = spec in REWARD_FUNCTIONS
        function = REWARD_FUNCTIONS.find(spec, key).function
        all_built_in = all(other in REWARD_FUNCTIONS for other in self.names)
        if cfg.kwargs and all_built_in:
            raise ConfigError(
                f"reward.kwargs={dict(cfg.kwargs)!r}: the built-in {spec!r} takes none; remove them"
            )
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{name}: is asynchronous; name a plain function")
        if built_in:
            return RewardFunction(name, function, {}, built_in=True, takes_extra_info=False)
        takes_extra_info = _check_signature(name, function, cfg.kwargs)
        kwargs = dict(cfg.kwargs)
        return RewardFunction(
            name, function, kwargs, built_in=False, takes_extra_info=takes_extra_info
        )


def _check_signature(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function takes `extra_info`. Raises ConfigError: it cannot be called with our
    arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return False
    parameters = signature.parameters
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_extra_info = EXTRA_ARGUMENT in parameters or takes_any_keyword
    arguments = (*ARGUMENTS, EXTRA_ARGUMENT) if takes_extra_info else ARGUMENTS
    problem = f"{name}: cannot be called as f({'=, '.join(arguments)}=, **reward.kwargs)"
    fix = (
        "give its parameters these names, or defaults; **kwargs takes further arguments (the "
        "`solution_str` of verl is `response` here)"
    )
    if set(arguments) & set(kwargs):
        fix = "rename this key of reward.kwargs, and the parameter of the function"
    with as_config_error(problem, fix, TypeError):
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    return takes_extra_info
