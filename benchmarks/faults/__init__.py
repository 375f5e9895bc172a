"""What faults cost: benchmarks that kill processes of a training run."""
