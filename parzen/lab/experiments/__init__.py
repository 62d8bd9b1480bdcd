"""One file for each experiment of the paper: which runs it is made of, and what is measured."""
