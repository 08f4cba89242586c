"""Trials of a user's own optimizer before a run relies on it: whether its state can be saved and
continues as it was, and whether it works on sharded weights."""

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.roles import own_optimizers
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import OPTIMIZERS
from one_step_off.training.optimizers import (
    built_user_class,
    decaying_and_not,
    set_learning_rate,
    user_class,
)

SHAPES = ((8, 6), (5,))
"""Of the parameters of the trial: a matrix and a vector."""

LEARNING_RATE = 1e-2
FIX = "change the class, or use adamw"


# In the driver, before engines are taken.


def check_user_optimizers(cfg: Config) -> None:
    """Try the optimizer of each role that names a class of the user's own: three steps, between
    which its state is saved and loaded.

    Raises:
        ConfigError: it cannot be imported, built, stepped or saved, or it steps differently after
            its state was loaded.
    """
    for role, settings in own_optimizers(cfg).items():
        # The trial must not change the random numbers of the run.
        with torch.random.fork_rng(devices=[]):
            _try_resume(role, settings)


def _try_resume(role: str, settings: Any) -> None:
    subject = f"{role}.optimizer={settings.optimizer!r}"
    optimizer_class = user_class(role, settings)

    def built(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = decaying_and_not(list(parameters))
        return built_user_class(optimizer_class, groups, role, settings)

    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    start = [parameter.detach().clone() for parameter in parameters]
    optimizer = built(parameters)
    _require_learning_rate(optimizer, subject)
    with as_config_error(f"{subject}: fails in a step", FIX):
        for seed in range(2):
            _step(optimizer, parameters, seed)
    if all(torch.equal(a, b) for a, b in zip(start, parameters, strict=True)):
        raise ConfigError(f"{subject}: two steps changed no weight; {FIX}")
    saved = _saved_and_read(optimizer, subject)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = built(copies)
    with as_config_error(f"{subject}: cannot load its own state", FIX):
        # A step of rate 0 without gradients, by which a resumed run makes the first state.
        state_dict._init_optim_state(resumed)
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.data.copy_(parameter.data)
        resumed.load_state_dict(saved)
    _step(optimizer, parameters, 2)
    _step(resumed, copies, 2)
    if not all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True)):
        raise ConfigError(
            f"{subject}: steps differently after its state was saved and loaded, so no run could "
            "be resumed; keep all that changes in its `state` and `param_groups`"
        )


def _require_learning_rate(optimizer: torch.optim.Optimizer, subject: str) -> None:
    if not all("lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"{subject}: its parameter groups have no lr, which the schedule sets; {FIX}"
        )


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)  # of an optimizer that rounds at random, too
    set_learning_rate(optimizer, LEARNING_RATE)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _saved_and_read(optimizer: torch.optim.Optimizer, subject: str) -> dict[str, Any]:
    """The state dict as it comes out of a file that may hold tensors and plain values only."""
    file = io.BytesIO()
    fix = "keep only tensors, numbers, text, lists and dicts in its `state` and `param_groups`"
    with as_config_error(f"{subject}: its state cannot be saved", fix):
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)


# In the ranks of a role.


def check_sharded(optimizer: torch.optim.Optimizer, role: str, settings: Any) -> None:
    """Try a user's own class on a matrix that is sharded like the model's (collective).

    A checkpoint has each rank's part of sharded tensors, and one rank's of everything else.

    Raises:
        ConfigError: it fails there, keeps plain tensors beside sharded weights, or numbers that
            differ from rank to rank.
    """
    if settings.optimizer in OPTIMIZERS:
        return
    subject = f"{role}.optimizer={settings.optimizer!r}"
    of_model: Any = optimizer.param_groups[0]["params"][0]
    mesh = of_model.device_mesh
    values = torch.arange(8.0 * mesh.size(), device=mesh.device_type).view(-1, 4)
    with as_config_error(f"{subject}: fails on sharded weights (DTensor)", FIX):
        parameter = nn.Parameter(distribute_tensor(values, mesh, of_model.placements))
        trial = built_user_class(type(optimizer), [{"params": [parameter]}], role, settings)
        for _ in range(2):
            parameter.grad = distribute_tensor(values - 3, mesh, of_model.placements)
            trial.step()
    numbers = {}
    for name, value in trial.state[parameter].items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.numel() > 1 and not isinstance(value, DTensor):
            raise ConfigError(
                f"{subject}: keeps {name!r} as a plain tensor beside sharded weights, so a "
                "checkpoint would have one rank's of it; make it with torch.zeros_like(parameter)"
            )
        if not isinstance(value, DTensor):
            numbers[name] = value.item() if is_tensor else value
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, numbers)
    for name in numbers:
        if any(other.get(name) != numbers[name] for other in of_ranks):
            raise ConfigError(
                f"{subject}: its {name!r} differs from rank to rank, and a checkpoint has one of "
                "them; compute it from whole tensors"
            )
