"""How a product is cut on a GPU: the configurations there are, which of them were measured, and how that is done."""
