"""The settings of a run: the sections of luigi.cfg and their only reader."""
