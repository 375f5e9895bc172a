"""Text → token ids: vocabulary, WordPiece, and the files that hold the ids."""
