"""A group's index, from its content: what a buffer answers, for groups that come from a file."""

from __future__ import annotations

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_index
from vime_proto.validate import validate_group


def index_group(group: sample_pb2.Group) -> buffer_pb2.GroupIndex:
    """Counts tokens, trainable tokens and versions of each sample.

    Raises:
        ContractError: the group breaks its contract.
    """
    validate_group(group)
    return group_index(group)
