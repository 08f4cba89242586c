"""Log-probs and entropies of logits, and their gradient, against the formulas in plain torch."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from one_step_off.training import token_outputs
from one_step_off.training.token_outputs import in_chunks, log_probs_and_entropy
from tests.unit.training.kernel_counts import counted_kernels

ROWS = 13
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
"""Of the largest value."""


def plain(logits, tokens, temperature=1.0, entropy="none"):
    """`log_probs_and_entropy` by torch's own functions and autograd."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    places = tokens if tokens.ndim == 2 else tokens.unsqueeze(-1)
    chosen = log_p.gather(-1, places).reshape(tokens.shape)
    if entropy == "none":
        return chosen, None
    if callable(entropy):
        return chosen, entropy(log_p.detach())
    if entropy == "squares":
        return chosen, log_p.detach().exp().square().sum(-1)
    # torch.special.entr has an infinite gradient at an entry that is masked.
    figure = -(log_p.exp() * log_p.clamp(min=-1000)).sum(-1)
    return chosen, figure if entropy == "grad" else figure.detach()


def results(function, hidden, head, tokens, temperature, entropy):
    """Log-probs, the figure, and the gradients of hidden states, for weights that differ by
    token."""
    hidden = hidden.clone().requires_grad_()
    chosen, figure = function(head(hidden), tokens, temperature, entropy)
    weights = torch.linspace(-1, 2, chosen.numel(), dtype=chosen.dtype).reshape(chosen.shape)
    loss = (chosen * weights).sum()
    if entropy == "grad":
        loss = loss + (figure * torch.linspace(1, -2, len(figure), dtype=figure.dtype)).sum()
    loss.backward()
    return [x.detach() for x in (chosen, figure, hidden.grad) if x is not None]


def likeliest(log_p):
    return log_p.topk(3, dim=-1).values


HEADS = {
    "plain": lambda x: x,
    "scaled": lambda x: x / 8.0,
    "soft cap": lambda x: 5 * torch.tanh(x / 5),
    "masked": lambda x: x.index_fill(-1, torch.tensor([2, 5]), -torch.inf),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("entropy", ["none", "metric", "grad", "squares", likeliest])
@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, 0), (0.7, 0), (0.7, 3)])
@pytest.mark.parametrize("entries", [7, 1000])
def test_values_and_gradients_equal_the_formulas(
    dtype, head, entropy, temperature, wanted, entries
):
    torch.manual_seed(0)
    hidden = (4 * torch.randn(ROWS, entries, dtype=torch.float64)).to(dtype)
    tokens = torch.randint(6, entries, (ROWS, wanted) if wanted else (ROWS,))
    if wanted:
        tokens[::2, 2] = tokens[::2, 0]  # a token that is wanted twice
    arguments = (hidden, HEADS[head], tokens, temperature, entropy)
    expected = results(plain, *arguments)
    got = results(log_probs_and_entropy, *arguments)
    assert len(got) == len(expected) == (2 if entropy == "none" else 3)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        largest = other[other.isfinite()].abs().max()
        # Gradients in bfloat16 may be rounded to the neighbor, in the head too.
        relative = 2**-7 if one.dtype == torch.bfloat16 else TOLERANCES[dtype]
        torch.testing.assert_close(one, other, rtol=relative, atol=TOLERANCES[dtype] * largest)


