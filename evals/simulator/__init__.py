"""A fleet of engines without its hardware: the real scheduler, and a cost model where the model would run."""
