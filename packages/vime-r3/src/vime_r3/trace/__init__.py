"""The codec of ``vime.routing.v1.RoutingTrace``: encode, decode, cut, join. No Python loop runs per token."""

from vime_r3.trace._decode import Routes, decode
from vime_r3.trace._encode import encode
from vime_r3.trace._header import check_header, hole_count, id_dtype
from vime_r3.trace._join import concatenate, extend, pad, remark
from vime_r3.trace._select import byte_ranges, select, truncate
from vime_r3.trace._wire import dumps, loads

__all__ = [
    "Routes",
    "byte_ranges",
    "check_header",
    "concatenate",
    "decode",
    "dumps",
    "encode",
    "extend",
    "hole_count",
    "id_dtype",
    "loads",
    "pad",
    "remark",
    "select",
    "truncate",
]