@pytest.mark.parametrize("wanted", [1, 3])
def test_gradients_by_differences(wanted):
    torch.manual_seed(1)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(6, (4, wanted))

    def all_outputs(logits):
        rows = token_outputs.row_statistics(logits, tokens, 0.7, "grad", compiled=False)
        return rows.chosen, rows.figure, rows.log_total + rows.highest.detach()

    def without_a_constant(logits):  # log_total alone moves with the highest logit
        chosen, entropy, _ = all_outputs(logits)
        return chosen, entropy

    assert torch.autograd.gradcheck(without_a_constant, logits)
    log_sum = all_outputs(logits)[2].sum()
    (gradient,) = torch.autograd.grad(log_sum, logits)
    expected = (logits / 0.7).softmax(-1) / 0.7
    torch.testing.assert_close(gradient, expected)


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, -torch.inf]], requires_grad=True)
    tokens = torch.tensor([1, 0])
    log_probs, entropy = log_probs_and_entropy(logits, tokens, entropy="metric")
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.75), 0.0]))
    torch.testing.assert_close(
        entropy, torch.tensor([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), 0.0])
    )
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    assert log_probs_and_entropy(logits, tokens)[1] is None
    half = log_probs_and_entropy(logits, tokens, temperature=0.5, entropy="grad")
    torch.testing.assert_close(half[0][0], torch.tensor(math.log(0.9)))
    assert half[1].requires_grad


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_blocks_of_rows_change_no_bit_and_bound_the_memory(monkeypatch, rows):
    torch.manual_seed(2)
    hidden = torch.randn(rows, 50).bfloat16()
    tokens = torch.randint(50, (rows, 2))
    arguments = (hidden, HEADS["plain"], tokens, 0.7, "grad")
    whole = results(log_probs_and_entropy, *arguments)
    monkeypatch.setitem(token_outputs.BLOCK_ELEMENTS, "cpu", 150)
    with counted_kernels() as counts:
        in_blocks = results(log_probs_and_entropy, *arguments)
    assert all(torch.equal(one, other) for one, other in zip(whole, in_blocks, strict=True))
    assert counts.largest[torch.float32] <= 3 * 50


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_chunks_keep_only_the_hidden_states(entropy):
    """No logits of a chunk outlive it: they are computed again in the backward pass."""
    head = torch.nn.Linear(8, 100, bias=False)
    hidden = torch.randn(1, 64, 8, requires_grad=True)
    tokens = torch.randint(100, (64,))

    def project(rows, tokens):
        return log_probs_and_entropy(head(rows), tokens, 1.0, entropy)

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        in_chunks(project, hidden, torch.arange(64), tokens, 16)
    assert max(kept) < 16 * 100


@pytest.fixture
def inductor_counts():
    """torch's own counts of the kernels that it generates, and of the bytes that they move."""
    from torch._inductor import metrics

    torch._logging.set_logs(inductor_metrics=True)
    torch._dynamo.reset()
    metrics.reset()
    yield metrics
    torch._logging.set_logs()
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_it_moves_the_logits_twice_and_their_gradient_once(inductor_counts):
    """Of all that an operator of its own would write and read again, nothing is left. Torch's
    autograd of the same formulas needs 22 kernels."""
    torch.manual_seed(3)
    rows, entries = 64, 1000
    logits = torch.randn(rows, entries).bfloat16().requires_grad_()
    tokens = torch.randint(entries, (rows,))
    log_probs, entropy = log_probs_and_entropy(logits, tokens, 0.7, "grad", compiled=True)
    (log_probs.sum() + entropy.sum()).backward()
    reading, writing = logits.nbytes, logits.nbytes
    small = 40 * 8 * rows  # the numbers of each row
    with torch.no_grad():
        (expected,) = plain_gradient(logits, tokens)
    torch.testing.assert_close(logits.grad, expected, rtol=2**-7, atol=1e-6)
    assert 2 * reading < inductor_counts.num_bytes_accessed <= 2 * reading + writing + small
    assert inductor_counts.generated_kernel_count <= 8


def plain_gradient(logits, tokens):
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        log_probs, entropy = plain(logits, tokens, 0.7, "grad")
        return torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)


@pytest.mark.slow
def test_it_is_compiled_once_for_all_numbers_of_rows():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    graphs = []
    for rows in (64, 33, 2, 100):
        torch.manual_seed(rows)
        hidden = torch.randn(rows, 50)
        tokens = torch.randint(50, (rows,))
        arguments = (hidden, HEADS["plain"], tokens, 0.7, "grad")
        expected = results(log_probs_and_entropy, *arguments)
        got = results(functools.partial(log_probs_and_entropy, compiled=True), *arguments)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]
