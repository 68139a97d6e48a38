"""Notices a missing rank, before and while a strategy is made."""
