"""torch.compile with a way out: where a function cannot be compiled, it runs as it is."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException


def is_wanted(setting: bool | None, device: torch.device) -> bool:
    """What `torch_compile` of a role means on this device; None: compile on GPUs."""
    return device.type == "cuda" if setting is None else setting


class Compiler:
    """Compiles functions that belong together. The first that fails to compile is reported in one
    line, and from then on all of them run as they are: a run need not end because of a missing C
    compiler or a bug in the compiler.

    Args:
        what: what is compiled, for that line.
        are_recomputed: by activation checkpointing, which needs the functions to run alike both
            times. A failure then raises RuntimeError.
        options: of torch.compile.
    """

    def __init__(self, what: str, are_recomputed: bool = False, **options: Any) -> None:
        self._what = what
        self._are_recomputed = are_recomputed
        self._options = options
        self._has_failed = False

    def compiled(
        self, function: Callable[..., Any], otherwise: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """`function`, compiled when it is called first.

        Args:
            otherwise: what runs in its place once compiling has failed, or has made as many graphs
                of this function as torch's limit allows; None: `function` itself.
        """
        plain = otherwise or function
        fast = torch.compile(function, **self._options)
        # Beyond the limit torch would run `function` as it is, without a word.
        fails_at_limit = otherwise is not None
        is_at_limit = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_at_limit
            if not (self._has_failed or is_at_limit):
                try:
                    # Compile the backward pass together with the forward pass: when it is due, it
                    # is too late to compute both uncompiled. The setting is one of each thread.
                    with (
                        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
                        torch._dynamo.config.patch(fail_on_recompile_limit_hit=fails_at_limit),
                    ):
                        return fast(*args, **kwargs)
                except TorchDynamoException as e:
                    self._report(e)
                except FailOnRecompileLimitHit:
                    is_at_limit = True
                    self._report_limit()
            return plain(*args, **kwargs)

        return call

    def _report_limit(self) -> None:
        logging.getLogger(__name__).warning(
            "%s: will run slower from now on, without torch.compile, which has made as many graphs "
            "as torch._dynamo.config.recompile_limit=%d allows",
            self._what,
            torch._dynamo.config.recompile_limit,
        )

    def _report(self, error: TorchDynamoException) -> None:
        self._has_failed = True
        cause = getattr(error, "inner_exception", error)
        reason = str(cause).strip().partition("\n")[0]
        if self._are_recomputed:
            raise RuntimeError(
                f"{self._what}: cannot be compiled ({type(cause).__name__}: {reason}); set the "
                "role's torch_compile=false, or its activation_checkpointing=false"
            ) from error
        logging.getLogger(__name__).warning(
            "%s: cannot be compiled and will run slower, without torch.compile (%s: %s)",
            self._what,
            type(cause).__name__,
            reason,
        )
