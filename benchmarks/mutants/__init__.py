"""Mutants of the product: small changes that tests should notice, and the share that they do."""
