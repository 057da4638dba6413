"""Slow tiers: where checkpoints go when fast memory is full."""

from .base import BaseStore as BaseStore
from .base import CheckpointLost as CheckpointLost
from .base import Store as Store
from .base import StoreStats as StoreStats
from .base import TransferRecord as TransferRecord
from .cascade import CascadeStore as CascadeStore
from .compressed import CompressedStore as CompressedStore
from .files import FileStore as FileStore
from .memory import MemoryStore as MemoryStore
from .memory import NumaStore as NumaStore
from .remote import RemoteStore as RemoteStore
from .striped import StripedStore as StripedStore
from .urls import open_store as open_store
from .wrapper import WrapperStore as WrapperStore
