"""Native decoders of the model families that qserve serves."""
