"""Several servers behind one address: their health, the router in front of them, and the HTTP between."""
