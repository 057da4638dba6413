"""Old names of what `environment`, `randomness` and `settings` hold."""

from .randomness import RandomState as RandomState
from .randomness import cuda_or_cpu as cuda_or_cpu
from .randomness import device_types as device_types
from .randomness import random_devices as random_devices
from .randomness import refuse_hidden_draws as refuse_hidden_draws
from .settings import Autocast as Autocast
from .settings import autocast as autocast
