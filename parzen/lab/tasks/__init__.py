"""What models are trained and judged on: each task samples, scores, and knows its vocabulary."""
