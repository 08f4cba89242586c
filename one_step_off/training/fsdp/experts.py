"""The experts of a model under FSDP2: which tokens they get, and where they are.

All families compute their experts through transformers' registry, so one function, put in there,
sees the router's choice in every layer. It counts the tokens of each expert, and then computes as
transformers does; or, with expert parallelism, sends each token to the rank that has its expert.

    ranks                  expert_parallel_size = 2, four ranks, eight experts
      0  1    experts 0-3 | 4-7     a row is a group that exchanges tokens; its ranks hold all
      2  3    experts 0-3 | 4-7     experts together. A column shards its experts by FSDP2.

A group of ranks works on the tokens of all of its ranks at once, so a rank's gradient of an expert
is the sum over the group already. No token is dropped: a rank receives as many as there are.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from one_step_off.models.experts import fused_experts, router_biases
from one_step_off.training.fsdp.collectives import exchange, total

IMPLEMENTATION = "one_step_off"
"""The name of our function in transformers' registry."""

SHARD = "shard"
"""The mesh dimension of ranks that shard the same experts."""

EXCHANGE = "exchange"
"""The mesh dimension of ranks that exchange tokens, and hold all experts together."""


class Routing:
    """How many tokens the routers of a model sent to each expert.

    Attributes:
        has_experts: whether the model has any that are counted.
        is_token: int64 [rows * width] of the micro-batch that is counted: 0 at padding. None: none
            is. Recomputing a layer counts its tokens once more, in all layers alike, which changes
            no ratio.
        counts: int64 [layers, experts], of this rank since the last optimizer step.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        modules = fused_experts(model)
        self.has_experts = bool(modules)
        self.is_token: Tensor | None = None
        experts = max((module.num_experts for module in modules.values()), default=0)
        self.counts = torch.zeros(len(modules), experts, dtype=torch.int64, device=device)
        self._total = torch.zeros_like(self.counts)
        biases = router_biases(model)
        self._biased: list[tuple[int, Tensor]] = []  # layer, and the bias of its router
        for layer, (name, module) in enumerate(modules.items()):
            module.routing = self
            module.counts = self.counts[layer]
            if name in biases:
                self._biased.append((layer, biases[name]))

    @torch.no_grad()
    def update_biases(self, rate: float) -> None:
        """Raise the bias of each expert that had fewer tokens than the mean of its layer since the
        last optimizer step, and lower that of each with more, by `rate` (collective):
        b_i += rate * sign(mean - load_i), arXiv:2408.15664, algorithm 1."""
        counts = self.counts.clone()
        dist.all_reduce(counts)
        load = counts.double()
        direction = torch.sign(load.mean(1, keepdim=True) - load)
        for layer, bias in self._biased:
            bias.add_(direction[layer].to(bias.dtype), alpha=rate)

    def end_step(self) -> None:
        """Begin to count anew for the next optimizer step."""
        self._total += self.counts
        self.counts.zero_()

    def metrics(self) -> dict[str, float]:
        """The load since the last call (collective); {} for a dense model. The host waits once."""
        if not self.has_experts:
            return {}
        total = self._total.double()
        self._total.zero_()
        dist.all_reduce(total)
        load = total / total.mean(1, keepdim=True)
        figures = torch.stack([load.max(), load.min(), (total == 0).sum()]).tolist()
        names = ("expert_load_max", "expert_load_min", "unused_experts")
        return dict(zip(names, figures, strict=True))


def expert_mesh(device: torch.device, size: int) -> DeviceMesh:
    """All ranks, as ("shard", "exchange"). `size`: how many exchange tokens, which are neighbours
    and so have the fastest links."""
    shape = (dist.get_world_size() // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=(SHARD, EXCHANGE))


def register(model: PreTrainedModel) -> None:
    """Let the model compute its experts, if it has any, by our function."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in fused_experts(model).values():
        module.config._experts_implementation = IMPLEMENTATION


