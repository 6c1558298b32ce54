"""From a leased batch to the model's input: index, columns, plan, micro-batches."""

from ._columns import Columns, RefusedSamplesError, UnsupportedSamplingError, read_columns
from ._index import BatchIndex
from ._micro import MicroBatch, build_micro_batch
from ._of_group import index_group
from ._plan import partition, plan_micro_batches, split_groups
from ._settings import BatchSettings

__all__ = [
    "BatchIndex",
    "BatchSettings",
    "Columns",
    "MicroBatch",
    "RefusedSamplesError",
    "UnsupportedSamplingError",
    "build_micro_batch",
    "index_group",
    "partition",
    "plan_micro_batches",
    "read_columns",
    "split_groups",
]
