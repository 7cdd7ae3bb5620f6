"""Checks of `fastckpt doctor`: what is configured on this host, for a checkpoint directory and for a rendezvous."""
