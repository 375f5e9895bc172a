"""The settings of a run: what luigi.cfg may say, and its only reader."""
