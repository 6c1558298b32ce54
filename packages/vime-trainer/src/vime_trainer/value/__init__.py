"""The critic: a model of its own that says what each prefix is worth."""

from vime_trainer.settings.critic import CriticSettings
from vime_trainer.value._head import critic_weights
from vime_trainer.value._model import ValueModel, ValueOutputs

__all__ = ["CriticSettings", "ValueModel", "ValueOutputs", "critic_weights"]
