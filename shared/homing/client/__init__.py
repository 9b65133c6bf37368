"""The asyncio client: submit, stream, abort, control; rejoins and resubmits by itself.

Frontends, the Python API and trainers all reach the fleet through this. Knows nothing of text or
HTTP.
"""

from homing.client.client import Client
from homing.client.fleet import FleetView
from homing.client.generation import Generation, Part

__all__ = ["Client", "FleetView", "Generation", "Part"]
