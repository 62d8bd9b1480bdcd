"""Language models whose memories read with any kernel."""
