"""Router replay: the policy's routers take the experts that the engine chose for each token.

In bfloat16 the engine and the trainer differ in the last bit of the router's scores, and so choose
other experts for some tokens, whose log-probs then differ by far more than a bit. A router still
computes its scores, and the weights of its experts follow from these; only the choice is given.

transformers' routers choose by `torch.topk`. While a router runs, its answer is replaced.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from one_step_off.config.errors import ConfigError

ROUTER_NAMES = ("gate", "router")
"""What transformers calls the module beside `experts` that chooses among them."""

TOPK = (torch.topk, Tensor.topk)


class RouterReplay:
    """The routers of a model, which take the experts of `use`. Until then they choose themselves.

    A backward pass that computes activations again must come before the next `use`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._experts: Tensor | None = None
        for layer, router in routers_of(model):
            router.forward = self._replayed(router, layer)

    def use(self, experts: Tensor | None) -> None:
        """The experts for the next pass: [tokens, layers, experts per token], as
        `batching.MicroBatch.experts`."""
        self._experts = experts

    def _replayed(self, router: nn.Module, layer: int) -> Callable[..., Any]:
        forward = router.forward

        @torch._dynamo.disable  # it cannot compile a mode whose answers are data
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self._experts is None:
                return forward(*args, **kwargs)
            choice = _GivenChoice(self._experts[:, layer].long(), router.num_experts)
            with choice:
                answer = forward(*args, **kwargs)
            if choice.count != 1:
                raise RuntimeError(f"{type(router).__name__} chose {choice.count} times by topk")
            return answer

        return replayed


class _GivenChoice(TorchFunctionMode):
    """Answers the `topk` over all experts with experts that are given.

    Args:
        experts: int64 [tokens, experts per token]; -1: topk's own answer.
        num_experts: of the layer. Some routers use topk among groups of experts, too.

    Attributes:
        count: how many times it was asked.
    """

    def __init__(self, experts: Tensor | None, num_experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.num_experts = num_experts
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return answer
        scores = args[0]
        if scores.ndim != 2 or scores.shape[1] != self.num_experts:
            return answer
        self.count += 1
        if self.experts is None:
            return answer
        chosen = torch.where(self.experts >= 0, self.experts, answer.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def routers_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """The routers of a model that is not sharded yet, each with the number of its decoder layer."""
    for name, block in model.named_modules():
        if isinstance(getattr(block, "experts", None), nn.Module):
            for router_name in ROUTER_NAMES:
                router = getattr(block, router_name, None)
                if isinstance(router, nn.Module):
                    yield int(re.findall(r"\.(\d+)\.", f".{name}.")[0]), router


def check(model: nn.Module, name: str) -> None:
    """Check that experts can be given to a model's routers.

    Args:
        model: without weights, on the device "meta".
        name: its key and path.

    Raises:
        ConfigError: it is a dense model, or its routers do not choose by topk.
    """
    key = f"rollout.replay_routing=true: {name}"
    routers = [router for _, router in routers_of(model)]
    if not routers:
        raise ConfigError(f"{key} has no experts to choose among; set it to false")
    for router in routers[:1]:
        if not _chooses_by_topk(router, model.config.get_text_config().hidden_size):
            raise ConfigError(
                f"{key} has a router, {type(router).__name__}, that does not choose by topk; set "
                "it to false"
            )


def _chooses_by_topk(router: Any, hidden_size: int) -> bool:
    num_experts = getattr(router, "num_experts", 0)
    hidden = torch.empty(2, hidden_size, device="meta")
    bias = torch.empty(num_experts, device="meta")  # what some are given besides
    choice = _GivenChoice(None, num_experts)
    with choice:
        router(*(hidden, bias)[: len(inspect.signature(router.forward).parameters)])
    return choice.count == 1
