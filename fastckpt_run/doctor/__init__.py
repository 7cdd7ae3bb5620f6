"""Checks of `fastckpt doctor`: the configuration of this host, for a checkpoint directory and for a rendezvous."""
