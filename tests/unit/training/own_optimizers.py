"""Optimizers as users write them: a good one, and some that no run could rely on."""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675), with steps that become shorter."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(group, parameter)

    def step_one(self, group, parameter):
        """One step of one parameter."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = self.first_momentum(parameter)
            state["count"] = 0
        state["count"] += 1
        first, second = group["betas"]
        direction = state["momentum"].lerp(parameter.grad, 1 - first).sign()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] / state["count"])
        state["momentum"].lerp_(parameter.grad, 1 - second)

    def first_momentum(self, parameter):
        """As it is before the first step."""
        return torch.zeros_like(parameter)


class CountsElsewhere(Lion):
    """Its rate depends on a number that no state dict has."""

    count = 0

    def step(self, closure=None):
        """Ever shorter steps."""
        self.count += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.count
        super().step()


class KeepsAnObject(Lion):
    """Its state holds what no file may hold."""

    def step_one(self, group, parameter):
        """Keeps an object of its own class."""
        super().step_one(group, parameter)
        self.state[parameter]["history"] = _History()


class _History:
    pass


class HasNoRate(Lion):
    """Its groups lack lr."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            del group["lr"]


class DoesNothing(Lion):
    """Steps that change no weight."""

    def step_one(self, group, parameter):
        """Nothing."""


class Breaks(Lion):
    """Raises in its step."""

    def step_one(self, group, parameter):
        """A division by zero."""
        return 1 / 0


class NeedsAGradient(Lion):
    """Refuses gradients of zero, with which a resumed run makes the first state."""

    def step_one(self, group, parameter):
        """Raises ValueError: there is nothing to learn."""
        if not parameter.grad.any():
            raise ValueError("a gradient is zero")
        super().step_one(group, parameter)


class KeepsPlainTensors(Lion):
    """Its momentum is of this rank's rows, and does not say so."""

    def first_momentum(self, parameter):
        """Not a DTensor."""
        rows = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return torch.zeros_like(rows)

    def step_one(self, group, parameter):
        """On this rank's rows."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = self.first_momentum(parameter)
        grad = parameter.grad
        rows = grad.to_local() if hasattr(grad, "to_local") else grad
        state["momentum"].add_(rows)
        weights = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        weights.add_(state["momentum"], alpha=-group["lr"])


class NormOfItsRows(Lion):
    """Keeps a number that is different on every rank."""

    def step_one(self, group, parameter):
        """Keeps the norm of this rank's gradient."""
        super().step_one(group, parameter)
        grad = parameter.grad
        rows = grad.to_local() if hasattr(grad, "to_local") else grad
        self.state[parameter]["norm"] = float(rows.norm())


def function(params, lr):
    """No class."""
    return Lion(params, lr)
