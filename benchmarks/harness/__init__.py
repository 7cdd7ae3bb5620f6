"""Contenders that take turns in fresh processes, their results as JSON, and the page that is made of them."""
