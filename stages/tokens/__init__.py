"""Text to token ids: the vocabulary, WordPiece, and the files of ids."""
