"""The live page at `/`: one HTML file, one stylesheet, one script, and the JSON that they read."""

from homing.frontend.page.fleet import fleet_json
from homing.frontend.page.routes import page_routes

__all__ = ["fleet_json", "page_routes"]
