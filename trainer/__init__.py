"""How a model is trained. Importing this package costs nothing: torch comes in with the modules that need it."""
