"""Generated pages of the documentation, and what its site needs: `make docs-reference`, `make docs`."""
