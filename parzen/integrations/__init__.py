"""Parzen inside other libraries. Nothing here is imported by ``import parzen``."""
