"""What a run records: the console line, TensorBoard, metrics.jsonl, and the summary of a phase."""
