"""From hidden states to log-probs and entropies of the wanted tokens, or a scalar head's output.

    m = max_v x_v    z_v = x_v - m    T = log sum_v exp(z_v)    log p_v = z_v - T
    H = T - sum_v p_v z_v

The logits x are the largest tensors of an update. They exist for a chunk of the tokens at a time,
and one autograd function reads them: forward for the figures above, backward to write the gradient

    dL/dx_v = (sum of g over the wanted tokens that are v) - p_v (sum of all g + h (log p_v + H))

where g are the gradients of the log-probs and h that of the entropy. Between the two it keeps the
logits in their own dtype, and m, T and H of each row.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from one_step_off.training.compilation import Compiler

TokenOutputs = tuple[Tensor, Tensor | None]
"""Outputs for n tokens: their log-probs (or the values of a scalar head), [n]; and [n] of the
statistic that was asked for, such as their entropy, or None."""

Figure = str | Callable[[Tensor], Tensor]
"""The statistic of `log_probs_and_entropy`."""

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits that are in float32 at a time, where the function is not compiled: on a CPU they stay in
its caches, and a GPU is busy for longer than the host needs for a launch."""

LOWEST_LOG_PROB = -1000.0
"""Below it a probability is 0 in every dtype. An entry that the model masks has minus infinity, and
0 times that would be no number."""


@dataclass(frozen=True)
class RowStatistics:
    """Of n rows of logits.

    Attributes:
        chosen: log-probs of the wanted tokens, [n, m].
        figure: the statistic that was asked for, [n], or as its function returns it.
        log_total: T of each row, [n].
        highest: m of each row, [n]; no gradient flows through it.
    """

    chosen: Tensor
    figure: Tensor | None
    log_total: Tensor
    highest: Tensor


def log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy: Figure = "none",
    compiled: bool = False,
) -> TokenOutputs:
    """The log-prob of each token and a statistic of its distribution, after temperature, in nats:
    float32, or float64 of such logits.

    Args:
        logits: [n, vocabulary].
        tokens: int64 [n]; or [n, m], where m tokens of each place are wanted.
        temperature: the logits are divided by it, as the engine does before it samples.
        entropy: the statistic: "none"; the entropy, as "metric" without a gradient, or as "grad"
            with one; without a gradient also "squares": sum_v p(v)^2; or a function of all
            log-probs, [rows, vocabulary], which is called for some rows after the others.
        compiled: compute by a kernel that torch.compile makes, which moves a fraction of the bytes;
            but not for a function.

    Returns:
        As `tokens`; and [n], what the function returns, or None.
    """
    rows = row_statistics(logits, tokens, temperature, entropy, compiled)
    return rows.chosen.reshape(tokens.shape), rows.figure


def row_statistics(
    logits: Tensor, tokens: Tensor, temperature: float, entropy: Figure, compiled: bool
) -> RowStatistics:
    """As `log_probs_and_entropy`, with the sums by which rows that are split over ranks join."""
    places = tokens if tokens.ndim == 2 else tokens.unsqueeze(-1)
    statistics: Any = _RowStatistics.apply(logits, places, temperature, entropy, compiled)
    return RowStatistics(*statistics)


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        places: Tensor,
        temperature: float,
        entropy: Figure,
        compiled: bool,
    ) -> tuple[Tensor | None, ...]:
        is_compiled = compiled and not callable(entropy)
        measure = _compiled_measure if is_compiled else _measured_in_blocks
        chosen, figure, log_total, highest = measure(logits, places, temperature, entropy)
        ctx.set_materialize_grads(False)
        if entropy == "grad" or figure is None:
            ctx.mark_non_differentiable(highest)
        else:
            ctx.mark_non_differentiable(highest, figure)
        ctx.temperature = temperature
        ctx.is_compiled = is_compiled
        kept_figure = figure if entropy == "grad" else None
        ctx.save_for_backward(logits, places, kept_figure, log_total, highest)
        return chosen, figure, log_total, highest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        of_chosen: Tensor | None,
        of_figure: Tensor | None,
        of_log_total: Tensor | None,
        _: None,
    ) -> tuple[Tensor | None, ...]:
        tensors = (*ctx.saved_tensors, of_chosen, of_figure, of_log_total)
        differentiate = _compiled_gradient if ctx.is_compiled else _gradient_in_blocks
        return differentiate(*tensors, ctx.temperature), None, None, None, None


