"""A fleet of engines without its hardware: the real scheduler, with a cost model in place of the model."""
