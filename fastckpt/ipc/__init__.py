"""How workers and the owner of the arena talk: JSON messages with a schema over an abstract Unix socket."""