def _measured_in_blocks(
    logits: Tensor, places: Tensor, temperature: float, entropy: Figure
) -> list[Tensor | None]:
    parts = []
    for rows in _blocks(logits, places):
        parts.append(_measured(logits[rows], places[rows], temperature, entropy))
    return [_concatenated(column) for column in zip(*parts, strict=True)]


def _gradient_in_blocks(logits: Tensor, places: Tensor, *tensors_and_temperature: Any) -> Tensor:
    *tensors, temperature = tensors_and_temperature
    written = torch.empty_like(logits)
    for rows in _blocks(logits, places):
        of_rows: Any = [None if tensor is None else tensor[rows] for tensor in tensors]
        written[rows] = _gradient(logits[rows], places[rows], *of_rows, temperature)
    return written


def _blocks(logits: Tensor, places: Tensor) -> Iterator[slice]:
    """Rows of which the logits, and the pairs of wanted tokens, fit into BLOCK_ELEMENTS; one block
    without rows, if there are none."""
    count, entries = logits.shape
    largest = max(entries, places.shape[1] ** 2)
    step = max(BLOCK_ELEMENTS[logits.device.type] // largest, 1)
    for start in range(0, max(count, 1), step):
        yield slice(start, start + step)


def _concatenated(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    if len(tensors) < 2:
        return parts[0]
    return torch.cat(tensors)


def _measured(
    logits: Tensor, places: Tensor, temperature: float, entropy: Figure
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The fields of `RowStatistics`."""
    scaled = _scaled(logits, temperature)
    highest = scaled.amax(-1, keepdim=True)
    shifted = scaled - highest
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    log_total = total.log()
    chosen = shifted.gather(-1, places) - log_total
    figure = None
    if callable(entropy):
        figure = entropy(shifted.sub_(log_total))
    elif entropy == "squares":
        figure = weights.square().sum(-1) / total.squeeze(-1).square()
    elif entropy != "none":
        weighted = shifted.clamp_(min=LOWEST_LOG_PROB).mul_(weights).sum(-1, keepdim=True)
        figure = (log_total - weighted / total).squeeze(-1)
    return chosen, figure, log_total.squeeze(-1), highest.squeeze(-1)


def _gradient(
    logits: Tensor,
    places: Tensor,
    entropy: Tensor | None,
    log_total: Tensor,
    highest: Tensor,
    of_chosen: Tensor | None,
    of_entropy: Tensor | None,
    of_log_total: Tensor | None,
    temperature: float,
) -> Tensor:
    """The loss's gradient with respect to these logits, in their dtype.

    Args:
        entropy, log_total, highest: as `_measured` returned them.
        of_chosen, of_entropy, of_log_total: the loss's gradients with respect to these; None: zero.
    """
    slope = torch.zeros_like(highest) if of_log_total is None else of_log_total
    if of_chosen is not None:
        slope = slope - of_chosen.sum(-1)

    def through_probabilities(logits: Tensor) -> Tensor:
        log_p = (_scaled(logits, temperature) - highest[:, None]).sub_(log_total[:, None])
        p = log_p.exp()
        if of_entropy is None or entropy is None:
            return p.mul_(slope[:, None])
        log_p.clamp_(min=LOWEST_LOG_PROB).add_(entropy[:, None]).mul_(-of_entropy[:, None])
        return p.mul_(log_p.add_(slope[:, None]))

    written = (through_probabilities(logits) / temperature).to(logits.dtype)
    if of_chosen is None:
        return written
    # In float32 for the wanted tokens too: bfloat16 has no room for the sum of both terms.
    direct = _direct_gradient(places, of_chosen)
    at_places = (through_probabilities(logits.gather(-1, places)) + direct) / temperature
    return written.scatter_(-1, places, at_places.to(logits.dtype))


def _direct_gradient(places: Tensor, of_chosen: Tensor) -> Tensor:
    """The gradient of each wanted token's own log-prob, where one may be wanted twice: [n, m]."""
    if places.shape[1] == 1:
        return of_chosen
    is_same = places[:, :, None] == places[:, None, :]
    return torch.where(is_same, of_chosen[:, None, :], 0.0).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 1.0:  # a pass over all logits that would change nothing
        return exact
    return exact / temperature


_compiler = Compiler("log-probs of the logits")
_measure = _compiler.compiled(_measured, otherwise=_measured_in_blocks)
_differentiate = _compiler.compiled(_gradient, otherwise=_gradient_in_blocks)


def _compiled_measure(*arguments: Any) -> tuple[Tensor | None, ...]:
    return _measure(*_of_any_length(arguments))


def _compiled_gradient(*arguments: Any) -> Tensor:
    return _differentiate(*_of_any_length(arguments))


def _of_any_length(arguments: tuple[Any, ...]) -> list[Any]:
    """For the compiler: any number of rows, and tensors without a history, or it would compile
    again for others."""
    marked = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument = argument.detach()
            torch._dynamo.maybe_mark_dynamic(argument, 0)
        marked.append(argument)
    return marked


class _Gather(torch.autograd.Function):
    """See `gathered_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        exact = torch.promote_types(ctx.dtype, torch.float32)
        summed = gradients[0].new_zeros(ctx.shape, dtype=exact)
        return summed.index_add_(0, index, gradients[0].to(exact)).to(ctx.dtype), None


def gathered_rows(rows: Tensor, index: Tensor) -> Tensor:
    """The rows of a tensor [T, ...] at some indices [n]. The gradient of a row that is there for
    several sequences is summed in float32: bfloat16 would round after each."""
    return _Gather.apply(rows, index)


def in_chunks(
    project: Callable[..., TokenOutputs],
    hidden: Tensor,
    logit_index: Tensor,
    tokens: Tensor,
    chunk: int,
) -> TokenOutputs:
    """`project` of the wanted positions, `chunk` of them at a time.

    All logits in fp32 would take 10 GB for 16k tokens of a 152k vocabulary. In training each chunk
    is recomputed in the backward pass, so that its logits need not be kept.

    Args:
        project: (hidden [c, H], tokens of these c places) -> its answer, see
            `TokenOutputs`.
        hidden: [rows, width, H].
        logit_index: int64 [n]; flat positions in [rows * width]. Where n is 0 one position stands
            in: its gradient is zero but reaches every parameter, so this rank takes part in every
            reduction.
        tokens: int64 [n]; the wanted tokens; or [n, m], where m of each place are wanted.

    Returns:
        The answer for all n tokens.
    """
    wanted = len(tokens)
    if not wanted:
        logit_index = logit_index.new_zeros(1)
        tokens = tokens.new_zeros(1, *tokens.shape[1:])
    hidden = gathered_rows(hidden.reshape(-1, hidden.shape[-1]), logit_index)
    if torch.is_grad_enabled() and len(tokens) > chunk:
        project = functools.partial(
            checkpoint, project, use_reentrant=False, preserve_rng_state=False
        )
    chunks = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    answers = [project(chunk_hidden, chunk_tokens) for chunk_hidden, chunk_tokens in chunks]
    values = _joined([value for value, _ in answers], wanted)
    if answers[0][1] is None:
        return values, None
    return values, _joined([figure for _, figure in answers], wanted)


def _joined(parts: list[Tensor], count: int) -> Tensor:
    # A clone: FSDP2's backward hook must not sit on a view.
    return torch.cat(parts)[:count].clone()
