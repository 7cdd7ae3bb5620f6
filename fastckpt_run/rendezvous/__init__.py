"""Runs in the agent: the rendezvous of several nodes over torch's TCPStore, without pickles and without polls."""
