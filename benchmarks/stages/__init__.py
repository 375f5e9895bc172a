"""Stages beside what others do the same work with: building data, packing, merging."""
