"""The known model families."""

from __future__ import annotations

from vime_proto.errors import nearest
from vime_trainer.models import glm4_moe, qwen3, qwen3_moe
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._family import Family

__all__ = ["FAMILIES", "family_of"]

FAMILIES: tuple[Family, ...] = (qwen3.FAMILY, qwen3_moe.FAMILY, glm4_moe.FAMILY)


def family_of(config: HfConfig) -> Family:
    """The family of a config.json, by `model_type`, or by `architectures` where that is missing.

    Raises:
        ValueError: an unknown one; names the nearest known.
    """
    kind = config.get("model_type", default=None)
    names = config.get("architectures", default=[])
    for family in FAMILIES:
        if kind == family.name or (kind is None and set(names) & set(family.architectures)):
            return family
    shown = kind if kind is not None else (names[0] if names else "")
    message = nearest(shown, [family.name for family in FAMILIES])
    raise ValueError(f"{config.source}: model_type: {message}")
