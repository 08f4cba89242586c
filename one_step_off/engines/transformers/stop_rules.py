"""Where an answer ends: at a token, at a text, or at its limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from one_step_off.config.schema import Config


@dataclass(frozen=True)
class StopRules:
    """Of one request.

    Attributes:
        tokenizer: of the policy.
        tokens: ids that end the answer.
        texts: that end it, wherever they end inside a token.
        skip_special_tokens: they do not count as text.
    """

    tokenizer: Any
    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    @staticmethod
    def of_run(cfg: Config, tokenizer: Any, eos_of_model: int | list[int] | None) -> "StopRules":
        """By `rollout.sampling_kwargs`.

        Args:
            cfg: of the run.
            tokenizer: its end of text ends an answer.
            eos_of_model: those of the model's generation config, which do too.
        """
        settings = cfg.rollout.sampling_kwargs
        tokens = set(settings.get("stop_token_ids") or ())
        if not settings.get("ignore_eos"):
            tokens.add(tokenizer.eos_token_id)
            several = eos_of_model if isinstance(eos_of_model, list) else [eos_of_model]
            tokens.update(several)
        texts = settings.get("stop") or ()
        if isinstance(texts, str):
            texts = [texts]
        known_tokens = frozenset(token for token in tokens if token is not None)
        skips = settings.get("skip_special_tokens", True)
        return StopRules(tokenizer, known_tokens, tuple(texts), skips)

    def finish_reason(self, tokens: Sequence[int], max_tokens: int) -> str:
        """Whether the answer ends with its last token: "stop" or "length"; "": it continues.

        Args:
            tokens: of the answer so far.
            max_tokens: its limit.
        """
        if tokens[-1] in self.tokens or self._ends_with_text(tokens):
            return "stop"
        return "length" if len(tokens) >= max_tokens else ""

    def _ends_with_text(self, tokens: Sequence[int]) -> bool:
        """Whether the last token has completed one of the texts."""
        if not self.texts:
            return False
        text = self.tokenizer.decode(
            list(tokens),
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return any(stop in text for stop in self.texts)
