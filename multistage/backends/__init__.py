"""Slow tiers: where checkpoints go when fast memory is full."""

from .base import CheckpointLost as CheckpointLost
from .base import Store as Store
from .base import StoreStats as StoreStats
from .base import TransferRecord as TransferRecord
from .files import FileStore as FileStore
from .memory import MemoryStore as MemoryStore
from .numa import NumaStore as NumaStore
from .urls import open_store as open_store
