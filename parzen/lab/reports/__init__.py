"""What runs found, as tables, figures and pages; the claims of the paper beside it."""
