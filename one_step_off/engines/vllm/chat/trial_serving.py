"""vLLM's half of the endpoint without an engine, for the trial episode of an external agent."""

from types import SimpleNamespace
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.engines.vllm.engine_args import engine_args


def serving_without_engine(cfg: Config, tokenizer: Any) -> Any:
    """The endpoint's `Serving` with vLLM's renderer and parsers, of which only the engine is
    missing: an episode generates by itself.

    Raises:
        ConfigError: vLLM cannot be imported here, or does not take the model.
    """
    try:
        from vllm.renderers import renderer_from_config

        from one_step_off.engines.vllm.chat.serving import Serving
        from one_step_off.engines.vllm.cpu_models import engine_config

        vllm_config = engine_config(engine_args(cfg, "cpu"))
        engine = SimpleNamespace(
            vllm_config=vllm_config,
            model_config=vllm_config.model_config,
            renderer=renderer_from_config(vllm_config),
            input_processor=None,
            errored=False,
            check_admission=lambda count: None,
        )
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"vLLM, which answers agents' requests, does not start: {type(error).__name__}: "
            f"{reason[0]}; install it by shell/setup.sh"
        ) from error
    return Serving(cfg, engine, tokenizer)
