"""The other side of a comparison: plain scripts, Hugging Face."""