def shard_experts(layer: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Place the experts of a decoder layer: divided over the ranks that exchange tokens, and then
    sharded over the others by an FSDP group of their own.

    Args:
        layer: its parameters have no memory yet.
        mesh: of `expert_mesh`.
        options: of `fully_shard`, but for the mesh.
    """
    exchange, shard = mesh[EXCHANGE], mesh[SHARD]
    # FSDP2 would round the weights of the experts' outputs, which some routers give in float32.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    options = options | {"mp_policy": policy, "mesh": shard}
    for module in fused_experts(layer).values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = parameter.chunk(exchange.size())[exchange.get_local_rank()]
            placed = DTensor.from_local(own.contiguous(), exchange, [Shard(0)])
            setattr(module, name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        module.exchange_group = exchange.get_group()
        sharded: Any = fully_shard(module, **options)
        # FSDP2 averages over its own ranks, and the mean over all is wanted, as of other weights.
        sharded.set_gradient_divide_factor(dist.get_world_size())
        if shard.size() > 1:  # of one rank FSDP2 would divide twice
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces


def is_divided(tensor: Any) -> bool:
    """Whether a parameter, or its gradient, is one of experts that `shard_experts` placed."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return bool(names) and EXCHANGE in names


class _LocalExperts:
    """A module of experts as a rank sees it that has some of them: they are all there are."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self._module = module
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def experts_forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The output of a layer's experts [tokens, H], as transformers' registry wants it.

    Args:
        self: the module of the experts.
        hidden: [tokens, H].
        chosen: the experts of each token, int64 [tokens, top_k].
        weights: of their outputs, [tokens, top_k].
    """
    is_token = self.routing.is_token
    if is_token is not None:
        once = is_token[:, None].expand_as(chosen).reshape(-1)
        self.counts.scatter_add_(0, chosen.reshape(-1), once)
    if not hasattr(self, "exchange_group"):
        return grouped_mm_experts_forward(self, hidden, chosen, weights)
    return _on_their_ranks(self, hidden, chosen, weights)


def _on_their_ranks(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As `experts_forward`, with each token sent to the ranks of its experts and back
    (collective)."""
    group = self.exchange_group
    count = self.num_experts // group.size()  # of each rank
    expert, order = chosen.reshape(-1).sort(stable=True)
    sent_to = expert.new_zeros(self.num_experts).scatter_add_(0, expert, torch.ones_like(expert))
    received_of = torch.empty_like(sent_to)  # [sender, own expert]
    dist.all_to_all_single(received_of, sent_to, group=group)
    by_rank = torch.stack([sent_to, received_of]).view(2, group.size(), count).sum(-1)
    sent, received = by_rank.tolist()  # here the host waits for the device

    rows = exchange(hidden[order // chosen.shape[-1]], sent, received, group)
    total = len(rows)
    own_expert = torch.arange(count, device=hidden.device).repeat(group.size())
    own_expert = own_expert.repeat_interleave(received_of, output_size=total)
    if not total:
        # So that a rank without tokens has gradients, zero ones, of its experts too.
        rows = nn.functional.pad(rows, (0, 0, 0, 1))
        own_expert = own_expert.new_zeros(1)
    ones = rows.new_ones(len(rows), 1)
    local: Any = _LocalExperts(self, count)
    outputs = grouped_mm_experts_forward(local, rows, own_expert[:, None], ones)[:total]
    returned = exchange(outputs, received, sent, group)

    weighted = returned[order.argsort()] * weights.reshape(-1, 1)
    return weighted.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def load_balancing_loss(
    router_logits: tuple[Tensor, ...],
    top_k: int,
    is_token: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The load-balancing loss of arXiv:2101.03961 in one micro-batch, over all layers together as
    transformers computes it: scalar, the experts per token where all are equally likely.

    Args:
        router_logits: of each layer with experts, [rows * width, experts].
        top_k: experts per token.
        is_token: [rows * width]; 0 at padding, which counts for nothing.
        group: the ranks that have the other tokens of the micro-batch; None: this one has all.
    """
    mask = is_token.float()
    tokens = total(mask.sum(), group)
    shares = []
    probabilities = []
    for logits in router_logits:
        weights = logits.float().softmax(-1)
        chosen = weights.topk(top_k, dim=-1).indices.flatten()
        counts = torch.zeros_like(weights[0]).scatter_add_(0, chosen, mask.repeat_interleave(top_k))
        shares.append(total(counts.detach(), group) / tokens)
        probabilities.append(total((weights * mask[:, None]).sum(0), group) / tokens)
    share = torch.stack(shares)  # [layers, experts]
    probability = torch.stack(probabilities)
    return share.shape[1] * (share.mean(0) * probability.mean(0)).sum()
