"""Text: fetched, unpacked, read, tokenised."""
