"""The last module that a fork server imports: what is there by then stays, and is no garbage.

Ranks share this memory; a collection of garbage in each of them would go through half a million
objects.
"""

import gc

from soframe.registry import KINDS
from tests.distributed import harness

for registry in KINDS.values():
    registry.discover()  # else each rank reads the metadata of all packages

harness.traces()  # of the modules as they are now
gc.collect()
gc.freeze()
