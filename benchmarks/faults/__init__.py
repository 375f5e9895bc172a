"""What faults cost: benchmarks that kill processes of a running training."""
