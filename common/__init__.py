"""Words and wiring that every other package shares; imports no torch."""
