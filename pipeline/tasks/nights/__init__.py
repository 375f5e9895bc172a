"""Nightly: the whole chain every night, and what each night leaves behind."""
