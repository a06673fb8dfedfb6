"""The routes of the server, a file for each part of its API. Each makes an ``APIRouter`` for a ``Service``."""
