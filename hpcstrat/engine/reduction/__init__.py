"""The one reduction path, gathers, and calls that carry objects."""
