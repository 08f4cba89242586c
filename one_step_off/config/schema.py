"""The schema of a config. Each section is a dataclass in a file of `sections/`, which are the
documentation of every key.

It imports neither torch nor Ray nor vLLM: a wrong config is refused within a second, before any
engine or GPU is taken. `loading.py` reads a config.
"""

from dataclasses import dataclass, field

from one_step_off.config.sections.agent import AgentConfig
from one_step_off.config.sections.algorithm import AlgorithmConfig
from one_step_off.config.sections.data import DataConfig
from one_step_off.config.sections.logging import LoggingConfig
from one_step_off.config.sections.model import ModelConfig
from one_step_off.config.sections.pipeline import PipelineConfig
from one_step_off.config.sections.placement import PlacementConfig
from one_step_off.config.sections.reward import RewardConfig
from one_step_off.config.sections.roles import (
    ActorConfig,
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
)
from one_step_off.config.sections.rollout import RolloutConfig
from one_step_off.config.sections.sft import SftConfig
from one_step_off.config.sections.trainer import TrainerConfig
from one_step_off.config.sections.weight_sync import WeightSyncConfig


@dataclass
class Config:
    """A run's whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
