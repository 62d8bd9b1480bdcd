"""One file for each task: samples, scores, vocabulary, and what the training loop sees of it."""
