"""What the bytes mean: ids, manifests and the layout of files, as pure functions."""
