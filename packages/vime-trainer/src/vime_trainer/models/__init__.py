"""Model families: sizes from config.json, and a table of weights that serves import, export and weight updates."""

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig, read_config
from vime_trainer.models._convert import check_names, export, fill, ignored, specs, tensor_specs
from vime_trainer.models._family import Family
from vime_trainer.models._folder import WeightFiles, write_folder
from vime_trainer.models._random import random_tensor
from vime_trainer.models._registry import FAMILIES, family_of
from vime_trainer.models._safetensors import TensorSpec
from vime_trainer.models._sharding import (
    Box,
    Place,
    boxes,
    check_place,
    join,
    local_shape,
    merge,
    padded_vocab,
    shard,
    unshard,
)
from vime_trainer.models._te_names import PerExpert, stored_key, table_name, table_weights
from vime_trainer.models._weights import Entry, HfTensor, Weight, expand

__all__ = [
    "FAMILIES",
    "Architecture",
    "Box",
    "Entry",
    "Family",
    "HfConfig",
    "HfTensor",
    "PerExpert",
    "Place",
    "TensorSpec",
    "Weight",
    "WeightFiles",
    "boxes",
    "check_names",
    "check_place",
    "expand",
    "export",
    "family_of",
    "fill",
    "ignored",
    "join",
    "local_shape",
    "merge",
    "padded_vocab",
    "random_tensor",
    "read_config",
    "shard",
    "specs",
    "stored_key",
    "table_name",
    "table_weights",
    "tensor_specs",
    "unshard",
    "write_folder",
]
