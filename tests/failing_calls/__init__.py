"""File operations that fail once, each in its turn, in agents and workers; what resumes is what was promised."""
