"""How a product is cut on a GPU: the possible configurations, those that were measured, and how they are measured."""
