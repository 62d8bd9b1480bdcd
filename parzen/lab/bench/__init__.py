"""Timings, none of which is taken before the result was compared with float64."""
