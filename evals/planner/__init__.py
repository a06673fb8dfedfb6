"""What a model needs before anything is bought or loaded: memory, time and money, from its config.json alone."""
