"""Slow tiers: where checkpoints go when fast memory is full."""

from .base import CheckpointLost as CheckpointLost
from .base import Store as Store
from .base import StoreStats as StoreStats
from .base import TransferRecord as TransferRecord
