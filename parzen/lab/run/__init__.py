"""A run: its frozen config, its folder, the training loop, and many of them."""
