"""Which of a model's parameters are hidden matrices, tables (embedding, head) and vectors."""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from one_step_off.models.hf_model import SCALAR_HEAD


@dataclass(frozen=True)
class ParameterKinds:
    """The trained parameters of a model by kind, each list in the model's order.

    Attributes:
        hidden_matrices: two-dimensional weights between hidden layers.
        others: embeddings, heads, and weights of three or more dimensions, such as the stacked
            experts of a MoE.
        vectors: norms, biases and single numbers.
    """

    hidden_matrices: list[Tensor]
    others: list[Tensor]
    vectors: list[Tensor]


def parameter_kinds(model: PreTrainedModel) -> ParameterKinds:
    """Sort the parameters that have gradients. A tied embedding and head are one table."""
    tables = {id(weight) for weight in _tables(model)}
    kinds = ParameterKinds([], [], [])
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim <= 1:
            kinds.vectors.append(parameter)
        elif parameter.ndim == 2 and id(parameter) not in tables:
            kinds.hidden_matrices.append(parameter)
        else:
            kinds.others.append(parameter)
    return kinds


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """The weights of all embeddings and of the head, be it of a language model or scalar."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))
    modules += [head for head in heads if head is not None]
    return [weight for module in modules for weight in module.parameters()]
