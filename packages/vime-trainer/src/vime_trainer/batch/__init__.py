"""From a leased batch to the model's input: index, columns, plan, micro-batches."""

from vime_trainer.settings.batch import BatchSettings

from ._columns import Columns, RefusedSamplesError, UnsupportedSamplingError, read_columns
from ._cost import TokenCost
from ._index import BatchIndex
from ._micro import MicroBatch, build_micro_batch
from ._of_group import index_group
from ._plan import plan_micro_batches, plan_shares, plan_step, share_samples, split_groups

__all__ = [
    "BatchIndex",
    "BatchSettings",
    "Columns",
    "MicroBatch",
    "RefusedSamplesError",
    "TokenCost",
    "UnsupportedSamplingError",
    "build_micro_batch",
    "index_group",
    "plan_micro_batches",
    "plan_shares",
    "plan_step",
    "read_columns",
    "share_samples",
    "split_groups",
]
