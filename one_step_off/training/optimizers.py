"""The optimizer of a role under FSDP2: built by its name, stepped, saved and loaded.

    adamw       torch's AdamW, its moments in 32 bits
    adamw_8bit  torchao's AdamW with moments of 8 bits: `eight_bit_adamw.py`
    muon        Muon for hidden matrices, AdamW for the rest: `muon.py`
    module:Class  the user's own subclass of torch.optim.Optimizer

All but the user's own have `new_state`, or are torch's AdamW, whose first state is known: so a
checkpoint can be written before the first step and changes nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.registry import import_object
from one_step_off.config.sections.roles import ADAMW, ADAMW_8BIT, MUON
from one_step_off.models.parameter_kinds import parameter_kinds
from one_step_off.training.muon import Muon, local, new_adamw_state


def build(model: PreTrainedModel, role: str, role_config: Any) -> torch.optim.Optimizer:
    """The optimizer that a role's config names, of all parameters that have gradients.

    Raises:
        ConfigError: the user's own class cannot be used, see `user_class` and `built_user_class`.
    """
    if role_config.optimizer == MUON:
        return _built_muon(model, role_config)
    groups = decaying_and_not([p for p in model.parameters() if p.requires_grad])
    if role_config.optimizer == ADAMW:
        return torch.optim.AdamW(groups, **_adamw_settings(role_config), fused=True)
    if role_config.optimizer == ADAMW_8BIT:
        from one_step_off.training.eight_bit_adamw import EightBitAdamW  # torchao, an extra

        settings = _adamw_settings(role_config) | role_config.optimizer_kwargs
        return EightBitAdamW(groups, **settings)
    return built_user_class(user_class(role, role_config), groups, role, role_config)


def decaying_and_not(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups: norms and biases do not decay, as is usual (and as Megatron has it)."""
    matrices = {"params": [p for p in parameters if p.ndim > 1]}
    vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]


def _adamw_settings(role_config: Any) -> dict[str, Any]:
    return {
        "lr": role_config.lr,
        "betas": tuple(role_config.betas),
        "eps": role_config.eps,
        "weight_decay": role_config.weight_decay,
    }


def _built_muon(model: PreTrainedModel, role_config: Any) -> Muon:
    kinds = parameter_kinds(model)
    others = decaying_and_not(kinds.others + kinds.vectors)
    settings = _adamw_settings(role_config) | role_config.optimizer_kwargs
    return Muon(kinds.hidden_matrices, others, **settings)


# The user's own class.


def user_class(role: str, role_config: Any) -> type[torch.optim.Optimizer]:
    """The class that `module:Class` names. Raises ConfigError: it is no optimizer."""
    spec = role_config.optimizer
    found = import_object(f"{role}.optimizer", spec)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    raise ConfigError(
        f"{role}.optimizer={spec!r}: is no subclass of torch.optim.Optimizer; name one"
    )


def built_user_class(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    role: str,
    role_config: Any,
) -> torch.optim.Optimizer:
    """An instance. It receives lr, those of betas, eps and weight_decay that it takes, and
    optimizer_kwargs. Raises ConfigError: it refuses them."""
    accepted = inspect.signature(optimizer_class).parameters
    settings = {
        name: value
        for name, value in _adamw_settings(role_config).items()
        if name == "lr" or name in accepted
    }
    settings |= role_config.optimizer_kwargs
    subject = f"{role}.optimizer={role_config.optimizer!r}: refuses its settings"
    with as_config_error(subject, f"change {role}.optimizer_kwargs, or the class"):
        return optimizer_class(groups, **settings)


# Steps.


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Of all parameters, for the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)  # torchao's, and some of the users' own
        else:
            group["lr"] = learning_rate


def move_state(optimizer: torch.optim.Optimizer, target: torch.device | str) -> None:
    """Move the sharded tensors of the state. The copies may still run when it returns."""
    for tensor in sharded_tensors(optimizer):
        # The DTensor stays the same object, so checkpoints find it; only what it points at moves.
        tensor._local_tensor = tensor._local_tensor.to(target, non_blocking=True)


def sharded_tensors(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The DTensors of the state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, DTensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Memory of this rank's part of the state, in bytes."""
    total = 0
    for state in optimizer.state.values():
        plain = _plain(optimizer, state)
        tensors = [value for value in _leaves(plain) if isinstance(value, Tensor)]
        total += sum(local(t).numel() * t.element_size() for t in tensors)
    return total


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    return [state]


# Checkpoints.


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has made no step the state that its first step would begin with.

    torch's `get_state_dict` would make it by a step of rate 0, which AdamW counts: the bias
    correction of the first real step would then be that of a second one, and the step about 0.74 of
    its size. The first state of a user's own class is not known: it gets none.
    """
    new_state = _state_maker(optimizer)
    if optimizer.state or new_state is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = new_state(group, parameter)


def _state_maker(optimizer: Any) -> Callable[[dict[str, Any], Tensor], dict[str, Tensor]] | None:
    """What makes the first state of a parameter; None of a user's own class."""
    if type(optimizer) is torch.optim.AdamW:
        return lambda group, parameter: new_adamw_state(parameter)
    return getattr(optimizer, "new_state", None)


def as_plain(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, keys by parameter, in plain tensors of the same memory, as
    torch's checkpoints write and fill them (collective)."""
    own = state_dict.get_optimizer_state_dict(model, optimizer)
    states = {name: _plain(optimizer, state) for name, state in own["state"].items()}
    return own | {"state": states}


def _plain(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return optimizer.as_plain(state) if hasattr(optimizer, "as_plain") else state


def load(model: PreTrainedModel, optimizer: torch.optim.Optimizer, plain: dict[str, Any]) -> None:
    """Load a state dict of `as_plain`, whose tensors have been filled (collective)."""
    loaded = state_dict.get_optimizer_state_dict(model, optimizer)
    for name, state in plain["state"].items():
        for key, value in state.items():
            # A moment's codes and scales have been filled in its own memory.
            is_filled = isinstance(value, dict) and hasattr(optimizer, "as_plain")
            if not is_filled:
                loaded["state"][name][key] = value
    if _state_maker(optimizer) is None:
        # They may hold what a user's own class counts. Those of the others hold settings: the
        # config's count, not the checkpoint's.
        loaded["param_groups"] = plain["param_groups"]
    options = state_dict.StateDictOptions(strict=False)  # tied tensors are named once
    state_dict.set_optimizer_state_dict(model, optimizer, loaded, options=options)


def prepare_loading(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, is_saved: bool
) -> None:
    """Let the optimizer have a state where a checkpoint has one, and none otherwise (collective).

    Args:
        is_saved: `has_saved_state` of the checkpoint.
    """
    if not is_saved:
        optimizer.state.clear()
        return
    create_state(optimizer)
    if not optimizer.state:
        # torch makes one by a step of rate 0. Whatever the step changes is loaded afterwards.
        state_dict.get_optimizer_state_dict(model, optimizer)


def has_saved_state(folder: str) -> bool:
    """Whether a checkpoint of `folder` holds the state of an optimizer: that of a user's own class
    has none before its first step."""
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)
