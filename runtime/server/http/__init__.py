"""HTTP itself: connections, bodies, authentication, event streams."""
