"""How ranks notice, before and while a strategy is made, that one is missing."""
