"""Any causal language model of transformers, computed by its own modules on our products and our paged attention."""
