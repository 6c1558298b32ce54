"""Publication of weights: chunks, manifest, and the update of every engine."""

from vime_trainer.settings.weights import WeightsSettings

from ._chunks import chunked
from ._fleet import Fleet
from ._publisher import Publisher, PublishError, PublishReport
from ._quorum import Quorum
from ._retention import Retention
from ._spool import spool
from ._store import ChunkStore, DirectoryStore, MemoryStore

__all__ = [
    "ChunkStore",
    "DirectoryStore",
    "Fleet",
    "MemoryStore",
    "PublishError",
    "PublishReport",
    "Publisher",
    "Quorum",
    "Retention",
    "WeightsSettings",
    "chunked",
    "spool",
]
