"""Runs in: tools, and in the agent. A report for people: the page, its charts, and the text in a terminal."""
