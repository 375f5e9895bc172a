"""The models; parameters carry their published names."""
