"""Names of a data set's shards, as NVIDIA's tools and AWS's archives use them."""

TRAINING_SHARDS, HELD_OUT_SHARDS = "*_training_*.hdf5", "*_test_*.hdf5"
