"""File systems that tests mount, and what the library does on them."""
