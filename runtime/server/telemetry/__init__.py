"""What the server says of its work: logs, metrics, traces and the view of the engine."""
